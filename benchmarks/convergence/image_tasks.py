"""Image tasks of the convergence benchmark: small networks on scikit-learn's digits, the loss
computed inside."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples import images, networks

HELD_OUT_ROWS = 180


class Classifier(nn.Module):
    """A network and its loss; ``accuracy`` is that of its last forward in eval mode."""

    accuracy: float | None = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(x)
        if not self.training:
            self.accuracy = float((logits.argmax(1) == labels).float().mean())
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Network:
    """What is built, for the settings on disk."""

    name: str


@dataclass(frozen=True)
class ImageTask:
    """A network, images a step and steps."""

    model: Network
    rows: int
    steps: int
    base = "sgd"
    unit = "nats per image"

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        data = self.corpus(None)
        size = data.train.pixels.shape[-1]
        network = networks.build(
            self.model.name, channels=data.channels, classes=data.classes, size=size
        )
        return Classifier(network)

    def corpus(self, path: str | None) -> images.Images:
        return images.load(path, per_pixel=self.model.name == "unet")

    def batch(self, corpus: images.Images, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Images and labels; one epoch after the other, each in an order of its own."""
        return corpus.draw(seed, step * self.rows, self.rows)

    def held_out(self, corpus: images.Images, part: str) -> list[tuple[Tensor, Tensor]]:
        """Every second image is of the "validation" part, by which rates are chosen, the others of
        the "test" part."""
        first = ("validation", "test").index(part)
        whole = corpus.held_out
        own = images.Part(whole.labels[first::2], whole.pixels[first::2])
        return list(replace(corpus, held_out=own).batches(HELD_OUT_ROWS, 0, 1))


IMAGE_TASKS = {
    "digits": ImageTask(Network("resnet8"), rows=64, steps=100),
    "digits_large_batch": ImageTask(Network("resnet8"), rows=512, steps=30),
    "digits_unet": ImageTask(Network("unet"), rows=64, steps=60),
}
