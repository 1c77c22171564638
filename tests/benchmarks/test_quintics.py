"""Coefficients of Newton-Schulz steps: each nearest to 1 on its interval, and as published."""

import numpy as np
import pytest
import torch

from benchmarks.kernels import quintics
from benchmarks.kernels.quintics import CUSHION, SMALLEST, main, nearest, rows, value
from tests.close import near

GRID = "the extrema lie between the points that are looked at"


def composed(table, x: np.ndarray) -> np.ndarray:
    for row in table:
        x = value(row, x)
    return x


@pytest.mark.parametrize("lower", [CUSHION, 0.1, 0.5, 0.9])
def test_a_quintic_is_the_nearest_to_1_as_no_other_is_nearer_at_all_four_points(lower):
    row, error = nearest(lower, 1.0)
    x = np.linspace(lower, 1.0, 200_001)
    off = value(row, x) - 1
    near(np.abs(off).max(), error, 1e-6 * error, GRID)
    # equioscillation at four points, one more than there are coefficients: de la Vallee Poussin's
    # bound is the error
    turns = [0, *(np.flatnonzero(np.diff(np.sign(np.diff(off)))) + 1), len(x) - 1]
    assert len(turns) == 4 and np.sign(off[turns]).tolist() == [-1, 1, -1, 1]
    near(
        torch.as_tensor(np.abs(off[turns])),
        torch.full((4,), error, dtype=torch.float64),
        1e-6 * error,
        GRID,
    )


@pytest.mark.parametrize("steps", SMALLEST)
def test_all_singular_values_from_the_smallest_on_end_around_1_and_the_margin_is_for_what_is_larger(
    steps,
):
    smallest = SMALLEST[steps]
    table, lower = rows(steps, smallest)
    without = [
        (a * m, b * m**3, c * m**5)
        for (a, b, c), m in zip(table, [1.01] * (steps - 1) + [1.0], strict=True)
    ]
    end = composed(without, np.geomspace(smallest, 1.0, 100_001))
    near(end.min(), lower, 1e-4, GRID)
    near(end.max(), 2 - lower, 1e-4, GRID)
    larger = np.geomspace(smallest, 1.01, 100_001)
    with_margin = composed(table, larger)
    # each margin takes a hundredth of the smallest value that the next step sees
    assert with_margin.min() > lower * 0.99**steps and with_margin.max() < 2 - lower + 1e-4
    assert composed(without, larger).max() > 2, "without it what is above 1 goes away from it"


def test_more_steps_and_a_smaller_cushion_end_nearer_to_1(monkeypatch):
    ends = [rows(steps, 1e-3)[1] for steps in (3, 4, 5, 6)]
    assert ends == sorted(ends) and ends[-1] > 0.99
    monkeypatch.setattr(quintics, "CUSHION", 0.0)
    assert rows(5, 1e-3)[1] > ends[2], "what the margin costs"


PUBLISHED = (
    (8.287212, -23.595887, 17.300387),
    (4.107059, -2.947850, 0.544843),
    (3.948691, -2.908902, 0.551819),
    (3.318420, -2.488488, 0.510049),
)
"""The first steps of Polar Express (arXiv:2505.16932), for singular values from 1e-3 on and without
the margin."""


def test_published_steps_are_of_this_program(capsys):
    table = [(a * 1.01, b * 1.01**3, c * 1.01**5) for a, b, c in rows(5, 1e-3)[0][:4]]
    published = torch.tensor(PUBLISHED, dtype=torch.float64)
    near(
        torch.tensor(table, dtype=torch.float64),
        published,
        2e-3 * published.abs(),
        "their cushion is 0.02407",
    )
    main(["--steps", "5"])
    assert "(2.3005, -1.6688, 0.4188)," in capsys.readouterr().out
