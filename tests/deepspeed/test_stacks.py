"""Experts stacked in one parameter are stepped as the same experts in modules of their own, in
every engine mode."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_kfac.config import keys as kfac_config
from tests.close import exact
from tests.deepspeed import expert_stacks
from tests.deepspeed.expert_stacks import (
    BIASED,
    Apart,
    Dispatched,
    Grouped,
    Lying,
    Picked,
    Upright,
    as_stacks,
    make,
)
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, patched, weights
from tests.ranks import run_ranks
from tests.spread import FACTOR, FLOOR, Variation, difference, within

ROWS, STEPS = 48, 4
SIZE = 0.1
"""Of steps: with those of other tests a batch is soon fitted, and its gradient is what rounding
leaves of it."""
MODES = {
    "z0": Upright,
    "z1": Lying,
    "z2": Grouped,
    "z3": Picked,
    "z3-offload": Upright,
    "z3-zero_init": Upright,
    "z2-bf16": Upright,
    "z3-bf16": Upright,
    "z1-bf16-accum32": Upright,
    "adam-z0": Dispatched,
    "adam-z1": Lying,
    "adam-z2": Upright,
    "adam-z2-round_robin": Grouped,
    "adam-z3": Lying,
    "adam-z3-offload": Picked,
    "adam-z2-bf16": Upright,
    "adam-z3-bf16-accum32": Upright,
    "adam-z2-fp16": Upright,
}

ACCUMULATED = {"z2", "adam-z3", "adam-z2-fp16"}
"""In two micro-batches."""
ALONE = ("z1", "z2", "z3-bf16", "adam-z0", "adam-z2-bf16", "adam-z3-offload")
"""On one rank, where no stage cuts a stack: every kind of stack, every rule."""


def trained(
    mode,
    kind,
    *,
    bias: bool,
    share: bool = False,
    order: int | None = None,
    results: torch.dtype | None = None,
):
    """The engine, its weights before and after some steps.

    Args:
        share: whether layers share the A of their inputs.
        order: seed of a permutation of every batch's rows.
        results: dtype in which a step's results travel; None: as the plan says.
    """
    block = mode.kfac_block
    if results is not None:
        block["plan"] = {"gradient_dtypes": lambda _, stored: (stored, results)}
    block["adam"] |= {"blocks": {r"into\.\d+": 2}} if kind is Apart else {}
    mode = replace(mode, size=SIZE)
    parts = 1 + (mode.name in ACCUMULATED)
    share = share or mode.adam  # small as they are, each expert has its own A then
    with patch.object(kfac_config, "SHARES", share):
        engine = build(
            mode,
            parts,
            model=make(kind, bias=bias),
            kfac=block,
            train_micro_batch_size_per_gpu=ROWS,
        )
    dtype = engine.get_data_types()[0]
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    initial = weights(engine)
    with patched(mode):
        for _ in range(STEPS * parts):
            x = torch.randn(ROWS, expert_stacks.WIDTH, generator=generator).to(dtype)
            y = torch.randint(expert_stacks.CLASSES, (ROWS,), generator=generator)
            x, y = Variation(order=order).rows(x, y)
            engine.backward(engine(x, y))
            engine.step()
    return engine, initial, weights(engine)


def variations(mode) -> list[dict]:
    """Engines that differ by rounding: in two orders of rows, as one of five was twenty times as
    close as the others. Which results travel, in 16 bits, depends on how parameters are cut: all of
    them or none bound that."""
    return [{"order": 1}, {"order": 2}] + [{"results": torch.float32}] * (mode.dtype != "fp32")


def worker(names) -> dict:
    """Mode -> (difference from experts apart, what that may be, layers without rows, updates of
    factors)."""
    found, spreads = {}, {}
    for name in names:
        mode, kind = BY_NAME[name], MODES[name]
        bias = kind in BIASED

        def apart(mode=mode, bias=bias, **variation):
            engine, initial, final = trained(mode, Apart, bias=bias, **variation)
            engine.destroy()
            return initial, final

        initial, plain = apart()
        alike = mode.mathematics, bias, mode.dtype != "fp32" and mode.stage  # which results travel
        if alike not in spreads:
            spreads[alike] = max(
                difference(apart(**other)[1], plain, initial) for other in variations(mode)
            )
        engine, initial, actual = trained(mode, kind, bias=bias)
        kfac = engine.kfac.preconditioner
        own = [layer.name for layer in kfac.layers if layer.product and layer.shares]
        assert not own, own  # an A for each expert, as modules have
        found[name] = (
            difference(actual, as_stacks(plain, kind), initial),
            FACTOR * spreads[alike] + FLOOR,
            sorted(kfac.proving.unfit),
            kfac.metrics.counts["factor_updates"],
        )
        engine.destroy()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_stacked_experts_step_as_experts_apart(world):
    found = run_ranks(
        "tests.deepspeed.test_stacks:worker",
        world=world,
        payload=list(ALONE if world == 1 else MODES),
        timeout=600,
    )[0]
    problems = []
    for name, (error, bound, silent, updates) in found.items():
        assert silent == [] and updates == STEPS, name
        problems += within(name, error, bound)
    assert not problems, problems


def test_one_rank_has_every_kind_of_stack_and_every_rule():
    def rules(names):
        return {(mode.adam, mode.dtype) for mode in map(BY_NAME.get, names)}

    assert {MODES[name] for name in ALONE} == set(MODES.values()) and rules(ALONE) | {
        (True, "fp16")
    } == rules(MODES)


def saved_worker(folder: str) -> dict:
    """Mode -> weights after four steps, of which two follow a checkpoint that another engine
    loaded, and without one; layers of which nothing was loaded."""
    found = {}
    for name in ("adam-z2", "adam-z3", "z2"):
        mode, finals = BY_NAME[name], []
        for resumed in (False, True):
            engine = build(mode, 1, model=make(Upright), train_micro_batch_size_per_gpu=ROWS)
            generator = torch.Generator().manual_seed(7 + dist.get_rank())
            for step in range(STEPS):
                x = torch.randn(ROWS, expert_stacks.WIDTH, generator=generator)
                y = torch.randint(expert_stacks.CLASSES, (ROWS,), generator=generator)
                if step == STEPS // 2 and not resumed:
                    engine.save_checkpoint(f"{folder}/{name}", tag="tag")
                if step == STEPS // 2 and resumed:
                    engine.destroy()
                    engine = build(
                        mode, 1, model=make(Upright, seed=1), train_micro_batch_size_per_gpu=ROWS
                    )
                    engine.load_checkpoint(f"{folder}/{name}", tag="tag")
                engine.backward(engine(x, y))
                engine.step()
            finals.append(weights(engine))
            engine.destroy()
        found[name] = finals
    return found


@pytest.mark.distributed
def test_stacks_resume_exactly(tmp_path):
    for found in run_ranks(
        "tests.deepspeed.test_stacks:saved_worker", world=2, payload=str(tmp_path)
    ):
        for name, (straight, resumed) in found.items():
            exact(resumed, straight, what=name)
