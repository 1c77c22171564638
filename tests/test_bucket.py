"""Where batch sums lie in a flat buffer: a pure layout."""

import pytest
import torch

from ds_kfac.bucket import ALIGNMENT, FactorBucket, step_buckets
from ds_kfac.factor_spec import factor_specs
from ds_kfac.layers.base import LayerSpec, Use
from ds_kfac.side import Side
from tests.models import linear_layer

LAYERS = [linear_layer(f"l{i}", 6 + i, 3) for i in range(5)]
FACTORS = factor_specs(LAYERS)
DECOMPOSERS = {factor.key: (place + 1) % 2 for place, factor in enumerate(FACTORS)}  # A on rank 1, G on rank 0


def plan(**options) -> FactorBucket:
    return FactorBucket.plan(LAYERS, FACTORS, DECOMPOSERS, world=3, **options)


def keys(bucket: FactorBucket) -> list[str]:
    return [slot.factor for slot in bucket.slots]


def test_every_factor_has_one_slot_in_its_decomposer_s_segment():
    bucket = plan()
    for rank, segment in enumerate(bucket.segments):
        expected = [factor.key for factor in FACTORS if DECOMPOSERS[factor.key] == rank]
        assert [slot.factor for slot in segment.slots] == expected
    assert bucket.segments[2].numel == 0
    assert {slot.factor: slot.numel for slot in bucket.slots} == {factor.key: factor.side.numel for factor in FACTORS}


def test_parts_are_aligned_and_neither_overlap_nor_leave_gaps():
    bucket, end = plan(), 0
    for segment in bucket.segments:
        assert segment.start == end
        assert [slot.count for slot in segment.slots] == [*range(end, end + len(segment.slots))]
        assert segment.body - segment.start - len(segment.slots) in range(ALIGNMENT)
        end = segment.body
        for slot in segment.slots:
            assert slot.start == end
            end += slot.numel + -slot.numel % ALIGNMENT
        assert segment.stop == end and segment.start % ALIGNMENT == segment.body % ALIGNMENT == 0
    assert bucket.numel == end


@pytest.mark.parametrize("wanted", [set(), {"l3/A"}, {"l0/G", "l4/A", "l4/G"}])
def test_only_the_factors_asked_for_are_in_it(wanted):
    bucket = plan(keys=wanted)
    assert set(keys(bucket)) == wanted and len(bucket.segments) == 3
    assert bucket.numel > 0 or not wanted


def test_layers_that_share_an_input_have_one_slot_for_it():
    layers = [linear_layer(name, 6, 3) for name in ("q", "k", "v")]
    factors = factor_specs(layers, [["q", "k", "v"]])
    bucket = FactorBucket.plan(layers, factors, dict.fromkeys([factor.key for factor in factors], 0), world=1)
    assert keys(bucket) == ["q/A", "q/G", "k/G", "v/G"]
    views = bucket.views(torch.zeros(bucket.numel))
    assert views["q"][0].A is not None and views["k"][0].A is None and views["k"][0].G is not None


def test_a_tied_layer_has_a_slot_for_each_use_of_each_side():
    width, vocabulary = Side.dense(5), Side.diagonal(11)
    uses = (Use("head", "Linear", width, vocabulary, False), Use("embedding", "Embedding", vocabulary, width, False))
    layer = LayerSpec("embedding", "embedding.weight", None, width, vocabulary, uses)
    factors = factor_specs([layer])
    bucket = FactorBucket.plan([layer], factors, dict.fromkeys([factor.key for factor in factors], 0), world=1)
    found = [(slot.factor, slot.use, slot.numel) for slot in bucket.slots]
    expected = [("embedding/A", 0, 15), ("embedding/A", 1, 11), ("embedding/G", 0, 11), ("embedding/G", 1, 15)]
    assert found == expected
    head, embedding = bucket.views(torch.zeros(bucket.numel))["embedding"]
    assert [len(sum_.sum_P) for use in (head, embedding) for sum_ in (use.A, use.G)] == [15, 11, 11, 15]


def test_views_of_the_whole_and_of_a_segment_are_the_same_elements():
    bucket = plan()
    flat = torch.arange(float(bucket.numel))
    whole = bucket.views(flat)
    assert list(whole) and all(len(uses) == 1 for uses in whole.values())
    for rank, segment in enumerate(bucket.segments):
        part = bucket.views(flat[segment.start : segment.stop].clone(), rank=rank)
        for slot in segment.slots:
            mine, all_ = (getattr(views[slot.layer][0], slot.side) for views in (part, whole))
            assert torch.equal(mine.sum_P, all_.sum_P) and torch.equal(mine.count, all_.count)
            assert mine.sum_P[0] == slot.start and mine.count == slot.count and len(mine.sum_P) == slot.numel
        absent = [which for name, uses in part.items() for which in "AG" if getattr(uses[0], which) is None]
        assert len(absent) == len(segment.slots), "each layer's other side is on the other rank"
    whole["l2"][0].G.sum_P.fill_(-1)  # views, not copies
    assert (flat == -1).sum() == 6


def test_a_layer_whose_sides_are_both_the_identity_has_no_slot():
    none = Side.identity(5)
    bare = LayerSpec("bare", "bare.weight", None, none, none, (Use("bare", "Linear", none, none, False),))
    assert FactorBucket.plan([*LAYERS, bare], FACTORS, DECOMPOSERS, world=3) == plan()


def test_halves_are_of_about_equal_size_upper_layers_first_and_together_everything():
    every = frozenset(factor.key for factor in FACTORS)
    upper, lower = step_buckets(LAYERS, FACTORS, DECOMPOSERS, world=3, keys=every, halved=True)
    assert {*keys(upper), *keys(lower)} == every and not {*keys(upper)} & {*keys(lower)}
    assert {slot.layer for slot in upper.slots} == {"l3", "l4"}
    assert step_buckets(LAYERS, FACTORS, DECOMPOSERS, world=3, keys=every, halved=False) == (plan(),)
    assert step_buckets(LAYERS, FACTORS, DECOMPOSERS, world=3, keys=frozenset(), halved=True) == ()
