"""Of each way to write a product with a parameter: the sum over its rows of g a^T is the
parameter's gradient, or there are no rows at all. What the reader of code finds is how it lies."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.product_code import multiplied
from ds_kfac.model.products import Products
from tests.close import close
from tests.model.recorder import Recorder
from tests.model.written import written

N, I, O, E, G = 6, 5, 3, 4, 4  # noqa: E741
"""G = E: groups of rows, as many as there are experts."""


class Part(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        # a piece of a buffer, as DeepSpeed has it
        self.w = nn.Parameter(torch.empty(shape))
        self.w.data = torch.randn(7 + self.w.numel())[7:].view(shape)
        self.v = nn.Parameter(torch.randn(O, O))  # not a layer
        self.b = nn.Parameter(torch.ones(O))
        self.frozen = nn.Parameter(torch.randn(I, 7), requires_grad=False)


class View(torch.autograd.Function):
    """Its node has the name of torch's, but its gradient is doubled."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def changed(tensor: Tensor, how: Callable[[Tensor], object]) -> Tensor:
    how(tensor)
    return tensor


def groups(x: Tensor, *order: int) -> Tensor:
    """[G, E, 2, I] of [N, I], with different rows, its dimensions in this order."""
    every = torch.stack([x[:2] * (k + 1) + k for k in range(G * E)]).view(G, E, 2, I)
    return every.permute(*order) if order else every


NAMES = {
    "View": View,
    "changed": changed,
    "groups": groups,
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "dispatched": lambda x: groups(x)[0],
    "wide": lambda x: F.pad(x, (2, 1)),  # grouped products need rows of 16 bytes
    "PICKED": torch.tensor([2, 0, 2, 3, -1, 0]),
    "ENDS": torch.tensor([2, 2, 5, 6], dtype=torch.int32),
    "SPREAD": torch.arange(1.0, 1 + O)[:, None],
    **{"N": N, "I": I, "O": O, "E": E},
}
Layout = tuple[tuple[int, ...], bool]
"""Shape of the parameter, and whether its matrices are transposed."""

COUNTED: dict[Layout, str] = {
    ((O, I), False): """
        F.linear(x, self.w)
        F.linear(x[0], self.w)
        F.linear(x[:0], self.w)
        F.linear(x.view(2, 3, I).transpose(0, 1), self.w)
        x @ self.w.T
        self.w @ x[1]
        self.w @ x.view(2, 3, I).mT
        torch.addmm(torch.zeros(O, 1), self.w, x.T, alpha=0.5)
        F.linear(x.double(), self.w.double()).float()
        x.double() @ self.w.double().T
        x @ self.w.T.contiguous()
        F.linear(x, changed(self.w.clone(), lambda w: w.data.mul_(3)))
        F.linear(x, self.w.clamp(-50, 50))
        F.linear(x, self.w[:2])
        F.linear(x, self.w.flatten().view(O, I))
        torch.bmm(x.view(2, 3, I), self.w.T.expand(2, I, O))
        torch.einsum("...i,oi->...o", x[1], self.w)
        torch.einsum("oi,bni->bon", self.w, x.view(2, 3, I))
    """,
    ((I, O), True): """
        x @ self.w
        x[1] @ self.w
        torch.ones(O).addmm(x, self.w, beta=3, alpha=-2)
        x @ self.w[:, 1:]
        torch.einsum("ni,io->no", x, self.w)
        torch.einsum("...i,io->...o", x.view(2, 3, 1, I), self.w)
    """,
    ((I, I), False): """
        x @ self.w.T
        torch.cat([F.linear(x * k, w) for k, w in enumerate(self.w.chunk(2), 1)], -1)
        self.w[1:3] @ x.T
    """,
    ((I, I), True): "x @ self.w",
    # rows that are repeated for each example
    ((4, O), False): "F.linear(self.v.expand(2, O, O), self.w)",
    ((1, I), False): "F.linear(x, self.w)",
    ((O, 1), False): "F.linear(x[:, :1], self.w)",
    ((1, O), True): "x[:, :1] @ self.w",
    ((E, O, I), False): """
        torch.einsum("...ei,eoi->...eo", groups(x, 0, 2, 1, 3), self.w)
        sum(F.linear(x * e, self.w[e]) for e in range(E - 1))
        F.linear(x, self.w[torch.tensor(-2)])
        torch.bmm(dispatched(x), self.w.mT.contiguous())
        self.w @ dispatched(x).mT
        dispatched(x)[:2] @ self.w[1::2].mT
        self.w @ groups(x).mT
        torch.stack([x, -x.cos()], 1) @ self.w[PICKED].mT
        torch.bmm(self.w[1:][PICKED % 3], x[:, :, None])
        torch.bmm(self.w[PICKED].double(), x[:, :, None].double())
        torch.bmm(self.w[[1, 1, -3]], x[:3, :, None])
        torch.bmm(self.w[torch.arange(E) % 2 > 0], x[:2, :, None])
        torch.bmm(torch.index_select(input=self.w, index=PICKED % E, dim=0), x[:, :, None])
        F.linear(x, self.w[PICKED][1])
    """,
    ((E, I, O), True): """
        torch.baddbmm(torch.zeros(E, 1, O), dispatched(x), self.w, alpha=0.25)
        torch.einsum("eio,bnei->oben", self.w, groups(x, 0, 2, 1, 3))
        torch.einsum("ni,io->no", x, self.w[2])
        sum(x @ w for w in self.w.unbind()[1:])
        groups(x) @ self.w
        groups(x, 1, 0, 2, 3) @ self.w[:, None]
        x @ self.w
    """,
    ((E, 4, 8), False): """
        torch._grouped_mm(wide(x), self.w.mT, offs=ENDS)
        torch._grouped_mm(wide(x), self.w[1:3].mT, offs=ENDS[1:3])[:5]
    """,
    ((1, 4, 8), False): "torch._grouped_mm(wide(x), self.w.mT, offs=ENDS[:1])[:2]",
    ((1, O, I), False): """
        x @ self.w.mT
        x[:2, None] @ self.w[torch.tensor([0, -1])].mT
    """,
}
BIASED = "torch.addmm(self.b, x, self.w, alpha=2, beta=2)"
NONE: dict[Layout, str] = {
    ((O, I), False): """
        F.linear(x, 0.5 * self.w)
        F.linear(x, torch.where(SPREAD > 1, self.w, 0.0))
        self.w @ self.frozen
        self.w @ self.w.T
        F.linear(x, changed(self.w.clone(), lambda w: w.div_(2)))
        F.linear(x, self.w.clamp(-0.1, 0.1))
        F.linear(x, self.w.detach())
        F.linear(x, View.apply(self.w))
        F.linear(x, self.w[torch.tensor([0, 2])])
        F.linear(x, self.w.view(torch.int32).view(torch.float32))
        torch.func.vmap(lambda row: F.linear(row, self.w))(x)
        torch.nested.to_padded_tensor(F.linear(nested(x), self.w), 0.0)
    """,
    ((4, O), False): "F.linear(self.v, self.w)",
    ((6, I), False): "F.linear(x, self.w[0::2]) * (x @ self.w[1::2].T)",
    ((O, 2 * I), False): "F.linear(x, self.w[:, ::2])",
    ((O, 7), False): "F.linear(x, self.w[:, :I])",
    ((6, 4), False): "x[:, :4] @ self.w.view(4, 6)",
    ((I, I), False): "F.linear(x, self.w.T)",
    ((I, O), True): """
        torch.linalg.multi_dot([x, self.w, torch.ones(O, 2)])
        x.to_sparse() @ self.w
        torch.einsum("ni,io", x, self.w)
        torch.einsum("ni,io->o", x, self.w)
    """,
    ((E, I, O), True): "torch.einsum('ni,eio->eno', x, self.w)",
    ((E, O, I), False): """
        torch.einsum("eni,eoi->eno", dispatched(x)[:2], self.w[1:3])
        torch.einsum("eni,eoi->eno", dispatched(x)[:2], self.w.view(2, 2 * O, I))
        torch.einsum("eni,eoi->no", dispatched(x), self.w)
        torch.bmm(self.w[PICKED], self.w[PICKED].mT)
        torch.bmm(changed(self.w[PICKED], lambda w: w.mul_(2)), x[:, :, None])
        torch.bmm(self.w.index_select(1, torch.tensor([0, 2])), dispatched(x).mT)
        torch.bmm(dispatched(x), self.w.flip(0).mT)
        groups(x) @ self.w.view(2, 2, O, I).mT.repeat(2, 2, 1, 1)
        groups(x)[:2, :2] @ self.w.view(2, 2, O, I).mT
        torch.bmm(dispatched(x), self.w[:, :2].mT)
    """,
}


def cases(table: dict[Layout, str]) -> list[Any]:
    """(layout, code) of every line."""
    lines = [(layout, line.strip()) for layout, text in table.items() for line in text.splitlines()]
    return [pytest.param(layout, code, id=code) for layout, code in lines if code]


def run(layout: Layout, code: str, bias: bool = False) -> tuple[Part, Recorder, Tensor]:
    """A module with this code, whose layers are those that a scan would find; and its loss."""
    shape, transposed = layout
    *stack, first, second = shape
    outputs, inputs = (second, first) if transposed else (first, second)
    kind, count = "Conv1D" if transposed else "Linear", stack[0] if stack else 1
    sides = Side.dense(inputs + bias), Side.dense(outputs)
    layer = LayerSpec("", kind, "0", "0.w", "0.b" if bias else None, *sides, product=True)
    layers = tuple(replace(layer, name=f"w.{e}", part=(e, count)) for e in range(count))
    part = written(f"return {code}", Part, **NAMES)(shape)
    recorder = Recorder(nn.Sequential(part), layers=layers, sampled=True)
    x = torch.randn(N, I, generator=torch.Generator().manual_seed(2)).requires_grad_()
    return part, recorder, recorder.model(x).double().sin().sum()


@pytest.mark.parametrize(("layout", "code"), [*cases(COUNTED), (((I, O), True), BIASED)])
def test_the_rows_of_a_product_give_its_gradient(layout, code):
    bias = code == BIASED
    part, recorder, loss = run(layout, code, bias)
    layers, calls = recorder.layers, recorder.capture.pending
    parameters = [part.w, part.b] if bias else [part.w]
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    actual = torch.zeros(len(layers), layers[0].G.dim, layers[0].A.dim, dtype=torch.double)
    assert calls
    gradients = torch.autograd.grad(loss, [call.edge for call in calls])
    for call, gradient in zip(calls, gradients, strict=True):
        x = call.input_rows(call.kept.saved_tensors[0])
        a, g = x.reshape(-1, x.shape[-1]), call.gradient_rows(gradient).reshape(-1, layers[0].G.dim)
        if bias:
            a = torch.cat([a, torch.ones(len(a), 1)], 1)
        actual[call.layer.part[0]] += g.double().T @ a.double()
    shape, transposed = layout
    weight = actual[..., :-1] if bias else actual
    weight = weight.mT if transposed else weight
    close(weight.reshape(shape).float(), expected[0], sums=1000)
    if bias:
        close(actual[0, :, -1].float(), expected[1], sums=1000)


ALPHA = (((I, O), True), "torch.addmm(self.b, x, self.w, alpha=2)")


@pytest.mark.parametrize(("layout", "code"), [*cases(NONE), ALPHA])
def test_what_is_no_product_with_the_parameter_itself_has_no_rows(layout, code):
    _, recorder, loss = run(layout, code, bias="self.b" in code)
    loss.backward()
    assert not recorder.capture.pending


UNREAD = r"changed|flatten|T\.expand|mat[12]=|\.addmm\(x|enumerate|unbind|index_select"
"""The reader does not know code with one of these."""


@pytest.mark.parametrize(
    ("layout", "code"), [case for case in cases(COUNTED) if not re.search(UNREAD, case.id)]
)
def test_the_code_of_a_product_says_how_its_matrix_lies(layout, code):
    shape, transposed = layout
    assert multiplied(written(f"return {code}", Part, **NAMES)(shape))["w"].transposed == transposed


def test_a_parameter_that_lies_otherwise_than_it_is_indexed_has_no_rows():
    w = nn.Parameter(torch.randn(I, I))
    w.data = w.data.clone().T
    seen = []
    with Products({w: 1}, seen.append):
        F.linear(torch.randn(N, I), w)
        torch.randn(N, I) @ w
    assert not seen
