"""Programs that use an engine in unusual ways, which DeepSpeed alone survives: K-FAC does, too.
Others are in tests/deepspeed: test_calls.py, test_interruptions.py, test_unused.py."""

import io

import pytest
import torch
import torch.distributed as dist

from tests.campaign.engines import engine_of, is_finite, mode_of, state_is_finite
from tests.close import exact
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import micro_batches, weights

STEPS = 8
OPTIMIZERS = {0: "AdamW", 2: "KFACAdamW", 3: "KFACAdamW"}
"""Stage -> the optimizer that a program runs with there."""


def saved_between_micro_batches(engine, x, y):
    engine.backward(engine(x, y))
    engine.step()
    engine.save_checkpoint(shared_folder(), tag="tag")
    return engine(x, y)


def state_saved_and_loaded(engine, x, y):
    file = io.BytesIO()
    torch.save(engine.module.state_dict(), file)
    file.seek(0)
    engine.module.load_state_dict(torch.load(file))
    return engine(x, y)


def odd_lengths(engine, x, y):
    step = engine.global_steps
    rows, length = 1 + step % 4, 1 + (step + dist.get_rank()) % 3
    return engine(x[:rows, :length], y[:rows, :length])


def past_the_engine(engine, x, y):
    return engine.module(x, y)


def twice(engine, x, y):
    engine.backward(engine(x, y))
    engine.step()
    return engine(x, y)


PROGRAMS = {
    # what is done in a step -> the steps that it equals to the bit, its accumulation, its stages
    saved_between_micro_batches: (twice, 2, (0, 2, 3)),
    state_saved_and_loaded: (lambda engine, x, y: engine(x, y), 1, (0, 2)),
    odd_lengths: (None, 1, (0, 2, 3)),
    past_the_engine: (None, 1, (0, 2)),
}
CASES = [(program, stage) for program, (*_, stages) in PROGRAMS.items() for stage in stages]


def trained(program, stage: int, accumulation: int, *, plain: bool = False):
    torch.manual_seed(0)
    mode = mode_of(stage, OPTIMIZERS[stage])
    engine = engine_of(mode, plain=plain, accumulation=accumulation)
    for step in range(STEPS):
        ((x, y),) = micro_batches(step, 1)
        engine.backward(program(engine, x, y))
        engine.step()
    return engine


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("program", "stage"), CASES)
def test_a_program_that_deepspeed_alone_survives_trains_with_kfac(program, stage):
    usual, accumulation, _ = PROGRAMS[program]
    alone = trained(program, stage, accumulation, plain=True)
    assert is_finite(weights(alone)), "DeepSpeed alone does not survive it"
    engine = trained(program, stage, accumulation)
    found = weights(engine)
    assert is_finite(found) and state_is_finite(engine) and engine.global_steps == STEPS
    if usual:
        exact(found, weights(trained(usual, stage, accumulation)))
