"""An expert without tokens takes no curvature from those that share its A, nor makes that one
refresh more often."""

import pytest
import torch
from torch import nn

from tests.deepspeed.expert_stacks import EXPERTS, WIDTH, Upright, make
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS, REFRESH, ROWS = 9, 4, 48


class Avoids(nn.Module):
    """Routes no row to one expert."""

    def __init__(self, dead: int | None) -> None:
        super().__init__()
        self.weight, self.dead = nn.Parameter(torch.eye(EXPERTS, WIDTH)), dead

    def forward(self, h):
        weight = nn.functional.linear(h.float(), self.weight.float()).softmax(-1)
        return (weight * (torch.arange(EXPERTS) != self.dead)).topk(2)


def worker(mode: str) -> dict:
    """Dead expert -> layers without a basis, and on this rank step -> refreshed factors."""
    found = {}
    block = {
        **BY_NAME[mode].kfac_block,
        "eigenbasis": {"refresh_interval": REFRESH},
        "burn_in": {"steps": 0},
    }
    for dead in (None, *range(EXPERTS)):
        model = make(Upright)
        model.router = Avoids(dead)
        engine = build(
            BY_NAME[mode], 1, model=model, kfac=block, train_micro_batch_size_per_gpu=ROWS
        )
        curvature, refreshed = engine.kfac.preconditioner.curvature, {}
        shared = {spec.key for spec in curvature.specs.values() if len(spec.layers) == EXPERTS}
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x, y = (
                torch.randn(ROWS, WIDTH, generator=generator),
                torch.randint(5, (ROWS,), generator=generator),
            )
            engine.backward(engine(x, y))
            engine.step()
            refreshed[step] = {key for key, last in curvature.log.fresh.items() if last == step}
        bases = {name for name, state in engine.kfac.preconditioner.state.items() if state.basis}
        found[dead] = set(engine.kfac.preconditioner.state) - bases, refreshed, shared
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_an_expert_without_tokens_takes_no_basis_from_others_nor_makes_them_refresh(world):
    ranks = run_ranks("tests.deepspeed.test_dead_experts:worker", world=world, payload="z2")
    for dead in range(EXPERTS):
        without = set().union(*(found[dead][0] for found in ranks))
        assert len(without) == 2 and all(
            f"[{dead}]" in name or f".{dead}" in name for name in without
        ), without
        for found in ranks:
            _, refreshed, shared = found[dead]
            assert shared, "no A is shared, so nothing is tested"
            for step, keys in refreshed.items():
                assert keys <= found[None][1][step], (
                    dead,
                    step,
                    "refreshes that the others have not made",
                )
                assert shared & keys == shared & found[None][1][step], (dead, step)
