"""Experts stacked in one parameter are stepped as the same experts in modules of their own, in every engine mode."""

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed import expert_stacks
from tests.deepspeed.expert_stacks import BIASED, Apart, Dispatched, Grouped, Lying, Picked, Upright, as_stacks, make
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, patched, weights
from tests.ranks import run_ranks
from tests.spread import FACTOR, FLOOR, Variation, difference, within

ROWS, STEPS = 48, 4
ROUNDED = 2.0**-8
"""Of what moved: a step's results travel in bf16, and which of them stay on their rank depends on the parameters."""
MODES = {
    "z0": Upright, "z1": Lying, "z2": Grouped, "z2-offload": Lying, "z2-overlap-not_contiguous": Upright,
    "z3": Picked, "z3-sub_groups": Lying, "z3-offload": Upright, "z3-zero_init": Upright, "z2-bf16": Upright,
    "z3-bf16": Upright, "z0-bf16-fused": Upright, "z1-bf16-accum32": Upright,
    "adam-z0": Dispatched, "adam-z1": Lying, "adam-z2": Upright, "adam-z2-round_robin": Grouped, "adam-z3": Lying,
    "adam-z3-zero_init": Upright, "adam-z3-offload": Picked, "adam-z2-bf16": Upright, "adam-z3-bf16-accum32": Upright,
    "root-z2": Upright, "root-z3": Lying,
}  # fmt: skip


def trained(mode, kind, *, bias: bool, share: bool = False, order: int | None = None):
    """The engine, its weights before and after some steps; ``order``: seed of a permutation of every batch's rows."""
    block = {**mode.kfac_block, "layers": {"share_inputs": share}}
    if kind is Apart:  # of stacks it is known
        block["adam"] = {**block["adam"], "blocks": {r"into\.\d+": 2}}
    engine = build(mode, 1, model=make(kind, bias=bias), kfac=block, train_micro_batch_size_per_gpu=ROWS)
    dtype = engine.get_data_types()[0]
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    initial = weights(engine)
    with patched(mode):
        for _ in range(STEPS):
            x = torch.randn(ROWS, expert_stacks.WIDTH, generator=generator).to(dtype)
            y = torch.randint(expert_stacks.CLASSES, (ROWS,), generator=generator)
            x, y = Variation(order=order).rows(x, y)
            engine.backward(engine(x, y))
            engine.step()
    return engine, initial, weights(engine)


def worker(names) -> dict:
    """Mode -> (difference from experts apart, what that may be, layers without rows, updates of factors)."""
    found = {}
    for name in names:
        mode, kind, apart = BY_NAME[name], MODES[name], {}
        for order in (None, 1, 2):
            engine, apart_initial, apart[order] = trained(mode, Apart, bias=kind in BIASED, order=order)
            engine.destroy()
        spread = max(difference(apart[order], apart[None], apart_initial) for order in (1, 2))
        engine, initial, actual = trained(mode, kind, bias=kind in BIASED)
        kfac = engine.kfac.preconditioner
        found[name] = (
            difference(actual, as_stacks(apart[None], kind), initial),
            FACTOR * spread + (ROUNDED if "16" in name else FLOOR),
            sorted(layer.name for layer in kfac.layers if layer.name not in kfac.capture.called),
            kfac.metrics.counts["factor_updates"],
        )
        engine.destroy()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_stacked_experts_step_as_experts_apart(world):
    found = run_ranks("tests.deepspeed.test_stacks:worker", world=world, payload=list(MODES), timeout=600)[0]
    problems = []
    for name, (error, bound, silent, updates) in found.items():
        assert silent == [] and updates == STEPS, name
        problems += within(name, error, bound)
    assert not problems, problems
