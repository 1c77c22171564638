"""Experts stacked in one parameter are stepped as the same experts in modules of their own, in
every engine mode; and so is a head that is cut into parts."""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.config import keys as kfac_config
from ds_kfac.model import blocks
from tests.deepspeed.expert_stacks import (
    BIASED,
    CLASSES,
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
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, patched, weights
from tests.ranks import of_ranks
from tests.spread import FACTOR, FLOOR, Variation, difference, within

pytestmark = pytest.mark.ranks
ROWS, STEPS = 48, 4
SIZE = 0.1
"""Of steps: with those of other tests a batch is soon fitted, and its gradient is what rounding
leaves of it."""
MODES = {
    "z0": Upright,
    "z1": Lying,
    "z2": Grouped,
    "z3": Picked,
    "z3-zero_init": Upright,
    "z2-bf16": Upright,
    "adam-z0": Dispatched,
    "adam-z1": Lying,
    "adam-z2-round_robin": Grouped,
    "adam-z3-offload": Picked,
    "adam-z3-bf16-accum32": Upright,
}
ACCUMULATED = {"z2", "adam-z3-bf16-accum32"}
"""In two micro-batches."""
RESUMES = ("z2", "adam-z1", "adam-z3-offload")
ALONE = ("z2", "adam-z0")
"""On one rank, where no stage cuts a stack."""


def trained(
    mode: Mode,
    kind: type,
    *,
    bias: bool,
    share: bool = False,
    order: int | None = None,
    results: torch.dtype | None = None,
    resumes: bool = False,
):
    """The engine, its weights before and after some steps.

    Args:
        share: whether layers share the A of their inputs.
        order: seed of a permutation of every batch's rows.
        results: dtype in which a step's results travel; None: as the plan says.
        resumes: whether half of the steps are another engine's, from a checkpoint.
    """
    block = mode.kfac_block
    if results is not None:
        block["plan"] = {"gradient_dtypes": lambda _, stored: (stored, results)}
    block["adam"] |= {"blocks": {r"into\.\d+": 2}} if kind is Apart else {}
    mode = replace(mode, size=SIZE)
    parts = 1 + (mode.name in ACCUMULATED)
    share = share or mode.adam  # small as they are, each expert has its own A then

    def make_engine(seed: int):
        model = make(kind, bias=bias, seed=seed)
        with patch.object(kfac_config, "SHARES", share):
            return build(mode, parts, model=model, kfac=block, train_micro_batch_size_per_gpu=ROWS)

    engine, generator = make_engine(0), torch.Generator().manual_seed(7 + dist.get_rank())
    initial = weights(engine)
    with patched(mode):
        for number in range(STEPS * parts):
            if resumes and number == STEPS // 2 * parts:
                folder, saved = shared_folder(), engine
                saved.save_checkpoint(folder)
                engine = make_engine(1)
                engine.load_checkpoint(folder)
            x, y = Variation(order=order).rows(*batch(ROWS, generator))
            engine.backward(engine(x.to(engine.get_data_types()[0]), y))
            engine.step()
    return engine, initial, weights(engine)


def spread_of(mode: Mode, **options) -> tuple[dict, float]:
    """Weights of an engine, and how far others are that differ by rounding: in two orders of rows,
    as one of five was twenty times as close as the others. Which results travel, in 16 bits,
    depends on how parameters are cut: all of them or none bound that."""
    variations = [{}, {"order": 1}, {"order": 2}]
    variations += [{"results": torch.float32}] * (mode.dtype != "fp32")
    finals = []
    for variation in variations:
        engine, initial, final = trained(mode, Apart, **{**options, **variation})
        finals.append(final)
        engine.destroy()
    return finals[0], max(difference(other, finals[0], initial) for other in finals[1:])


@cache
def spread_of_experts(name: str, bias: bool) -> tuple[dict, float]:
    return spread_of(BY_NAME[name], bias=bias)


STACKED = [(name, world) for world in (1, 2) for name in (MODES if world == 2 else ALONE)]


@pytest.mark.parametrize(("name", "world"), STACKED)
def test_stacked_experts_step_as_experts_apart(name, world):
    mode, kind = BY_NAME[name], MODES[name]
    bias = kind in BIASED
    plain, spread = spread_of_experts(name, bias)
    engine, initial, actual = trained(mode, kind, bias=bias, resumes=name in RESUMES)
    kfac = engine.kfac.preconditioner
    shared = [layer.name for layer in kfac.layers if layer.product and layer.shares]
    assert not shared, "an A for each expert, as modules have"
    assert not kfac.proving.unfit and kfac.steps == STEPS
    off = difference(actual, as_stacks(plain, kind), initial)
    assert not within(name, off, FACTOR * spread + FLOOR)


CUT = ("adam-z0", "adam-z2-round_robin", "adam-z3-offload", "adam-z2-bf16")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CUT)
def test_a_head_in_parts_steps_as_a_whole_one(name):
    """The head, [5, 12] with a bias, is the only layer that keeps Adam's direction. Without G, as
    by default: then its rows are stepped one by one. In 16 bits the results of parts travel, and
    are rounded, where those of a whole head need not."""
    mode = BY_NAME[name]
    factor = {**mode.kfac_block["factor"], "fisher": "activations_only"}
    mode = replace(mode, kfac={**mode.kfac, "factor": factor}, orthogonal=True)
    options = {"bias": True, "share": True, "results": torch.float32}
    whole, spread = spread_of(mode, **options)
    with patch.multiple(blocks, LARGEST=60, PART=13):
        engine, initial, actual = trained(mode, Apart, **options)
    kfac = engine.kfac.preconditioner
    parts = [layer.name for layer in kfac.layers if "head" in layer.name]
    assert parts == [f"head.{index}" for index in range(CLASSES)] and not kfac.proving.unfit
    workers = kfac.plan.assignment.workers
    assert {rank for part in parts for rank in workers[part]} == {0, 1}
    assert of_ranks(parts) == [parts, parts]
    assert not within(name, difference(actual, whole, initial), FACTOR * spread + FLOOR)


class Avoids(nn.Module):
    """Routes no row to one expert."""

    def __init__(self, dead: int | None) -> None:
        super().__init__()
        self.weight, self.dead = nn.Parameter(torch.eye(EXPERTS, WIDTH)), dead

    def forward(self, h):
        weight = nn.functional.linear(h.float(), self.weight.float()).softmax(-1)
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


@pytest.mark.parametrize("world", [1, 2])
def test_an_expert_without_tokens_takes_no_basis_from_others_nor_makes_them_refresh(world):
    _, usual, _ = trained_without(None)
    for dead in range(EXPERTS):
        names, refreshed, shared = trained_without(dead)
        without = set().union(*of_ranks(names))
        assert without == {f"experts.{stack}.{dead}" for stack in ("gate_up_proj", "down_proj")}
        assert shared, "no A is shared, so nothing is tested"
        for keys, others in zip(refreshed, usual, strict=True):
            assert keys <= others and shared & keys == shared & others, (dead, keys, others)
