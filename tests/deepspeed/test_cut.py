"""A head that is cut into parts is stepped as a whole one, in every engine mode, and the parts have
several owners."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from ds_kfac.model import blocks as cut
from tests.deepspeed import expert_stacks
from tests.deepspeed.expert_stacks import Apart
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.test_stacks import trained, variations
from tests.ranks import run_ranks
from tests.spread import FACTOR, FLOOR, difference, within

MODES = (
    "adam-z0",
    "adam-z1",
    "adam-z2-round_robin",
    "adam-z3-offload",
    "adam-z2-bf16",
    "adam-z3",
)
CUT = patch.multiple(cut, LARGEST=60, PART=13)
"""The head, [5, 12] with a bias, is the only layer that keeps Adam's direction; five parts."""

EXACT = {"results": torch.float32}
"""In 16 bits results are rounded where they travel, and those of parts do where those of a whole
head need not."""


def without_G(name: str) -> Mode:
    """As by default: then a head's rows are stepped one by one."""
    mode = BY_NAME[name]
    factor = {**mode.kfac_block["factor"], "fisher": "activations_only"}
    return replace(mode, kfac={**mode.kfac, "factor": factor}, orthogonal=True)


def worker(names) -> dict:
    """Mode -> (difference from a whole head, what that may be, its layers and who owns them,
    problems of counts)."""
    found = {}
    for name in names:
        mode, whole = without_G(name), []
        for variation in ({}, *variations(mode)):
            engine, initial, final = trained(
                mode, Apart, bias=True, share=True, **{**EXACT, **variation}
            )
            assert [
                layer.name for layer in engine.kfac.preconditioner.layers if "head" in layer.name
            ] == ["head"]
            engine.destroy()
            whole.append(final)
        spread = max(difference(other, whole[0], initial) for other in whole[1:])
        with CUT:
            engine, initial, actual = trained(mode, Apart, bias=True, share=True, **EXACT)
        kfac = engine.kfac.preconditioner
        parts = [layer.name for layer in kfac.layers if "head" in layer.name]
        found[name] = (
            difference(actual, whole[0], initial),
            FACTOR * spread + FLOOR,
            parts,
            {rank for part in parts for rank in kfac.plan.assignment.workers[part]},
            sorted(kfac.proving.unfit),
        )
        engine.destroy()
    return found


@pytest.mark.distributed
def test_a_head_in_parts_steps_as_a_whole_one():
    found = run_ranks("tests.deepspeed.test_cut:worker", world=2, payload=list(MODES), timeout=600)[
        0
    ]
    problems = []
    for name, (error, bound, parts, owners, silent) in found.items():
        assert (
            parts == [f"head.{index}" for index in range(expert_stacks.CLASSES)] and silent == []
        ), name
        assert owners == {0, 1}, name
        problems += within(name, error, bound)
    assert not problems, problems
