"""Matrices that are parameters of any module: found in its code, their rows seen in its
products."""

import functools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.product_code import MatrixLayout, borrowed_weights, multiplied
from ds_kfac.model.scan import LayerChoice, scan
from tests.close import close
from tests.deepspeed.expert_stacks import BIASED, STACKS, WIDTH, Apart, Dispatched, make
from tests.model.recorder import Recorder, equal_bits, proven, unannounced
from tests.model.written import module, written
from tests.ops.specification import symmetric_pack

ROWS, IN, OUT = 11, 5, 3
X = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
TWO = torch.stack([X, X.sin()])
GROUPS = torch.randn(ROWS, 3, IN, generator=torch.Generator().manual_seed(2))
APART = LayerChoice(shares=False)


def second_moment(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1]).double()
    return symmetric_pack(x.T @ x / len(x))


# found in code


class Outer(nn.Module):
    class Inner(nn.Module):
        def forward(self, x):
            return x @ self.w


class Wrapping(Outer.Inner):
    """Its methods have the names of functions that have no code, as those of torch."""

    attend = functools.wraps(F.scaled_dot_product_attention)(lambda self, *args: args)
    circle = functools.wraps(F.relu)(lambda self, x: x)
    circle.__wrapped__ = circle


UNKNOWN = {"nn": nn, "F": F, "__name__": "nowhere"}
exec("class Made(nn.Module):\n    def forward(self, x):\n        return x @ self.w", UNKNOWN)
UPDATE = """
def forward(self, x, i):
    y = self.d
    y = y + x
    rows = self.b[i]
    x = F.linear(x, self.u + self.b @ self.a) + (self.u.T @ self.u).sum()
    return x, self.w @ self.basis, y @ self.d, rows @ self.e
"""
TWO_WAYS = "return torch.einsum('ni,oi->no', x, self.w) + F.linear(x, self.w)"
NAMELESS = "def forward(self, x, /):\n    return x @ self.w"
STANDS, LIES = MatrixLayout(False), MatrixLayout(True)
READ = {
    "an inner class": (Outer.Inner, {"w": LIES}),
    "methods that wrap what has no code": (Wrapping, {"w": LIES}),
    "a class without a source": (UNKNOWN["Made"], {}),
    "arguments without names": (written(NAMELESS), {"w": LIES}),
    "no product": (written("return x[:, :3] * self.w[:, 0] + self.w.sum()"), {}),
    "one matrix in two ways": (written(TWO_WAYS), {}),
    # an update W + B A, a penalty, a product with no parameter, and variables that are not always
    # parameters
    "products of two parameters": (written(UPDATE), {"w": STANDS, "d": LIES, "e": LIES}),
}


@pytest.mark.parametrize("name", READ)
def test_code_is_read_where_there_is_any(name):
    kind, expected = READ[name]
    part = kind()
    for parameter in "wabdeu":
        part.register_parameter(parameter, nn.Parameter(torch.zeros(4, 4)))
    part.register_buffer("basis", torch.zeros(4, 4))
    assert multiplied(part) == expected
    assert borrowed_weights(part) == []


# seen in products


class DbrxExpertGLU(nn.Module):
    """As transformers': experts one below the other, cut by the module around it."""

    moe_num_experts = 2

    def __init__(self):
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(2 * OUT, IN)) for _ in range(3))

    def forward(self, x, w1, v1, w2):
        return (x.matmul(w1.T).sigmoid() * x.matmul(v1.T)).matmul(w2)


# as DeepSeek-V4's in transformers: a map of its own for each group of the inputs
GROUPED = """
w = self.weight.view(self.groups, -1, 5).transpose(1, 2)
return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
"""
DBRX = """
weights = self.mlp.w1, self.mlp.v1, self.mlp.w2
cut = [[w.view(2, 3, 5)[torch.tensor(e)] for w in weights] for e in range(2)]
return torch.stack([self.mlp(rows, *of_expert) for rows, of_expert in zip(x, cut)])
"""
XLNET = """
h = torch.einsum("tbi,inw->tbnw", x, self.q)
return torch.einsum("tbnw,hnw->bth", h.tanh(), self.o)
"""
BY_NUMBER = """
w = self.wo_a.weight.reshape((3, 2, 5))
return torch.bmm(x.transpose(0, 1), w.mT).transpose(0, 1)
"""
METHOD = "def correct(self, x):\n    return F.linear(x, self.coefs.weight.clamp(-9, 9))"
AROUND = "return self.inner.other(self.inner.correct(x))"
PROJECT = """
def project(self, x):
    return F.linear(x, self.linear.weight, self.linear.bias)

def forward(self, x):
    return self.project(x)
"""


def adapted() -> nn.Module:
    """A method, which is no forward, bounds a weight before it multiplies, as Gemma 3n's AltUp."""
    inner = module(METHOD, coefs=nn.Linear(IN, OUT, bias=False), other=nn.Linear(OUT, 2))
    return module(AROUND, inner=inner)


def grouped() -> nn.Module:
    made = written(GROUPED, nn.Linear)(IN, 6, bias=False)
    made.groups = 3
    return made


def further_out() -> nn.Module:
    """A method is called from further out, in a recomputation."""
    outer = module("return self.inner.project(x)", inner=module(PROJECT, linear=nn.Linear(IN, IN)))
    code = "return checkpoint(self.outer, x.clone().requires_grad_(), use_reentrant=True)"
    made = written(code, checkpoint=checkpoint)()
    made.outer = outer
    return made


EXPERTS = [f"mlp.{name}.{e}" for name in ("w1", "v1", "w2") for e in range(2)]
xlnet = partial(module, XLNET, q=(IN, 2, OUT), o=(IN, 2, OUT))
by_number = partial(module, BY_NUMBER, wo_a=nn.Linear(IN, 6, bias=False))
ARCHITECTURES = {
    "XLNet's matrices of three dimensions": (xlnet, TWO, ["q", "o"]),
    "DBRX's experts": (lambda: module(DBRX, mlp=DbrxExpertGLU()), TWO, EXPERTS),
    "DeepSeek's groups": (grouped, GROUPS, ["0", "1", "2"]),
    "groups by number": (by_number, GROUPS, ["wo_a.0", "wo_a.1", "wo_a.2"]),
    "a method that bounds a weight": (adapted, X, ["inner.coefs", "inner.other"]),
    "a method called from further out": (further_out, X, ["outer.inner.linear"]),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_matrix_of_a_modules_own_has_the_rows_of_its_products(name):
    make, x, names = ARCHITECTURES[name]
    model = nn.ModuleDict({"m": make()})
    model.forward = lambda x: model["m"](x).square().mean()
    found = scan(model, APART)
    assert [layer.name.removeprefix("m.") for layer in found.layers] == names and not found.skipped
    checks = proven(model, found.layers, [x])
    assert all(check.calls and check.fits for check in checks.values()), checks


LENDER = """
def reset(self):
    nn.init.normal_(self.read.weight)

def forward(self, x):
    x = (self.by_operator.weight @ x.to(self.read.weight.dtype).T).T
    x = F.linear(x, self.by_function.weight, self.by_function.bias)
    x = self.read(F.linear(x, weight=self.by_word.weight))
    x = F.linear(self.both(x), self.both.weight)
    return F.conv1d(x.T, self.convolution.weight, None, padding=2, groups=5)[:, :11].T
"""


def test_a_weight_that_the_module_around_it_takes_has_the_rows_of_that():
    """In each way that transformers does."""
    names = ["by_operator", "by_function", "by_word", "both", "read"]
    convolution = nn.Conv1d(IN, IN, 3, padding=2, groups=IN)
    linears = {name: nn.Linear(IN, IN) for name in names}
    model = module(LENDER, **linears, convolution=convolution)
    children = {child: name for name, child in model.named_children()}
    called = {children[weight.module]: weight.is_called for weight in borrowed_weights(model)}
    assert called == {**dict.fromkeys([*names[:3], "convolution"], False), "both": True}
    assert {left.name: left.reason for left in scan(model).skipped} == {
        "convolution": "its parent module uses the weight without calling this module"
    }
    recorder = Recorder(model)
    recorder.backward(model(X).square().mean())
    means = recorder.factors()
    assert list(means) == names
    close(means["by_operator"].A, second_moment(torch.cat([X, torch.ones(ROWS, 1)], 1)), sums=ROWS)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_has_the_rows_of_its_projections(batch_first, apart):
    """Sequences come first inside of it, whatever it is given. Keys and values are one product, or
    one each: under ZeRO-3, whose hooks give it two tensors where it was given one. They are two
    thirds of the outputs in either way."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    model = nn.ModuleDict({"attention": attention})
    mask = torch.tensor([[True, True, False], [True, True, True]])
    query, memory = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    keys = torch.zeros(2, 1, 1, 3).masked_fill(~mask[:, None, None], float("-inf"))
    left_out = keys.expand(2, 2, 3, 3).reshape(4, 3, 3)

    def forward():
        q, k = (x if batch_first else x.transpose(0, 1) for x in (query, memory))
        v = k.clone() if apart else k
        output, _ = attention(q, k, v, need_weights=False, attn_mask=left_out)
        return (output if batch_first else output.transpose(0, 1))[mask].square().mean()

    model.forward = forward
    recorder = Recorder(model, mask=lambda arguments, keywords: mask)
    recorder.backward(model())
    rows = [torch.cat([x[mask], torch.ones(5, 1)], 1) for x in (query, memory, memory)]
    A = recorder.factors()["attention.in_proj_weight"].A
    close(A, second_moment(torch.cat(rows)), sums=15)


def test_products_are_watched_in_captured_forwards_alone_also_after_an_error():
    modes = []
    code = "modes.append(len(_get_current_function_mode_stack()))\nreturn F.linear(x, self.w)"
    names = {"modes": modes, "_get_current_function_mode_stack": _get_current_function_mode_stack}
    model = nn.Sequential(written(code, **names)())
    model[0].w = nn.Parameter(torch.ones(OUT, IN))
    recorder, plain = Recorder(model), F.linear
    with pytest.raises(RuntimeError):
        model(X[:, :2])
    for active in (True, False):
        recorder.capture.active = active
        recorder.backward(model(X).sum())
    recorder.capture.remove()
    model(X)
    assert modes == [1, 1, 0, 0] and F.linear is plain


# stacks of experts


def mixture(kind, checkpointed: str = "", choice: LayerChoice | None = None, **options) -> Recorder:
    """A step of a model with experts of some kind."""
    bias = kind in BIASED or (kind is Apart and options.pop("bias", False))
    recorder = Recorder(make(kind, bias=bias, checkpointed=checkpointed), choice)
    recorder.begin(**options)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    recorder.backward(recorder.model(x, torch.arange(ROWS) % 5))
    return recorder


NAMES = {
    f"experts.{stack}.{e}": f"experts.{apart}.{e}"
    for apart, stack in (("into", "gate_up_proj"), ("out", "down_proj"))
    for e in range(3)
}


@pytest.mark.parametrize("kind", [kind for kind in STACKS if kind is not Dispatched])
@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not"])
def test_measured_rows_of_an_expert_are_its_own_also_where_a_stack_has_one_A(kind, checkpointed):
    apart = mixture(Apart, checkpointed, measure=True, bias=kind in BIASED).capture.measured
    stacked = mixture(kind, checkpointed, measure=True).capture.measured
    rows = [int(stacked[name]) for name in NAMES]
    assert rows == [int(apart[other]) for other in NAMES.values()] and sum(rows) == 4 * ROWS


@pytest.mark.parametrize("kind", STACKS)
def test_a_common_A_is_that_of_all_tokens_that_enter(kind):
    apart, together = mixture(kind, choice=APART), mixture(kind)
    first = "experts.gate_up_proj.0"
    shared = {layer.name: layer.shares for layer in together.layers if "experts" in layer.name}
    assert shared == {name: first if "gate" in name and name != first else None for name in NAMES}
    own = [apart.capture.sums[f"experts.gate_up_proj.{e}/A"] for e in range(3)]
    common = together.capture.sums[f"{first}/A"]
    close(common.sum_P, sum(one.sum_P for one in own), sums=ROWS)
    assert float(common.counts[0]) == sum(float(one.counts[0]) for one in own) == 2 * ROWS
    for layer in apart.layers:  # each G is of its own rows, also the first one's
        one, other = (recorder.capture.sums[f"{layer.name}/G"] for recorder in (together, apart))
        close((one.sum_P, one.counts), (other.sum_P, other.counts), sums=ROWS)


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_rows_behind_a_grouped_products_groups_are_none(experts, shares):
    """As in a buffer for as many tokens as may come."""
    ends = torch.tensor([4, 9][-experts:], dtype=torch.int32)
    code = "return torch._grouped_mm(x, self.w.mT, offs=self.ends)[:9]"
    model = nn.Sequential(module(code, w=(experts, 4, WIDTH), ends=ends))
    x = torch.randn(ROWS, WIDTH)
    recorder = Recorder(model, LayerChoice(shares=shares))
    recorder.backward(model(x).square().mean())
    found = recorder.factors()
    has_parts = experts == 2 and not shares
    close(found["0.w.0"].A, second_moment(x[: 4 if has_parts else 9]), sums=ROWS)
    if has_parts:
        close(found["0.w.1"].A, second_moment(x[4:9]), sums=ROWS)


def test_places_without_a_token_are_no_rows_of_a_stack_s_expert():
    """As AutoEP's: 8 places for 6 tokens, of which 4 are one expert's."""
    code = "return torch.cat([F.linear(x[:4], self.w1[0]), F.linear(x[4:], self.w1[1])])"
    around = "return self.experts(torch.cat([x, x.new_zeros(2, 5)]))[:6]"
    experts = module(code, w1=(2, OUT, IN))
    model = nn.Sequential(module(around, experts=experts, _is_autoep_layer=True, ep_size=3))
    # the dispatched rows lie in another order
    mask = torch.tensor([[True, True, False], [True, True, True]])
    recorder = Recorder(model, APART, mask=lambda arguments, keywords: mask)
    recorder.backward(model(X[:6]).square().mean())
    found = recorder.factors()
    for name, own in {"0.experts.w1.0": X[:4], "0.experts.w1.1": X[4:6]}.items():
        assert found[name].rows == len(own)
        close(found[name].A, second_moment(own), sums=len(own))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_closure_may_multiply_by_the_models_own_parameter(reentrant, plain):
    """Autograd recomputes the closure outside of any module's call."""
    code = """
        product = lambda x: F.linear(x, self.w).sin()
        if self.reentrant is None:
            return product(x)
        return checkpoint(product, x.clone().requires_grad_(), use_reentrant=self.reentrant)
    """
    found = []
    for kind in (None, reentrant):
        model = written(code, checkpoint=checkpoint)()
        model.w, model.reentrant = nn.Parameter(torch.ones(OUT, IN)), kind
        recorder = Recorder(model)
        backward = unannounced if plain else recorder.backward
        backward(model(X).square().sum())
        assert not recorder.capture.failed
        found.append(recorder.factors())
    equal_bits(found[1], found[0])
