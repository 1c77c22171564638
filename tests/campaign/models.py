"""Small models that do what models should not do."""

import torch
from torch import Tensor, nn

from tests.models import CLASSES, FEATURES, Net, cross_entropy


class Branches(nn.Module):
    """Three layers that share their input, until they do not."""

    apart = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(FEATURES, 11) for _ in range(3))
        self.out = nn.Linear(11, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        other = torch.tanh(x) if self.apart else x
        return cross_entropy(self.out(torch.tanh(self.q(x)) * torch.sigmoid(self.k(other)) + self.v(x)), y)


class Conditional(Net):
    """``middle``'s twin is used or not, once or more often."""

    used, times = True, 1

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(19, 19)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))
        for _ in range(self.times if self.used else 0):
            h = h + torch.tanh(self.side(h))
        return cross_entropy(self.head(h), y)


class Frozen(Net):
    """The first layers are frozen and run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm(self.silu(self.first(x)))
        return cross_entropy(self.head(torch.tanh(self.middle(h))), y)


class Discriminator(nn.Module):
    """Two layers; of a generator or of what judges it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 9), nn.Linear(9, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Named(nn.Module):
    """Names that are no file names."""

    KEYS = ("en/de", "/campaign-escape", "../up", "x" * 300, "CON", " a b ", "head", "Head")

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({key: nn.Linear(FEATURES, FEATURES) for key in self.KEYS if "." not in key})
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for adapter in self.adapters.values():
            x = x + torch.tanh(adapter(x))
        return cross_entropy(self.out(x), y)
