"""The KAISA grid: which numbers of gradient workers there are."""

import pytest

from ds_kfac.assignment.assign import worker_counts, workers_for


def test_worker_counts_divide_the_world():
    assert worker_counts(12) == (1, 2, 3, 4, 6, 12)
    assert worker_counts(7) == (1, 7)
    assert worker_counts(1) == (1,)


@pytest.mark.parametrize(
    ("fraction", "world", "expected"),
    [
        (1.0, 8, 8),
        (0.5, 8, 4),
        (0.125, 8, 1),
        (0.01, 8, 1),
        (0.33, 3, 1),
        (1 / 3, 9, 3),
        (0.5, 1, 1),
    ],
)
def test_a_fraction_is_a_number_of_workers(fraction, world, expected):
    assert workers_for(fraction, world) == expected


@pytest.mark.parametrize(
    ("fraction", "world", "message"),
    [
        (0.4, 8, r"0\.4, which is 3\.2 of 8 ranks.*divide 8: 0\.25 \(g = 2\) or 0\.5 \(g = 4\)"),
        (0.6, 7, r"0\.142857 \(g = 1\) or 1 \(g = 7\)"),
    ],
)
def test_a_fraction_off_the_grid_is_refused_with_its_neighbours(fraction, world, message):
    with pytest.raises(ValueError, match=message):
        workers_for(fraction, world)
