"""One engine for long: nothing grows, and all stays finite."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.campaign.engines import anywhere, engine_of, is_finite, mode_of, state_is_finite
from tests.campaign.harness import ROOM, SILENT, SURVIVED, Case, NothingTried, Outcome
from tests.deepspeed.runs import held, weights
from tests.models import TwinNet, make_tokens

SOAK = 2000
SETTLED = 500
"""Steps of the soak after which nothing may grow any more; all schedules have passed their burn-in
then."""
GROWTH = 8
"""MiB that resident memory may grow by over the rest of the soak: the allocator's, not a leak's. A
single activation kept in every captured step shows in the number of tensors."""
SOAKED = {
    "factor": {"update_interval": 2, "fisher": "empirical"},
    "eigenbasis": {"refresh_interval": 4},
    "layers": {"types": ["Linear", "LayerNorm", "RMSNorm"]},
    "communication": {"dtype": "bf16"},
    "adaptive": 0.1,
    "burn_in": {"steps": 20},
}
"""Norms, the empirical Fisher, adaptive intervals, a burn-in, and 16 bits on the wire."""
HAPPENED = ("refreshes", "captures", "captures_skipped", "sent_bytes_factors")
"""Counters that may not be zero after the soak."""


def cases() -> list[Case]:
    name = f"soak, {SOAK} steps with norms, adaptive intervals and saves"
    only = {"seconds": 300, "accepts": (SURVIVED,)}
    return [Case("lifetime", name, "tests.campaign.lifetime:soak", SOAK, **only)]


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(steps: int) -> Outcome:
    torch.manual_seed(0)
    mode, own = mode_of(2, "KFACAdamW"), {"accumulation": 2, "kfac": SOAKED}
    engine = engine_of(mode, "KFACAdamW", model=TwinNet(), **own)
    world, rank = dist.get_world_size(), dist.get_rank()
    losses, samples, rows = [], [], 2
    place = [tempfile.mkdtemp(prefix="campaign-soak", dir=ROOM) if rank == 0 else ""]
    dist.broadcast_object_list(place)
    for step in range(steps):
        total = 0.0
        tokens, _ = make_tokens(step, world * rows * 2, 6)
        share = tokens[rank * rows * 2 : (rank + 1) * rows * 2].split(rows)
        for part in share:
            loss = engine(part, part)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 2
        losses.append(total)
        if (step + 1) % 250 == 0:
            engine.save_checkpoint(place[0], tag="tag")
        if (step + 1) % 100 == 0 and step + 1 >= min(SETTLED, steps // 2):
            alive = {"tensors": tensors_alive(), "resident": resident()}
            samples.append(held(engine.module) | alive)
    numbers = engine.kfac.counters()
    never = anywhere([name for name in HAPPENED if not numbers[name]])
    if never or numbers["steps"] != steps:
        made = f"{numbers['steps']:.0f} of {steps} steps"
        raise NothingTried(f"{made}; counters that are zero: {never}")
    finite = state_is_finite(engine) and is_finite(weights(engine))
    grown = growth(samples)
    engine.destroy()
    dist.barrier()
    shutil.rmtree(place[0], ignore_errors=True)
    megabytes = grown.pop("resident") / 2**20
    note = f"{megabytes:+.1f} MiB; loss {losses[0]:.2f} to {losses[-1]:.3f}"
    more = {key: value for key, value in grown.items() if value > 0}
    bad = more or megabytes > GROWTH or not finite
    problems = anywhere([f"{note}; grows: {more}"] if bad else [])
    return (SILENT, problems[0]) if problems else (SURVIVED, note)


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Least of the later half minus most of the earlier: adaptive intervals let counts vary from
    step to step."""
    early, late = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    least = {key: min(row[key] for row in late) for key in samples[0]}
    return {key: value - max(row[key] for row in early) for key, value in least.items()}
