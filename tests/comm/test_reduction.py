"""Batch sums in messages of 32 and 16 bits: what travels in which, and what arrives; and what is
said of a collective that failed."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.comm import lost
from ds_kfac.comm.message import Channel, Scalars, deliver, merged
from ds_kfac.comm.reduce import DTYPES, Reducer, ReductionPlan, buckets, payloads
from ds_kfac.model.rows import BatchSum
from tests.models import linear_layer

CPU, WORLD = torch.device("cpu"), 4
FACTORS = factor_specs([linear_layer(f"l{i}", 5 + 2 * i, 3 + i) for i in range(4)])
KEYS = frozenset(factor.key for factor in FACTORS)
LARGE = 2**28
TOLERANCE = {"fp32": 1e-6, "bf16": 2**-8}
"""Of an element, relative to its slot's largest: one rounding of every rank's; in fp32 only the
order of the sum."""
COUNTS = torch.tensor([1000.5, 1.0, 2000.5])
"""Exact in fp32 only."""


def reduced(name: str, values, *, first: int = 0) -> tuple[list, dict[str, BatchSum]]:
    """The slots of one reduction of all factors, and what their owners have. Collective.

    Args:
        values: (slot, rank) -> the sum's elements.
        first: by how many ranks the owners are displaced. One rank owns nothing.
    """
    owners = {f.key: (first + 3 * i + i // 2) % (WORLD - 1) for i, f in enumerate(FACTORS)}
    plan = ReductionPlan(FACTORS, owners, Contributors(WORLD), DTYPES[name], LARGE)
    slots, _ = plan.of(KEYS, 0)
    channel = Channel(dist.group.WORLD)
    reducer = Reducer(plan, channel, CPU)
    assert set(reducer.begin(KEYS, 0)) == KEYS
    rank = channel.rank
    sums = {slot.factor: BatchSum(values(slot, rank), COUNTS + rank) for slot in slots}
    found = reducer.reduce(sums)
    assert set(found) == {slot.factor for slot in slots if slot.owner == rank}
    return slots, merged(found, None)


def random(slot, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * slot.numel + rank)
    return torch.randn(slot.numel, generator=generator)


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("name", DTYPES)
def test_a_sum_is_in_32_bits_and_the_same_bits_whoever_owns_it(name):
    """Of layers that are not cut every tensor-parallel rank has an owner of its own."""
    runs = [reduced(name, random, first=first) for first in range(3)]
    assert len({slot.owner for slots, _ in runs for slot in slots}) == 3
    for slot in runs[0][0]:
        expected = sum(random(slot, rank).double() for rank in range(WORLD))
        largest = sum(random(slot, rank).abs().max() for rank in range(WORLD))
        for _, found in runs:
            part, other = found[slot.factor], runs[0][1][slot.factor]
            assert torch.equal(part.sum_P, other.sum_P), slot.factor
            assert (part.sum_P - expected).abs().max() <= TOLERANCE[name] * largest
            assert torch.equal(part.counts, 4 * COUNTS + 6), "in fp32"
    # in 16 bits 256 + 1 is 256
    _, found = reduced(name, lambda slot, rank: torch.full((slot.numel,), 1.0 + 255 * (rank == 0)))
    assert all((part.sum_P == 259).all() for part in found.values())


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("name", DTYPES)
def test_the_ends_of_the_range_zeros_and_what_is_not_finite_arrive(name):
    bad = {"l0/A": 1e-37, "l0/G": 1e37, "l1/A": float("nan"), "l2/G": float("inf")}
    _, found = reduced(
        name, lambda slot, rank: torch.full((slot.numel,), bad.get(slot.factor, 0.0))
    )
    for key, part in found.items():
        value = bad.get(key, 0.0)
        if key in ("l0/A", "l0/G"):
            assert ((part.sum_P / value - WORLD).abs() <= WORLD * TOLERANCE[name]).all(), key
        else:
            expected = torch.full_like(part.sum_P, WORLD * value)
            assert torch.equal(part.sum_P.nan_to_num(7.0), expected.nan_to_num(7.0)), key


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("nbytes", [2000, 4096, 10**5])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_no_rank_sends_or_receives_more_than_the_bound_in_a_message(count, nbytes, itemsize):
    factors = factor_specs([linear_layer(f"l{i}", 60 + i, 30) for i in range(5)])
    homes = {factor.key: (place + 1) % 2 for place, factor in enumerate(factors)}
    few = Contributors(8, 4, dict.fromkeys(homes, count))
    slots, _ = ReductionPlan(factors, homes, few, torch.float32, LARGE).of(frozenset(homes), 3)
    covered: Counter = Counter()
    for bucket in buckets(slots, world=8, itemsize=itemsize, nbytes=nbytes):
        sent, received = Counter(), Counter()
        for piece in bucket:
            # pieces of a sum come in their order, without gaps
            assert piece.start == covered[piece.slot.factor]
            covered[piece.slot.factor] += piece.numel
        for (source, target), size in payloads(bucket, itemsize)[1].items():
            sent[source] += size
            received[target] += size
        assert max(*sent.values(), *received.values()) <= nbytes
    assert covered == {slot.factor: slot.numel for slot in slots if slot.senders}


def launch_fails(**_) -> None:
    raise RuntimeError("connection closed")


def wait_fails(**_) -> SimpleNamespace:
    return SimpleNamespace(wait=launch_fails)


def test_a_rank_whose_launch_fails_and_one_whose_wait_fails_do_not_miss_each_other(monkeypatch):
    """Ranks fail one after the other here."""
    store, names, channel = dist.HashStore(), [[0], [1], [2]], Channel.__new__(Channel)
    monkeypatch.setattr(lost, "_store", lambda: store)
    monkeypatch.setattr(lost, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    for rank, fails, words in (
        (0, launch_fails, "rank 1, 2 did not come"),
        (1, wait_fails, "rank 2 did not come"),
        (2, launch_fails, "no rank has said why"),
    ):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "all_to_all_single", fails)
        channel.group, channel.rank, channel.world = rank, rank, 3
        channel.calls, channel.sent, channel.received = Counter(), Counter(), Counter()
        part = Scalars(names, rank).part({rank: 1.0}, CPU)
        with pytest.raises(lost.LostRank, match=words):
            deliver([part], channel, CPU)
