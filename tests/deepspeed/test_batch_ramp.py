"""A batch that grows trains like one engine that is fed the larger batches whole, at rates set by hand."""

import math

import pytest
import torch

import ds_kfac
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
"""Micro-batches of each step by hand: a fourth single one, because DeepSpeed's count of them is odd after three."""
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 40, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": LR},
}


def rate_by_hand(batches: int) -> float:
    """WarmupDecayLR's, when so many batches of the first size were seen: DeepSpeed's first two steps have the same."""
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
                "difference": max(float((w - final[n]).abs().max()) for n, w in weights(engine).items()),
                "moved": max(float((w - initial[n]).abs().max()) for n, w in final.items()),
                "samples": (ramp.samples, engine.global_samples, ramp.batch, engine.train_batch_size()),
            }
            engine.destroy()
    return results


def test_it_trains_like_batches_fed_whole():
    for result in run_ranks("tests.deepspeed.test_batch_ramp:worker", world=2, payload=MODES):
        for name, found in result.items():
            losses, batches, rates, samples = zip(*found["rows"], strict=True)
            assert list(batches) == STEPS, name
            seen = [sum(STEPS[:step]) for step in range(len(STEPS))]
            wanted = [rate_by_hand(done) * math.sqrt(count) for done, count in zip(seen, STEPS, strict=True)]
            assert list(rates) == pytest.approx(wanted), name
            assert list(samples) == [FIRST * sum(STEPS[: step + 1]) for step in range(len(STEPS))], name
            assert found["samples"] == (FIRST * sum(STEPS), FIRST * sum(STEPS), 4 * FIRST, 4 * FIRST), name
            rounding = {"bf16": 2.0**-7, "fp16": 2.0**-9}.get(BY_NAME[name].dtype, 1e-4)
            assert losses == pytest.approx(found["losses"], rel=rounding), name
            assert found["difference"] < 20 * rounding * found["moved"], (name, found["difference"], found["moved"])


def noisy(payload: tuple[str, str]) -> dict:
    """A ramp by noise, saved after some steps, goes on to the bit in another engine; ranks always agree."""
    name, folder = payload
    mode, block = BY_NAME[name], {**BY_NAME[name].kfac_block, "factor": {"update_interval": 1}}
    with patched(mode):
        engine = build(mode, 1, scheduler=SCHEDULE, kfac=block)
        ramp = ds_kfac.BatchRamp(engine, largest=8 * FIRST, margin=1e-3)
        before = ramped(engine, 7)
        engine.save_checkpoint(folder, tag="tag")
        told, used = ramp.noise.told, sum(row[1] for row in before)
        after = ramped(engine, 4, first=used)
        engine.destroy()
        again = build(mode, 1, scheduler=SCHEDULE, kfac=block, seed=1)
        ds_kfac.BatchRamp(again, largest=8 * FIRST, margin=1e-3)
        again.load_checkpoint(folder, tag="tag")
        resumed = ramped(again, 4, first=used)
        counters = again.kfac.counters()
        again.destroy()
    return {"before": before, "after": after, "resumed": resumed, "told": told, "noise": counters["noise_scale"]}


@pytest.mark.parametrize("name", ["adam-z0", "adam-z2", "adam-z3"])
def test_a_ramp_by_noise_goes_on_to_the_bit_and_ranks_agree(name, tmp_path):
    one, other = run_ranks("tests.deepspeed.test_batch_ramp:noisy", world=2, payload=(name, str(tmp_path)))
    assert one["resumed"] == one["after"]
    batches = [row[1] for row in one["before"] + one["after"]]
    assert batches == [row[1] for row in other["before"] + other["after"]] and one["told"] == other["told"]
    assert batches[:5] == [1] * 5 and batches[-1] == 8, batches
    assert batches == sorted(batches) and one["noise"] > 0


def measured(names: list[str]) -> dict:
    """tr Sigma and |G|^2 of one step in every mode, of the same 16 samples; and after a step that was not applied."""
    results = {}
    for name, accumulation in names:
        mode = BY_NAME[name]
        with patched(mode):
            engine = build(mode, accumulation, kfac={**mode.kfac_block, "factor": {"update_interval": 1}})
            noise = engine.kfac.measure_noise()
            for x, y in micro_batches(0, accumulation):
                loss = engine(*inputs(engine, x, y))
                engine.backward(loss)
                engine.step()
            results[name, accumulation] = noise.average.tolist(), noise.measurements
            engine.destroy()
    return results


def test_every_mode_measures_the_same_noise():
    alone = [("adam-z0", 4)]
    cases = [(name, 2) for name in ("adam-z0", "adam-z2", "adam-z3", "adam-z2-offload", "z1", "z2-bf16", "z3-fp16")]
    (first,) = run_ranks("tests.deepspeed.test_batch_ramp:measured", world=1, payload=alone)
    expected, _ = first[alone[0]]
    for result in run_ranks("tests.deepspeed.test_batch_ramp:measured", world=2, payload=cases):
        for (name, _), (found, measurements) in result.items():
            rounding = {"bf16": 2.0**-7, "fp16": 2.0**-9}.get(BY_NAME[name].dtype, 1e-5)
            # both are differences of numbers of the size of the first
            assert found == pytest.approx(expected, abs=4 * rounding * expected[0]), name
            assert measurements == 1


def without_curvature(_) -> list[float]:
    mode = BY_NAME["adam-z2"]
    engine = build(mode, 1, kfac={"adam": {"rotate": False}})
    noise, found = engine.kfac.measure_noise(), []
    for _ in range(22):
        ramped(engine, 1)
        found.append(noise.measurements)
    engine.destroy()
    return found


def test_a_rule_without_factors_measures_noise_on_a_clock_of_its_own():
    for found in run_ranks("tests.deepspeed.test_batch_ramp:without_curvature", world=2):
        assert found == [0] * 10 + [1] * 10 + [2] * 2


def refused(_) -> list[str]:
    mode, messages = BY_NAME["z2"], []
    engine = build(mode, 1)

    def attempt(**arguments) -> None:
        with pytest.raises(ValueError) as error:
            ds_kfac.BatchRamp(engine, **arguments)
        messages.append(str(error.value))

    attempt(largest=FIRST)
    attempt(largest=4 * FIRST, at=[8, 4])
    engine.kfac.detach()
    attempt(largest=4 * FIRST)
    assert engine.lr_scheduler is None, "a refused ramp leaves the engine as it was"
    ramp = ds_kfac.BatchRamp(engine, largest=4 * FIRST, at=AT)  # without K-FAC and without a schedule
    rows = ramped(engine, len(STEPS))
    assert [row[1] for row in rows] == STEPS and rows[-1][2] == pytest.approx(2 * LR)
    with pytest.raises(AttributeError):
        _ = ramp.max_lrs
    engine.destroy()
    return messages


def test_what_it_cannot_do_is_an_error_with_a_remedy():
    for messages in run_ranks("tests.deepspeed.test_batch_ramp:refused", world=2):
        for message, words in zip(
            messages, ["largest is 8", "ascend, got [8, 4]", "attach it, or give at"], strict=True
        ):
            assert words in message
