"""Many engines in one process, one engine for long, and more ranks than cores."""

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.campaign.engines import anywhere, engine_of, is_finite, mode_of, state_is_finite, weights
from tests.campaign.harness import ROOM, SILENT, SURVIVED, Case, NothingTried, Outcome
from tests.deepspeed.runs import held, train
from tests.models import TwinNet, make_net, make_tokens

ENGINES, SOAK = 20, 2000
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
    here = "tests.campaign.lifetime"
    only = {"accepts": (SURVIVED,)}
    return [
        Case(
            "lifetime", f"{ENGINES} engines in one process", f"{here}:engines", seconds=120, **only
        ),
        Case(
            "lifetime",
            f"soak, {SOAK} steps with norms, adaptive intervals and saves",
            f"{here}:soak",
            SOAK,
            seconds=300,
            **only,
        ),
        *(
            Case(
                "lifetime",
                f"8 ranks, {name}",
                f"{here}:wide",
                payload,
                world=8,
                seconds=120,
                **only,
            )
            for name, payload in {
                "z2, KFACAdamW": (2, "KFACAdamW"),
                "z3, KFACAdamW": (3, "KFACAdamW"),
                "z0, K-FAC into AdamW": (0, "AdamW"),
            }.items()
        ),
    ]


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def engines(_) -> Outcome:
    """Of three stages in turn; every one is used, then destroyed.

    Tensors are counted but for stage 3, where DeepSpeed alone keeps about 30 of every engine.
    """
    found, kept = [], []
    for number in range(ENGINES):
        before, model = tensors_alive(), make_net()
        mode = mode_of((0, 2, 3)[number % 3], "KFACAdamW")
        engine = engine_of(
            mode, "KFACAdamW", model=model, kfac={"eigenbasis": {"refresh_interval": 2}}
        )
        train(engine, 1, steps=3)
        engine.destroy()
        del engine
        found.append(held(model))
        del model
        if number >= 3 and number % 3 != 2:
            kept.append(tensors_alive() - before)
    # three first ones: what DeepSpeed makes once for a stage
    grown = {
        key: (found[3][key], row[key])
        for row in found[3:]
        for key in row
        if row[key] > found[3][key]
    }
    if grown := anywhere([str(grown)] if grown else []):
        return SILENT, f"grows: {grown[0]}"
    if more := anywhere([str(kept)] if max(kept) > 0 else []):
        return SILENT, f"tensors kept of each: {more[0]}"
    return SURVIVED, f"after each {found[-1]}"


def soak(steps: int) -> Outcome:
    torch.manual_seed(0)
    engine = engine_of(
        mode_of(2, "KFACAdamW"), "KFACAdamW", model=TwinNet(), accumulation=2, kfac=SOAKED
    )
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
            samples.append(
                held(engine.module) | {"tensors": tensors_alive(), "resident": resident()}
            )
    numbers = engine.kfac.counters()
    never = anywhere([name for name in HAPPENED if not numbers[name]])
    if never or numbers["steps"] != steps:
        raise NothingTried(
            f"{numbers['steps']:.0f} of {steps} steps; counters that are zero: {never}"
        )
    finite = state_is_finite(engine) and is_finite(weights(engine))
    grown = growth(samples)
    engine.destroy()
    with contextlib.suppress(FileNotFoundError):
        import shutil

        dist.barrier()
        shutil.rmtree(place[0], ignore_errors=True)
    megabytes = grown.pop("resident") / 2**20
    note = f"{megabytes:+.1f} MiB; loss {losses[0]:.2f} to {losses[-1]:.3f}"
    more = {key: value for key, value in grown.items() if value > 0}
    if problems := anywhere(
        [f"{note}; grows: {more}"] if more or megabytes > GROWTH or not finite else []
    ):
        return SILENT, problems[0]
    return SURVIVED, note


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Least of the later half minus most of the earlier: adaptive intervals let counts vary from
    step to step."""
    early, late = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    return {
        key: min(row[key] for row in late) - max(row[key] for row in early) for key in samples[0]
    }


def wide(payload: tuple[int, str]) -> Outcome:
    """Equal, finite weights on all ranks after some steps."""
    stage, optimizer = payload
    engine = engine_of(mode_of(stage, optimizer), optimizer)
    losses = train(engine, 1, steps=6)
    own = weights(engine)
    sums = torch.stack([value.double().sum() for value in own.values()])
    everyone = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sums)
    engine.destroy()
    if not all(torch.equal(one, sums) for one in everyone):
        return SILENT, "ranks have different weights"
    if not is_finite(own):
        return SILENT, "weights not finite"
    return SURVIVED, f"loss of rank {dist.get_rank()} {losses[0]:.2f} to {losses[-1]:.2f}"
