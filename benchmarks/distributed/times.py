"""Seconds of every step of whole refresh intervals, engines in turn, so that noise hits all of
them.

The refresh interval is short, so that there are several to take the fastest of: a step in which
something is refreshed is the same with a longer one, and the median step is one in which nothing
is.
"""

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.distributed.bytes import build, difference, snapshot, train_step
from benchmarks.distributed.cases import Case
from examples.gpt import GPTConfig

REFRESH = 20
SETTLE = 10
"""Steps before the first that is timed; among them the first refresh, which is of everything at
once."""


def time_modes(strategy: str, world: int) -> dict[str, Case]:
    """Same work on average: every factor captured every UPDATE steps and refreshed every REFRESH.
    In one run."""
    case = Case(strategy, world).with_options(eigenbasis={"refresh_interval": REFRESH})
    return {
        "no K-FAC": Case(None, world),
        "all at once": case,
        "staggered": replace(case, staggers=True),
    }


def measure_times(
    cases: list[Case], model: GPTConfig, rows: int, intervals: int
) -> list[dict[str, Any]]:
    """Of each case, this rank's row: wall clock and processor seconds of each timed step, seconds
    per K-FAC stage, traffic over all timed steps, most collectives in one of them, refreshes. Runs
    on every rank."""
    engines = [build(case, model, rows) for case in cases]
    for engine in engines:
        if hasattr(engine, "kfac"):
            engine.kfac.metrics.timings = True
    results: list[dict[str, Any]] = [defaultdict(list) for _ in cases]
    starts: list[Any] = [None for _ in cases]
    for step in range(SETTLE + intervals * REFRESH):
        for index, engine in enumerate(engines):
            kfac = engine.kfac.preconditioner if hasattr(engine, "kfac") else None
            if step == SETTLE and kfac:
                starts[index] = snapshot(kfac.channel), kfac.metrics.counts["refreshes"]
            stages = dict(kfac.metrics.seconds) if kfac else {}
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
                stages = {
                    name: total - stages.get(name, 0.0)
                    for name, total in kfac.metrics.seconds.items()
                }
                results[index]["stages"].append(stages)
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
    """Mode -> its numbers. A step takes as long as its slowest rank; of the same step of several
    intervals, which does the same work, the fastest counts."""
    found = {}
    for index, name in enumerate(names):
        rows = [results[index] for results in ranks]
        found[name] = {
            kind: _fastest(
                [max(step) for step in zip(*(row[kind] for row in rows), strict=True)], intervals
            )
            for kind in ("wall", "processor")
        }
        if "traffic" in rows[0]:
            steps = len(rows[0]["wall"])
            found[name] |= {
                "payload": [
                    max(sum(row["traffic"][way].values()) / steps for way in ("sent", "received"))
                    for row in rows
                ],
                "calls": max(max(row["calls"]) for row in rows),
                "refreshes": sum(row["refreshes"] for row in rows) / intervals,
                "stages": _stages(rows, found[name]["wall"]),
            }
    return found


def _fastest(seconds: list[float], intervals: int) -> list[float]:
    steps = len(seconds) // intervals
    return [min(seconds[place::steps]) for place in range(steps)]


def _stages(rows: list[dict[str, Any]], wall: list[float]) -> dict[str, list[float]]:
    """Stage -> its seconds in the median and in the worst step, on the rank that spends most."""
    order = sorted(range(len(wall)), key=wall.__getitem__)
    at = order[len(order) // 2], order[-1]
    names = rows[0]["stages"][0]
    return {
        name: [max(row["stages"][step].get(name, 0.0) for row in rows) for step in at]
        for name in names
    }
