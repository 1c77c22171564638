"""QR steps between exact refreshes: how many there were since the last exact one is state like any other."""

from pathlib import Path

import pytest
import torch

from tests.close import exact
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, patched, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
# Submitted at even steps, in effect one later: exact at 0, QR at 2 and 4, exact at 6, QR at 8.
LAGGING = {**KFAC, "eigenbasis": {"refresh_interval": 2, "lag": 1, "stagger": False}, "plan": {"exact_every": 3}}


def tensors(engine) -> dict[str, torch.Tensor]:
    factors = engine.kfac.preconditioner.curvature.factors
    return {key: state.basis.vectors[0] for key, state in factors.items() if state.basis is not None}


def steps(engine) -> set[int]:
    return {state.qr_steps for state in engine.kfac.preconditioner.curvature.factors.values()}


def resume_worker(folder: str) -> dict:
    results = {}
    for name in ("z0", "z2", "adam-z3"):
        kfac = {**LAGGING, "adam": {"orthogonalize": False}}
        first, second = build(BY_NAME[name], 4, kfac=kfac), build(BY_NAME[name], 4, seed=99, kfac=kfac)
        train(first, 4, steps=5)
        seen, pending = [steps(first)], dict(first.kfac.preconditioner.curvature.pending)
        Path(folder, name).mkdir(exist_ok=True)
        first.save_checkpoint(f"{folder}/{name}", tag="tag")
        second.load_checkpoint(f"{folder}/{name}", tag="tag")
        for step in range(5, 10):
            losses = [train(engine, 4, steps=1, first=step) for engine in (first, second)]
            exact(losses[0], losses[1], what=f"{name} {step}")
            assert steps(first) == steps(second), (name, step)
            seen.append(steps(first))
        bases = zip(tensors(first).values(), tensors(second).values(), strict=True)
        counters = first.kfac.counters()
        counts = {key: counters[key] for key in ("refreshes_qr", "refreshes_eigh")}
        results[name] = {"seen": seen, "pending": pending, "same": all(torch.equal(*pair) for pair in bases), **counts}
        for engine in (first, second):
            engine.destroy()
    return results


def test_resuming_in_the_middle_of_a_cycle_continues_it(tmp_path):
    for results in run_ranks("tests.deepspeed.test_qr_steps:resume_worker", world=2, payload=str(tmp_path)):
        for name, result in results.items():
            assert result["pending"] and set(result["pending"].values()) == {5}, "saved while a step was under way"
            assert result["seen"] == [{1}, {2}, {2}, {0}, {0}, {1}], (name, result)
            assert result["same"] and 3 * result["refreshes_eigh"] == 2 * result["refreshes_qr"] > 0, (name, result)


def overflow_worker(_) -> dict:
    mode = BY_NAME["z2-fp16"]
    engine = build(mode, 4, kfac={**KFAC, "eigenbasis": {"refresh_interval": 1}, "plan": {"exact_every": 3}})
    seen = []
    with patched(mode):
        for step in (0, 1, 2):
            train(engine, 4, steps=1, first=step)
            before = tensors(engine)
            seen.append(steps(engine))
            for x, y in micro_batches(step + 1, 4):  # an infinite loss scale: the step is skipped
                engine.backward(engine(x.half(), y) * float("inf"))
                engine.step()
            assert steps(engine) == seen[-1]
            assert all(torch.equal(now, before[key]) for key, now in tensors(engine).items())
        train(engine, 4, steps=1, first=3)
    return {"seen": [*seen, steps(engine)], "skipped": engine.kfac.counters()["skipped_steps"]}


def test_a_skipped_step_does_not_count():
    for result in run_ranks("tests.deepspeed.test_qr_steps:overflow_worker", world=2):
        assert result == {"seen": [{0}, {1}, {2}, {0}], "skipped": 3}
