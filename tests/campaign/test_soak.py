"""One engine for long: nothing grows, and all stays finite."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.campaign.engines import engine_of, is_finite, mode_of, state_is_finite
from tests.deepspeed.runs import held, weights
from tests.models import TwinNet, make_tokens

STEPS, SETTLED, ROWS = 2000, 500, 2
"""Nothing may grow after SETTLED steps: all schedules have passed their burn-in then."""
GROWTH = 8 * 2**20
"""Bytes that resident memory may grow by over the rest: the allocator's, not a leak's. A single
activation kept in every captured step shows in the number of tensors."""
KFAC = {
    "factor": {"update_interval": 2, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 4},
    "layers": {"types": ["Linear", "LayerNorm", "RMSNorm"]},
    "communication": {"dtype": "bf16"},
    "adaptive": 0.1,
    "burn_in": {"steps": 20},
}
HAPPENED = ("refreshes", "captures", "captures_skipped", "sent_bytes_factors")
"""Counters that may not be zero in the end."""


def sizes(engine) -> dict[str, int]:
    gc.collect()
    tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return {**held(engine.module), "tensors": tensors, "resident": resident}


@pytest.mark.ranks(2)
def test_nothing_grows_in_thousands_of_steps_with_adaptive_intervals_and_saves(tmp_path):
    """A growth is the least of the later half of the samples minus the most of the earlier:
    adaptive intervals let counts vary from step to step."""
    engine = engine_of(mode_of(2, "KFACAdamW"), model=TwinNet(), accumulation=2, kfac=KFAC)
    rank, samples = dist.get_rank(), []
    for step in range(1, STEPS + 1):
        tokens, _ = make_tokens(step, dist.get_world_size() * ROWS * 2, 6)
        for part in tokens.split(ROWS)[2 * rank : 2 * rank + 2]:
            engine.backward(engine(part, part))
            engine.step()
        if step % 250 == 0:
            engine.save_checkpoint(str(tmp_path), tag="tag")
        if step % 100 == 0 and step >= SETTLED:
            samples.append(sizes(engine))
    numbers = engine.kfac.counters()
    assert numbers["steps"] == STEPS and all(numbers[name] for name in HAPPENED), numbers
    assert state_is_finite(engine) and is_finite(weights(engine))
    half = len(samples) // 2
    for name in samples[0]:
        least, most = (
            choose(row[name] for row in part)
            for choose, part in ((min, samples[half:]), (max, samples[:half]))
        )
        assert least - most <= (GROWTH if name == "resident" else 0), (name, samples)
