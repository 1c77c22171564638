"""Ops over many layers in one call and fused ops: every implementation against the specification in float64."""

import math

import pytest
import torch

from ds_kfac.ops import functional, reference
from ds_kfac.ops.functional import packed_numel
from tests.close import close, exact

DIMS = [1, 2, 63, 129, 257]
ALIGNMENT = 32


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layout() -> tuple[list[int], int]:
    """Aligned starts of the triangles of ``DIMS``, with a gap before the first; and the end."""
    starts, end = [], ALIGNMENT
    for dim in DIMS:
        starts.append(end)
        end += -(-packed_numel(dim) // ALIGNMENT) * ALIGNMENT
    return starts, end


def matrices() -> list[torch.Tensor]:
    return [(x := normal(dim, dim, seed=dim)) + x.T for dim in DIMS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pack_into_writes_every_triangle_and_nothing_else(ops, dtype, poisoned):
    starts, end = layout()
    out = torch.full((end,), float("nan"), dtype=dtype)
    ops.symmetric_pack_into_(out, starts, matrices())
    written = torch.zeros(end, dtype=torch.bool)
    for start, dim, x in zip(starts, DIMS, matrices(), strict=True):
        written[start : start + packed_numel(dim)] = True
        rows = [x[row, : row + 1] for row in range(dim)]
        assert torch.equal(out[start : start + packed_numel(dim)], torch.cat(rows).to(dtype))
    assert torch.isnan(out[~written]).all()


def test_pack_into_rounds_the_extremes_as_torch_does(ops):
    nan, inf = float("nan"), float("inf")
    values = [nan, inf, -inf, -0.0, 1e-40, 6e-8, 65519.0, 65520.0, 3.4e38, 1.00390625, 1.01171875, -2049.0, 2.5e-8]
    x = torch.zeros(len(values), len(values))
    x[-1] = torch.tensor(values)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.zeros(packed_numel(len(x)), dtype=dtype)
        ops.symmetric_pack_into_(out, [0], [x])
        exact(out[-len(x) :], x[-1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_from_gives_whole_matrices(ops, dtype, poisoned):
    starts, end = layout()
    packed = torch.full((end,), float("nan"), dtype=dtype)
    functional.symmetric_pack_into_(packed, starts, matrices())
    found = ops.symmetric_unpack_from(packed, starts, DIMS)
    for x, expected in zip(found, matrices(), strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, expected.to(dtype).float())


def batch(bad: dict[int, float] | None = None) -> tuple[list, list, list, list, list]:
    """Averages, sums, counts, updates and decays of a factor per entry of ``DIMS``."""
    averages = [normal(packed_numel(dim), seed=dim) for dim in DIMS]
    sums = [10 * normal(packed_numel(dim), seed=dim + 1) for dim in DIMS]
    for index, value in (bad or {}).items():
        sums[index][-1] = value
    counts = [torch.tensor(float(count)) for count in (3, 1, 0.5, 1e6, 7)]
    updates = [torch.tensor(float(k)) for k in (0, 1, 2, 100, 1)]
    return averages, sums, counts, updates, [0.95, 0.0, 0.5, 0.95, 0.4]


def test_ema_update_is_the_bias_corrected_average(ops, poisoned):
    averages, sums, counts, updates, decays = batch()
    expected = []
    for average, total, count, k, decay in zip(averages, sums, counts, updates, decays, strict=True):
        r = min(1 - 1 / (float(k) + 1), decay)
        expected.append(r * average.double() + (1 - r) * total.double() / max(float(count), 1.0))
    used = ops.ema_update_(averages, sums, counts, updates, decays)
    assert used.dtype == torch.bool and used.tolist() == [True] * len(DIMS)
    assert [float(k) for k in updates] == [1, 2, 3, 101, 2]
    for average, wanted in zip(averages, expected, strict=True):
        close(average, wanted, sums=4)


def test_ema_update_leaves_factors_without_rows_or_with_overflow_alone(ops):
    averages, sums, counts, updates, decays = batch({0: float("nan"), 3: float("inf"), 4: -float("inf")})
    counts[1] = torch.tensor(0.0)
    before = [average.clone() for average in averages]
    used = ops.ema_update_(averages, sums, counts, updates, decays)
    assert used.tolist() == [False, False, True, False, False]
    assert [float(k) for k in updates] == [0, 1, 3, 100, 1]
    for average, old, changed in zip(averages, before, used, strict=True):
        assert torch.equal(average, old) != bool(changed)


ADAM_SHAPES = [(1, 1, 1), (3, 2, 63), (2, 129, 2), (2, 257, 129)]  # the last in several pieces of work
WAITING = [torch.float32, torch.bfloat16, torch.float16]


def adam_wanted(y, first, second, updates, betas, eps):
    """Direction and moments in float64, of betas as fp32 has them; vectors of matrices."""
    b1, b2 = torch.tensor(betas).double()
    y, k = y.double(), (updates.double() + 1)[:, None, None]
    m, v = b1 * first.double() + (1 - b1) * y, b2 * second.double() + (1 - b2) * y.square()
    numerator = b1 * m / (1 - b1 ** (k + 1)) + (1 - b1) * y / (1 - b1**k)
    return numerator / ((v / (1 - b2**k)).sqrt() + eps), m, v


def adam_state(n, rows, columns, updates):
    """x, moments, updates of each matrix."""
    seen = torch.tensor([updates + 3.0 * index if updates else 0.0 for index in range(n)])
    x, first, second = (normal(n, rows, columns, seed=seed) for seed in range(3))
    return x, first * bool(updates), second.abs() * bool(updates), seen


@pytest.mark.parametrize("waits", WAITING)
@pytest.mark.parametrize(("updates", "betas"), [(0, (0.9, 0.999)), (5, (0.0, 0.95)), (300, (0.95, 0.4))])
@pytest.mark.parametrize("shape", ADAM_SHAPES)
def test_adam_scale_and_fold_against_float64(ops, shape, updates, betas, waits, poisoned):
    x, first, second, seen = adam_state(*shape, updates)
    scale = torch.tensor(0.5)
    wanted = adam_wanted(0.5 * x, first, second, seen, betas, 1e-3)[0]
    size = adam_wanted(0.5 * x.abs(), first.abs(), second, seen, betas, 1e-3)[0]  # of terms that may cancel
    before, usable = [part.clone() for part in (first, second, seen)], torch.ones(shape[0], dtype=torch.bool)
    for place in ("apart", "direction", "waiting"):
        given = x.clone()
        direction = given if place == "direction" else torch.full_like(x, float("nan"))
        waiting = given if place == "waiting" and waits is torch.float32 else torch.empty(shape, dtype=waits)
        ops.adam_scale_(direction, waiting, given, first, second, seen, usable, scale, betas=betas, eps=1e-3)
        close(direction, wanted, sums=10, scale=size)
        exact(waiting, (0.5 * x).to(waits))
        assert place != "apart" or torch.equal(given, x)
        assert all(map(torch.equal, before, (first, second, seen))), "moments change when they are told to"
    _, *moments = adam_wanted(waiting.float(), first, second, seen, betas, 1e-3)
    _, *sizes = adam_wanted(waiting.float().abs(), first.abs(), second, seen, betas, 1e-3)
    ops.adam_fold_(first, second, seen, waiting, usable, betas=betas)
    for part, expected, terms in zip((first, second), moments, sizes, strict=True):
        close(part, expected, sums=10, scale=terms)
    exact(seen, before[2] + 1)


@pytest.mark.parametrize("updates", [0.0, 3.0])
def test_adam_takes_nothing_of_what_is_not_usable(ops, updates, poisoned):
    x, first, second, seen = adam_state(3, 63, 7, updates)
    x[1, 3, 4], x[1, 5, 6] = float("inf"), float("nan")
    usable, before = torch.tensor([True, False, True]), [part.clone() for part in (first, second, seen)]
    direction, waiting = torch.empty_like(x), torch.empty_like(x)
    for eps in (1e-3, 0.0):
        ops.adam_scale_(direction, waiting, x, first, second, seen, usable, betas=(0.9, 0.99), eps=eps)
        assert not direction[1].any() and not waiting[1].any() and torch.isfinite(direction).all()
    ops.adam_fold_(first, second, seen, waiting, usable, betas=(0.9, 0.99))
    for part, old in zip((first, second, seen), before, strict=True):
        assert torch.equal(part[1], old[1]) and not torch.equal(part[0], old[0])


def test_adam_of_matrices_that_lie_apart_is_torchs():
    """Views with gaps, transposed ones: what no kernel is made for."""
    x, first, second, seen = adam_state(2, 63, 7, 5)
    usable, options = torch.tensor([True, False]), {"betas": (0.9, 0.99), "eps": 1e-3}
    wanted = torch.empty_like(x), torch.empty_like(x)
    reference.adam_scale_(*wanted, x, first, second, seen, usable, **options)
    transposed = [part.mT.contiguous().mT for part in (x, x, x, first, second)]
    functional.adam_scale_(*transposed, seen, usable, **options)
    for part, expected in zip(transposed, wanted, strict=False):
        close(part, expected, sums=10)
    first_wanted, seen_wanted = first.clone(), seen.clone()
    reference.adam_fold_(first_wanted, second, seen_wanted, wanted[1], usable, betas=(0.9, 0.99))
    functional.adam_fold_(transposed[3], transposed[4], seen, transposed[1], usable, betas=(0.9, 0.99))
    close(transposed[3], first_wanted, sums=10)
    exact(seen, seen_wanted)


def finish_given(shape, sized):
    """Directions, their norms and all else but the shift. The first has not its full size; the last, if there are
    several, may not be stepped along."""
    n = shape[0]
    x, size, target = normal(*shape), torch.tensor([0.3, 7.0, 2.0])[:n], torch.tensor([5.0, 0.25, 1.0])[:n]
    bound = torch.full((n,), math.inf)
    bound[2:] = 0.0
    norm, replacement = torch.linalg.vector_norm(x, dim=(1, 2)), torch.tensor([-1.0, 2.0, -0.75])[:n]
    return x, norm, size if sized else None, target, torch.full((n,), 1.5), bound, replacement


def check_finish(finish, shape, sized):
    x, norm, _, target, *_, replacement = given = finish_given(shape, sized)
    before = [None if part is None else part.clone() for part in given[1:]]
    scale = target.double()
    if sized:
        scale = scale * torch.tensor([0.3 / 1.5, 1.0, 1.0])[: len(x)].double() / norm.double()
    scaled = scale[:, None, None] * x.double()
    wanted = scaled + 0.5
    wanted[2:] = replacement[2:, None, None]
    finish(*given, 0.5)
    close(x, wanted, sums=6, scale=scaled.abs() + 1)
    exact(x[2:], torch.full_like(x[2:], -0.75))
    assert all(old is new or torch.equal(old, new) for old, new in zip(before, given[1:], strict=True))


def check_replaced(finish, sized):
    x, norm, size, _, _, bound, replacement = given = finish_given((3, 63, 7), sized)
    bound[:] = math.inf
    x[0, 3, 4], x[1, 5, 6], x[1, 0, 0] = math.inf, math.nan, math.inf
    norm[:2] = torch.linalg.vector_norm(x, dim=(1, 2))[:2]
    if sized:
        size[1] = math.nan
    finish(*given, -1e-30)
    exact(x[:2], replacement[:2, None, None].expand(2, 63, 7))
    assert torch.isfinite(x[2]).all() and x[2].unique().numel() > 63


def check_zero(finish):
    x, norm, size, *others = finish_given((3, 63, 7), True)
    x[0], norm[0], size[1] = 0.0, 0.0, 0.0
    finish(x, norm, size, *others, -1e-30)
    exact(x[:2], torch.full((2, 63, 7), -1e-30))


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 63, 65), (3, 33, 129)])
def test_finish_direction_against_float64(ops, shape, sized, poisoned):
    check_finish(ops.finish_direction_, shape, sized)


@pytest.mark.parametrize("sized", [True, False])
def test_finish_direction_replaces_what_is_no_number(ops, sized, poisoned):
    check_replaced(ops.finish_direction_, sized)


def test_finish_direction_of_zero_is_the_shift(ops, poisoned):
    check_zero(ops.finish_direction_)
