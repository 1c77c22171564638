"""Small odd-sized models and data that are the same in every process."""

import torch
from torch import Tensor, nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec

FEATURES, CLASSES = 13, 5


class Net(nn.Module):
    """Linear with and without bias, a norm, an in-place activation; odd sizes so that ZeRO cuts
    through layers."""

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
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    )


def stop(gradient: Tensor) -> Tensor:
    raise FloatingPointError("stopped")


class Stoppable(Net):
    """Its backward raises FloatingPointError below ``middle`` when asked to."""

    stops = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.norm(self.silu(self.first(x)))
        if self.stops:
            z.register_hook(stop)
        z = self.head(torch.tanh(self.middle(z)))
        return z if y is None else cross_entropy(z, y)


def make_net(model: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def make_batch(step: int, rows: int, tokens: int = 3) -> tuple[Tensor, Tensor]:
    """The global batch of a step: inputs [rows, tokens, FEATURES], labels [rows, tokens]."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, tokens, FEATURES, generator=generator, dtype=torch.float32)
    return x, torch.randint(CLASSES, (rows, tokens), generator=generator)


VOCABULARY, TOKENS = 11, 3


class TokenNet(nn.Module):
    """An embedding, LayerNorm, RMSNorm, linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 13)
        self.rms = nn.RMSNorm(13)
        self.down = nn.Linear(13, 7, bias=False)
        self.lm_head = nn.Linear(7, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.7)

    def forward(
        self, tokens: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(tokens)
        h = self.down(torch.tanh(self.rms(self.up(self.norm(x)))))
        context = torch.cumsum(
            x if attention_mask is None else x * attention_mask[..., None], dim=1
        )
        return cross_entropy(self.lm_head(x + h + 0.3 * context), labels)


class TwinNet(TokenNet):
    """Four layers of one shape, and a pair of another."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(13, 13) for _ in range(4)])
        self.pair = nn.ModuleList([nn.Linear(13, 7, bias=False) for _ in range(2)])

    def forward(
        self, tokens: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(tokens)
        h = torch.tanh(self.rms(self.up(self.norm(x))))
        for twin in self.twins:
            h = h + torch.tanh(twin(h))
        out = self.down(h) + self.pair[0](h) + self.pair[1](h)
        return cross_entropy(self.lm_head(x + out + 0.3 * torch.cumsum(x, dim=1)), labels)


def make_tokens(step: int, rows: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """The global batch of a step: tokens and labels, int64 [rows, tokens]."""
    generator = torch.Generator().manual_seed(2000 + step)
    return tuple(torch.randint(VOCABULARY, (2, rows, tokens), generator=generator))


def linear_layer(name: str, dim_A: int, dim_G: int) -> LayerSpec:
    """A Linear without bias as scan would find it, with dense sides."""
    A, G = Side.dense(dim_A), Side.dense(dim_G)
    return LayerSpec(name, "Linear", name, f"{name}.weight", None, A, G)
