"""A batch that grows trains like one engine that is fed the larger batches whole, at rates set by
hand."""

import copy
import math
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import ds_kfac
from tests.close import close, near
from tests.deepspeed.modes import BY_NAME, LR, MICRO_ROWS
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, micro_batches, patched, weights
from tests.models import make_net
from tests.ranks import of_ranks

FIRST = 2 * MICRO_ROWS  # samples of a step of 2 ranks
STEPS = [1, 1, 1, 1, 2, 2, 4, 4]
"""Micro-batches of each step by hand: a fourth single one, because DeepSpeed's count of them is odd
after three."""
STEPS_OF_RATES = 40
"""Operations on a rate, one after another."""
RATES = {"total_num_steps": 40, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": LR}
SCHEDULE = {"type": "WarmupDecayLR", "params": RATES}


def rate_by_hand(batches: int) -> float:
    """WarmupDecayLR's, when so many batches of the first size were seen: DeepSpeed's first two
    steps have the same."""
    batches = max(0, batches - 1)
    return LR * (batches / 4 if batches < 4 else (40 - batches) / (40 - 4))


def parts(first: int, count: int) -> list:
    """This rank's micro-batches number first .. first + count."""
    return [next(iter(micro_batches(index, 1))) for index in range(first, first + count)]


def loss_of(engine, x, y) -> torch.Tensor:
    return engine(x.to(engine.device, engine.get_data_types()[0]), y.to(engine.device))


def ramped(engine, steps: int, first: int = 0) -> list[tuple]:
    """(loss, batch, rate, samples) of each step, until there were so many."""
    rows, total, index, rate = [], [], first, engine.get_lr()[0]
    while len(rows) < steps:
        ((x, y),) = parts(index, 1)
        index += 1
        loss, before = loss_of(engine, x, y), engine.global_steps
        engine.backward(loss)
        engine.step()
        total.append(float(loss.detach()))
        if engine.global_steps > before:
            rows.append((sum(total) / len(total), len(total), rate, engine.global_samples))
            total, rate = [], engine.get_lr()[0]
    return rows


def by_hand(engine, steps: list[int]) -> list[float]:
    """Losses of the same micro-batches, each step's in one, at rates set by hand."""
    losses, index = [], 0
    for count in steps:
        x, y = (torch.cat(tensors) for tensors in zip(*parts(index, count), strict=True))
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_by_hand(index) * math.sqrt(count)
        loss = loss_of(engine, x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        index += count
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["adam-z0", "adam-z3-offload", "z1", "z2-offload", "z2-fp16"])
def test_it_trains_like_batches_fed_whole(name):
    mode = BY_NAME[name]
    with patched(mode):
        plain, engine = (build(mode, scheduler=SCHEDULE) for _ in range(2))
        initial, expected = weights(engine), by_hand(plain, STEPS)
        ramp = ds_kfac.BatchRamp(engine, largest=4 * FIRST, at=[3 * FIRST, 7 * FIRST])
        losses, batches, rates, samples = zip(*ramped(engine, len(STEPS)), strict=True)
    assert list(batches) == STEPS
    seen = [sum(STEPS[:step]) for step in range(len(STEPS) + 1)]
    pairs = zip(seen, STEPS, strict=False)
    wanted = [rate_by_hand(done) * math.sqrt(count) for done, count in pairs]
    close(list(rates), wanted, sums=STEPS_OF_RATES)
    assert list(samples) == [FIRST * done for done in seen[1:]]
    assert ramp.batch == engine.train_batch_size() == 4 * FIRST
    dtype = plain.get_data_types()[0]
    close(list(losses), expected, sums=len(STEPS) * (13 + 17 + 19), dtype=dtype)
    final, share = weights(plain), 0.002 if dtype is torch.float32 else 0.05
    off = max(float((w - final[n]).abs().max()) for n, w in weights(engine).items())
    moved = max(float((w - initial[n]).abs().max()) for n, w in final.items())
    why = "elements with hardly any gradient turn with rounding; a wrong rate moves all by more"
    near(off, 0.0, share * moved, why)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["adam-z0", "adam-z3"])
def test_a_ramp_goes_on_to_the_bit_and_ranks_agree(name):
    """Saved after its first doubling, in another engine."""
    folder, at = shared_folder(), [2 * FIRST, 9 * FIRST]
    engine, again = (build(BY_NAME[name], scheduler=SCHEDULE, seed=seed) for seed in (0, 1))
    for each in (engine, again):
        ds_kfac.BatchRamp(each, largest=4 * FIRST, at=at)
    before = ramped(engine, 5)
    engine.save_checkpoint(folder, tag="tag")
    again.load_checkpoint(folder, tag="tag")
    used = sum(row[1] for row in before)
    after = ramped(engine, 3, first=used)
    assert ramped(again, 3, first=used) == after
    batches = [row[1] for row in before + after]
    assert of_ranks(batches) == [batches, batches] and batches == sorted(batches)
    assert (batches[0], batches[4], batches[-1]) == (1, 2, 4)


def engine_of(scheduler=None, *, accumulation=1, micro=MICRO_ROWS, lr=0.5, **config):
    """An engine on one rank."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    given = {"optimizer": optimizer, "model_parameters": None}
    if scheduler:
        given["lr_scheduler"] = scheduler(optimizer)
    config |= {"optimizer": None, "train_micro_batch_size_per_gpu": micro}
    return build(BY_NAME["z0-noclip"], accumulation, model=model, given=given, **config)


def stepped(engine, **metrics) -> float:
    """Take the micro-batches of a step; return the rate after it."""
    before = engine.global_steps
    while engine.global_steps == before:
        engine.backward(loss_of(engine, *parts(engine.micro_steps, 1)[0]))
        engine.step(lr_kwargs=metrics or None)
    return float(engine.optimizer.param_groups[0]["lr"])


def set_rate(engine, rate: float) -> None:
    """The user's own hand on the rate, between two steps."""
    for group in engine.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate


exponential = partial(ExponentialLR, gamma=0.9)


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=2, factor=0.1)


def refusal(engine, **arguments) -> str:
    before = engine.lr_scheduler
    with pytest.raises(ValueError) as error:
        ds_kfac.BatchRamp(engine, **arguments)
    assert engine.lr_scheduler is before, "a refused ramp leaves the engine as it was"
    return str(error.value)


@pytest.mark.ranks(1)
def test_what_it_cannot_do_is_an_error_with_a_remedy():
    engine, middle = engine_of(), engine_of(accumulation=2)
    assert "largest is 4, but the batch is 4" in refusal(engine, largest=4, at=[4])
    assert "for example at=[" in refusal(engine, largest=16)
    for at in ([8, 4], [4, 8, 16]):
        said = refusal(engine, largest=16, at=at)
        assert "at must list 1 to 2 numbers" in said and f"got {at}" in said, said
    unmanaged = engine_of(managed_gradient_accumulation=False)
    assert "the caller decides where a step ends" in refusal(unmanaged, largest=16, at=[4])
    middle.backward(loss_of(middle, *parts(0, 1)[0]))
    middle.step()
    assert "in the middle of a step" in refusal(middle, largest=16, at=[4])
    ds_kfac.BatchRamp(engine, largest=16, at=[4])
    assert "has a ramp" in refusal(engine, largest=16, at=[4])
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(RuntimeError, match="train without a ramp"):
        stepped(engine)


SIZES = [1, 2, 4, 4, 4, 4]
"""Micro-batches of the steps after the first one, where at is [4, 16]; the first two are of one, as
the count is odd."""
GROWTH, SEEN = [size**0.5 for size in SIZES], [1, 2, 4, 8, 12, 16]
DECAYED = [0.5 * 0.9**n * growth for n, growth in enumerate(GROWTH)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("scheduler", "at", "hand", "wanted"),
    [
        # a schedule goes on from its last rate
        (exponential, [4, 16], {}, [0.5 * 0.9 ** SEEN[n] * GROWTH[n] for n in range(6)]),
        # and from one that is set by hand, as without a ramp
        (exponential, [1000], {0: 0.2}, [0.5 * 0.9, 0.2 * 0.9, 0.2 * 0.9**2]),
        # patience of 2 steps, not of 2 first batches
        (plateau, [4, 8], {}, [0.5, 0.5 * 2**0.5, 0.5 * 2, 0.05 * 2, 0.05 * 2]),
        # without a schedule it grows with the batch alone, also one that is set by hand
        (None, [4, 16], {}, [0.5 * growth for growth in GROWTH]),
        (None, [4, 16], {0: 0.2, 3: 0.3}, [0.5, 0.2 * 2**0.5, 0.2 * 2, 0.2 * 2, 0.3, 0.3]),
        # or one that the user decays at every step
        (None, [4, 16], {n: 0.9 * DECAYED[n] for n in range(6)}, DECAYED),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rates_grow_with_the_batch(scheduler, at, hand, wanted, as_tensor):
    engine = engine_of(scheduler, lr=torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5)
    ramp, rates = ds_kfac.BatchRamp(engine, largest=16, at=at), []
    for step in range(len(wanted)):
        rates.append(stepped(engine, **({"metrics": 1.0} if scheduler is plateau else {})))
        if step in hand:
            set_rate(engine, hand[step])
    close(rates, wanted, sums=STEPS_OF_RATES)
    assert (ramp.batch == 16) == (at != [1000])


def saved_ramp():
    """An engine after four steps, and the state of its ramp."""
    engine = engine_of(exponential)
    ramp = ds_kfac.BatchRamp(engine, largest=16, at=[4, 16])
    for _ in range(4):
        stepped(engine)
    return engine, ramp, copy.deepcopy(ramp.state_dict())


@pytest.mark.ranks(1)
def test_states_load_from_and_into_engines_without_a_ramp():
    engine, _, state = saved_ramp()
    plain = engine_of(exponential)
    plain.lr_scheduler.load_state_dict(state)
    assert plain.lr_scheduler.last_epoch == engine.global_samples / 4
    before, late = engine_of(exponential), engine_of(exponential)
    for _ in range(10):
        stepped(before)
    ds_kfac.BatchRamp(late, largest=16, at=[1000]).load_state_dict(before.lr_scheduler.state_dict())
    late.optimizer.load_state_dict(before.optimizer.state_dict())
    late.global_samples = before.global_samples
    close(stepped(late), 0.5 * 0.9**11, sums=STEPS_OF_RATES)
    # a rate that was set by hand is saved
    engine, other = engine_of(), engine_of()
    ramp, loaded = (ds_kfac.BatchRamp(each, largest=16, at=[4, 1000]) for each in (engine, other))
    stepped(engine), stepped(engine)
    set_rate(engine, 0.2)  # with twice the first batch
    loaded.load_state_dict(copy.deepcopy(ramp.state_dict()))
    close([stepped(other), stepped(other)], [0.2, 0.2], sums=STEPS_OF_RATES)


@pytest.mark.ranks(1)
def test_a_state_of_another_first_batch_loads_unless_its_batch_cannot_be_had():
    engine, ramp, state = saved_ramp()
    other, odd = engine_of(exponential, accumulation=2), engine_of(exponential, micro=12)
    loaded = ds_kfac.BatchRamp(other, largest=16, at=[1000])
    other.micro_steps = 3  # in the middle of a step
    loaded.load_state_dict(copy.deepcopy(state))
    assert (loaded.first, loaded.batch, other.micro_steps) == (4, ramp.batch, engine.micro_steps)
    close(stepped(other), stepped(engine), sums=STEPS_OF_RATES)
    with pytest.raises(ValueError, match="batch is 16 samples, which is not a multiple of 12"):
        ds_kfac.BatchRamp(odd, largest=24, at=[1000]).load_state_dict(state)
    assert odd.lr_scheduler.last_epoch == 0 and odd.train_batch_size() == 12
