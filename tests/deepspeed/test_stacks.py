"""Experts stacked in one parameter are stepped as the same experts in modules of their own, in
every engine mode."""

from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.config import keys as kfac_config
from tests.deepspeed.expert_stacks import (
    BIASED,
    EXPERTS,
    WIDTH,
    Apart,
    Dispatched,
    Grouped,
    Lying,
    Picked,
    Upright,
    as_stacks,
    batch,
    make,
)
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.parallel import Parallelism, assert_trained_alike, shared_folder
from tests.deepspeed.runs import build, patched
from tests.ranks import of_ranks

pytestmark = pytest.mark.ranks
ROWS, STEPS, PARTS = 48, 4, 2
"""Of a micro-batch; of a run; micro-batches of a step."""
SIZE = 0.1
"""Of steps: with those of other tests a batch is soon fitted, and its gradient is what rounding
leaves of it."""
MODES = {
    "z0": Upright,
    "z2": Grouped,
    "z3-zero_init": Upright,
    "z2-bf16": Upright,
    "adam-z0": Dispatched,
    "adam-z1": Lying,
    "adam-z3-offload": Picked,
    "adam-z3-bf16-accum32": Upright,
}


@cache
def whole_rows(world: int):
    """The mean over the batch of all ranks and micro-batches."""

    def losses(model, kfac, step, variation):
        x, y = variation.rows(*rows_of(step, world * PARTS))
        kfac.batch = x.to(next(model.parameters()).dtype), y
        yield model(*kfac.batch)

    return losses


def rows_of(step: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(parts * ROWS, torch.Generator().manual_seed(7 + step))


@dataclass(frozen=True)
class Stacks(Parallelism):
    """Experts of a kind, all of them on every rank. Half of the steps are another engine's, from a
    checkpoint."""

    kind: type

    @property
    def whole(self):
        return partial(make, Apart, bias=self.kind in BIASED)

    def make(self, mode: Mode):
        saved, resumed, folder = self.started(mode), self.started(mode, seed=1), shared_folder()
        self.train(saved, STEPS // 2)
        saved.save_checkpoint(folder)
        resumed.load_checkpoint(folder)
        return resumed

    def started(self, mode: Mode, seed: int = 0):
        model, mode = make(self.kind, bias=self.kind in BIASED, seed=seed), replace(mode, maps={})
        # small as they are, each expert has its own A if they may share
        with patch.object(kfac_config, "SHARES", mode.adam):
            return build(mode, PARTS, model=model, train_micro_batch_size_per_gpu=ROWS)

    def train(self, engine, steps: int = STEPS) -> None:
        """Up to so many steps."""
        world, rank = dist.get_world_size(), dist.get_rank()
        for step in range(engine.global_steps, steps):
            parts = [t.split(ROWS) for t in rows_of(step, world * PARTS)]
            for number in range(rank * PARTS, (rank + 1) * PARTS):
                x, y = (part[number] for part in parts)
                engine.backward(engine(x.to(engine.get_data_types()[0]), y))
                engine.step()

    def losses(self, mode: Mode):
        return whole_rows(dist.get_world_size())

    def part(self, values):
        return as_stacks(values, self.kind)

    def check(self, engine, mode: Mode) -> None:
        kfac = engine.kfac.preconditioner
        shared = [layer.name for layer in kfac.layers if layer.product and layer.shares]
        assert not shared, "an A for each expert, as modules have"
        assert not kfac.proving.unfit and kfac.steps == STEPS


# on one rank no stage cuts a stack
@pytest.mark.parametrize(("name", "world"), [("z2", 1), *((name, 2) for name in MODES)])
def test_stacked_experts_step_as_experts_apart(name, world):
    maps = {r"experts\.into\.\d+": 2} if "adam" in name else {}
    mode = replace(BY_NAME[name], size=SIZE, maps=maps)
    with patched(mode):
        assert_trained_alike(Stacks(MODES[name]), mode)


class Avoids(nn.Module):
    """Routes no row to one expert."""

    def __init__(self, dead: int | None) -> None:
        super().__init__()
        self.weight, self.dead = nn.Parameter(torch.eye(EXPERTS, WIDTH)), dead

    def forward(self, h):
        weight = nn.functional.linear(h, self.weight).softmax(-1)
        return (weight * (torch.arange(EXPERTS) != self.dead)).topk(2)


def trained_without(dead: int | None) -> tuple[set[str], list[set[str]], set[str]]:
    """Layers without a basis; on this rank, factors that each step refreshed; and those that all
    experts share."""
    kfac = merged(KFAC, {"eigenbasis": {"refresh_interval": 4}, "burn_in": {"steps": 0}})
    model = make(Upright)
    model.router = Avoids(dead)
    engine = build(BY_NAME["z2"], model=model, kfac=kfac, train_micro_batch_size_per_gpu=ROWS)
    curvature, refreshed = engine.kfac.preconditioner.curvature, []
    for step in range(9):
        engine.backward(engine(*batch(ROWS, torch.Generator().manual_seed(step))))
        engine.step()
        refreshed.append({key for key, last in curvature.log.fresh.items() if last == step})
    states = engine.kfac.preconditioner.state
    shared = {spec.key for spec in curvature.specs.values() if len(spec.layers) == EXPERTS}
    return {name for name, state in states.items() if not state.basis}, refreshed, shared


@pytest.mark.parametrize("world", [2])
def test_an_expert_without_tokens_takes_no_basis_from_others_nor_makes_them_refresh(world):
    _, usual, _ = trained_without(None)
    for dead in (0, 1):  # the first has the name of the A of all
        names, refreshed, shared = trained_without(dead)
        without = set().union(*of_ranks(names))
        assert without == {f"experts.{stack}.{dead}" for stack in ("gate_up_proj", "down_proj")}
        assert shared, "no A is shared, so nothing is tested"
        for keys, others in zip(refreshed, usual, strict=True):
            assert keys <= others and shared & keys == shared & others, (dead, keys, others)
