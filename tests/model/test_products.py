"""Matrices that are parameters of any module: found in its code, their rows seen in its
products."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from ds_kfac.curvature.methods import EIGEN
from ds_kfac.model.product_code import MatrixLayout, borrowed_weights, contraction, multiplied
from ds_kfac.model.products import Products, gradient_to_rows
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.plan.common import own_inputs
from tests.deepspeed.expert_stacks import BIASED, STACKS, WIDTH, Apart, Dispatched, make
from tests.model.recorder import Recorder
from tests.model.written import written
from tests.ops.specification import symmetric_pack

ROWS, IN, OUT = 11, 5, 3
X = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))


class Own(nn.Module):
    """A matrix [O, I] called w."""

    shape = (OUT, IN)

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(self.shape, generator=torch.Generator().manual_seed(2)))


class Lying(Own):
    shape = (IN, OUT)


class AsLinear(Own):
    def forward(self, x):
        return F.linear(x, self.w)


class Turned(Own):
    def forward(self, x):
        return x @ self.w.T


class Checkpointed(AsLinear):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


UPRIGHT = {
    "linear": "return F.linear(x, self.w)",
    "by names": "return F.linear(input=x, weight=self.w)",
    "turned": "return x @ self.w.T",
    "by method": "return x.matmul(self.w.transpose(0, 1))",
    "by variable": "matrix = self.w.t()\nreturn torch.mm(x, matrix)",
    "in double": "return F.linear(x.double(), self.w.to(torch.float64)).float()",
    "left": "return (self.w @ x.T).T",
    "left, of many": "x = x.view(1, *x.shape).mT\nreturn torch.matmul(self.w, x).mT[0]",
    "einsum, whose output is a permuted view": 'return torch.einsum("oi,ni->on", self.w, x).T',
}
LYING = {
    "plain": "return x @ self.w",
    "in double": "return x.double().matmul(self.w.double()).float()",
    "added": "return torch.addmm(torch.zeros(3), x, self.w)",
    "left": "return self.w.T.matmul(x.T).T",
    "einsum": 'return torch.einsum("ni,io->no", x, self.w)',
    "einsum in double": 'return torch.einsum("ni,io->no", x.double(), self.w.double()).float()',
}
NOT_A_PRODUCT = written("return x[:, :3] * self.w[:, 0] + self.w.sum()", Own)


class Net(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.first, self.part = nn.Linear(IN, IN), part

    def forward(self, x):
        self.seen = self.first(x)
        self.out = self.part(self.seen)
        self.out.retain_grad()
        return self.out.square().mean()


KINDS = [
    *(
        pytest.param(written(code, Own), False, "einsum" in name, id=name)
        for name, code in UPRIGHT.items()
    ),
    *(
        pytest.param(written(code, Lying), True, "einsum" in name, id=f"lying, {name}")
        for name, code in LYING.items()
    ),
    pytest.param(Checkpointed, False, None, id="checkpointed"),
    pytest.param(Reentrant, False, None, id="reentrant"),
]


@pytest.mark.parametrize(("kind", "lies", "einsum"), KINDS)
def test_a_matrix_of_a_modules_own_has_the_rows_of_its_products(kind, lies, einsum):
    model = Net(kind())
    assert einsum is None or multiplied(model.part) == {"w": MatrixLayout(lies, first=int(einsum))}
    recorder = Recorder(model)
    loss = model(X)
    recorder.backward(loss)
    A, G = recorder.factors()["part.w"][:2]
    x, g = model.seen.detach().double(), model.out.grad.double()
    close(A, symmetric_pack(x.T @ x / ROWS))
    close(G, symmetric_pack(ROWS * g.T @ g))


def close(actual, expected):
    """Sums of ROWS products of fp32 numbers."""
    bound = 16 * ROWS * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= bound


class Split(nn.Module):
    """Matrices of three dimensions, as transformers' XLNet has them: [I, (heads, width)], and [O,
    (heads, width)]."""

    def __init__(self):
        super().__init__()
        self.q, self.o = (nn.Parameter(torch.randn(IN, 2, OUT)) for _ in range(2))

    def forward(self, x):
        h = torch.einsum("tbi,inw->tbnw", x, self.q)
        return torch.einsum("tbnw,hnw->bth", h.tanh(), self.o)


class LeftStack(nn.Module):
    """As transformers' Zamba: every entry multiplies columns of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, OUT, IN))

    def forward(self, x):
        columns = torch.stack([x, x.sin()]).mT  # [2, examples, I, N]
        return (self.w[:, None] @ columns).mT


class DbrxExpertGLU(nn.Module):
    """As transformers': experts one below the other, cut by the module around it."""

    moe_num_experts = 2

    def __init__(self):
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(2 * OUT, IN)) for _ in range(3))

    def forward(self, x, w1, v1, w2):
        return (x.matmul(w1.T).sigmoid() * x.matmul(v1.T)).matmul(w2)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = DbrxExpertGLU()

    def forward(self, x):
        weights = self.mlp.w1, self.mlp.v1, self.mlp.w2
        return torch.stack(
            [
                self.mlp(x[e], *(w.view(2, OUT, IN)[torch.tensor(e)] for w in weights))
                for e in range(2)
            ]
        )


class ByLinears(nn.Module):
    """The same with a Linear for each matrix."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.kind, self.linears = type(part), nn.ModuleDict()
        p = {name: weight.detach() for name, weight in part.named_parameters()}
        if self.kind is Split:
            matrices = {"q": p["q"].flatten(1).T, "o": p["o"].flatten(1)}
        elif self.kind is LeftStack:
            matrices = {f"w-{e}": p["w"][e] for e in range(2)}
        else:
            cut = {name.removeprefix("mlp."): weight.view(2, OUT, IN) for name, weight in p.items()}
            matrices = {
                f"mlp-{n}-{e}": w[e].T if n == "w2" else w[e]
                for n, w in cut.items()
                for e in range(2)
            }
        for name, matrix in matrices.items():
            self.linears[name] = linear = nn.Linear(*reversed(matrix.shape), bias=False)
            linear.weight.data.copy_(matrix)

    def forward(self, x):
        get = self.linears.__getitem__
        if self.kind is Split:
            return get("o")(get("q")(x).tanh()).transpose(0, 1)
        if self.kind is LeftStack:
            return torch.stack([get("w-0")(x), get("w-1")(x.sin())])
        return torch.stack(
            [
                get(f"mlp-w2-{e}")(get(f"mlp-w1-{e}")(x[e]).sigmoid() * get(f"mlp-v1-{e}")(x[e]))
                for e in range(2)
            ]
        )


@pytest.mark.parametrize("kind", [Split, LeftStack, Experts])
def test_matrices_inside_of_parameters_have_the_rows_of_linears(kind):
    torch.manual_seed(3)
    part, x, found = kind(), torch.randn(2, ROWS, IN), []
    for model in (ByLinears(part), part):
        recorder = Recorder(model, LayerChoice(shares=False))
        recorder.backward(model(x).square().mean())
        found.append(recorder.factors())
    expected, actual = found
    assert list(actual) == [name.removeprefix("linears.").replace("-", ".") for name in expected]
    for of_linears, of_products in zip(expected.values(), actual.values(), strict=True):
        close(of_products.A, of_linears.A)
        # R_p is the number of rows of the product nearest to the loss: of a stack those of all its
        # matrices
        close(of_products.G / of_products.terms, of_linears.G / of_linears.terms)


@pytest.mark.parametrize(
    ("equation", "place", "layout"),
    [
        ("ibh,hnd->ibnd", 1, MatrixLayout(True, 1)),
        ("ibnd,hnd->ibh", 1, MatrixLayout(False, 1)),
        ("hnd,ibnd->ibh", 0, MatrixLayout(False, 1)),
        ("ab,bc->ac", 0, MatrixLayout(False, 1)),
        ("b n h, d n h -> b d", 1, MatrixLayout(False, 1)),
        ("bnij,bnd->bij", 1, None),
        ("ij,jk", 1, None),
        ("...i,io->...o", 1, MatrixLayout(True, 1)),
        ("...hd,hod->...ho", 1, MatrixLayout(False)),
        ("bi,...io->...bo", 1, None),
        ("...i,...io->...o", 1, None),
        ("...i,io->o", 1, None),
        ("ii,io->o", 1, None),
        ("bi,oio->bo", 1, None),
        ("bi,oip->bop", 1, None),
        ("bi,io->o", 1, None),
        ("i,o->io", 1, None),
        ("ecd,edf->ecf", 1, MatrixLayout(True)),
        ("bsgd,grd->bsgr", 1, MatrixLayout(False)),
        ("neo,bni->beno", 0, None),
        ("ecd,edf->cf", 1, MatrixLayout(True, 2)),
        ("cd,edf->ecf", 1, None),
        ("ecdk,edkf->ecf", 1, None),
    ],
)
def test_an_equation_says_how_a_matrix_lies(equation, place, layout):
    found = contraction(equation, place)
    assert (None if found is None else found.layout) == layout


class Lender(nn.Module):
    """Takes a weight in each way that transformers does."""

    def __init__(self):
        super().__init__()
        self.by_operator, self.by_function, self.by_word, self.both, self.read = (
            nn.Linear(IN, IN) for _ in range(5)
        )
        self.convolution = nn.Conv1d(IN, IN, 3, padding=2, groups=IN)
        self.reset()

    def reset(self):
        nn.init.normal_(self.read.weight)

    def forward(self, x):
        x = (self.by_operator.weight @ x.to(self.read.weight.dtype).T).T
        x = F.linear(x, self.by_function.weight, self.by_function.bias)
        x = self.read(F.linear(x, weight=self.by_word.weight))
        x = F.linear(self.both(x), self.both.weight)
        return F.conv1d(x.T, self.convolution.weight, None, padding=2, groups=IN)[:, :ROWS].T


def test_a_weight_that_the_module_around_it_takes_has_the_rows_of_that():
    model = Lender()
    names = {id(module): name for name, module in model.named_modules()}
    assert {names[id(child)]: called for child, called, _ in borrowed_weights(model)} == {
        "by_operator": False,
        "by_function": False,
        "by_word": False,
        "both": True,
        "convolution": False,
    }
    found = scan(model)
    assert {left.name: left.reason for left in found.skipped} == {
        "convolution": "its parent module uses its weight without calling it"
    }
    recorder = Recorder(model)
    recorder.backward(model(X).square().mean())
    means = recorder.factors()
    assert list(means) == ["by_operator", "by_function", "by_word", "both", "read"]
    x = torch.cat([X, torch.ones(ROWS, 1)], 1).double()
    close(means["by_operator"][0], symmetric_pack(x.T @ x / ROWS))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(IN, IN)

    def project(self, x):
        return F.linear(x, self.linear.weight, self.linear.bias)

    def forward(self, x):
        return self.project(x)


class Outer(nn.Module):
    """Calls a method of the module around a layer, whose hooks do not see it."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner.project(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = Outer()

    def forward(self, x):
        return checkpoint(self.outer, x, use_reentrant=True)


def test_a_method_called_from_further_out_is_seen_in_a_recomputation_too():
    model = Checkpointed()
    recorder = Recorder(model)
    recorder.backward(model(X.clone().requires_grad_()).square().mean())
    A = recorder.factors()["outer.inner.linear"].A
    x = torch.cat([X, torch.ones(ROWS, 1)], 1).double()
    close(A, symmetric_pack(x.T @ x / ROWS))


def test_a_gradient_of_a_base_lies_as_its_view_does():
    """As that of an einsum, whose dimensions are in another order in memory."""
    base = torch.zeros(2, 3, 5)
    gradient = torch.arange(30.0).view(2, 3, 5)
    assert torch.equal(gradient_to_rows(base.permute(1, 2, 0))(gradient), gradient.permute(1, 2, 0))


def test_an_einsum_with_a_matrix_of_a_stack_is_a_product_with_each():
    class Stacked(Own):
        shape = (2, IN, OUT)

        def forward(self, x):
            return (
                torch.einsum("ni,io->no", x, self.w[0]).sum()
                + torch.einsum("ni,io->no", x, self.w[1]).sum()
            )

    model = nn.Sequential(Stacked())
    assert [(x.name, x.A.dim, x.G.dim) for x in scan(model).layers] == [
        ("0.w.0", IN, OUT),
        ("0.w.1", IN, OUT),
    ]
    recorder = Recorder(model, LayerChoice(shares=False))
    recorder.backward(model(X))
    close(recorder.factors()["0.w.1"][0], symmetric_pack(X.double().T @ X.double() / ROWS))


GROUPS, RANK = 3, 2


class GroupedLinear(nn.Linear):
    """As DeepSeek-V4's in transformers: a map of its own for each group of the inputs."""

    def __init__(self):
        super().__init__(IN, GROUPS * RANK, bias=False)
        self.groups = GROUPS

    def forward(self, x):
        w = self.weight.view(self.groups, -1, IN).transpose(1, 2)
        return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


class BorrowingGroups(nn.Module):
    """As in DeepSeek-V4's own code."""

    def __init__(self):
        super().__init__()
        self.groups, self.wo_a = GROUPS, nn.Linear(IN, GROUPS * RANK, bias=False)

    def forward(self, x):
        return torch.einsum("ngi,gri->ngr", x, self.wo_a.weight.view(self.groups, RANK, -1))


class GroupsByNumber(BorrowingGroups):
    def forward(self, x):
        w = self.wo_a.weight.reshape((3, RANK, IN))
        return torch.stack(
            [F.linear(rows, part) for rows, part in zip(x.unbind(1), w.unbind(), strict=True)], 1
        )


@pytest.mark.parametrize("kind", [GroupedLinear, BorrowingGroups, GroupsByNumber])
def test_rows_that_are_viewed_as_a_stack_are_a_matrix_each(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(ROWS, GROUPS, IN)
    found = scan(model)
    place = "0" if kind is GroupedLinear else "0.wo_a"
    assert not found.skipped and [layer.name for layer in found.layers] == [
        f"{place}.{k}" for k in range(GROUPS)
    ]
    assert {(layer.G.dim, layer.A.dim) for layer in found.layers} == {(RANK, IN)}
    recorder = Recorder(model, LayerChoice(shares=False))
    output = model(x)
    output.retain_grad()
    recorder.backward(output.square().sum())
    for k, (A, G, _, terms) in enumerate(recorder.factors().values()):
        rows, gradients = x[:, k].double(), output.grad[:, k].double()
        close(A, symmetric_pack(rows.T @ rows / ROWS))
        assert terms == ROWS * (GROUPS if kind is not GroupsByNumber else 3)
        close(G, symmetric_pack(gradients.T @ gradients * terms))


class Uncut(nn.Module):
    """A number that does not divide the rows cuts nothing."""

    def __init__(self):
        super().__init__()
        self.wo_a = nn.Linear(IN, GROUPS * RANK)

    def forward(self, x):
        if self.grouped:
            return torch.einsum("ngi,gri->ngr", x, self.wo_a.weight.view(self.parts, -1, IN))
        return self.wo_a(x)

    grouped = False
    parts = property(lambda self: 4)


def test_a_view_that_is_no_stack_is_none():
    model = nn.Sequential(Uncut())
    assert borrowed_weights(model[0]) == [] and [layer.name for layer in scan(model).layers] == [
        "0.wo_a"
    ]


def test_one_matrix_in_two_ways_is_none():
    class TwoWays(Own):
        def forward(self, x):
            return torch.einsum("ni,oi->no", x, self.w) + F.linear(x, self.w)

    assert multiplied(TwoWays()) == {}


def test_products_are_watched_in_captured_forwards_and_their_backwards_only():
    class Watched(AsLinear):
        def forward(self, x):
            modes.append([type(mode) for mode in _get_current_function_mode_stack()])
            return super().forward(x)

    modes: list[list[type]] = []
    model, plain = Net(Watched()), F.linear
    recorder = Recorder(model)
    for active in (True, False):
        recorder.capture.active = active
        loss = model(X)
        recorder.backward(loss)
        assert F.linear is plain
    recorder.capture.active = True
    with pytest.raises(RuntimeError):
        model(X[:, :2])
    model(X).backward()
    recorder.capture.remove()
    model(X)
    assert modes == [[Products], [], [Products], []] and F.linear is plain


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

    def forward(attention_mask=None):
        q, k = (x if batch_first else x.transpose(0, 1) for x in (query, memory))
        output = attention(q, k, k.clone() if apart else k, need_weights=False, attn_mask=left_out)[
            0
        ]
        return (output if batch_first else output.transpose(0, 1))[mask].square().mean()

    model.forward = forward
    recorder = Recorder(model)
    recorder.capture.read_mask = lambda arguments, keywords: mask
    recorder.backward(model())
    A = recorder.factors()["attention.in_proj_weight"].A
    # q's, ..
    rows = torch.cat(
        [torch.cat([x[mask], torch.ones(5, 1)], 1) for x in (query, memory, memory)]
    ).double()
    close(A, symmetric_pack(rows.T @ rows / len(rows)))


def test_what_is_no_product_is_no_layer():
    assert multiplied(NOT_A_PRODUCT()) == {}
    found = scan(Net(NOT_A_PRODUCT()))
    assert [layer.name for layer in found.layers] == ["first"]
    assert [(left.name, left.numel) for left in found.skipped] == [("part", OUT * IN)]


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not"])
def test_a_stacks_entries_have_the_rows_of_the_same_experts_apart(kind, checkpointed):
    bias, y = kind in BIASED, torch.arange(ROWS) % 5
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    found = {}
    for one in (Apart, kind):
        model = make(one, bias=bias, checkpointed=checkpointed)
        recorder = Recorder(model, LayerChoice(shares=False))
        recorder.backward(model(x, y))
        found[one] = recorder.factors()
    for e in range(3):
        for apart, stacked in (("into", "gate_up_proj"), ("out", "down_proj")):
            expected, actual = (
                found[Apart][f"experts.{apart}.{e}"],
                found[kind][f"experts.{stacked}.{e}"],
            )
            close(actual.A, expected.A)
            close(actual.G, expected.G)
            assert actual[2:] == expected[2:]


@pytest.mark.parametrize("kind", STACKS)
def test_a_common_A_is_that_of_all_tokens_that_enter(kind):
    model = make(kind, bias=kind in BIASED)
    shared = {layer.name: layer.shares for layer in scan(model).layers if "experts" in layer.name}
    first = "experts.gate_up_proj.0"
    assert shared == {
        **{f"experts.gate_up_proj.{e}": first if e else None for e in range(3)},
        **{f"experts.down_proj.{e}": None for e in range(3)},
    }
    apart = Recorder(make(kind, bias=kind in BIASED), LayerChoice(shares=False))
    together = Recorder(model)
    x, y = (
        torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)),
        torch.arange(ROWS) % 5,
    )
    for recorder in (apart, together):
        recorder.backward(recorder.model(x, y))
    own = [apart.capture.sums[f"experts.gate_up_proj.{e}/A"] for e in range(3)]
    common = together.capture.sums[f"{first}/A"]
    close(common.sum_P, sum(one.sum_P for one in own))
    assert float(common.counts[0]) == sum(float(one.counts[0]) for one in own) == 2 * ROWS
    for layer in apart.layers:  # each G is of its own rows, also the first one's
        one, other = (recorder.capture.sums[f"{layer.name}/G"] for recorder in (together, apart))
        close(one.sum_P, other.sum_P)
        assert torch.equal(one.counts, other.counts)


class GateAndUp(nn.Module):
    """Experts whose gates and ups are stacks of their own, as AutoEP's w1 and w3."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(3, 8, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(3, WIDTH, 8))

    def forward(self, x):
        parts = [x[e::4] for e in range(3)]
        return sum(
            (
                F.linear(
                    F.silu(F.linear(part, self.gate[e])) * F.linear(part, self.up[e]), self.down[e]
                )
            )
            .square()
            .mean()
            for e, part in enumerate(parts)
        )


def test_own_as_of_two_stacks_with_one_input_are_common_expert_by_expert():
    x, found = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)), {}
    for shares in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(GateAndUp())
        recorder = Recorder(model, LayerChoice(shares=shares))
        if shares:
            layers, _ = own_inputs(recorder.layers, EIGEN, moments=2, world=1)
            assert [one.shares for one in layers] == [None] * 3 + [
                f"0.gate.{e}" for e in range(3)
            ] + [None] * 3
            recorder.capture.remove()
            recorder = Recorder(model, layers=layers)
        recorder.backward(model(x))
        found[shares] = {
            key: (own.sum_P, own.counts[0]) for key, own in recorder.capture.sums.items()
        }
    assert found[False].keys() - found[True].keys() == {f"0.up.{e}/A" for e in range(3)}
    for key, (sum_P, count) in found[True].items():
        close(sum_P, found[False][key][0])
        assert count == found[False][key][1] > 0


@pytest.mark.parametrize("kind", [kind for kind in STACKS if kind is not Dispatched])
@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not"])
def test_measured_rows_of_an_expert_are_its_own_also_where_a_stack_has_one_A(kind, checkpointed):
    x, y = (
        torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)),
        torch.arange(ROWS) % 5,
    )
    found = {}
    for one in (Apart, kind):
        model = make(one, bias=kind in BIASED, checkpointed=checkpointed)
        recorder = Recorder(model)
        recorder.begin(measure=True)
        recorder.backward(model(x, y))
        found[one] = {name: int(rows) for name, rows in recorder.capture.measured.items()}
    for apart, stacked in (("into", "gate_up_proj"), ("out", "down_proj")):
        own = [found[kind][f"experts.{stacked}.{e}"] for e in range(3)]
        assert (
            own == [found[Apart][f"experts.{apart}.{e}"] for e in range(3)] and sum(own) == 2 * ROWS
        )


def test_a_class_without_a_source_is_no_error_and_an_inner_one_is_read():
    made = {"nn": nn, "F": F, "__name__": "nowhere"}
    exec(
        "class Own(nn.Module):\n    def forward(self, x):\n        return F.linear(x, self.w)", made
    )

    class Inner(AsLinear):
        class Innermost(Turned):
            def forward(self, x):
                return self.w @ x

    for kind, found in ((made["Own"], {}), (Inner.Innermost, {"w": MatrixLayout(False)})):
        module = kind()
        module.w = nn.Parameter(torch.ones(2, 3))
        assert multiplied(module) == found and borrowed_weights(module) == []


class Wrapping(AsLinear):
    """Its methods have the names of functions that have no code, as those of torch."""

    attend = functools.wraps(F.scaled_dot_product_attention)(lambda self, *args: args)
    circle = functools.wraps(F.relu)(lambda self, x: x)
    circle.__wrapped__ = circle


def test_methods_that_wrap_what_has_no_code_are_read():
    assert multiplied(Wrapping()) == {"w": MatrixLayout(False)}


if torch.cuda.device_count() < 0:  # as where a library is missing

    class Either(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

else:

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))

        @torch.no_grad()
        def reset(self) -> None:
            self.w.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w


def test_of_two_classes_with_one_name_the_one_that_exists_is_read():
    assert multiplied(Either()) == {"w": MatrixLayout(True)}


class Behind(nn.Module):
    """Rows behind those of the groups, as in a buffer for as many tokens as may come."""

    def __init__(self, experts: int):
        super().__init__()
        self.experts, self.w = experts, nn.Parameter(torch.randn(experts, 4, WIDTH))

    def forward(self, x):
        ends = torch.tensor([4, 9][-self.experts :], dtype=torch.int32)
        return torch._grouped_mm(x, self.w.mT, offs=ends)[:9]


@pytest.mark.parametrize("experts", [1, 2])
@pytest.mark.parametrize("shares", [True, False])
def test_rows_behind_a_grouped_products_groups_are_none(experts, shares):
    torch.manual_seed(4)
    model, x = nn.Sequential(Behind(experts)), torch.randn(ROWS, WIDTH)
    recorder = Recorder(model, LayerChoice(shares=shares))
    recorder.backward(model(x).square().mean())
    found = recorder.factors()
    of_first = 4 if experts == 2 and not shares else 9
    close(found["0.w.0"][0], symmetric_pack((x[:of_first].T @ x[:of_first] / of_first).double()))
    if experts == 2 and not shares:
        close(found["0.w.1"][0], symmetric_pack((x[4:9].T @ x[4:9] / 5).double()))


class Clamped(nn.Module):
    """A method, which is no forward, bounds a child's weight before it multiplies by it, as Gemma
    3n's AltUp does."""

    def __init__(self):
        super().__init__()
        self.coefs, self.other = nn.Linear(IN, OUT, bias=False), nn.Linear(OUT, 2)

    def correct(self, x):
        # no element is out of that: see test_product_rows.py
        weight = self.coefs.weight.clamp(-9, 9)
        return F.linear(x, weight)


class AroundClamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Clamped()

    def forward(self, x):
        return self.inner.other(self.inner.correct(x))


def test_a_weight_that_a_method_bounds_is_seen():
    torch.manual_seed(0)
    recorder = Recorder(nn.Sequential(AroundClamped()))
    assert [
        child is recorder.model[0].inner.coefs
        for child, *_ in borrowed_weights(recorder.model[0].inner)
    ] == [True]
    recorder.model(X).square().mean().backward()
    means = recorder.factors()
    assert set(means) == {"0.inner.coefs", "0.inner.other"}
    A = means["0.inner.coefs"].A
    close(A, symmetric_pack(X.double().T @ X.double() / ROWS))


def test_a_method_whose_arguments_have_no_names_is_read():
    by_place = written("def forward(self, x, /):\n    return F.linear(x, self.w)", Own)
    assert multiplied(by_place()) == {"w": MatrixLayout(False)}


class _OtherGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(IN, OUT)

    def forward(self, x):
        return self.gate(x)


@pytest.mark.parametrize("name", ["TopKGate", "DbrxExpertGLU"])
def test_a_class_that_has_only_the_name_of_a_known_one_is_like_any_other(name):
    model = type(name, (_OtherGate,), {})()
    assert borrowed_weights(model) == [] and multiplied(model) == {}
    assert [layer.name for layer in scan(model).layers] == ["gate"]


def test_a_nested_input_is_no_product_and_no_error():
    """It has no sizes to read; the forward goes on, and the layer shows no rows."""

    class Nested(AsLinear):
        def forward(self, x):
            return torch.nested.to_padded_tensor(
                super().forward(torch.nested.nested_tensor([*x.split([1, len(x) - 1])])), 0.0
            )

    recorder = Recorder(model := Net(Nested()))
    recorder.backward(model(X).sum())
    assert (
        not any(key.startswith("part") for key in recorder.factors())
        and model.part.w.grad is not None
    )
