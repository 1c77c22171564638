"""A layer that some ranks use and others do not: its factors find the ranks that have rows, whoever
averages them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.close import near
from tests.deepspeed.features import merged
from tests.deepspeed.modes import KFAC, MICRO_ROWS, Mode
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, train
from tests.models import FEATURES, Net, make_batch
from tests.ranks import of_ranks

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


def make_engine(stage: int, interval: int = 1, **blocks):
    """And the rank after the one that decomposes A of ``extra``."""
    intervals = {
        "factor": {"rows": 3, "update_interval": interval},
        "eigenbasis": {"refresh_interval": 2 * interval},
    }
    mode = Mode("partly", stage, kfac=merged(KFAC, intervals, blocks))
    engine = build(mode, model=Partly())
    owner = engine.kfac.preconditioner.plan.assignment.eigen_workers["extra/A"]
    return engine, (owner + 1) % dist.get_world_size()


def counts_of(engine) -> list[int | None]:
    """How many ranks contribute to each factor of ``extra``; None: all."""
    counts = engine.kfac.preconditioner.plan.contributors.counts
    return [counts.get(key) for key in EXTRA]


def expected_A(world: int, other: int, steps: list[int]) -> torch.Tensor:
    """Of the rows of one rank, averaged as docs/explanation/formulas.md says."""
    A = torch.zeros(FEATURES + 1, FEATURES + 1)
    share = slice(other * MICRO_ROWS, (other + 1) * MICRO_ROWS)
    for n, step in enumerate(steps, 1):
        x = make_batch(step, world * MICRO_ROWS)[0][share].flatten(0, 1)
        x, keep = torch.cat([x, torch.ones(len(x), 1)], dim=1), min(1 - 1 / n, DECAY)
        A = keep * A + (1 - keep) * x.T @ x / len(x)
    return A


ALL_WORKERS = {"assignment": {"gradient_worker_fraction": 1.0}}


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "blocks"), [(2, {}), (0, {}), (0, ALL_WORKERS)])
@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_that_another_rank_uses_is_captured_there(stage, blocks, world):
    engine, other = make_engine(stage, **blocks)
    engine.module.used = dist.get_rank() == other
    factors, updates, counts = engine.kfac.preconditioner.curvature.factors, [0.0], []
    for step in range(STEPS):
        train(engine, 1, steps=1, first=step)
        updates.append(float(factors["extra/A"].updates) if "extra/A" in factors else 0.0)
        counts.append(counts_of(engine))
    assert of_ranks(counts) == [counts] * world, "ranks plan alike"
    assert counts[0] == [1, 1] and counts[-1] == [None, None], counts
    steps = [step for step in range(STEPS) if updates[step + 1] > updates[step]]
    if "extra/A" in factors:
        assert steps[0] == 0 and steps[-5:] == list(range(STEPS - 5, STEPS)), steps
        assert len(steps) < STEPS, "the eigen worker alone was to contribute: nothing was tested"
        A = factors["extra/A"].side.blocks(factors["extra/A"].packed_P)[0][0]
        near(A, expected_A(world, other, steps), 1e-5, "fp32 sums")
    taken = max(of_ranks(len(steps)))
    summary = engine.kfac.preconditioner.metrics.values()
    assert summary["missed_updates"] == summary["empty_updates"] == 2 * (STEPS - taken)


@pytest.mark.ranks(2)
def test_a_layer_that_nobody_uses_in_a_step_costs_no_rank_more():
    engine, _ = make_engine(3)
    for step in range(STEPS):
        engine.module.used = step % 2 == 0
        train(engine, 1, steps=1, first=step)
        assert counts_of(engine) == [1, 1]
    assert engine.kfac.preconditioner.metrics.values()["missed_updates"] == STEPS


@pytest.mark.ranks(2)
def test_a_save_knows_who_contributes_though_the_next_update_has_not_come():
    folder, options = shared_folder(), {"interval": 2, "burn_in": {"steps": 0}}
    (engine, other), (resumed, _) = (make_engine(2, **options) for _ in range(2))
    engine.module.used = dist.get_rank() == other
    train(engine, 1, steps=3)
    assert counts_of(engine)[0] == 1
    engine.save_checkpoint(folder, tag="t")
    resumed.load_checkpoint(folder, tag="t")
    assert counts_of(resumed)[0] is None
    known = [x.kfac.preconditioner.observations for x in (engine, resumed)]
    assert known[0] == known[1]
