"""A layer that some ranks use and others do not: its factors find the ranks that have rows, whoever
averages them."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.close import near
from tests.covering import some
from tests.deepspeed.modes import KFAC, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, train
from tests.models import FEATURES, Net, make_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS, DECAY, EXTRA = 10, 0.9, ("extra/A", "extra/G")


class Partly(Net):
    """``extra`` sees the inputs themselves, where ``used`` says so; else none of them, as an expert
    without tokens: ZeRO needs a gradient of every layer on every rank."""

    used = True

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, FEATURES)

    def forward(self, x, y=None):
        out = self.extra(x if self.used else x[:0])
        return super().forward(x + (out if self.used else out.sum()), y)


def mode(stage: int, interval: int = 1, **options) -> Mode:
    factor = {**KFAC["factor"], "rows": 3, "update_interval": interval}
    return Mode(
        "partly",
        stage,
        kfac={"factor": factor, "eigenbasis": {"refresh_interval": 2 * interval}, **options},
    )


CASES = {  # mode, and who uses the layer: (step, the rank after its eigen worker, rank) -> bool
    "another rank": (mode(2), lambda step, other, rank: rank == other),
    "another rank, stage 0": (mode(0), lambda step, other, rank: rank == other),
    "bases travel": (
        mode(0, assignment={"gradient_worker_fraction": 1.0}),
        lambda step, other, rank: rank == other,
    ),
    "nobody, at odd steps": (mode(3), lambda step, other, rank: step % 2 == 0),
}


def worker(names) -> dict:
    rank, found = dist.get_rank(), {}
    for name in names:
        engine = build(CASES[name][0], 1, model=Partly())
        kfac, counts = engine.kfac.preconditioner, []
        owner = kfac.plan.assignment.eigen_workers["extra/A"]
        other, updates = (owner + 1) % dist.get_world_size(), []
        for step in range(STEPS):
            engine.module.used = CASES[name][1](step, other, rank)
            train(engine, 1, steps=1, first=step)
            factor = kfac.curvature.factors.get("extra/A")
            updates.append(None if factor is None else float(factor.updates))
            counts.append([kfac.plan.contributors.counts.get(key) for key in EXTRA])
        A = kfac.curvature.factors.get("extra/A")
        found[name] = {
            "A": None if A is None else A.side.blocks(A.packed_P)[0][0],
            "other": other,
            "updates": updates,
            "counts": counts,
            "summary": kfac.metrics.values(),
        }
        engine.destroy()
    return found


def expected_A(world: int, other: int, steps: list[int]) -> torch.Tensor:
    """Of the rows of one rank, averaged as docs/explanation/formulas.md says."""
    A, share = (
        torch.zeros(FEATURES + 1, FEATURES + 1),
        slice(other * MICRO_ROWS, (other + 1) * MICRO_ROWS),
    )
    for n, step in enumerate(steps, 1):
        x = make_batch(step, world * MICRO_ROWS)[0][share].flatten(0, 1)
        x, keep = torch.cat([x, torch.ones(len(x), 1)], dim=1), min(1 - 1 / n, DECAY)
        A = keep * A + (1 - keep) * x.T @ x / len(x)
    return A


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_that_another_rank_uses_is_captured_there(world):
    names = some([name for name in CASES if "another" in name or "travel" in name], world)
    for name, *results in zip(
        names, *([of[n] for n in names] for of in _run(world, names)), strict=True
    ):
        (own,) = [result for result in results if result["A"] is not None]
        before = [0.0, *own["updates"][:-1]]
        steps = [step for step in range(STEPS) if own["updates"][step] > before[step]]
        assert steps[0] == 0 and steps[-5:] == list(range(STEPS - 5, STEPS)), (name, steps)
        assert len(steps) < STEPS, "the eigen worker alone was to contribute, so nothing was tested"
        near(own["A"], expected_A(world, own["other"], steps), 1e-5, "fp32 sums", what=name)
        for result in results:
            assert result["counts"] == results[0]["counts"], "ranks plan alike"
            assert result["counts"][0] == [1, 1] and result["counts"][-1] == [None, None], (
                name,
                result["counts"],
            )
            assert (
                result["summary"]["missed_updates"]
                == 2 * (STEPS - len(steps))
                == result["summary"]["empty_updates"]
            )


def test_a_layer_that_nobody_uses_in_a_step_costs_no_rank_more():
    for result in (of["nobody, at odd steps"] for of in _run(2, ["nobody, at odd steps"])):
        assert result["counts"] == [[1, 1]] * STEPS
        assert result["summary"]["missed_updates"] == STEPS


def _run(world: int, names) -> list[dict]:
    return run_ranks("tests.deepspeed.test_partly_used:worker", world=world, payload=names)


def saving_worker(_) -> dict:
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    engine = build(mode(2, interval=2, burn_in={"steps": 0}), 1, model=Partly())
    kfac = engine.kfac.preconditioner
    other = (kfac.plan.assignment.eigen_workers["extra/A"] + 1) % 2
    for step in range(3):
        engine.module.used = dist.get_rank() == other
        train(engine, 1, steps=1, first=step)
    before = kfac.plan.contributors.counts.get("extra/A")
    engine.save_checkpoint(directory[0], tag="t")
    resumed = build(mode(2, interval=2, burn_in={"steps": 0}), 1, model=Partly())
    resumed.load_checkpoint(directory[0], tag="t")
    known, after = (
        resumed.kfac.preconditioner.observations,
        resumed.kfac.preconditioner.plan.contributors.counts,
    )
    return {"before": before, "after": after.get("extra/A"), "same": known == kfac.observations}


def test_a_save_knows_who_contributes_though_the_next_update_has_not_come():
    for result in run_ranks("tests.deepspeed.test_partly_used:saving_worker", world=2):
        assert result == {"before": 1, "after": None, "same": True}
