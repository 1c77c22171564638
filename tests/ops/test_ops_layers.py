"""Ops over many layers in one call and fused ops: every implementation against the specification in float64."""

import math

import pytest
import torch

from ds_kfac.ops import functional
from tests.close import close, exact
from tests.ops import specification


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    specification.adam_scale_(*wanted, x, first, second, seen, usable, **options)
    transposed = [part.mT.contiguous().mT for part in (x, x, x, first, second)]
    functional.adam_scale_(*transposed, seen, usable, **options)
    for part, expected in zip(transposed, wanted, strict=False):
        close(part, expected, sums=10)
    first_wanted, seen_wanted = first.clone(), seen.clone()
    specification.adam_fold_(first_wanted, second, seen_wanted, wanted[1], usable, betas=(0.9, 0.99))
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


def check_replaced(finish, sized):
    x, norm, size, _, _, bound, replacement = given = finish_given((3, 63, 7), sized)
    bound[:] = math.inf
    x[0, 3, 4], x[1, 5, 6], x[1, 0, 0] = math.inf, math.nan, math.inf
    norm[:2] = torch.linalg.vector_norm(x, dim=(1, 2))[:2]
    if sized:
        size[1] = math.nan
    finish(x, *given, -1e-30)
    exact(x[:2], replacement[:2, None, None].expand(2, 63, 7))
    assert torch.isfinite(x[2]).all() and x[2].unique().numel() > 63


def check_zero(finish):
    x, norm, size, *others = finish_given((3, 63, 7), True)
    x[0], norm[0], size[1] = 0.0, 0.0, 0.0
    finish(x, x, norm, size, *others, -1e-30)
    exact(x[:2], torch.full((2, 63, 7), -1e-30))


@pytest.mark.parametrize("sized", [True, False])
def test_finish_direction_replaces_what_is_no_number(ops, sized, poisoned):
    check_replaced(ops.finish_direction_, sized)


def test_finish_direction_of_zero_is_the_shift(ops, poisoned):
    check_zero(ops.finish_direction_)


@pytest.mark.parametrize("layers", [2, 1])
def test_finish_direction_writes_to_nothing_beside_results_that_lie_apart(ops, layers, poisoned):
    x, *others = finish_given((2, 63, 7), True)
    memory = torch.full((layers, x.numel() // layers + 5), -3.0)
    ops.finish_direction_(memory[:, 2:-3].unflatten(1, (-1, 7)), x.clone(), *others, 0.5)
    exact(memory[:, [0, 1, -3, -2, -1]], torch.full((layers, 5), -3.0))
    ops.finish_direction_(x, x, *others, 0.5)
    exact(memory[:, 2:-3].reshape(x.shape), x)
