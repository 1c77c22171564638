"""The Triton kernels over a layer's matrix, interpreted, against float64 on odd sizes with poisoned outputs."""

import pytest
import torch

from ds_kfac.ops.check import NotMadeFor
from tests.close import close, exact
from tests.ops.test_ops_layers import adam_state, adam_wanted, check_finish, check_replaced, check_zero
from tests.ops.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")


@pytest.fixture(scope="module")
def scale():
    with interpreted("scale") as (module,):
        yield module


@pytest.mark.parametrize("waits", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("updates", "betas"), [(0, (0.9, 0.999)), (5, (0.0, 0.95)), (10_000, (0.95, 0.4))])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 63), (2, 33, 129), (5, 63, 2), (2, 129, 65)])
def test_adam_scale_and_fold_against_float64(scale, shape, updates, betas, waits, poisoned):
    x, first, second, seen = adam_state(*shape, updates)
    usable, times, eps = torch.ones(shape[0], dtype=torch.bool), torch.tensor(0.25), 1e-3
    usable[1::2] = False
    x[1::2] = float("nan")  # a neighbour's
    first[1::2], second[1::2] = 0.5, 0.25
    before = [part.clone() for part in (first, second, seen)]
    clean = torch.where(usable[:, None, None], 0.25 * x, 0.0)
    wanted = adam_wanted(clean, first, second, seen, betas, eps)[0].masked_fill_(~usable[:, None, None], 0.0)
    size = adam_wanted(clean.abs(), first.abs(), second, seen, betas, eps)[0]  # of terms that may cancel
    direction, waiting = torch.empty_like(x), torch.empty(shape, dtype=waits)
    scale.adam_scale_(direction, waiting, x, first, second, seen, usable, times, betas=betas, eps=eps)
    close(direction, wanted, sums=10, scale=size)
    if waits is torch.bfloat16:  # the interpreter cuts digits off
        assert ((waiting - clean).abs() <= 2.0**-7 * clean.abs()).all()
    else:
        exact(waiting, clean.to(waits))
    assert all(map(torch.equal, before, (first, second, seen)))
    in_place = x.clone()
    scale.adam_scale_(in_place, waiting, in_place, first, second, seen, usable, 0.25, betas=betas, eps=eps)
    exact(in_place, direction)
    _, *moments = adam_wanted(waiting.float(), first, second, seen, betas, eps)
    _, *sizes = adam_wanted(waiting.float().abs(), first.abs(), second, seen, betas, eps)
    scale.adam_fold_(first, second, seen, waiting, usable, betas=betas)
    for part, old, expected, terms in zip((first, second), before, moments, sizes, strict=False):
        close(part[::2], expected[::2], sums=10, scale=terms[::2])
        exact(part[1::2], old[1::2])
    exact(seen, before[2] + usable)


@pytest.mark.parametrize("updates", [0.0, 1.0, 2.0, 100.0, 1e6])
def test_adam_scale_corrects_the_bias_as_float64_does(scale, updates, poisoned):
    """fp32 powers near 1 would lose half of the digits."""
    ones, yes = torch.ones(1, 1, 1), torch.tensor([True])
    for betas in ((0.9, 0.999), (0.99999, 0.9999)):
        state = (0 * ones, 0 * ones, torch.tensor([updates])) if not updates else (ones, ones, torch.tensor([updates]))
        found, waiting = torch.empty_like(ones), torch.empty_like(ones)
        scale.adam_scale_(found, waiting, ones, *state, yes, betas=betas, eps=0.0)
        close(found, adam_wanted(ones, *state, betas, 0.0)[0], sums=10)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 63, 65), (3, 33, 129)])
def test_finish_direction_against_float64(scale, shape, sized, poisoned):
    check_finish(scale.finish_direction_, shape, sized)


@pytest.mark.parametrize("sized", [True, False])
def test_finish_direction_replaces_what_is_no_number(scale, sized, poisoned):
    check_replaced(scale.finish_direction_, sized)


def test_finish_direction_of_zero_is_the_shift(scale, poisoned):
    check_zero(scale.finish_direction_)


def test_wrong_arguments_are_named(scale):
    one, vectors = torch.zeros(1, 2, 2), (torch.zeros(1), torch.tensor([True]))
    betas = {"betas": (0.9, 0.99), "eps": 0.1}
    with pytest.raises(ValueError, match=r"do not fit, got torch.float32 \(1, 2, 2\)"):
        scale.adam_scale_(one, one, one, torch.zeros(1, 3, 2), one, *vectors, **betas)
    with pytest.raises(ValueError, match=r"waiting or usable does not fit, got torch.float32 \(1, 3, 2\)"):
        scale.adam_fold_(one, one, vectors[0], torch.zeros(1, 3, 2), vectors[1], betas=(0.9, 0.99))
    with pytest.raises(NotMadeFor, match=r"expected contiguous fp32 \[n, O, I\] and \[n\], got torch.float32"):
        scale.adam_scale_(one, one, one, one.double(), one, *vectors, **betas)
    vector, gaps = vectors[0], torch.zeros(1, 4, 4)[:, ::2]
    with pytest.raises(NotMadeFor, match=r"finish_direction_: expected contiguous fp32 \[n, O, I\]"):
        scale.finish_direction_(gaps, vector, None, *[vector] * 4, 1.0)
    with pytest.raises(ValueError, match=r"finish_direction_: .* do not fit, got .* torch.float32 \(2,\)"):
        scale.finish_direction_(one, vector, torch.zeros(2), *[vector] * 4, 1.0)
    with pytest.raises(NotMadeFor, match="betas, eps or shift as numbers, got tensors"):
        scale.finish_direction_(one, vector, None, *[vector] * 4, torch.tensor(1.0))
    with pytest.raises(NotMadeFor, match=r"expected a contiguous buffer and bool, got torch.float64"):
        scale.adam_scale_(one, one.double(), one, one, one, *vectors, **betas)
    with pytest.raises(NotMadeFor, match="betas, eps or shift as numbers, got tensors"):
        scale.adam_scale_(one, one, one, one, one, *vectors, betas=(torch.tensor(0.9), 0.99), eps=0.1)
