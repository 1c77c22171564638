"""Seconds of every step of whole refresh intervals. Engines take turns, so noise hits all of them.

The refresh interval is short, so that there are several to take the fastest of. A step in which
something is refreshed does the same work with a longer interval, and the median step refreshes
nothing.
"""

import time
from collections import defaultdict
from typing import Any

import torch.distributed as dist

from benchmarks.distributed.bytes import build, difference, snapshot, train_step
from benchmarks.distributed.cases import Case
from examples.gpt import GPTConfig

REFRESH = 20
SETTLE = 10
"""Steps before the first that is timed; the first refresh, of everything at once, is among them."""


def measure_times(
    cases: list[Case], model: GPTConfig, rows: int, intervals: int
) -> list[dict[str, Any]]:
    """Return this rank's row of each case; runs on every rank.

    A row has the wall clock and processor seconds of each timed step, the largest number of
    collectives in one, the traffic over all of them, and the number of refreshes.
    """
    engines = [build(case, model, rows) for case in cases]
    results: list[dict[str, Any]] = [defaultdict(list) for _ in cases]
    starts: list[Any] = [None for _ in cases]
    for step in range(SETTLE + intervals * REFRESH):
        for index, engine in enumerate(engines):
            kfac = getattr(getattr(engine, "kfac", None), "preconditioner", None)
            if step == SETTLE and kfac:
                starts[index] = snapshot(kfac.channel), kfac.metrics.counts["refreshes"]
            calls = sum(kfac.channel.calls.values()) if kfac else 0
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            train_step(engine, rows, model.context, step)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            if step < SETTLE:
                continue
            results[index]["wall"].append(wall)
            results[index]["processor"].append(processor)
            if kfac:
                results[index]["calls"].append(sum(kfac.channel.calls.values()) - calls)
    for engine, result, start in zip(engines, results, starts, strict=True):
        if start:
            kfac = engine.kfac.preconditioner
            result["traffic"] = difference(snapshot(kfac.channel), start[0])
            result["refreshes"] = kfac.metrics.counts["refreshes"] - start[1]
            kfac.close()
    return [dict(result) for result in results]


def over_ranks(
    ranks: list[list[dict[str, Any]]], names: list[str], intervals: int
) -> dict[str, dict[str, Any]]:
    """Return mode -> its numbers over all ranks.

    A step takes as long as its slowest rank. The same step of several intervals does the same work,
    so the fastest of them counts.
    """
    found = {}
    for index, name in enumerate(names):
        rows = [results[index] for results in ranks]
        found[name] = {
            clock: _fastest([max(step) for step in zip(*own, strict=True)], intervals)
            for clock in ("wall", "processor")
            for own in [[row[clock] for row in rows]]
        }
        if "traffic" in rows[0]:
            steps = len(rows[0]["wall"])
            found[name]["payload"] = max(
                sum(row["traffic"][way].values()) / steps
                for row in rows
                for way in ("sent", "received")
            )
            found[name]["calls"] = max(max(row["calls"]) for row in rows)
            found[name]["refreshes"] = sum(row["refreshes"] for row in rows) / intervals
    return found


def _fastest(seconds: list[float], intervals: int) -> list[float]:
    steps = len(seconds) // intervals
    return [min(seconds[place::steps]) for place in range(steps)]
