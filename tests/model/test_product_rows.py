"""Of each way to write a product with a parameter: the sum over its rows of g a^T is the
parameter's gradient, or there are no rows at all."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.curvature.factor import Side
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.products import Products
from tests.close import close

N, I, O, E, G = 6, 5, 3, 4, 4  # noqa: E741
"""G = E: groups of rows, as many as there are experts."""
PICKED, ENDS = torch.tensor([2, 0, 2, 3, -1, 0]), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
UP, LYING, SQUARE, STACK, LYING_STACK = (O, I), (I, O), (I, I), (E, O, I), (E, I, O)
WIDE = (E, 4, 8)
"""Grouped products need rows of 16 bytes."""


class Part(nn.Module):
    def __init__(self, shape: tuple[int, ...], run: Callable) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(shape, generator=generator))
        flat = torch.cat([torch.zeros(7), self.w.detach().flatten()])
        self.w.data = flat[7:].view(shape)  # as DeepSpeed has it: a piece of a buffer
        self.v = nn.Parameter(torch.randn(O, O, generator=generator))  # not a layer
        self.frozen = nn.Parameter(torch.randn(I, 7, generator=generator), requires_grad=False)
        self.norm = self.w.detach().norm()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Doubled(torch.autograd.Function):
    """A view whose gradient is doubled."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class View(Doubled):
    pass


def changed(tensor: Tensor, how: Callable[[Tensor], object]) -> Tensor:
    how(tensor)
    return tensor


def without_gradient(make: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return make()


def view_of_deleted_copy(w: Tensor) -> Tensor:
    copy = w.double()
    return copy.T


def groups(x: Tensor, *order: int) -> Tensor:
    """[G, E, 2, I] of [N, I], with different rows, its dimensions in this order."""
    every = torch.stack([x[:2] * (k + 1) + k for k in range(G * E)]).view(G, E, 2, I)
    return every.permute(*order) if order else every


def dispatched(x: Tensor) -> Tensor:
    return groups(x)[0]


class Case(NamedTuple):
    shape: tuple[int, ...]
    run: Callable[[Part, Tensor], Tensor]
    transposed: bool = False
    bias: bool = False


COUNTED = {
    "linear": Case(UP, lambda s, x: F.linear(x, s.w)),
    "linear, by names": Case(UP, lambda s, x: F.linear(weight=s.w, input=x)),
    "linear with a bias": Case(UP, lambda s, x: F.linear(x, s.w, torch.ones(O))),
    "linear of one row": Case(UP, lambda s, x: F.linear(x[0], s.w)),
    "linear of no rows": Case(UP, lambda s, x: F.linear(x[:0], s.w)),
    "linear of a sequence": Case(UP, lambda s, x: F.linear(x.view(2, 3, I), s.w)),
    "linear of a transposed sequence": Case(
        UP, lambda s, x: F.linear(x.view(2, 3, I).transpose(0, 1), s.w)
    ),
    "x @ w.T": Case(UP, lambda s, x: x @ s.w.T),
    "x @ w.T, square": Case(SQUARE, lambda s, x: x @ s.w.T),
    "x @ w, square": Case(SQUARE, lambda s, x: x @ s.w, transposed=True),
    "x @ w": Case(LYING, lambda s, x: x @ s.w, transposed=True),
    "a vector @ w": Case(LYING, lambda s, x: x[1] @ s.w, transposed=True),
    "w @ a vector": Case(UP, lambda s, x: s.w @ x[1]),
    "w @ x.T": Case(UP, lambda s, x: s.w @ x.T),
    "w @ x.T, of many": Case(UP, lambda s, x: s.w @ x.view(2, 3, I).mT),
    "w.T @ x.T": Case(LYING, lambda s, x: s.w.T @ x.T, transposed=True),
    "matmul by names": Case(LYING, lambda s, x: torch.matmul(other=s.w, input=x), transposed=True),
    "mm": Case(LYING, lambda s, x: torch.mm(x, mat2=s.w), transposed=True),
    "addmm": Case(LYING, lambda s, x: torch.addmm(torch.zeros(O), x, s.w), transposed=True),
    "addmm, alpha": Case(
        LYING, lambda s, x: torch.addmm(torch.zeros(O), x, s.w, alpha=0.25), transposed=True
    ),
    "addmm, alpha and beta": Case(
        LYING, lambda s, x: torch.ones(O).addmm(x, s.w, beta=3, alpha=-2), transposed=True
    ),
    "addmm by names": Case(
        LYING, lambda s, x: torch.addmm(input=torch.ones(O), mat1=x, mat2=s.w), transposed=True
    ),
    "addmm, w first": Case(UP, lambda s, x: torch.addmm(torch.zeros(O, 1), s.w, x.T, alpha=0.5)),
    "baddbmm, alpha": Case(
        LYING_STACK,
        lambda s, x: torch.baddbmm(torch.zeros(E, 1, O), dispatched(x), s.w, alpha=0.25),
        transposed=True,
    ),
    "a dtype": Case(UP, lambda s, x: F.linear(x.double(), s.w.double()).float()),
    "a dtype, transposed": Case(UP, lambda s, x: x.double() @ s.w.T.to(torch.float64)),
    "a view of a copy": Case(UP, lambda s, x: x.double() @ s.w.double().T),
    "a view of a copy that nobody holds": Case(
        UP, lambda s, x: x.double() @ view_of_deleted_copy(s.w)
    ),
    "a copy of a view": Case(UP, lambda s, x: x @ s.w.T.contiguous()),
    "a copy of a copy": Case(UP, lambda s, x: x @ s.w.clone().clone().T),
    "a clone by name": Case(UP, lambda s, x: F.linear(x, torch.clone(input=s.w))),
    "a copy whose numbers alone change": Case(
        UP, lambda s, x: F.linear(x, changed(s.w.clone(), lambda w: w.data.mul_(3)))
    ),
    "clamped where nothing is": Case(UP, lambda s, x: F.linear(x, s.w.clamp(-50, 50))),
    "the first rows": Case(UP, lambda s, x: F.linear(x, s.w[:2])),
    "the last rows": Case(UP, lambda s, x: x @ s.w[1:].T),
    "some columns of a lying one": Case(LYING, lambda s, x: x @ s.w[:, 1:], transposed=True),
    "chunks, one after the other": Case(
        SQUARE,
        lambda s, x: torch.cat([F.linear(x * k, w) for k, w in enumerate(s.w.chunk(2), 1)], -1),
    ),
    "chunks, w first": Case(SQUARE, lambda s, x: s.w[1:3] @ x.T),
    "flattened, and back": Case(UP, lambda s, x: F.linear(x, s.w.flatten().view(O, I))),
    "another dimension": Case(UP, lambda s, x: x @ s.w[None].mT),
    "another dimension, of many": Case(UP, lambda s, x: x.view(2, 3, I) @ s.w[None, None].mT),
    "expanded": Case(UP, lambda s, x: torch.bmm(x.view(2, 3, I), s.w.T.expand(2, I, O))),
    "expanded, the rows are not": Case(UP, lambda s, x: x @ s.w.T.expand(2, I, O)),
    "rows that are repeated for each example": Case(
        (4, O), lambda s, x: F.linear(s.v.expand(2, O, O), s.w)
    ),
    "one output": Case((1, I), lambda s, x: F.linear(x, s.w)),
    "one input": Case((O, 1), lambda s, x: F.linear(x[:, :1], s.w)),
    "one input, lying": Case((1, O), lambda s, x: x[:, :1] @ s.w, transposed=True),
    "einsum": Case(LYING, lambda s, x: torch.einsum("ni,io->no", x, s.w), transposed=True),
    "einsum of any dimensions": Case(
        LYING, lambda s, x: torch.einsum("...i,io->...o", x.view(2, 3, 1, I), s.w), transposed=True
    ),
    "einsum of any dimensions, none": Case(
        UP, lambda s, x: torch.einsum("...i,oi->...o", x[1], s.w)
    ),
    "einsum of a stack, of any dimensions": Case(
        STACK, lambda s, x: torch.einsum("...ei,eoi->...eo", groups(x, 0, 2, 1, 3), s.w)
    ),
    "einsum, transposed output": Case(
        UP, lambda s, x: torch.einsum("oi,bni->bon", s.w, x.view(2, 3, I))
    ),
    "einsum of a stack": Case(STACK, lambda s, x: torch.einsum("eni,eoi->eno", dispatched(x), s.w)),
    "einsum of a stack, of a batch": Case(
        LYING_STACK,
        lambda s, x: torch.einsum("eio,bnei->oben", s.w, groups(x, 0, 2, 1, 3)),
        transposed=True,
    ),
    "einsum of an entry": Case(
        LYING_STACK, lambda s, x: torch.einsum("ni,io->no", x, s.w[2]), transposed=True
    ),
    "entries": Case(STACK, lambda s, x: sum(F.linear(x * e, s.w[e]) for e in range(E - 1))),
    "an entry from the end": Case(STACK, lambda s, x: F.linear(x, s.w[-1])),
    "an entry by a tensor": Case(STACK, lambda s, x: F.linear(x, s.w[torch.tensor(-2)])),
    "unbound": Case(
        LYING_STACK, lambda s, x: sum(x @ w for w in s.w.unbind()[1:]), transposed=True
    ),
    "a stack, each its own rows": Case(STACK, lambda s, x: torch.bmm(dispatched(x), s.w.mT)),
    "a stack in another dtype": Case(
        STACK, lambda s, x: torch.bmm(dispatched(x).double(), s.w.double().mT)
    ),
    "a stack, transposed and copied": Case(
        STACK, lambda s, x: torch.bmm(dispatched(x), s.w.mT.contiguous())
    ),
    "a stack first": Case(STACK, lambda s, x: s.w @ dispatched(x).mT),
    "a part of a stack": Case(STACK, lambda s, x: dispatched(x)[:2] @ s.w[1:3].mT),
    "every second of a stack": Case(STACK, lambda s, x: dispatched(x)[:2] @ s.w[1::2].mT),
    "a stack of groups": Case(LYING_STACK, lambda s, x: groups(x) @ s.w, transposed=True),
    "a stack of groups, experts first": Case(
        LYING_STACK, lambda s, x: groups(x, 1, 0, 2, 3) @ s.w[:, None], transposed=True
    ),
    "a stack first, of groups": Case(STACK, lambda s, x: s.w @ groups(x).mT),
    "a stack, all of the same rows": Case(LYING_STACK, lambda s, x: x @ s.w, transposed=True),
    "a stack, all of the same rows, of a batch": Case(
        LYING_STACK, lambda s, x: x.view(2, 1, 3, I) @ s.w, transposed=True
    ),
    "grouped": Case(WIDE, lambda s, x: torch._grouped_mm(F.pad(x, (2, 1)), s.w.mT, offs=ENDS)),
    "grouped, a part": Case(
        WIDE, lambda s, x: torch._grouped_mm(F.pad(x, (2, 1)), s.w[1:3].mT, offs=ENDS[1:3])[:5]
    ),
    "picked": Case(STACK, lambda s, x: torch.bmm(s.w[PICKED], x[:, :, None])),
    "picked, on the right": Case(
        LYING_STACK, lambda s, x: torch.bmm(x[:, None], s.w[PICKED]), transposed=True
    ),
    "picked and transposed": Case(STACK, lambda s, x: torch.bmm(x[:, None], s.w[PICKED].mT)),
    "picked, several rows": Case(
        STACK, lambda s, x: torch.stack([x, -x.cos()], 1) @ s.w[PICKED].mT
    ),
    "picked from a part": Case(STACK, lambda s, x: torch.bmm(s.w[1:][PICKED % 3], x[:, :, None])),
    "picked in another dtype": Case(
        STACK, lambda s, x: torch.bmm(s.w.double()[PICKED], x[:, :, None].double())
    ),
    "picked, then another dtype": Case(
        STACK, lambda s, x: torch.bmm(s.w[PICKED].double(), x[:, :, None].double())
    ),
    "picked by a list": Case(STACK, lambda s, x: torch.bmm(s.w[[1, 1, -3]], x[:3, :, None])),
    "picked by a mask": Case(
        STACK, lambda s, x: torch.bmm(s.w[torch.arange(E) % 2 > 0], x[:2, :, None])
    ),
    "index_select": Case(
        STACK, lambda s, x: torch.bmm(s.w.index_select(0, PICKED % E), x[:, :, None])
    ),
    "index_select by names": Case(
        STACK,
        lambda s, x: torch.bmm(
            torch.index_select(input=s.w, index=PICKED % E, dim=0), x[:, :, None]
        ),
    ),
    "picked, one of them": Case(STACK, lambda s, x: F.linear(x, s.w[PICKED][3])),
    "a stack of one, grouped": Case(
        (1, 4, 8), lambda s, x: torch._grouped_mm(F.pad(x, (2, 1)), s.w.mT, offs=ENDS[:1])[:2]
    ),
    "a stack of one": Case((1, O, I), lambda s, x: x @ s.w.mT),
    "a stack of one, picked": Case(
        (1, O, I), lambda s, x: x[:2, None] @ s.w[torch.tensor([0, -1])].mT
    ),
    "a bias, times as much": Case(
        LYING, lambda s, x: torch.addmm(s.b, x, s.w, alpha=2, beta=2), transposed=True, bias=True
    ),
}
SPREAD = torch.arange(1.0, 1 + O)[:, None]
NONE = {
    "scaled": Case(UP, lambda s, x: F.linear(x, 0.5 * s.w)),
    "einsum of a part of a stack": Case(
        STACK, lambda s, x: torch.einsum("eni,eoi->eno", dispatched(x)[:2], s.w[1:3])
    ),
    "einsum of a stack, two entries as one": Case(
        STACK, lambda s, x: torch.einsum("eni,eoi->eno", dispatched(x)[:2], s.w.view(2, 2 * O, I))
    ),
    "einsum that sums over a stack": Case(
        STACK, lambda s, x: torch.einsum("eni,eoi->no", dispatched(x), s.w)
    ),
    "masked": Case(UP, lambda s, x: F.linear(x, s.w * (SPREAD > 1))),
    "where": Case(UP, lambda s, x: F.linear(x, torch.where(SPREAD > 1, s.w, 0.0))),
    "masked_fill": Case(UP, lambda s, x: F.linear(x, s.w.masked_fill(SPREAD > 2, 0.0))),
    "dropped": Case(UP, lambda s, x: F.linear(x, F.dropout(s.w, 0.5, training=True))),
    "weight norm by hand": Case(UP, lambda s, x: F.linear(x, s.w / s.w.norm(dim=1, keepdim=True))),
    "a low-rank update": Case(
        UP, lambda s, x: F.linear(x, torch.zeros(O, I) + s.v @ s.w), transposed=True
    ),
    "a low-rank update of a frozen matrix": Case(UP, lambda s, x: s.w @ s.frozen),
    "a low-rank update of a frozen matrix, cast": Case(
        UP, lambda s, x: s.w.double() @ s.frozen.double()
    ),
    "rows that are a parameter's": Case((4, O), lambda s, x: F.linear(s.v, s.w)),
    "a penalty": Case(UP, lambda s, x: s.w @ s.w.T),
    "a penalty of a copy": Case(UP, lambda s, x: s.w.double() @ s.w.double().T),
    "a penalty of entries": Case(STACK, lambda s, x: torch.bmm(s.w, s.w.mT)),
    "one picked by another": Case(STACK, lambda s, x: torch.bmm(s.w[PICKED], s.w[PICKED].mT)),
    "a copy, scaled in place": Case(
        UP, lambda s, x: F.linear(x, changed(s.w.clone(), lambda w: w.mul_(3)))
    ),
    "a copy, divided in place": Case(
        UP, lambda s, x: F.linear(x, changed(s.w.clone(), lambda w: w.div_(s.norm)))
    ),
    "a copy, one row set": Case(
        UP, lambda s, x: F.linear(x, changed(s.w.clone(), lambda w: w[0].zero_()))
    ),
    "a copy, changed after a view of it": Case(
        UP,
        lambda s, x: (lambda w, view: x @ changed(w, lambda w: w.mul_(2)).T)(
            *(lambda w: (w, w.T))(s.w.clone())
        ),
    ),
    "a copy, bounded in place": Case(
        UP, lambda s, x: F.linear(x, changed(s.w.clone(), lambda w: w.clamp_(-0.1, 0.1)))
    ),
    "clamped": Case(UP, lambda s, x: F.linear(x, s.w.clamp(-0.1, 0.1))),
    "picked, and changed": Case(
        STACK, lambda s, x: torch.bmm(changed(s.w[PICKED], lambda w: w.mul_(2)), x[:, :, None])
    ),
    "a copy without gradient": Case(UP, lambda s, x: F.linear(x, without_gradient(s.w.clone))),
    "a view without gradient": Case(UP, lambda s, x: x @ without_gradient(lambda: s.w.T)),
    "detached": Case(UP, lambda s, x: F.linear(x, s.w.detach())),
    "of another gradient": Case(UP, lambda s, x: F.linear(x, Doubled.apply(s.w))),
    "every second row": Case((6, I), lambda s, x: F.linear(x, s.w[0::2]) * (x @ s.w[1::2].T)),
    "every second column": Case((O, 2 * I), lambda s, x: F.linear(x, s.w[:, ::2])),
    "some columns": Case((O, 7), lambda s, x: F.linear(x, s.w[:, :I])),
    "other sides of the same memory": Case((6, 4), lambda s, x: x[:, :4] @ s.w.view(4, 6)),
    "the transposed": Case(SQUARE, lambda s, x: F.linear(x, s.w.T)),
    "picked rows of a matrix": Case(UP, lambda s, x: F.linear(x, s.w[torch.tensor([0, 2])])),
    "picked along another dimension": Case(
        STACK, lambda s, x: torch.bmm(s.w.index_select(1, torch.tensor([0, 2])), dispatched(x).mT)
    ),
    "a flipped stack": Case(STACK, lambda s, x: torch.bmm(dispatched(x), s.w.flip(0).mT)),
    "two stacks of one": Case(
        STACK, lambda s, x: groups(x) @ s.w.view(2, 2, O, I).mT.repeat(2, 2, 1, 1)
    ),
    "some outputs of each": Case(STACK, lambda s, x: torch.bmm(dispatched(x), s.w[:, :2].mT)),
    "its integers": Case(UP, lambda s, x: F.linear(x, s.w.view(torch.int32).view(torch.float32))),
    "multi_dot": Case(
        LYING, lambda s, x: torch.linalg.multi_dot([x, s.w, torch.ones(O, 2)]), transposed=True
    ),
    "chain_matmul": Case(LYING, lambda s, x: torch.chain_matmul(x, s.w), transposed=True),
    "tensordot": Case(LYING, lambda s, x: torch.tensordot(x, s.w, 1), transposed=True),
    "a bias, of which beta is another": Case(
        LYING, lambda s, x: torch.addmm(s.b, x, s.w, alpha=2), transposed=True, bias=True
    ),
    "scaled by a node that is named as a view's": Case(
        UP, lambda s, x: F.linear(x, View.apply(s.w))
    ),
    "mapped": Case(UP, lambda s, x: torch.func.vmap(lambda row: F.linear(row, s.w))(x)),
    "of sparse rows": Case(LYING, lambda s, x: x.to_sparse() @ s.w, transposed=True),
}


def layers_of(case: Case) -> list[LayerSpec]:
    """As a scan would find them."""
    *stack, first, second = case.shape
    out, into = (second, first) if case.transposed else (first, second)
    sides = Side.dense(into + case.bias), Side.dense(out)
    kind, count = "Conv1D" if case.transposed else "Linear", stack[0] if stack else 1
    return [
        LayerSpec(
            f"w.{e}",
            kind,
            "0",
            "0.w",
            "0.b" if case.bias else None,
            *sides,
            product=True,
            part=(e, count),
        )
        for e in range(count)
    ]


def run(case: Case) -> tuple[Part, list[LayerSpec], Capture, Tensor]:
    part = Part(case.shape, case.run)
    if case.bias:
        part.b = nn.Parameter(torch.ones(O))
    model, layers = nn.Sequential(part), layers_of(case)
    capture = Capture(model, layers, lambda announced: 1.0, sampled=True)
    capture.begin_step(frozenset(key for layer in layers for key in layer.keys), 0)
    x = torch.randn(N, I, generator=torch.Generator().manual_seed(2)).requires_grad_()
    return part, layers, capture, model(x).double().sin().sum()


@pytest.mark.parametrize("name", COUNTED)
def test_the_rows_of_a_product_give_its_gradient(name):
    case = COUNTED[name]
    part, layers, capture, loss = run(case)
    parameters = [part.w, part.b] if case.bias else [part.w]
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    actual = torch.zeros(len(layers), layers[0].G.dim, layers[0].A.dim, dtype=torch.double)
    assert capture.pending
    for call, gradient in zip(
        capture.pending,
        torch.autograd.grad(loss, [call.edge for call in capture.pending]),
        strict=True,
    ):
        x = call.input_rows(call.kept.saved_tensors[0])
        a, g = x.reshape(-1, x.shape[-1]), call.gradient_rows(gradient).reshape(-1, layers[0].G.dim)
        if case.bias:
            a = torch.cat([a, torch.ones(len(a), 1)], 1)
        actual[call.layer.part[0]] += g.double().T @ a.double()
    weight = actual[..., :-1] if case.bias else actual
    if case.transposed:
        weight = weight.mT
    close(weight.reshape(case.shape).float(), expected[0], sums=1000)
    if case.bias:
        close(actual[0, :, -1].float(), expected[1], sums=1000)


def test_a_parameter_that_lies_otherwise_than_it_is_indexed_has_no_rows():
    part = Part(SQUARE, lambda s, x: x @ s.w)
    part.w.data = part.w.data.clone().T
    seen = []
    products = Products({part.w: 1}, seen.append)
    with products:
        F.linear(torch.randn(N, I), part.w)
        torch.randn(N, I) @ part.w
    assert not seen


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("name", NONE)
def test_what_is_no_product_with_the_parameter_itself_has_no_rows(name):
    _, _, capture, loss = run(NONE[name])
    loss.backward()
    assert not capture.pending
