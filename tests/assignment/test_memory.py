"""Bytes of state on every rank. Arithmetic, no ranks."""

from dataclasses import replace

from ds_kfac.assignment.costs import Work, factor_specs
from ds_kfac.curvature.factor import Side
from tests.assignment.test_assign import COSTS, INTERVALS, layers
from tests.models import linear_layer


def test_memory_is_factors_on_eigen_workers_and_bases_and_moments_on_workers():
    specs = [replace(linear_layer("l0", 5, 3), G=Side.diagonal(3))]
    factors = factor_specs(specs)
    work = Work(specs, factors, 4, None, COSTS, **INTERVALS, moments=2)
    found = work.memory({"l0": (0, 2)}, {"l0/A": 2, "l0/G": 3})
    bases_and_moments = 4 * (5 * 5 + 5) + 4 * 3 + 2 * 4 * 15 + 4  # and their counter
    assert found == [bases_and_moments, 0, bases_and_moments + 4 * 15 + 4, 4 * 3 + 4]


def test_a_shared_factor_takes_memory_once_a_rank():
    specs = layers((7, 3), (7, 3))
    factors = factor_specs(specs, [["l0", "l1"]])
    work = Work(specs, factors, 2, None, COSTS, **INTERVALS)
    A, G = 4 * (49 + 7), 4 * (9 + 3)
    packed_A, packed_G = 4 * 28 + 4, 4 * 6 + 4
    eigen_workers = {"l0/A": 0, "l0/G": 0, "l1/G": 0}
    assert work.memory({"l0": (0,), "l1": (0,)}, eigen_workers) == [A + 2 * G + packed_A + 2 * packed_G, 0]
    assert work.memory({"l0": (0,), "l1": (1,)}, eigen_workers) == [A + G + packed_A + 2 * packed_G, A + G]


def test_the_ones_of_an_identity_are_counted_for_every_layer():
    specs = [replace(linear_layer("l0", 5, 3), G=Side.identity(3))]
    work = Work(specs, factor_specs(specs), 2, None, COSTS, **INTERVALS)
    assert work.memory({"l0": (1,)}, {"l0/A": 0}) == [4 * 15 + 4, 4 * (5 * 5 + 5) + 4 * 3]
