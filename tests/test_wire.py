"""Batch sums over the wire in 32 and 16 bits; ranks are threads here."""

import pytest
import torch
from torch import Tensor

from ds_kfac.bucket import FactorBucket
from ds_kfac.factor_spec import factor_specs
from ds_kfac.wire import DTYPES, Reduction, segment_bytes
from tests.fake_network import FakeNetwork
from tests.models import linear_layer

LAYERS = [linear_layer(f"l{i}", 5 + 2 * i, 3 + i) for i in range(4)]
FACTORS = factor_specs(LAYERS)
TOLERANCE = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}
"""Of an element, relative to its slot's largest: one rounding of every rank's; in fp32 only the order of the sum."""


def bucket_for(world: int) -> FactorBucket:
    """Odd splits; with three ranks and more one has nothing."""
    owners = max(1, world - 1)
    return FactorBucket.plan(
        LAYERS, FACTORS, {factor.key: (3 * i + i // 2) % owners for i, factor in enumerate(FACTORS)}, world=world
    )


def filled(bucket: FactorBucket, rank: int, scale=lambda slot: 1.0, seed: int = 0) -> Tensor:
    """Random sums, and counts that say whose they are."""
    flat = torch.zeros(bucket.numel)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for place, slot in enumerate(bucket.slots):
        flat[slot.count] = 1000.5 + 10 * rank + place  # exact in fp32 only
        flat[slot.start :][: slot.numel] = scale(slot) * torch.randn(slot.numel, generator=generator)
    return flat


def reduced(bucket: FactorBucket, flats: list[Tensor], dtype: torch.dtype, residuals=None) -> list[Reduction]:
    """Every rank's reduction, waited for; its ``total`` is the rank's segment."""

    def work(channel):
        own = None if residuals is None else residuals[channel.rank]
        reduction = Reduction(bucket, flats[channel.rank].clone(), channel, dtype, own)
        reduction.total = reduction.wait()
        return reduction

    return FakeNetwork(len(flats)).run(work)


def totals(bucket: FactorBucket, reductions: list[Reduction]) -> dict[str, tuple[Tensor, Tensor]]:
    """Factor key -> sum and count, as its owner has them."""
    found = {}
    for rank, reduction in enumerate(reductions):
        segment = bucket.segments[rank]
        assert reduction.total.shape == (segment.numel,) and reduction.total.dtype == torch.float32
        views = bucket.views(reduction.total, rank=rank)
        for slot in segment.slots:
            part = getattr(views[slot.layer][0], slot.side)
            found[slot.factor] = part.sum_P, part.count
    return found


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_owners_get_the_sum_over_all_ranks(world, name):
    bucket = bucket_for(world)
    flats = [filled(bucket, rank) for rank in range(world)]
    found = totals(bucket, reduced(bucket, flats, DTYPES[name]))
    assert set(found) == {factor.key for factor in FACTORS}
    for slot in bucket.slots:
        total, count = found[slot.factor]
        parts = torch.stack([flat[slot.start :][: slot.numel] for flat in flats]).double()
        bound = TOLERANCE[name] * parts.abs().amax(dim=1).sum()
        assert (total - parts.sum(dim=0)).abs().max() <= bound
        assert count == sum(flat[slot.count] for flat in flats), "counts travel in fp32"
    if world == 1:
        assert torch.equal(found["l0/A"][0], flats[0][bucket.slots[0].start :][: bucket.slots[0].numel])


def test_fp32_is_the_sum_in_rank_order_bit_for_bit():
    bucket = bucket_for(3)
    flats = [filled(bucket, rank, seed=1) for rank in range(3)]
    expected = torch.stack(flats).sum(dim=0)
    for rank, reduction in enumerate(reduced(bucket, flats, torch.float32)):
        segment = bucket.segments[rank]
        assert torch.equal(reduction.total, expected[segment.start : segment.stop])


def test_sums_are_added_up_in_32_bits():
    """In 16 bits 256 + 1 is 256."""
    bucket = bucket_for(4)
    flats = [torch.full((bucket.numel,), 256.0 if rank == 0 else 1.0) for rank in range(4)]
    for total, _ in totals(bucket, reduced(bucket, flats, torch.bfloat16)).values():
        assert (total == 259).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_slot_keeps_its_own_relative_precision(name):
    """Slots of 1e-12 beside slots of 1e6: fp16 has neither."""
    bucket = bucket_for(2)
    scales = {slot.factor: 10.0 ** (-12 + 18 * i / (len(FACTORS) - 1)) for i, slot in enumerate(bucket.slots)}
    assert min(scales.values()) == 1e-12 and max(scales.values()) == pytest.approx(1e6)
    flats = [filled(bucket, rank, lambda slot: scales[slot.factor], seed=2) for rank in range(2)]
    found = totals(bucket, reduced(bucket, flats, DTYPES[name]))
    for slot in bucket.slots:
        parts = torch.stack([flat[slot.start :][: slot.numel] for flat in flats])
        # of each element, not of the largest: floating point
        bound = TOLERANCE[name] * parts.abs().sum(dim=0)
        assert ((found[slot.factor][0] - parts.sum(dim=0)).abs() <= bound).all(), slot.factor


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("value", [1e-37, 1e37])
def test_the_ends_of_the_range_of_32_bits_arrive(value, name):
    bucket = bucket_for(2)
    flats = [torch.full((bucket.numel,), value) for _ in range(2)]
    for total, _ in totals(bucket, reduced(bucket, flats, DTYPES[name])).values():
        assert ((total / value - 2).abs() <= 2 * TOLERANCE[name]).all()


@pytest.mark.parametrize("name", DTYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(name):
    bucket = bucket_for(2)
    flats = [torch.zeros(bucket.numel) for _ in range(2)]
    flats[0][bucket.slots[1].start] = float("nan")
    flats[1][bucket.slots[2].start] = float("inf")
    found = totals(bucket, reduced(bucket, flats, DTYPES[name]))
    finite = {key for key, (total, _) in found.items() if torch.isfinite(total).all()}
    assert finite == {slot.factor for i, slot in enumerate(bucket.slots) if i not in (1, 2)}
    assert all((found[key][0] == 0).all() for key in finite)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bytes_are_those_that_were_sent_to_others(world, name):
    bucket, dtype, network = bucket_for(world), DTYPES[name], FakeNetwork(world)

    def work(channel):
        Reduction(bucket, filled(bucket, channel.rank), channel, dtype).wait()
        return channel

    sizes = [segment_bytes(segment, dtype) for segment in bucket.segments]
    for rank, channel in enumerate(network.run(work)):
        assert channel.sent["factors"] == network.wire[rank] == sum(sizes) * (world > 1) - sizes[rank] * (world > 1)
        assert channel.received["factors"] == sizes[rank] * (world - 1)
        assert channel.calls["factors"] == network.entered[rank] == (world > 1)


def test_sixteen_bits_are_half_the_bytes_but_for_counts():
    bucket = bucket_for(2)
    body = sum(segment.stop - segment.body for segment in bucket.segments)
    header = sum(segment.body - segment.start for segment in bucket.segments)
    by_name = {name: sum(segment_bytes(s, dtype) for s in bucket.segments) for name, dtype in DTYPES.items()}
    expected = {"fp32": 4 * (header + body), "bf16": 4 * header + 2 * body, "fp16": 8 * header + 2 * body}
    assert by_name == expected


# error feedback


STEPS = 200


def errors(dtype: torch.dtype, value: float, *, feedback: bool) -> Tensor:
    """After each step, what has not arrived so far of 2 ``value`` a step from two ranks, in units of ``value``."""
    layers = LAYERS[:1]
    bucket = FactorBucket.plan(layers, factor_specs(layers), {"l0/A": 0, "l0/G": 1}, world=2)
    slot = bucket.segments[0].slots[0]

    def work(channel):
        residuals, totals = {} if feedback else None, []
        for _ in range(STEPS):
            reduction = Reduction(bucket, torch.full((bucket.numel,), value), channel, dtype, residuals)
            totals.append(reduction.wait()[slot.start : slot.start + slot.numel].double())
            residuals = reduction.residuals if feedback else None
        return torch.stack(totals) if channel.rank == 0 else None

    sums = FakeNetwork(2).run(work)[0].cumsum(dim=0)
    assert (sums == sums[:, :1]).all()
    return (2 * value * torch.arange(1, STEPS + 1) - sums[:, 0]) / value


SCALES = [1.0, 2.0**40, 2.0**-40]
"""Powers of two: they do not change how a number is rounded."""


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "above"), [("bf16", 2.0**-9), ("fp16", 2.0**-12)])
def test_with_error_feedback_what_arrives_follows_what_was_meant(name, above, scale):
    """1 + ``above`` is rounded down to 1 every time: without feedback the error grows by it with every step, with
    feedback it never exceeds one rounding, up or down, of each rank."""
    value = scale * (1 + above)
    plain = errors(DTYPES[name], value, feedback=False)
    torch.testing.assert_close(plain[-1].item(), STEPS * 2 * above, rtol=0.01, atol=0)
    assert (plain.diff() > 0).all()
    assert errors(DTYPES[name], value, feedback=True).abs().max() <= 2 * 2 * above


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_batch_that_is_not_finite_leaves_nothing_behind(name):
    bucket = bucket_for(2)
    broken, fine = bucket.slots[0], bucket.slots[1]
    flats = [filled(bucket, rank, seed=3) for rank in range(2)]
    flats[0][broken.start + 1] = float("inf")
    residuals = [reduction.residuals for reduction in reduced(bucket, flats, DTYPES[name], [{}, {}])]
    key = lambda slot: (slot.layer, slot.use, slot.side)  # noqa: E731
    assert set(residuals[0]) == {key(slot) for slot in bucket.slots}
    assert (residuals[0][key(broken)] == 0).all() and (residuals[0][key(fine)] != 0).any()
    for each in residuals:
        assert all(torch.isfinite(residual).all() for residual in each.values())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_residual_is_what_rounding_took_and_takes_two_bytes(name):
    bucket = bucket_for(2)
    flats = [filled(bucket, rank, seed=4) for rank in range(2)]
    reductions = reduced(bucket, flats, DTYPES[name], [{}, {}])
    found = totals(bucket, reductions)
    for slot in bucket.slots:
        parts = [flat[slot.start :][: slot.numel] for flat in flats]
        taken = [reduction.residuals[slot.layer, slot.use, slot.side] for reduction in reductions]
        assert all(residual.element_size() == 2 for residual in taken)
        rest = parts[0].double() + parts[1].double() - found[slot.factor][0]
        bound = 2**-8 * sum(residual.abs().max() for residual in taken) + 1e-6
        assert (rest - sum(residual.double() for residual in taken)).abs().max() <= bound


def test_without_feedback_nothing_is_kept_and_sums_are_left_alone():
    bucket = bucket_for(2)
    flats = [filled(bucket, rank) for rank in range(2)]

    def work(channel):
        flat = flats[channel.rank].clone()
        reduction = Reduction(bucket, flat, channel, torch.float16)
        reduction.wait()
        return reduction.residuals == {} and torch.equal(flat, flats[channel.rank])

    assert FakeNetwork(2).run(work) == [True, True]
