"""A model with the same experts in several ways: as modules, and stacked as [E, O, I] or [E, I,
O]."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, TOP, CLASSES = 12, 8, 3, 2, 5


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, h):
        return F.linear(h.float(), self.weight.float()).softmax(-1).topk(TOP)


class Apart(nn.Module):
    """Experts as modules."""

    def __init__(self, bias: bool):
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 2 * INNER, bias) for _ in range(EXPERTS))
        self.out = nn.ModuleList(nn.Linear(INNER, WIDTH, bias) for _ in range(EXPERTS))

    def expert(self, e, rows):
        gate, up = self.into[e](rows).chunk(2, -1)
        return self.out[e](F.silu(gate) * up)

    def forward(self, h, weight, index):
        result = torch.zeros_like(h)
        for e in range(EXPERTS):
            token, place = torch.where(index == e)
            if len(token):
                rows = self.expert(e, h[token])
                result = result.index_add(
                    0, token, rows * weight[token, place, None].to(rows.dtype)
                )
        return result


class Upright(Apart):
    """As transformers' Mixtral."""

    def __init__(self, bias: bool):
        nn.Module.__init__(self)
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def expert(self, e, rows):
        gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj[e])


class Grouped(Upright):
    """As transformers' with ``experts_implementation`` grouped_mm."""

    def forward(self, h, weight, index):
        order = index.flatten().argsort(stable=True)
        ends = index.flatten().bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
        rows = h[order // TOP]
        gate, up = torch._grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(
            2, -1
        )
        rows = torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        return torch.zeros_like(h).index_add(
            0, order // TOP, rows * weight.flatten()[order, None].to(rows.dtype)
        )


class Picked(Upright):
    """As transformers' with ``experts_implementation`` batched_mm."""

    def forward(self, h, weight, index):
        rows, chosen = h.repeat_interleave(TOP, dim=0), index.reshape(-1)
        gate, up = torch.bmm(self.gate_up_proj[chosen], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        rows = torch.bmm(self.down_proj[chosen], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (rows * weight.reshape(-1, 1).to(rows.dtype)).view(len(h), TOP, -1).sum(1)


class Lying(Apart):
    """As transformers' GPT-OSS."""

    def __init__(self, bias: bool):
        nn.Module.__init__(self)
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER))
        self.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def expert(self, e, rows):
        gate, up = (rows @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down_proj[e] + self.down_proj_bias[e]


class Dispatched(Lying):
    """Every expert has a place for every token, zero where it was not chosen, as Llama-4's; without
    biases."""

    def __init__(self, bias: bool):
        super().__init__(bias)
        del self.gate_up_proj_bias, self.down_proj_bias

    def forward(self, h, weight, index):
        chosen = torch.zeros(len(h), EXPERTS, dtype=h.dtype).scatter(1, index, 1.0).T
        rows = h.unsqueeze(0) * chosen.unsqueeze(-1)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, self.down_proj)
        return (
            rows * torch.zeros_like(chosen.T).scatter(1, index, weight.to(h.dtype)).T.unsqueeze(-1)
        ).sum(0)


BIASED = {Lying}
STACKS = (Upright, Grouped, Picked, Lying, Dispatched)


class Mixture(nn.Module):
    """Classifies rows."""

    def __init__(self, kind: type, bias: bool = False, checkpointed: str = ""):
        super().__init__()
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), Router(), kind(bias)
        self.head, self.checkpointed = nn.Linear(WIDTH, CLASSES), checkpointed

    def mixed(self, h):
        weight, index = self.router(h)
        return h + self.experts(h, weight, index)

    def forward(self, x, y=None):
        h = self.first(x)
        if self.checkpointed:
            reentrant = self.checkpointed == "reentrant"
            h = torch.utils.checkpoint.checkpoint(self.mixed, h, use_reentrant=reentrant)
        else:
            h = self.mixed(h)
        logits = self.head(h)
        return logits if y is None else F.cross_entropy(logits.float(), y)


def make(kind: type, *, bias: bool = False, seed: int = 0, checkpointed: str = "") -> Mixture:
    """The same function for every kind."""
    generator = torch.Generator().manual_seed(seed)
    plain = Mixture(Apart, bias)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    model = Mixture(kind, bias, checkpointed)
    with torch.no_grad():
        for name, value in as_stacks(dict(plain.state_dict()), kind).items():
            model.get_parameter(name).copy_(value)
    return model


def as_stacks(values: dict[str, torch.Tensor], kind: type) -> dict[str, torch.Tensor]:
    """Weights of experts apart, by the names of another kind."""
    if kind is Apart:
        return values
    own = {name: value for name, value in values.items() if not name.startswith("experts.")}
    for part, name in (("into", "gate_up_proj"), ("out", "down_proj")):
        for what in ("weight", "bias"):
            if f"experts.{part}.0.{what}" in values:
                stack = torch.stack([values[f"experts.{part}.{e}.{what}"] for e in range(EXPERTS)])
                lying = what == "weight" and issubclass(kind, Lying)
                own[f"experts.{name}" + ("_bias" if what == "bias" else "")] = (
                    stack.mT if lying else stack
                )
    return own


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)
