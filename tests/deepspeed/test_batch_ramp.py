"""A batch that grows trains like one engine that is fed the larger batches whole, at rates set by
hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

import ds_kfac
from tests.close import close, near
from tests.deepspeed.modes import BY_NAME, LR, MICRO_ROWS
from tests.deepspeed.runs import build, micro_batches, patched, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
MODES = [
    "adam-z0",
    "adam-z2",
    "adam-z3",
    "adam-z2-offload",
    "adam-z3-offload",
    "z1",
    "z2-offload",
    "z0-bf16",
    "z2-fp16",
]
FIRST = 2 * MICRO_ROWS  # samples of a step of 2 ranks
AT = [3 * FIRST, 7 * FIRST]
STEPS = [1, 1, 1, 1, 2, 2, 4, 4]
"""Micro-batches of each step by hand: a fourth single one, because DeepSpeed's count of them is odd
after three."""
STEPS_OF_RATES = 40
"""Operations on a rate, one after another."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        "total_num_steps": 40,
        "warmup_num_steps": 4,
        "warmup_type": "linear",
        "warmup_max_lr": LR,
    },
}


def rate_by_hand(batches: int) -> float:
    """WarmupDecayLR's, when so many batches of the first size were seen: DeepSpeed's first two
    steps have the same."""
    batches = max(0, batches - 1)
    return LR * (batches / 4 if batches < 4 else (40 - batches) / (40 - 4))


def parts(first: int, count: int) -> list:
    """This rank's micro-batches number first .. first + count."""
    return [next(iter(micro_batches(index, 1))) for index in range(first, first + count)]


def inputs(engine, x, y):
    return x.to(engine.device, engine.get_data_types()[0]), y.to(engine.device)


def ramped(engine, steps: int, first: int = 0) -> list[tuple]:
    """(loss, batch, rate, samples) of each step, until there were so many."""
    rows, total, index, rate = [], [], first, engine.get_lr()[0]
    while len(rows) < steps:
        ((x, y),) = parts(index, 1)
        index += 1
        loss, before = engine(*inputs(engine, x, y)), engine.global_steps
        engine.backward(loss)
        engine.step()
        total.append(float(loss.detach()))
        if engine.global_steps > before:
            rows.append((sum(total) / len(total), len(total), rate, engine.global_samples))
            total, rate = [], engine.get_lr()[0]
    return rows


def by_hand(engine, steps: list[int]) -> list[float]:
    """The same micro-batches, each step's in one, at rates set by hand."""
    losses, index = [], 0
    for count in steps:
        x, y = (torch.cat(tensors) for tensors in zip(*parts(index, count), strict=True))
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_by_hand(index) * math.sqrt(count)
        loss = engine(*inputs(engine, x, y))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        index += count
    return losses


def worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        with patched(mode):
            plain = build(mode, 1, scheduler=SCHEDULE)
            expected, final = by_hand(plain, STEPS), weights(plain)
            plain.destroy()
            engine = build(mode, 1, scheduler=SCHEDULE)
            initial = weights(engine)
            ramp = ds_kfac.BatchRamp(engine, largest=4 * FIRST, at=AT)
            rows = ramped(engine, len(STEPS))
            results[name] = {
                "rows": rows,
                "losses": expected,
                "difference": max(
                    float((w - final[n]).abs().max()) for n, w in weights(engine).items()
                ),
                "moved": max(float((w - initial[n]).abs().max()) for n, w in final.items()),
                "samples": (engine.global_samples, ramp.batch, engine.train_batch_size()),
            }
            engine.destroy()
    return results


def test_it_trains_like_batches_fed_whole():
    for result in run_ranks("tests.deepspeed.test_batch_ramp:worker", world=2, payload=MODES):
        for name, found in result.items():
            losses, batches, rates, samples = zip(*found["rows"], strict=True)
            assert list(batches) == STEPS, name
            seen = [sum(STEPS[:step]) for step in range(len(STEPS))]
            wanted = [
                rate_by_hand(done) * math.sqrt(count)
                for done, count in zip(seen, STEPS, strict=True)
            ]
            close(list(rates), wanted, sums=STEPS_OF_RATES, what=name)
            assert list(samples) == [
                FIRST * sum(STEPS[: step + 1]) for step in range(len(STEPS))
            ], name
            assert found["samples"] == (FIRST * sum(STEPS), 4 * FIRST, 4 * FIRST), name
            dtype = DTYPES[BY_NAME[name].dtype]
            close(
                list(losses),
                found["losses"],
                sums=len(STEPS) * (13 + 17 + 19),
                dtype=dtype,
                what=name,
            )
            share = 0.002 if dtype is torch.float32 else 0.05
            why = (
                "elements with hardly any gradient turn with rounding; a rate or a sum that is "
                "wrong moves all by more"
            )
            near(found["difference"], 0.0, share * found["moved"], why, what=name)


def saved(payload: tuple[str, str]) -> dict:
    """A ramp, saved after its first doubling, goes on to the bit in another engine."""
    name, folder = payload
    mode, at = BY_NAME[name], [2 * FIRST, 9 * FIRST]
    with patched(mode):
        engine = build(mode, 1, scheduler=SCHEDULE)
        ds_kfac.BatchRamp(engine, largest=4 * FIRST, at=at)
        before = ramped(engine, 5)
        engine.save_checkpoint(folder, tag="tag")
        used = sum(row[1] for row in before)
        after = ramped(engine, 3, first=used)
        engine.destroy()
        again = build(mode, 1, scheduler=SCHEDULE, seed=1)
        ds_kfac.BatchRamp(again, largest=4 * FIRST, at=at)
        again.load_checkpoint(folder, tag="tag")
        resumed = ramped(again, 3, first=used)
        again.destroy()
    return {"before": before, "after": after, "resumed": resumed}


@pytest.mark.parametrize("name", ["adam-z0", "adam-z2", "adam-z3"])
def test_a_ramp_goes_on_to_the_bit_and_ranks_agree(name, tmp_path):
    one, other = run_ranks(
        "tests.deepspeed.test_batch_ramp:saved", world=2, payload=(name, str(tmp_path))
    )
    assert one["resumed"] == one["after"]
    batches = [row[1] for row in one["before"] + one["after"]]
    assert batches == [row[1] for row in other["before"] + other["after"]]
    assert (
        batches[0] == 1 and batches[4] == 2 and batches[-1] == 4 and batches == sorted(batches)
    ), batches


def engine_of(
    scheduler=None, *, first=4, micro=4, managed=True, lr: float | torch.Tensor = 0.5
) -> SimpleNamespace:
    """What a ramp uses of an engine: DeepSpeed's order of things in a step, without a model."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    engine = SimpleNamespace(
        optimizer=optimizer,
        lr_scheduler=scheduler and scheduler(optimizer),
        global_samples=0,
        micro_steps=0,
        dp_world_size=1,
        global_rank=0,
        batch=first,
        _is_gradient_accumulation_boundary=None,
        train_micro_batch_size_per_gpu=lambda: micro,
        managed_gradient_accumulation=lambda: managed,
    )
    engine.train_batch_size = lambda: engine.batch
    engine.gradient_accumulation_steps = lambda: engine.batch // micro
    engine.set_train_batch_size = lambda batch: setattr(engine, "batch", batch)
    return engine


def stepped(engine, *args) -> float:
    """The micro-batches of a step; the rate after it."""
    while True:
        ends = (engine.micro_steps + 1) % engine.gradient_accumulation_steps() == 0
        if ends:
            engine.optimizer.step()
            engine.lr_scheduler.step(*args)
            engine.global_samples += engine.batch
        engine.micro_steps += 1
        if ends:
            return engine.optimizer.param_groups[0]["lr"]


def exponential(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.1)


def refusal(engine, **arguments) -> str:
    before = engine.lr_scheduler
    with pytest.raises(ValueError) as error:
        ds_kfac.BatchRamp(engine, **arguments)
    assert engine.lr_scheduler is before, "a refused ramp leaves the engine as it was"
    return str(error.value)


def test_what_it_cannot_do_is_an_error_with_a_remedy():
    assert "largest is 4, but the batch is 4" in refusal(engine_of(), largest=4, at=[4])
    assert "give at" in refusal(engine_of(), largest=16) and "removed in 0.2" in refusal(
        engine_of(), largest=16
    )
    for at in ([8, 4], [4, 8, 16]):
        assert (
            f"at has to be 1 to 2 ascending numbers of samples (16 at most), got {at}"
            in refusal(engine_of(), largest=16, at=at)
        )
    assert "the caller decides where a step ends" in refusal(
        engine_of(managed=False), largest=16, at=[4]
    )
    engine = engine_of(first=8)
    engine.micro_steps = 1
    assert "in the middle of a step" in refusal(engine, largest=16, at=[4])
    engine = engine_of()
    ds_kfac.BatchRamp(engine, largest=16, at=[4])
    assert "has a ramp" in refusal(engine, largest=16, at=[4])
    engine._is_gradient_accumulation_boundary = True
    with pytest.raises(RuntimeError, match="train without a ramp"):
        stepped(engine)


def test_schedules_that_go_on_from_their_last_rate():
    engine = engine_of(exponential)
    ramp = ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    rates = [stepped(engine) for _ in range(6)]
    # steps of 1, 1 (the count is odd), 2, 4, 4, 4 micro-batches
    seen, sizes = [1, 2, 4, 8, 12, 16], [1, 2, 4, 4, 4, 4]
    close(
        rates,
        [0.5 * 0.9**n * size**0.5 for n, size in zip(seen, sizes, strict=True)],
        sums=STEPS_OF_RATES,
    )
    assert engine.global_samples == 4 * seen[-1] and ramp.batch == 16


def test_schedules_of_metrics_and_of_samples_are_stepped_once():
    engine = engine_of(plateau)
    ds_kfac.BatchRamp(engine, largest=16, at=[4, 8])
    rates = [stepped(engine, 1.0) for _ in range(5)]
    close(
        rates[2:4],
        [0.5 * 2, 0.05 * 2],
        sums=STEPS_OF_RATES,
        what="patience of 2 steps, not of 2 first batches",
    )


def test_without_a_schedule_the_rate_grows_by_the_batch_alone():
    engine = engine_of()
    ramp = ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    rates = [stepped(engine) for _ in range(5)]
    close(rates[-1], 0.5 * 2, sums=STEPS_OF_RATES)
    assert ramp.batch == 16
    with pytest.raises(AttributeError):
        _ = ramp.max_lrs


def hand(engine, change) -> None:
    """The user's own hand on the rate, between two steps."""
    for group in engine.optimizer.param_groups:
        rate = change(group["lr"])
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate


@pytest.mark.parametrize(
    "lr", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"]
)
def test_a_rate_set_by_hand_stays_and_grows_with_the_batch(lr):
    engine = engine_of(lr=lr)
    ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    rates = []
    for step in range(6):  # of 1, 1, 2, 4, 4, 4 micro-batches; the rates are those of the next one
        rates.append(float(stepped(engine)))
        if step in (0, 3):
            hand(engine, lambda rate: 0.2 if step == 0 else 0.3)  # noqa: B023
    close(rates, [0.5, 0.2 * 2**0.5, 0.2 * 2, 0.2 * 2, 0.3, 0.3], sums=STEPS_OF_RATES)


def test_a_rate_that_the_user_decays_decays_at_every_step():
    engine = engine_of()
    ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    rates = []
    for _ in range(6):
        rates.append(stepped(engine))
        hand(engine, lambda rate: 0.9 * rate)
    close(
        rates,
        [0.5 * 0.9**n * size**0.5 for n, size in enumerate([1, 2, 4, 4, 4, 4])],
        sums=STEPS_OF_RATES,
    )


def test_a_schedule_goes_on_from_a_rate_set_by_hand_as_without_a_ramp():
    engine = engine_of(exponential)
    ds_kfac.BatchRamp(engine, largest=16, at=[1000])
    stepped(engine)
    hand(engine, lambda rate: 0.2)
    close([stepped(engine), stepped(engine)], [0.2 * 0.9, 0.2 * 0.9**2], sums=STEPS_OF_RATES)


def test_a_rate_set_by_hand_is_saved():
    engine, other = engine_of(), engine_of()
    ramp, loaded = (ds_kfac.BatchRamp(each, largest=16, at=[4, 1000]) for each in (engine, other))
    stepped(engine), stepped(engine)
    hand(engine, lambda rate: 0.2)  # with twice the first batch
    loaded.load_state_dict(copy.deepcopy(ramp.state_dict()))
    close([stepped(other), stepped(other)], [0.2, 0.2], sums=STEPS_OF_RATES)


def test_checkpoints_with_and_without_a_ramp_load_into_each_other():
    engine = engine_of(exponential)
    ramp = ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    for _ in range(4):
        stepped(engine)
    state = copy.deepcopy(ramp.state_dict())
    # into an engine without one, which goes on with the schedule
    plain = engine_of(exponential)
    plain.lr_scheduler.load_state_dict(state)
    assert plain.lr_scheduler.last_epoch == engine.global_samples / 4
    # of one without, which has gone on for some steps
    before = engine_of(exponential)
    for _ in range(10):
        stepped(before)
    late = engine_of(exponential)
    late_ramp = ds_kfac.BatchRamp(late, largest=16, at=[1000])
    late_ramp.load_state_dict(before.lr_scheduler.state_dict())
    late.optimizer.load_state_dict(before.optimizer.state_dict())
    late.global_samples = before.global_samples
    close(stepped(late), 0.5 * 0.9**11, sums=STEPS_OF_RATES)
    # of an engine without a schedule
    bare = engine_of()
    ds_kfac.BatchRamp(bare, largest=16, at=[4]).load_state_dict(None)
    close([stepped(bare), stepped(bare)], [0.5, 0.5 * 2**0.5], sums=STEPS_OF_RATES)
    # with another first batch, in the middle of a step
    other = engine_of(exponential, first=8)
    other_ramp = ds_kfac.BatchRamp(other, largest=16, at=[1000])
    other.micro_steps = 3
    other_ramp.load_state_dict(copy.deepcopy(state))
    assert (other_ramp.first, other_ramp.batch, other.micro_steps) == (
        4,
        ramp.batch,
        engine.micro_steps,
    )
    close(stepped(other), stepped(engine), sums=STEPS_OF_RATES)
    # where its batch cannot be had
    odd = engine_of(exponential, first=12, micro=12)
    odd_ramp = ds_kfac.BatchRamp(odd, largest=24, at=[1000])
    with pytest.raises(ValueError, match="batch is 16 samples, which 12"):
        odd_ramp.load_state_dict(state)
    assert odd.lr_scheduler.last_epoch == 0 and odd.batch == 12
