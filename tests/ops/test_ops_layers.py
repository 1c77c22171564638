"""Ops over many layers in one call and fused ops: every implementation against the specification in
float64."""

import math

import pytest
import torch

from ds_kfac.ops import functional
from tests.close import close, exact
from tests.ops import specification


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adam_wanted(x, first, second, updates, betas, eps):
    """Direction and moments in float64, of betas as fp32 has them; vectors of matrices."""
    b1, b2 = torch.tensor(betas).double()
    x, k = x.double(), (updates.double() + 1)[:, None, None]
    m, v = b1 * first.double() + (1 - b1) * x, b2 * second.double() + (1 - b2) * x.square()
    numerator = b1 * m / (1 - b1 ** (k + 1)) + (1 - b1) * x / (1 - b1**k)
    return numerator / ((v / (1 - b2**k)).sqrt() + eps), m, v


def adam_state(n, rows, columns, updates):
    """x, moments, updates of each matrix."""
    seen = torch.tensor([updates + 3.0 * index if updates else 0.0 for index in range(n)])
    x, first, second = (normal(n, rows, columns, seed=seed) for seed in range(3))
    return x, first * bool(updates), second.abs() * bool(updates), seen


@pytest.mark.parametrize("updates", [0.0, 3.0])
def test_adam_takes_nothing_of_what_is_not_usable(ops, updates, poisoned):
    for eps in (1e-3, 0.0):
        x, *state = adam_state(3, 63, 7, updates)
        x[1, 3, 4], x[1, 5, 6] = float("inf"), float("nan")
        direction, before = torch.empty_like(x), [part.clone() for part in state]
        ops.adam_step_(
            direction, x, *state, torch.tensor([True, False, True]), betas=(0.9, 0.99), eps=eps
        )
        assert not direction[1].any() and torch.isfinite(direction).all()
        for part, old in zip(state, before, strict=True):
            assert torch.equal(part[1], old[1]) and not torch.equal(part[0], old[0])


def test_adam_leaves_the_gradient_unless_the_direction_takes_its_place(ops, poisoned):
    x, *state = adam_state(2, 63, 7, 3.0)
    usable, options = torch.tensor([True, False]), {"betas": (0.9, 0.99), "eps": 1e-3}
    kept, direction = x.clone(), torch.empty_like(x)
    ops.adam_step_(direction, x, *[part.clone() for part in state], usable, **options)
    exact(x, kept)
    ops.adam_step_(x, x, *state, usable, **options)
    exact(x, direction)


def test_adam_of_matrices_that_lie_apart_is_torchs():
    """Views with gaps, transposed ones: what no kernel is made for."""
    x, *moments, updates = adam_state(2, 63, 7, 5)
    usable, options = torch.tensor([True, False]), {"betas": (0.9, 0.99), "eps": 1e-3}
    given = *(part.mT.contiguous().mT for part in (x, x, *moments)), updates.clone()
    wanted = torch.empty_like(x), x, *moments, updates
    specification.adam_step_(*wanted, usable, **options)
    functional.adam_step_(*given, usable, **options)
    close(given, wanted, sums=10)


def test_adam_is_the_same_however_many_rows_a_chunk_has(monkeypatch):
    found = []
    for elements in (1 << 16, 1):
        monkeypatch.setattr(functional, "CPU_CHUNK", elements)
        x, *state = adam_state(2, 63, 7, 3.0)
        functional.adam_step_(x, x, *state, torch.tensor([True, True]), betas=(0.9, 0.99), eps=1e-3)
        found.append([x, *state])
    close(found[0], found[1], sums=10)


def finish_given(n, sized):
    """n directions [63, 7], their norms and all else. The first has not its full size."""
    x, size, target = (
        normal(n, 63, 7),
        torch.tensor([0.3, 7.0, 2.0, 2.0])[:n],
        torch.tensor([5.0, 0.25, 1.0, 1.0])[:n],
    )
    norm, used = torch.linalg.vector_norm(x, dim=(1, 2)), torch.ones(n, dtype=torch.bool)
    return x, norm, size if sized else None, target, torch.full((n,), 1.5), used


@pytest.mark.parametrize("sized", [True, False])
def test_finish_direction_writes_zeros_for_what_is_no_number_or_not_used(ops, sized, poisoned):
    x, norm, size, target, full, used = finish_given(4, sized)
    used[2] = False
    x[0, 3, 4], x[1, 5, 6], x[1, 0, 0], x[2, 1, 1] = math.inf, math.nan, math.inf, math.nan
    norm[:2] = torch.linalg.vector_norm(x, dim=(1, 2))[:2]
    if sized:
        size[1] = math.nan
    ops.finish_direction_(x, x, norm, size, target, full, used)
    exact(x[:3], torch.zeros(3, 63, 7))
    assert torch.isfinite(x[3]).all() and x[3].unique().numel() > 63


def test_finish_direction_of_norm_or_size_zero_is_zero(ops, poisoned):
    x, norm, size, *others = finish_given(3, True)
    x[0], norm[0], size[1] = 0.0, 0.0, 0.0
    ops.finish_direction_(x, x, norm, size, *others)
    exact(x[:2], torch.zeros(2, 63, 7))


@pytest.mark.parametrize("layers", [2, 1])
def test_finish_direction_writes_to_nothing_beside_results_that_lie_apart(ops, layers, poisoned):
    x, *others = finish_given(2, True)
    memory = torch.full((layers, x.numel() // layers + 5), -3.0)
    ops.finish_direction_(memory[:, 2:-3].unflatten(1, (-1, 7)), x.clone(), *others)
    exact(memory[:, [0, 1, -3, -2, -1]], torch.full((layers, 5), -3.0))
    ops.finish_direction_(x, x, *others)
    exact(memory[:, 2:-3].reshape(x.shape), x)
