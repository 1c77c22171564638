"""EKFAC with padding in 16 bits, its loss scale included, against tests/oracle.py on a rounded copy."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import ReferenceStep, build, patched, reference_options, weights
from tests.deepspeed.test_features import ACCUMULATION, CORRECTED, ROWS, STEPS, batch, case
from tests.models import TokenNet, make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import run_ranks
from tests.spread import FACTOR, FLOOR, OTHERS, PLAIN, Variation, difference, within

pytestmark = pytest.mark.distributed
MODES = ["z2-fp16", "z3-fp16", "z2-bf16", "z3-bf16-accum32"]
SCALE = 2**8
KFAC = case(masked=True, preconditioner=CORRECTED, damping={"value": 0.01})["mode"]["kfac"]


def trained(mode, initial: dict, world: int, variation: Variation = PLAIN, *, pieces: int = 1) -> dict:
    """By the reference, on the whole batch.

    Args:
        pieces: the gradient is a sum of so many micro-batches' in 16 bits, which rounds otherwise than one product.
    """
    model, dtype = make_net(TokenNet), {"fp16": torch.float16, "bf16": torch.bfloat16}[mode.dtype]
    model.load_state_dict(initial)
    work = copy.deepcopy(model).to(dtype)
    for p in work.parameters():
        p.grad_dtype = torch.float32
    kfac = ReferenceKFAC(work, **reference_options(mode.kfac))
    step, scale, twin = ReferenceStep(mode, model, work, kfac), SCALE if mode.dtype == "fp16" else 1, make_net(TokenNet)
    for index in range(STEPS):
        tokens, labels, mask = variation.rows(*batch(index, True, world))
        kfac.rows, kfac.terms = labels >= 0, float((labels >= 0).sum())
        (scale * work(tokens, labels, mask)).backward()
        if pieces > 1:
            twin.load_state_dict(work.state_dict())
            for micro in zip(*(part.chunk(pieces) for part in (tokens, labels, mask)), strict=True):
                (scale / pieces * twin.to(dtype)(*micro)).backward()
        for p, q in zip(work.parameters(), twin.parameters(), strict=True):
            p.grad = (p.grad if q.grad is None else q.grad).float() / scale
            q.grad = None
        step(1.0, seed=scale)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def worker(names: list[str]) -> dict:
    world, rank, results = dist.get_world_size(), dist.get_rank(), {}
    for name in names:
        mode = replace(BY_NAME[name], kfac=copy.deepcopy(KFAC))
        engine = build(mode, ACCUMULATION, model=make_net(TokenNet), train_micro_batch_size_per_gpu=ROWS)
        initial = weights(engine)
        with patched(mode):
            for index in range(STEPS):
                whole = batch(index, True, world)
                for micro in range(ACCUMULATION):
                    first = (rank * ACCUMULATION + micro) * ROWS
                    tokens, labels, mask = (t[first : first + ROWS] for t in whole)
                    engine.backward(engine(tokens, labels=labels, attention_mask=mask))
                    engine.step()
        if rank == 0:
            one = trained(mode, initial, world)
            # not in float64: the rounding to 16 bits is part of what is compared
            others = [trained(mode, initial, world, other) for other in OTHERS if not other.exact]
            others.append(trained(mode, initial, world, pieces=world * ACCUMULATION))
            allowed = FACTOR * max(difference(other, one, initial) for other in others) + FLOOR
        final, kfac = weights(engine), engine.kfac.preconditioner
        if rank == 0:
            scale = float(kfac.layout.grad_scale())
            results[name] = difference(final, one, initial), allowed, scale
        engine.destroy()
    return results


def test_corrected_eigenvalues_with_padding_in_16_bits_match_the_reference():
    results = run_ranks("tests.deepspeed.test_half_features:worker", world=2, payload=MODES)[0]
    for name, (error, allowed, scale) in results.items():
        assert scale == (SCALE if "fp16" in name else 1), "a scale, or it would not be tested"
        assert not within(name, error, allowed)
