"""SP-NGD's augmentation of whole batches (Osawa et al. 2019, arXiv:1811.12019): running mixup,
erasing to zero."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ERASED, AREA, ASPECT = 0.5, (0.02, 0.25), (0.3, 1.0)


class RunningMixup:
    """Every image is mixed with the one at its place in the last batch, as that was after its own
    mixing:

        x <- lam x + (1 - lam) x_last,   lam = max(b, 1 - b),  b ~ Beta(alpha, alpha) for each image

    and its label alike. The first batch, also after a resumed run's start, stays as it is.
    """

    def __init__(self, alpha: float, classes: int) -> None:
        self.beta, self.classes = torch.distributions.Beta(alpha, alpha), classes
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, C, H, W] and labels int64 [N] -> mixed ones, labels fp32 [N, classes]."""
        y = F.one_hot(labels, self.classes).float()
        if self._last is not None and len(self._last[0]) == len(x):
            b = self.beta.sample((len(x),))
            lam = torch.maximum(b, 1 - b)
            x = torch.lerp(self._last[0], x, lam.view(-1, 1, 1, 1))
            y = torch.lerp(self._last[1], y, lam.view(-1, 1))
        self._last = x, y
        return x, y


def erased(x: Tensor) -> Tensor:
    """Half of the images with a rectangle of 2 to 25 % of their area set to zero, after
    normalization."""
    x = x.clone()
    height, width = x.shape[-2:]
    for image in x:
        draw, area, aspect, top, left = torch.rand(5).tolist()
        if draw >= ERASED:
            continue
        size = (AREA[0] + area * (AREA[1] - AREA[0])) * height * width
        ratio = ASPECT[0] + aspect * (ASPECT[1] - ASPECT[0])
        h, w = (
            min(height, round(math.sqrt(size * ratio))),
            min(width, round(math.sqrt(size / ratio))),
        )
        at, across = int(top * (height - h + 1)), int(left * (width - w + 1))
        image[:, at : at + h, across : across + w] = 0
    return x
