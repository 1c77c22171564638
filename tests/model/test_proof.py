"""The proof by its own: rows that are right fit, of every kind of layer; rows that are wrong do
not.

Faults are put in by hand here, with nothing but the proof to find them.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model import capture, proof
from ds_kfac.model.calls import Call
from ds_kfac.model.registry import TYPES
from ds_kfac.model.scan import LayerChoice, scan
from tests.model.recorder import proven
from tests.models import cross_entropy, linear_layer, make_net
from tests.rule_cases import Conv1D, LlamaRMSNorm

ROWS, TOKENS, WIDTH = 5, 3, 40
ALL = LayerChoice(types=TYPES)


class Tokens(nn.Module):
    """Of every kind that takes tokens; sides above and below that with several probes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 48), nn.LayerNorm(48, eps=0.5)
        self.middle, self.rms = nn.Linear(48, 48, bias=False), nn.RMSNorm(48)
        self.lying, self.named = Conv1D(48, 48), LlamaRMSNorm(48, 0.5)
        self.unbiased = nn.LayerNorm(48, bias=False)
        self.experts, self.head = nn.Parameter(torch.randn(4, 48, 48) / 7), nn.Linear(48, 7)

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x)))
        for _ in range(2):
            h = h + self.rms(self.middle(h))
        h = h + self.named(self.lying(self.unbiased(h)))
        h = h + torch.bmm(h.reshape(-1, 48)[:12].view(4, 3, 48), self.experts).sum(0)[:1]
        return cross_entropy(self.head(h), torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 7)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 36, 3, padding=1, stride=2, padding_mode="reflect")
        self.norm, self.groups = nn.BatchNorm2d(36), nn.GroupNorm(4, 36)
        self.depthwise = nn.Conv2d(36, 36, 3, groups=36, dilation=2)
        self.pairs = nn.Conv2d(36, 72, 1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(72, 6, 3, stride=2, groups=2)

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        return self.up(self.pairs(self.groups(self.depthwise(h)))).square().mean()


class Checkpointed(Tokens):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Detached(Tokens):
    """Calls that no gradient reaches."""

    def forward(self, x):
        self.first(x[:2] + 1).detach()
        return super().forward(x) + 0.0 * self.first(x[:1] + 2).sum()


def batch(model, seed: int = 0):
    torch.manual_seed(seed)
    shape = (ROWS, 3, 20, 20) if isinstance(model, Images) else (ROWS, TOKENS, WIDTH)
    return torch.randn(shape)


def prove(model, batches=None, **options):
    layers = scan(model, ALL).layers
    return proven(model, layers, [batch(model)] if batches is None else batches, **options)


def unfit(found) -> set[str]:
    assert all(seen.is_finite for seen in found.values())
    return {name for name, seen in found.items() if not seen.fits}


# rows that are right

MASK = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 4 != 0
WAYS = {
    "rows": {},
    "examples": {"sharing": "reduce"},
    # rows that a factor leaves out are in the gradient
    "mask": {"mask": lambda *_: MASK},
    "stride": {"stride": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Tokens, Images, Detached, Checkpointed, Reentrant])
def test_right_rows_fit_in_every_kind_of_layer(kind, way):
    found = prove(make_net(kind), [batch(make_net(kind), 0), batch(make_net(kind), 1)], **WAYS[way])
    # they have no examples
    experts = {name for name in found if "experts" in name} if way == "examples" else set()
    assert len(found) > 5 and unfit(found) == experts, found
    assert all(seen.ratio > 0 and seen.calls > 0 for seen in found.values()), "nothing was compared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_fits_with_many_micro_batches(dtype):
    model = make_net(Tokens).to(dtype)
    assert not unfit(prove(model, [batch(model, seed).to(dtype) for seed in range(16)]))
    with torch.autocast("cpu", dtype):
        assert not unfit(prove(make_net(Tokens)))


def squares(model, x):
    return model(x).square().mean()


def single_rows():
    """(u . g) (v . a) of a single row is often near zero, and its rounding is not."""
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(200)))
    for linear in model:
        nn.init.orthogonal_(linear.weight)
    return model, torch.randn(1, 12), squares


def long_sides(rows: int, inputs: int, outputs: int):
    """A dot of few rows may be small by chance, and its rounding is not."""
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, 3))
    return model, torch.randn(rows, inputs), squares


def rows_that_cancel():
    """Of images that are alike inside, as pixels of a sky below a batch norm: partial sums are far
    larger than what is left."""
    half, sign = torch.randn(32, 3, 1, 1).expand(-1, 3, 32, 32), torch.ones(64, 1, 1, 1)
    sign[32:] = -1
    images = torch.cat([half, half]) + 0.3 * torch.randn(64, 3, 32, 32)
    gradient = torch.randn(1, 16, 1, 1) * sign + 0.3 * torch.randn(64, 16, 32, 32)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False))
    return model, images, lambda model, x: (model(x) * gradient).mean()


SHAPES = {"long inputs": (2, 2000, 40), "long outputs": (4, 40, 1500), "many rows": (5000, 8, 40)}
SMALL = {"single rows": single_rows, "rows that cancel": rows_that_cancel}
SMALL |= {name: partial(long_sides, *shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_small_by_chance_is_within_its_rounding(name):
    for seed in range(12 if name in SHAPES else 1):
        torch.manual_seed(seed)
        model, x, loss = SMALL[name]()
        found = prove(model, [x], loss=loss)
        assert 0 < max(seen.ratio for seen in found.values()) < 0.5, (seed, found)


def test_what_is_not_finite_shows_nothing():
    found = prove(make_net(Tokens), [torch.full((ROWS, TOKENS, WIDTH), float("inf"))])
    assert not any(seen.is_finite for seen in found.values())


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_of_other_engines_fit_whether_the_step_has_them_or_not(keeps):
    def loss(model, x):
        generated = torch.tanh(x * torch.ones((), requires_grad=True))
        model(generated).backward()  # another model's loss
        if not keeps:
            model.zero_grad()
        return model(x)

    assert not unfit(prove(make_net(Tokens), loss=loss))


# uses that are not seen


class Tied(Tokens):
    def forward(self, x):
        weight = self.first.weight
        return super().forward(x) + torch.linalg.multi_dot([x[0], weight.T, weight]).mean()


class Mapped(Tokens):
    def forward(self, x):
        return super().forward(x) + torch.func.vmap(self.first)(x).square().mean()


class Penalized(Tokens):
    """A double backward: the sum of g a^T at the output is not all of dW, the rest flows through
    the backward's own products."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(super().forward(x), x, create_graph=True)
        return super().forward(x) + gradient.square().sum()


@pytest.mark.parametrize("kind", [Tied, Mapped, Penalized])
def test_a_use_that_is_not_seen_is_found(kind):
    found = prove(make_net(kind))
    assert "first" in unfit(found) and "another use was not seen" in str(found["first"])
    assert unfit(found) == {"first"} or kind is Penalized


# faults, each put into the code that captures

INPUTS = {
    "another operand": torch.randn_like,
    "a stale copy": lambda x: x.clone().mul_(1.01),
    "other rows": lambda x: x.roll(1, 0),
    "a step of columns": lambda x: x.roll(1, -1),
}
GRADIENTS = {
    "a scale": lambda g: g * 0.25,
    "outputs left out": lambda g: g.clone().index_fill_(-1, torch.tensor(3), 0.0),
}


@pytest.mark.parametrize("name", [*INPUTS, *GRADIENTS])
def test_wrong_inputs_and_gradients_are_found(name):
    """Of the layer "first"."""
    called, gradient_rows = capture.Capture._called, Call.gradient_rows

    def wrong_input(self, calls, x, output):
        is_first = calls[0].layer.name == "first"
        return called(self, calls, INPUTS[name](x) if is_first else x, output)

    def wrong_gradient(self, gradient):
        rows = gradient_rows(self, gradient)
        return GRADIENTS[name](rows) if self.layer.name == "first" else rows

    if name in INPUTS:
        fault = patch.object(capture.Capture, "_called", wrong_input)
    else:
        fault = patch.object(Call, "gradient_rows", wrong_gradient)
    with fault:
        assert unfit(prove(make_net(Tokens))) == {"first"}


# formats


def tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("rows", [64, 4096])
def test_products_in_tf32_fit_on_a_gpu_and_would_not_if_they_were_taken_for_fp32(rows):
    """There convolutions are computed so, unless torch is told otherwise, and linears where the
    user allows it."""
    layer = linear_layer("layer", 96, 64)
    own = proof.Proof([layer], lambda layer: layer.keys[0], 0, torch.device("cpu"))
    a, g = torch.randn(2, rows, 96)
    g = g[:, :64].contiguous()
    (v,), (u,) = (tf32(own.probes(key, layer)) for key in layer.keys)
    products = ((tf32(a) @ v) * (tf32(g) @ u)).double()
    ratios = []
    for device in ("cuda", "cpu"):
        numbers = proof.Numbers.unpacked(own.numbers())
        numbers.t[0], numbers.squares[0] = products.sum(dim=0), products.square().sum()
        numbers.calls[0] = numbers.ranks[0] = 1
        numbers.eps[0] = proof.accuracy(torch.float32, torch.device(device))
        numbers.rows[0] = rows
        gradients, eps = {"layer": tf32(g).T @ tf32(a)}, proof.eps_of(torch.float32)
        options = {"divisor": 1, "world": 1, "eps": eps, "floor": 0}
        ratios.append(float(own.ratios(numbers.packed(), gradients, **options)))
    assert ratios[0] < 0.5 and ratios[1] > 2, ratios
