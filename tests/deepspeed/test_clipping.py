"""Clipping with the K-FAC gradient: raw gradients are clipped by the user's bound, and their norm is reported."""

from dataclasses import replace

import pytest
import torch

from tests.close import near
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, expected, patched, train, weights
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
MODES = ["z0", "z1-offload", "z2-bf16", "z3", "z1-bf16-accum32"]
BOUND = 0.01
"""A tenth and less of these gradients' norms."""


def worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = replace(BY_NAME[name], clip=BOUND)
        engine = build(mode, 1)
        initial = weights(engine)
        with patched(mode):
            train(engine, 1)
        found = expected(mode, 1, torch.distributed.get_world_size(), initial)
        moved = difference(weights(engine), found.weights, initial)
        norms = []
        for kfac in (True, False):
            engine.destroy()
            engine = build(mode, 1, kfac={**mode.kfac_block, "enabled": kfac})
            with patched(mode):
                train(engine, 1, steps=1)
            norms.append(engine.get_global_grad_norm())
        engine.destroy()
        results[name] = moved, found.bound, [None if norm is None else float(norm) for norm in norms]
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_raw_gradients_are_clipped_and_their_norm_is_reported(world):
    for of_rank in run_ranks("tests.deepspeed.test_clipping:worker", world=world, payload=MODES):
        for name, (moved, bound, (ours, plain)) in of_rank.items():
            assert not within(name, moved, bound), (name, moved)
            assert (ours is None) == (plain is None), (name, ours, plain)
            if plain is not None:
                assert plain > 10 * BOUND, "nothing was clipped, so nothing was tested"
                coarse = 2**-7 if "16" in name else 2**-13
                near(ours, plain, coarse * plain, "gradients in 16 bits; a captured backward", what=name)
