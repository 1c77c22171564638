"""Rows: weight sharing, sub-samples, formats, by themselves, without hooks; and layers that see the
same tensor, and what merely looks like it."""

import numpy as np
import pytest
import torch
from torch import nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.calls import Call, Rows
from ds_kfac.model.convolutions import phase
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.masks import Forward
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import BatchSum, RowSums, is_nonzero, kept_rows
from ds_kfac.model.shared import SharedInputs, agreed
from tests.close import close
from tests.ops.specification import symmetric_pack


def sum_of_G(g, scale: float):
    """Of a call of a linear layer without bias."""
    x, side = torch.zeros(*g.shape[:-1], 4), Side.dense(g.shape[-1])
    layer = LayerSpec("layer", "Linear", "", "w", None, Side.dense(4), side)
    rows = Rows("w", Forward(), g.shape[:-1], g.shape[:-1].numel(), recomputed=False)
    call = Call(layer, LAYERS["Linear"], nn.Identity(), rows, g.shape)
    G = BatchSum.empty(side.numel, torch.device("cpu"))
    RowSums().add_gradients(call, x, g, g.any(), G, scale)
    return G.sum_P


def second_moment(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1]).double()
    return symmetric_pack(x.T @ x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_divided_after_the_product(dtype):
    g = torch.randn(2, 3, 5).to(dtype)
    G = sum_of_G(g, scale=2.0**16)
    assert G.dtype is torch.float32
    close(G, second_moment(g) / 2.0**32, sums=6)
    G = sum_of_G(g.float() * 2.0**80, scale=2.0**80)
    close(G, second_moment(g), sums=6)


@pytest.mark.parametrize("interval", [1, 5, 16, 7919])
def test_a_place_visits_all_alike_at_any_interval(interval):
    for stride in (2, 3, 7, 16, 100):
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


X = torch.arange(12.0).view(3, 4)


def test_the_same_memory_seen_in_one_way_is_the_same_input():
    same = [X, X.detach(), X.T.T]
    others = [X.clone(), X[:2], X.view(4, 3), X.as_strided((3, 4), (1, 3)), X.flatten()[1:]]
    for other in same + others:
        shared = SharedInputs("ab")
        is_same = shared.number("a", X) == shared.number("b", other)
        assert is_same == any(other is one for one in same), other


def test_an_input_changed_in_place_in_between_is_another_one():
    x, shared = X.clone(), SharedInputs("ab")
    first = shared.number("a", x)
    assert shared.number("b", x.add_(0)) != first


def test_memory_that_was_freed_and_taken_again_is_not_the_same_input():
    shared, memory, numbers = SharedInputs("ab"), np.ones(1000, dtype=np.float32), []
    for name in "abababab":
        x = torch.from_numpy(memory)  # a storage of its own at the same place
        numbers.append(shared.number(name, x))
        del x
    assert numbers == [*range(8)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{"a": (0,), "b": (0,), "c": (0,)}, {"a": (0,), "b": (0,), "c": (1,)}], (("a", "b"),)),
        ([{"a": (0,), "b": (0,), "c": (1,)}, {"a": (0,), "b": (0,), "c": (0,)}], (("a", "b"),)),
        # a rank that called neither has no say, but one that called half of them has
        ([{"a": (0,), "b": (0,)}, {}], (("a", "b"),)),
        ([{"a": (0,), "b": (0,)}, {"a": (0,)}], ()),
        # layers that nobody called are not a group
        ([{"c": (0,)}, {}], ()),
        # layers of different kinds are apart, and groups come in module order
        ([dict.fromkeys("dCBa", (0,)) | {"E": (1,), "e": (1,)}], (("a", "d"), ("B", "C"))),
    ],
)
def test_groups_are_those_that_every_rank_has_seen(ranks, expected):
    kinds = {name: "capital" if name.isupper() else "small" for name in "abBcCdEe"}
    assert agreed(ranks, kinds) == expected
