"""Batch sums over the wire in 32 and 16 bits; ranks are threads here."""

from collections import Counter

import pytest
import torch

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.comm.reduce import DTYPES, Reducer, ReductionPlan, payloads
from ds_kfac.model.rows import BatchSum
from tests.close import close
from tests.comm.fake_network import FakeNetwork
from tests.models import linear_layer

CPU = torch.device("cpu")
LAYERS = [linear_layer(f"l{i}", 5 + 2 * i, 3 + i) for i in range(4)]
FACTORS = factor_specs(LAYERS)
KEYS = frozenset(factor.key for factor in FACTORS)
TOLERANCE = {"fp32": 1e-6, "bf16": 2**-8}
"""Of an element, relative to its slot's largest: one rounding of every rank's; in fp32 only the
order of the sum."""


class Run:
    """All messages of one step, on every rank. Odd splits; with three ranks and more one owns
    nothing.

    Args:
        values: (slot, rank) -> the sum's elements.
        first: by how many ranks the owners are displaced.
    """

    def __init__(
        self,
        world: int,
        name: str,
        values,
        *,
        count: int | None = None,
        nbytes: int = 2**28,
        first: int = 0,
    ) -> None:
        owners = max(1, world - 1)
        eigen_workers = {
            factor.key: (first + 3 * i + i // 2) % owners for i, factor in enumerate(FACTORS)
        }
        counts = {} if count is None else dict.fromkeys(KEYS, count)
        self.network, self.dtype = FakeNetwork(world), DTYPES[name]
        contributors = Contributors(world, world, counts=counts)
        self.plan = ReductionPlan(FACTORS, eigen_workers, contributors, self.dtype, nbytes)
        self.slots, self.buckets = self.plan.of(KEYS, 0)
        self.values = {
            # counts that are exact in fp32 only
            (slot.factor, rank): (
                values(slot, rank),
                torch.tensor([1000.5 + 10 * rank + place, 1.0, 2000.5 + rank]),
            )
            for place, slot in enumerate(self.slots)
            for rank in slot.contributors
        }
        self.found: dict[str, BatchSum] = {}
        self.channels = self.network.run(self._work)

    def _work(self, channel):
        sums = {
            slot.factor: BatchSum(*(x.clone() for x in self.values[slot.factor, channel.rank]))
            if channel.rank in slot.contributors
            else BatchSum.empty(slot.numel, CPU)
            for slot in self.slots
        }
        reducer = Reducer(self.plan, channel, CPU)
        for bucket in self.buckets:
            reducer.add(bucket, reducer.send(bucket, sums), sums)
        for slot in self.slots:
            if slot.owner == channel.rank:
                self.found[slot.factor] = sums[slot.factor]
            elif channel.rank in slot.contributors:
                assert torch.equal(
                    sums[slot.factor].sum_P, self.values[slot.factor, channel.rank][0]
                ), "left alone"
        return channel

    def parts(self, slot) -> torch.Tensor:
        return torch.stack([self.values[slot.factor, rank][0] for rank in slot.contributors])


def random(slot, rank: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(
        slot.numel, generator=torch.Generator().manual_seed(100 * slot.numel + rank)
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("world", "count"), [(2, None), (3, None), (3, 2), (5, None), (5, 1), (5, 3)]
)
@pytest.mark.parametrize("nbytes", [2**28, 150])
def test_owners_get_the_sum_over_all_contributors(world, count, name, nbytes):
    run = Run(world, name, random, count=count, nbytes=nbytes)
    assert set(run.found) == KEYS and (len(run.buckets) > 0) == (count != 1)
    for slot in run.slots:
        parts = run.parts(slot).double()
        assert len(parts) == (count or world)
        bound = TOLERANCE[name] * parts.abs().amax(dim=1).sum()
        assert (run.found[slot.factor].sum_P - parts.sum(dim=0)).abs().max() <= bound
        expected = sum(run.values[slot.factor, rank][1] for rank in slot.contributors)
        assert torch.equal(run.found[slot.factor].counts, expected), "counts travel in fp32"


def test_fp32_is_the_sum_in_rank_order_bit_for_bit():
    run = Run(3, "fp32", random)
    for slot in run.slots:
        zero, one, two = run.parts(slot)
        assert torch.equal(run.found[slot.factor].sum_P, zero + one + two)


@pytest.mark.parametrize("name", DTYPES)
def test_a_sum_is_the_same_bits_whoever_owns_it(name):
    """Of layers that are not cut every tensor-parallel rank has an owner of its own."""
    runs = [Run(4, name, random, first=first) for first in range(3)]
    for slot in runs[0].slots:
        assert len({slot.owner for run in runs for slot in run.slots}) == 3
        for run in runs[1:]:
            assert torch.equal(run.found[slot.factor].sum_P, runs[0].found[slot.factor].sum_P), (
                slot.factor
            )


def test_sums_are_added_up_in_32_bits():
    """In 16 bits 256 + 1 is 256."""
    run = Run(4, "bf16", lambda slot, rank: torch.full((slot.numel,), 256.0 if rank == 0 else 1.0))
    assert all((part.sum_P == 259).all() for part in run.found.values())


def test_every_element_keeps_its_own_relative_precision():
    """Sums of 1e-12 next to sums of 1e6."""
    scales = {
        factor.key: 10.0 ** (-12 + 18 * i / (len(FACTORS) - 1)) for i, factor in enumerate(FACTORS)
    }
    assert min(scales.values()) == 1e-12
    close(max(scales.values()), 1e6, condition=18)  # a power
    run = Run(2, "bf16", lambda slot, rank: random(slot, rank, scales[slot.factor]))
    for slot in run.slots:
        parts = run.parts(slot)
        bound = TOLERANCE["bf16"] * parts.abs().sum(dim=0)
        assert ((run.found[slot.factor].sum_P - parts.sum(dim=0)).abs() <= bound).all(), slot.factor


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", [1e-37, 1e37])
def test_the_ends_of_the_range_of_32_bits_arrive(value, name):
    run = Run(2, name, lambda slot, rank: torch.full((slot.numel,), value))
    assert all(
        ((part.sum_P / value - 2).abs() <= 2 * TOLERANCE[name]).all() for part in run.found.values()
    )


@pytest.mark.parametrize("name", DTYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(name):
    bad = {("l1/A", 0): float("nan"), ("l2/G", 1): float("inf")}
    run = Run(
        2, name, lambda slot, rank: torch.full((slot.numel,), bad.get((slot.factor, rank), 0.0))
    )
    finite = {key for key, part in run.found.items() if torch.isfinite(part.sum_P).all()}
    assert finite == KEYS - {"l1/A", "l2/G"}
    assert all((run.found[key].sum_P == 0).all() for key in finite)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("world", "count"), [(2, None), (3, 2), (3, 1)])
def test_bytes_are_those_that_were_sent_to_others(world, count, name):
    run = Run(world, name, random, count=count)
    sent, received = torch.zeros(world), torch.zeros(world)
    for bucket in run.buckets:
        for (source, target), nbytes in sum(
            payloads(bucket, run.dtype.itemsize), Counter()
        ).items():
            sent[source] += nbytes
            received[target] += nbytes
    for rank, channel in enumerate(run.channels):
        assert (
            channel.sent["factors"] == sent[rank] and channel.received["factors"] == received[rank]
        )
        assert (
            channel.calls["factors"]
            == run.network.entered[rank]
            == len(run.buckets)
            == (count != 1)
        )
        assert 0 <= run.network.wire[rank] - sent[rank] <= 2 * 16 * world * len(run.buckets), (
            "padding only"
        )
