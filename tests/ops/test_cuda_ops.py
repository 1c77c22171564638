"""The CUDA ops, their source run as loops on the host, through the binding: against torch, several
launches too."""

import math

import pytest
import torch

from ds_kfac.ops.check import NotMadeFor
from ds_kfac.ops.cuda import CudaOps
from ds_kfac.ops.functional import packed_numel
from tests.ops import specification
from tests.ops.cuda_emulation import emulated

DIMS = [1, 2, 63, 129, 257, 0, 64]


@pytest.fixture(scope="module", params=[3, 512], ids=["3 layers a launch", "512 layers a launch"])
def ops(request):
    return emulated(request.param)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors() -> tuple[list, list, list, list, list]:
    """Averages, sums, counts, updates and decays of a factor per entry of ``DIMS``."""
    averages = [normal(packed_numel(dim), seed=dim) for dim in DIMS]
    sums = [10 * normal(packed_numel(dim), seed=dim + 1) for dim in DIMS]
    counts = [torch.tensor(count) for count in (3.0, 1.0, 0.5, 1e6, 7.0, 2.0, 11.0)]
    updates = [torch.tensor(count) for count in (0.0, 1.0, 2.0, 100.0, 1.0, 4.0, 5.0)]
    return averages, sums, counts, updates, [0.95, 0.0, 0.5, 0.95, 0.4, 0.9, 0.99]


def check_against_the_specification(ops, averages, sums, counts, updates, decays, usable):
    expected, counted = ([x.clone() for x in tensors] for tensors in (averages, updates))
    assert specification.ema_update_(expected, sums, counts, counted, decays).tolist() == usable
    used = ops.ema_update_(averages, sums, counts, updates, decays)
    assert used.dtype == torch.bool and used.tolist() == usable
    for found, wanted in zip((*averages, *updates), (*expected, *counted), strict=True):
        assert torch.equal(found, wanted)


def test_running_averages_are_those_of_the_specification_bit_for_bit(ops, poisoned):
    check_against_the_specification(ops, *factors(), usable=[True] * len(DIMS))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_layers_without_rows_or_with_overflow_are_left_alone(ops, value, poisoned):
    averages, sums, counts, updates, decays = factors()
    for index in (0, 2, 4):
        sums[index][-1] = value  # one element, the last, of one block of threads
    sums[6][0] = value
    counts[3], counts[5] = torch.tensor(0.0), torch.tensor(0.0)
    before = [average.clone() for average in averages]
    usable = [False, True, False, False, False, False, False]
    check_against_the_specification(ops, averages, sums, counts, updates, decays, usable)
    for index, (average, old) in enumerate(zip(averages, before, strict=True)):
        assert torch.equal(average, old) != usable[index]


def test_no_layers_are_fine(ops):
    ops.symmetric_pack_into_(torch.zeros(3), [], [])
    assert ops.symmetric_unpack_from(torch.zeros(3), [], []) == []
    assert ops.ema_update_([], [], [], [], []).shape == (0,)


def test_wrong_arguments_are_named(ops):
    x, one = torch.zeros(3, 3), torch.zeros(())
    with pytest.raises(ValueError, match="a triangle of side 3 at 1 is outside of 6 elements"):
        ops.symmetric_pack_into_(torch.zeros(6), [1], [x])
    with pytest.raises(ValueError, match="a triangle of side 3 at -1 is outside"):
        ops.symmetric_unpack_from(torch.zeros(6), [-1], [3])
    with pytest.raises(NotMadeFor, match=r"fp32, bf16 or fp16, got torch.float64 \(6,\)"):
        ops.symmetric_pack_into_(torch.zeros(6, dtype=torch.float64), [0], [x])
    with pytest.raises(
        NotMadeFor, match=r"contiguous rows, got torch.float32 \(2, 2\) strides \(1, 2\)"
    ):
        ops.symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(2, 2).T])
    with pytest.raises(ValueError, match=r"square matrices, got torch.float32 \(3, 2\)"):
        ops.symmetric_pack_into_(torch.zeros(6), [0], [torch.zeros(3, 2)])
    with pytest.raises(ValueError, match=r"averages of \[6\] elements, sums of \[5\]"):
        ops.ema_update_([torch.zeros(6)], [torch.zeros(5)], [one], [one], [0.9])
    with pytest.raises(ValueError, match=r"scalars, got torch.float32 \(2,\)"):
        ops.ema_update_([torch.zeros(6)], [torch.zeros(6)], [torch.zeros(2)], [one], [0.9])
    with pytest.raises(
        NotMadeFor, match=r"contiguous fp32 tensors, got torch.float32 \(6,\) strides \(2,\)"
    ):
        ops.ema_update_([torch.zeros(6)], [torch.zeros(12)[::2]], [one], [one], [0.9])
    with pytest.raises(NotMadeFor, match=r"one cuda device, got \['cpu'\]"):
        CudaOps(ops._library).symmetric_pack_into_(torch.zeros(6), [0], [x])
