"""Deep autoencoders, K-FAC's own classic task (Martens & Grosse 2015, sec. 13): how far a training
loss gets.

tanh between the layers, code and output linear; squared error summed over pixels, a mean over
images. Nothing is held out: what is reported as validation and as test is the loss of all images.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Of images [N, widths[0]] in 0 .. 1; the loss is computed inside, of the output of
    ``network``."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        encoder, decoder = list(widths), list(widths)[::-1]
        self.network = nn.Sequential(*_half(encoder), *_half(decoder))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.network(x) - target).square().sum(dim=1).mean()


def _half(widths: list[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return layers[:-1]


@dataclass(frozen=True)
class Widths:
    """From the image to the code, for the settings on disk; ``patches``: of photographs in place of
    digits."""

    widths: tuple[int, ...]
    patches: bool = False


@dataclass(frozen=True)
class Pictures:
    """Images fp32 [n, pixels] in 0 .. 1."""

    name: str
    pixels: Tensor


@dataclass(frozen=True)
class AutoencoderTask:
    """Widths, images a step and steps."""

    model: Widths
    rows: int
    steps: int
    base = "adamw"
    unit = "squared error per image"

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Autoencoder(self.model.widths)

    def corpus(self, path: str | None) -> Pictures:
        return _patches(int(self.model.widths[0] ** 0.5)) if self.model.patches else _digits()

    def batch(self, corpus: Pictures, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Images, twice: one epoch after the other, each in an order of its own."""
        n, chosen = len(corpus.pixels), []
        for place in range(step * self.rows, (step + 1) * self.rows):
            if not chosen or place % n == 0:
                order = torch.randperm(
                    n, generator=torch.Generator().manual_seed(seed * 7919 + place // n)
                )
            chosen.append(order[place % n])
        x = corpus.pixels[torch.stack(chosen)]
        return x, x

    def held_out(self, corpus: Pictures, part: str) -> list[tuple[Tensor, Tensor]]:
        """All images, whichever ``part``."""
        return [(corpus.pixels, corpus.pixels)]


def _digits() -> Pictures:
    from sklearn.datasets import load_digits

    return Pictures(
        "scikit-learn's digits", torch.tensor(load_digits().data / 16, dtype=torch.float32)
    )


def _patches(side: int) -> Pictures:
    """Grey squares, half overlapping, of the two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    pieces = []
    for photograph in load_sample_images().images:
        grey = torch.tensor(photograph, dtype=torch.float32).mean(dim=-1) / 255
        squares = grey.unfold(0, side, side // 2).unfold(1, side, side // 2)
        pieces.append(squares.reshape(-1, side * side))
    return Pictures("scikit-learn's photographs", torch.cat(pieces))


AUTOENCODER_TASKS = {
    "autoencoder": AutoencoderTask(Widths((64, 200, 100, 50, 10)), rows=256, steps=400),
    "autoencoder_patches": AutoencoderTask(
        Widths((256, 400, 200, 100, 30), patches=True), rows=256, steps=400
    ),
}
