"""Small odd-sized models and data that are the same in every process."""

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 13, 5


class Net(nn.Module):
    """Linear with and without bias, a norm, an in-place activation; odd sizes so that ZeRO cuts through layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 17)
        self.silu = nn.SiLU(inplace=True)  # smooth: rounding must not flip a mask
        self.norm = nn.LayerNorm(17)
        self.middle = nn.Linear(17, 19, bias=False)
        self.head = nn.Linear(19, CLASSES)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.head(torch.tanh(self.middle(self.norm(self.silu(self.first(x))))))
        return z if y is None else cross_entropy(z, y)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def make_net(model: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def make_batch(step: int, rows: int, tokens: int = 3) -> tuple[Tensor, Tensor]:
    """The global batch of a step: inputs [rows, tokens, FEATURES], labels [rows, tokens]."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, tokens, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (rows, tokens), generator=generator)
