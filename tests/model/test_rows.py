"""Rows: which of a call count, weight sharing and sub-samples; by themselves, without hooks."""

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

CPU = torch.device("cpu")
EXPAND, REDUCE = "expand", "reduce"
MASK = torch.tensor([[True, True, False], [True, False, False]])


def call_of(
    shape: tuple[int, ...], inputs: int, *, bias: bool = False, columns: slice | None = None
) -> Call:
    layer = LayerSpec(
        "layer",
        "Linear",
        "",
        "w",
        "b" if bias else None,
        Side.dense(inputs + bias),
        Side.dense(shape[-1]),
    )
    rows = Rows("w", Forward(), shape[:-1], torch.Size(shape[:-1]).numel(), recomputed=False)
    return Call(layer, LAYERS["Linear"], nn.Identity(), rows, torch.Size(shape), columns=columns)


def sums_of(x, g, kept=None, sharing=EXPAND, turn=0, stride=1, scale=1.0, bias=False):
    """(sum of A, rows of A, sum of G, rows of G)."""
    call, rows = call_of(tuple(g.shape), x.shape[-1], bias=bias), RowSums(sharing)
    rows.step = turn
    A, G = (BatchSum.empty(side.numel, CPU) for side in (call.layer.A, call.layer.G))
    if kept is None:
        kept = torch.ones(x.shape[:-1], dtype=torch.bool)
    else:
        call.rows.forward.masks = [kept]
    rows.add_inputs(call, x, kept, kept.any(), A, stride=stride)
    rows.add_gradients(call, x, g, g.any(), G, scale, stride=stride)
    return A.sum_P, float(A.counts[ROWS]), G.sum_P, float(G.counts[ROWS])


def second_moment(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1]).double()
    return symmetric_pack(x.T @ x)


def test_expand_takes_every_position_and_reduce_every_example():
    x, g = torch.randn(4, 3, 5), torch.randn(4, 3, 2)
    A, rows, G, of_G = sums_of(x, g)
    assert rows == of_G == 12
    close(A, second_moment(x), sums=12)
    close(G, second_moment(g), sums=12)
    A, rows, G, of_G = sums_of(x, g, sharing=REDUCE)
    assert rows == of_G == 4
    close(A, second_moment(x.mean(dim=1)), sums=12)
    close(G, second_moment(g.sum(dim=1)), sums=12)


@pytest.mark.parametrize(
    "mask", [None, torch.arange(24).view(4, 6) % 5 != 2], ids=["all", "masked"]
)
def test_rows_by_a_stride_are_in_the_mean_over_its_places_all_of_them(mask):
    x, g, stride = torch.randn(4, 6, 5), torch.randn(4, 6, 2), 5
    of_place = {
        phase(turn, stride): sums_of(x, g, mask, turn=turn, stride=stride) for turn in range(60)
    }
    assert len(of_place) == stride
    whole = sums_of(x, g, mask)
    for index, expected in enumerate(whole):
        mean = sum(found[index] for found in of_place.values()) / stride
        close(mean, expected, sums=24, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(6, 5), (6, 1, 5)])
def test_without_shared_positions_reduce_is_expand(shape):
    x = torch.randn(shape)
    for found, expected in zip(sums_of(x, x, sharing=REDUCE), sums_of(x, x), strict=True):
        close(found, expected, sums=6, dtype=torch.float32)


def exact_fishers(pooled: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear model y = W a of squared loss: K-FAC's Fisher by both rules, and the exact one.

    Pooled: one prediction per example, the mean over its positions. The Fisher of ½|y - t|² is
        E[J^T J]; the gradients
    of all its output directions together have it exactly, so there is nothing to sample.
    """
    N, T, inputs, outputs = 6, 3, 4, 2
    a = torch.randn(N, T, inputs)
    terms = N if pooled else N * T
    lower = torch.tril_indices(inputs, inputs)
    fishers = {}
    for rule in (EXPAND, REDUCE):
        G = torch.zeros(3)
        for direction in torch.eye(outputs):
            # of a mean over the terms
            g = (direction / terms / (T if pooled else 1)).expand(N, T, outputs)
            A, rows, of_direction, _ = sums_of(a, g, sharing=rule)
            G += terms * of_direction
        A_II = torch.zeros(inputs, inputs)
        A_II[lower[0], lower[1]] = A_II[lower[1], lower[0]] = A / rows
        fishers[rule] = torch.kron(torch.tensor([[G[0], G[1]], [G[1], G[2]]]), A_II).double()
    per_term = (a.mean(dim=1) if pooled else a.view(N * T, inputs)).double()
    jacobians = torch.stack(
        [torch.kron(torch.eye(outputs, dtype=torch.float64), row[None]) for row in per_term]
    )
    return fishers, torch.einsum("noi,noj->ij", jacobians, jacobians) / terms


def test_each_rule_is_exact_in_its_own_setting():
    for pooled, right, other in ((False, EXPAND, REDUCE), (True, REDUCE, EXPAND)):
        fishers, expected = exact_fishers(pooled)
        close(fishers[right], expected, sums=7 * 3, dtype=torch.float32)
        assert (fishers[other] - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_rows_that_do_not_count_are_in_no_sum_and_in_no_mean_nor_are_their_ones(bias):
    x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 2)
    of_rows = torch.cat([x, torch.ones(2, 3, 1)], dim=-1) if bias else x
    x[0, 2] = float("nan")  # a row that does not count may hold anything
    A, rows, *_ = sums_of(x, g, MASK, bias=bias)
    assert rows == 3
    close(A, second_moment(of_rows[MASK]), sums=3)
    A, rows, *_ = sums_of(x, g, MASK, REDUCE, bias=bias)
    assert rows == 2
    close(A, second_moment(torch.stack([of_rows[0, :2].mean(0), of_rows[1, 0]])), sums=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_divided_after_the_product(dtype):
    g = torch.randn(2, 3, 5).to(dtype)
    *_, G, rows = sums_of(torch.randn(2, 3, 5), g, scale=2.0**16)
    assert G.dtype is torch.float32 and rows == 6
    close(G, second_moment(g) / 2.0**32, sums=6)
    *_, G, _ = sums_of(torch.randn(2, 3, 5), g.float() * 2.0**80, scale=2.0**80)
    close(G, second_moment(g), sums=6)


def test_a_part_of_the_outputs_counts_so_much_in_A():
    x, call = torch.randn(4, 5), call_of((4, 6), 5, columns=slice(2, 4))
    batch = BatchSum.empty(call.layer.A.numel, CPU)
    RowSums().add_inputs(call, x, torch.ones(4, dtype=torch.bool), torch.tensor(True), batch)
    close(batch.sum_P, second_moment(x) / 3, sums=4)
    close(float(batch.counts[ROWS]), 4 / 3, dtype=torch.float32)
    rows = call.gradient_rows(torch.ones(4, 2))
    assert rows.tolist() == [[0, 0, 1, 1, 0, 0]] * 4


@pytest.mark.parametrize("interval", [1, 2, 5, 10, 16, 50, 7919])
def test_a_place_visits_all_alike_at_any_interval(interval):
    for stride in (2, 3, 4, 7, 10, 16, 100):
        visits = torch.zeros(stride)
        for capture in range(1000):
            visits[phase(capture * interval, stride)] += 1
        spread = float(((visits - 1000 / stride) ** 2).sum()) * stride / 1000
        # chi squared of a fair die passes this once in a million times (Laurent & Massart 2000)
        assert spread < stride - 1 + 2 * (14 * (stride - 1)) ** 0.5 + 28, (interval, stride, visits)


@pytest.mark.parametrize(
    ("x", "g", "mask", "counts"),
    [
        (1, 1, True, True),
        (1, 1, False, True),
        (0, 1, False, True),
        (1, 0, True, True),
        (1, 0, None, True),
        (1, 0, False, False),
        (0, 0, True, False),
        (0, 0, None, False),
        (1, float("nan"), False, True),
    ],
)
def test_which_rows_count(x, g, mask, counts):
    """Beside a row that does."""
    xs, gs = torch.tensor([[1.0], [x]]), torch.tensor([[1.0], [g]])
    kept = kept_rows(xs, is_nonzero(gs), None if mask is None else torch.tensor([True, mask]))
    assert kept.tolist() == [True, counts]


def test_a_call_without_a_gradient_has_no_row():
    none, every = torch.zeros(4, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)
    assert not kept_rows(torch.ones(4, 3, 2), none, None).any()
    assert not kept_rows(torch.ones(4, 3, 2), none, every).any()
    assert kept_rows(torch.ones(0, 3, 2), torch.zeros(0, 3, dtype=torch.bool), None).shape == (0, 3)


def test_rows_by_example():
    assert by_example(torch.ones(5)).shape == (1, 1, 5)
    assert by_example(torch.ones(4, 5)).shape == (4, 1, 5)
    assert by_example(torch.ones(4, 3, 2, 5)).shape == (4, 6, 5)
    assert by_example(torch.ones(0, 3, 5)).shape == (0, 3, 5)


def test_pairs_have_the_bias_and_zeros_where_a_row_does_not_count():
    x, g = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    a, b = pairs(call_of((2, 3, 4), 5, bias=True), x, g, MASK)
    assert torch.equal(a[..., -1], MASK.float()) and torch.equal(a[0, 2], torch.zeros(6))
    assert torch.equal(a[MASK][:, :-1], x[MASK]) and torch.equal(b, g)
