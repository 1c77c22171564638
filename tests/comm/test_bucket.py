"""Which batch sums travel in which message: a pure plan."""

from collections import Counter

import pytest
import torch

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.comm.reduce import CACHED, COUNTS, ReductionPlan, buckets, payloads
from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import LayerSpec
from tests.models import linear_layer

LAYERS = [linear_layer(f"l{i}", 60 + i, 30) for i in range(5)]
FACTORS = factor_specs(LAYERS)
# A on rank 1, G on rank 0
EIGEN_WORKERS = {factor.key: (place + 1) % 2 for place, factor in enumerate(FACTORS)}
EVERY = frozenset(factor.key for factor in FACTORS)
LARGE = 2**28
COUNT_BYTES = 4 * COUNTS
"""What travels with the first piece of a sum, in fp32."""


def found(world: int = 3, keys=EVERY, factors=FACTORS, step: int = 0, **options):
    eigen_workers = {factor.key: EIGEN_WORKERS.get(factor.key, 0) % world for factor in factors}
    plan = ReductionPlan(
        factors, eigen_workers, Contributors(world, **options), torch.float32, LARGE
    )
    return plan.of(frozenset(keys), step)[0]


def messages(sums, world: int = 3, itemsize: int = 4, nbytes: int = LARGE):
    return buckets(sums, world=world, itemsize=itemsize, nbytes=nbytes)


@pytest.mark.parametrize("wanted", [EVERY, set(), {"l3/A"}, {"l0/G", "l4/A", "l4/G"}], ids=len)
def test_every_factor_asked_for_has_one_sum_with_its_owner(wanted):
    sums = found(keys=wanted)
    assert sorted(slot.factor for slot in sums) == sorted(wanted)
    for slot in sums:
        factor = next(factor for factor in FACTORS if factor.key == slot.factor)
        assert (slot.owner, slot.numel) == (EIGEN_WORKERS[slot.factor], factor.side.numel)


def test_layers_that_share_an_input_have_one_sum_for_it():
    layers = [linear_layer(name, 6, 3) for name in ("q", "k", "v")]
    sums = found(factors=factor_specs(layers, [["q", "k", "v"]]), keys={"q/A", "q/G", "k/G", "v/G"})
    assert [slot.factor for slot in sums] == ["q/A", "q/G", "k/G", "v/G"]


def test_a_layer_whose_sides_are_both_the_identity_has_no_sum():
    none = Side.identity(5)
    bare = LayerSpec("bare", "Linear", "bare", "bare.weight", None, none, none)
    assert found(factors=factor_specs([*LAYERS, bare])) == found()


def test_one_message_carries_everything_if_nothing_bounds_it():
    (message,) = messages(found())
    assert {piece.slot.factor for piece in message} == EVERY


def test_sums_that_only_their_owner_makes_do_not_travel():
    alone = dict.fromkeys(EVERY, 1)
    assert messages(found(counts=alone)) == ()
    mixed = messages(found(counts={**alone, "l2/A": 2}, node_size=3))
    assert {piece.slot.factor for bucket in mixed for piece in bucket} == {"l2/A"}
    assert messages(found(world=1), world=1) == ()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("nbytes", [2000, 4096, 10**5])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_no_rank_sends_or_receives_more_than_the_bound_in_a_message(count, nbytes, itemsize):
    counts = dict.fromkeys(EVERY, count)
    sums = found(world=8, counts=counts, node_size=4, step=3)
    made = messages(sums, world=8, itemsize=itemsize, nbytes=nbytes)
    assert bool(made) == any(slot.senders for slot in sums)
    covered: Counter = Counter()
    for bucket in made:
        sent, received = Counter(), Counter()
        for piece in bucket:
            assert piece.start == covered[piece.slot.factor], (
                "pieces of a sum in their order, without gaps"
            )
            covered[piece.slot.factor] += piece.numel
        for (source, target), size in sum(payloads(bucket, itemsize), Counter()).items():
            assert source != target
            sent[source] += size - COUNT_BYTES * sum(
                p.start == 0 for p in bucket if source in p.slot.contributors
            )
            received[target] += size
        heads = COUNT_BYTES * sum(len(piece.slot.contributors) for piece in bucket)
        assert max(sent.values()) <= nbytes and max(received.values()) <= nbytes + heads
    assert covered == {slot.factor: slot.numel for slot in sums if slot.senders}


def test_the_payload_is_a_sum_from_each_contributor_to_the_owner():
    sums = found(world=4, counts=dict.fromkeys(EVERY, 2), node_size=2)
    total: Counter = Counter()
    for bucket in messages(sums, world=4, itemsize=2, nbytes=3000):
        total.update(sum(payloads(bucket, 2), Counter()))
    expected: Counter = Counter()
    for slot in sums:
        for rank in slot.contributors:
            if rank != slot.owner:
                expected[rank, slot.owner] += 2 * slot.numel + COUNT_BYTES
    assert total == expected


def test_messages_are_made_once_for_the_same_factors_of_the_same_ranks():
    homes = {factor.key: place % 4 for place, factor in enumerate(FACTORS)}
    few = Contributors(4, node_size=4, counts=dict.fromkeys(homes, 2))
    plan = ReductionPlan(FACTORS, homes, few, torch.float32, nbytes=LARGE)
    seen = {}
    for step in range(40):
        made, sent = plan.of(EVERY, step)
        ranks = tuple(slot.contributors for slot in made)
        assert ranks == tuple(few.of(key, home, step) for key, home in homes.items())
        assert sent == buckets(made, world=4, itemsize=4, nbytes=LARGE)
        assert seen.setdefault(ranks, sent) is sent
    assert 1 < len(seen) <= 3, "others of the node in turn"
    for number in range(2 * CACHED):
        plan.of(frozenset([FACTORS[0].key]), number)
        plan.of(
            frozenset(factor.key for place, factor in enumerate(FACTORS) if number >> place & 1), 0
        )
    assert buckets.cache_info().currsize <= CACHED
