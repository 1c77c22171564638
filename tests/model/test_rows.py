"""Rows: weight sharing, sub-samples, formats; by themselves, without hooks."""

import pytest
import torch
from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.calls import Call, Rows
from ds_kfac.model.convolutions import phase
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.masks import Forward
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import ROWS, BatchSum, RowSums, by_example, is_nonzero, kept_rows, pairs
from tests.close import close
from tests.ops.specification import symmetric_pack

MASK = torch.tensor([[True, True, False], [True, False, False]])


def call_of(shape: tuple[int, ...], inputs: int, bias: bool = False) -> Call:
    sides = Side.dense(inputs + bias), Side.dense(shape[-1])
    layer = LayerSpec("layer", "Linear", "", "w", "b" if bias else None, *sides)
    rows = Rows("w", Forward(), shape[:-1], torch.Size(shape[:-1]).numel(), recomputed=False)
    return Call(layer, LAYERS["Linear"], nn.Identity(), rows, torch.Size(shape))


def sums_of(x, g, kept=None, sharing="expand", scale=1.0, bias=False):
    """(sum of A, rows of A, sum of G)."""
    call, rows = call_of(tuple(g.shape), x.shape[-1], bias), RowSums(sharing)
    A, G = (
        BatchSum.empty(side.numel, torch.device("cpu")) for side in (call.layer.A, call.layer.G)
    )
    if kept is None:
        kept = torch.ones(x.shape[:-1], dtype=torch.bool)
    else:
        call.rows.forward.masks = [kept]
    rows.add_inputs(call, x, kept, kept.any(), A)
    rows.add_gradients(call, x, g, g.any(), G, scale)
    return A.sum_P, float(A.counts[ROWS]), G.sum_P


def second_moment(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1]).double()
    return symmetric_pack(x.T @ x)


@pytest.mark.parametrize("pooled", [False, True])
def test_each_rule_of_weight_sharing_is_exact_in_its_own_setting(pooled):
    """For y = W a of squared loss, whose Fisher is E[J^T J]. Pooled: one prediction per example,
    the mean over its positions. The gradients of all output directions together have it exactly,
    so there is nothing to sample."""
    N, T, inputs, outputs = 6, 3, 4, 2
    a, terms = torch.randn(N, T, inputs), N if pooled else N * T
    per_term = (a.mean(dim=1) if pooled else a.view(terms, inputs)).double()
    eye = torch.eye(outputs, dtype=torch.float64)
    jacobians = torch.stack([torch.kron(eye, row[None]) for row in per_term])
    exact = torch.einsum("noi,noj->ij", jacobians, jacobians) / terms
    lower, fishers = torch.tril_indices(inputs, inputs), {}
    for rule in ("expand", "reduce"):
        G, A = torch.zeros(3), torch.zeros(inputs, inputs)
        for direction in torch.eye(outputs):
            g = (direction / terms / (T if pooled else 1)).expand(N, T, outputs)
            sum_A, rows, of_direction = sums_of(a, g, sharing=rule)
            G += terms * of_direction
        A[lower[0], lower[1]] = A[lower[1], lower[0]] = sum_A / rows
        fishers[rule] = torch.kron(torch.tensor([[G[0], G[1]], [G[1], G[2]]]), A).double()
    right, other = ("reduce", "expand") if pooled else ("expand", "reduce")
    close(fishers[right], exact, sums=7 * 3, dtype=torch.float32)
    assert (fishers[other] - exact).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_do_not_count_are_in_no_sum_and_in_no_mean_nor_are_their_ones(bias):
    x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 2)
    of_rows = torch.cat([x, torch.ones(2, 3, 1)], dim=-1) if bias else x
    x[0, 2] = float("nan")  # a row that does not count may hold anything
    means = torch.stack([of_rows[0, :2].mean(0), of_rows[1, 0]])
    for sharing, expected in (("expand", of_rows[MASK]), ("reduce", means)):
        A, rows, _ = sums_of(x, g, MASK, sharing, bias=bias)
        assert rows == len(expected)
        close(A, second_moment(expected), sums=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_divided_after_the_product(dtype):
    g = torch.randn(2, 3, 5).to(dtype)
    *_, G = sums_of(torch.randn(2, 3, 5), g, scale=2.0**16)
    assert G.dtype is torch.float32
    close(G, second_moment(g) / 2.0**32, sums=6)
    *_, G = sums_of(torch.randn(2, 3, 5), g.float() * 2.0**80, scale=2.0**80)
    close(G, second_moment(g), sums=6)


@pytest.mark.parametrize("interval", [1, 2, 5, 10, 16, 50, 7919])
def test_a_place_visits_all_alike_at_any_interval(interval):
    for stride in (2, 3, 4, 7, 10, 16, 100):
        visits = torch.zeros(stride)
        for capture in range(1000):
            visits[phase(capture * interval, stride)] += 1
        spread = float(((visits - 1000 / stride) ** 2).sum()) * stride / 1000
        # chi squared of a fair die passes this once in a million times (Laurent & Massart 2000)
        assert spread < stride - 1 + 2 * (14 * (stride - 1)) ** 0.5 + 28, (interval, stride, visits)


def test_a_row_whose_gradient_is_not_finite_counts():
    with_gradient = is_nonzero(torch.tensor([[float("nan")], [0.0]]))
    kept = kept_rows(torch.ones(2, 1), with_gradient, torch.tensor([False, False]))
    assert kept.tolist() == [True, False]


def test_rows_by_example():
    shapes = {(5,): (1, 1, 5), (4, 5): (4, 1, 5), (4, 3, 2, 5): (4, 6, 5), (0, 3, 5): (0, 3, 5)}
    assert {shape: tuple(by_example(torch.ones(shape)).shape) for shape in shapes} == shapes


def test_pairs_have_the_bias_and_zeros_where_a_row_does_not_count():
    x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    a, b = pairs(call_of((2, 3, 4), 5, bias=True), x, g, MASK)
    assert torch.equal(a[..., -1], MASK.float()) and torch.equal(a[0, 2], torch.zeros(6))
    assert torch.equal(a[MASK][:, :-1], x[MASK]) and torch.equal(b, g)
