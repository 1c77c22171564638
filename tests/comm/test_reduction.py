"""Batch sums in messages of 32 and 16 bits: what travels in which, and what arrives; ranks are
threads here."""

from collections import Counter

import pytest
import torch

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.comm.reduce import DTYPES, Reducer, ReductionPlan, buckets, payloads
from ds_kfac.model.rows import BatchSum
from tests.comm.fake_network import FakeNetwork
from tests.models import linear_layer

CPU = torch.device("cpu")
FACTORS = factor_specs([linear_layer(f"l{i}", 5 + 2 * i, 3 + i) for i in range(4)])
KEYS = frozenset(factor.key for factor in FACTORS)
SOME = frozenset({"l0/A", "l2/G", "l3/A"})
LARGE = 2**28
TOLERANCE = {"fp32": 1e-6, "bf16": 2**-8}
"""Of an element, relative to its slot's largest: one rounding of every rank's; in fp32 only the
order of the sum."""


class Run:
    """One reduction of the factors ``keys`` on every rank.

    Args:
        values: (slot, rank) -> the sum's elements, or None: that rank has no rows.
        count: number of contributors of each factor; None: all ranks.
        first: by how many ranks the owners are displaced. With three ranks and more one owns
            nothing.
    """

    def __init__(
        self, world, name, values, *, count=None, nbytes=LARGE, first=0, keys=KEYS, step=0
    ) -> None:
        owners = max(1, world - 1)
        eigen_workers = {
            factor.key: (first + 3 * i + i // 2) % owners for i, factor in enumerate(FACTORS)
        }
        counts = {} if count is None else dict.fromkeys(KEYS, count)
        contributors = Contributors(world, world, counts=counts)
        self.network, self.dtype, self.keys, self.step = (
            FakeNetwork(world),
            DTYPES[name],
            keys,
            step,
        )
        self.plan = ReductionPlan(FACTORS, eigen_workers, contributors, self.dtype, nbytes)
        self.slots, self.buckets = self.plan.of(keys, step)
        self.values = {}
        for place, slot in enumerate(self.slots):
            for rank in slot.contributors:
                if (own := values(slot, rank)) is not None:
                    # counts that are exact in fp32 only
                    counted = torch.tensor([1000.5 + 10 * rank + place, 1.0, 2000.5 + rank])
                    self.values[slot.factor, rank] = own, counted
        self.found: dict[str, BatchSum] = {}
        self.channels = self.network.run(self._work)

    def _work(self, channel):
        reducer = Reducer(self.plan, channel, CPU)
        asked = set(reducer.begin(self.keys, self.step))
        assert asked == {s.factor for s in self.slots if channel.rank in s.contributors}
        sums = {
            key: BatchSum(*(x.clone() for x in own))
            for (key, rank), own in self.values.items()
            if rank == channel.rank
        }
        found = reducer.reduce(sums)
        assert set(found) == {slot.factor for slot in self.slots if slot.owner == channel.rank}
        self.found |= found
        return channel

    def parts(self, slot, which: int = 0) -> torch.Tensor:
        """By contributor with rows: elements, or counts."""
        ranks = [rank for rank in slot.contributors if (slot.factor, rank) in self.values]
        return torch.stack([self.values[slot.factor, rank][which] for rank in ranks])


def random(slot, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * slot.numel + rank)
    return torch.randn(slot.numel, generator=generator)


def on_rank_0(slot, rank: int) -> torch.Tensor | None:
    return random(slot, rank) if rank == 0 else None


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("world", "count", "keys", "values"),
    [
        (1, None, KEYS, random),
        (2, None, KEYS, random),
        (3, None, SOME, random),
        (3, 2, KEYS, random),
        (5, 1, KEYS, random),
        (5, 3, KEYS, random),
        (2, None, KEYS, on_rank_0),
    ],
)
@pytest.mark.parametrize("nbytes", [LARGE, 150])
def test_owners_get_the_sum_over_all_contributors(world, count, keys, values, name, nbytes):
    for step in range(3):
        run = Run(world, name, values, count=count, nbytes=nbytes, keys=keys, step=step)
        assert set(run.found) == keys and bool(run.buckets) == (world > 1 and count != 1)
        for slot in run.slots:
            parts, found = run.parts(slot).double(), run.found[slot.factor]
            assert found.ranks == len(slot.contributors) == (count or world)
            bound = TOLERANCE[name] * parts.abs().amax(dim=1).sum()
            assert (found.sum_P - parts.sum(dim=0)).abs().max() <= bound
            assert torch.equal(found.counts, run.parts(slot, 1).sum(dim=0)), "in fp32"


@pytest.mark.parametrize("name", DTYPES)
def test_a_sum_is_the_same_bits_whoever_owns_it(name):
    """Of layers that are not cut every tensor-parallel rank has an owner of its own."""
    runs = [Run(4, name, random, first=first) for first in range(3)]
    assert len({slot.owner for run in runs for slot in run.slots}) == 3
    for key in KEYS:
        for run in runs[1:]:
            assert torch.equal(run.found[key].sum_P, runs[0].found[key].sum_P), key


@pytest.mark.parametrize("name", DTYPES)
def test_the_ends_of_the_range_zeros_and_what_is_not_finite_arrive(name):
    bad = {"l0/A": 1e-37, "l0/G": 1e37, "l1/A": float("nan"), "l2/G": float("inf")}
    run = Run(2, name, lambda slot, rank: torch.full((slot.numel,), bad.get(slot.factor, 0.0)))
    for key, part in run.found.items():
        value = bad.get(key, 0.0)
        if key in ("l0/A", "l0/G"):
            assert ((part.sum_P / value - 2).abs() <= 2 * TOLERANCE[name]).all(), key
        else:
            expected = torch.full_like(part.sum_P, 2 * value)
            assert torch.equal(part.sum_P.nan_to_num(7.0), expected.nan_to_num(7.0)), key


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("nbytes", [2000, 4096, 10**5])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_no_rank_sends_or_receives_more_than_the_bound_in_a_message(count, nbytes, itemsize):
    factors = factor_specs([linear_layer(f"l{i}", 60 + i, 30) for i in range(5)])
    homes = {factor.key: (place + 1) % 2 for place, factor in enumerate(factors)}
    few = Contributors(8, 4, dict.fromkeys(homes, count))
    slots, _ = ReductionPlan(factors, homes, few, torch.float32, LARGE).of(frozenset(homes), 3)
    made = buckets(slots, world=8, itemsize=itemsize, nbytes=nbytes)
    covered: Counter = Counter()
    for bucket in made:
        sent, received = Counter(), Counter()
        for piece in bucket:
            # pieces of a sum come in their order, without gaps
            assert piece.start == covered[piece.slot.factor]
            covered[piece.slot.factor] += piece.numel
        _, elements = payloads(bucket, itemsize)
        for (source, target), size in elements.items():
            sent[source] += size
            received[target] += size
        assert max(sent.values()) <= nbytes and max(received.values()) <= nbytes
    assert covered == {slot.factor: slot.numel for slot in slots if slot.senders}
