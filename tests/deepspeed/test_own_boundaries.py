"""Programs that end steps themselves, and divide each micro-batch's loss by their number: G is that
of DeepSpeed's own accumulation, also where the model returns logits."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.close import close
from tests.covering import covering
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches
from tests.models import cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
MANY = 4
STILL = {"type": "SGD", "params": {"lr": 0.0}}
WAYS = (
    "boundary",
    "boundary, not scaled by DeepSpeed",
    "boundary, half by DeepSpeed",
    "unmanaged",
    "no_sync",
)
OTHER = {"not divided": 1.0, "divided by another number": 3.0}
SUM = "divided by their number, as a sum"


def loss_of(logits: Tensor, y: Tensor, *, summed: bool) -> Tensor:
    return (
        F.cross_entropy(logits.mT, y, reduction="sum") / y.numel()
        if summed
        else cross_entropy(logits, y)
    )


def factors(mode: str, way: str, logits: bool) -> dict:
    """Key -> (mean of a step's rows, its count)."""
    more = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
    accumulation = {"DeepSpeed": MANY, "boundary, half by DeepSpeed": 2}.get(way, 1)
    # whose A is of gradients
    kfac = {**BY_NAME[mode].kfac_block, "layers": {"types": ["Linear", "LayerNorm"]}}
    engine = build(
        BY_NAME[mode], accumulation, optimizer=STILL, gradient_clipping=0.0, kfac=kfac, **more
    )
    for micro, (x, y) in enumerate(micro_batches(0, MANY)):
        last = micro == MANY - 1
        if way.startswith("boundary") or way in OTHER or way == SUM:
            engine.set_gradient_accumulation_boundary(last)
        with engine.no_sync() if way == "no_sync" and not last else nullcontext():
            loss = loss_of(engine(x), y, summed=way == SUM) if logits else engine(x, y)
            loss = loss / OTHER.get(way, MANY / accumulation)
            engine.backward(loss, scale_wrt_gas="not scaled" not in way)
        if last or way == "DeepSpeed":
            engine.step()
    kfac = engine.kfac.preconditioner
    assert not kfac.proving.unfit
    own = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    engine.destroy()
    return {key: value for part in everyone for key, value in part.items()}


def worker(cases: list[tuple]) -> dict:
    return {case: factors(*case) for case in cases}


def test_G_is_that_of_deepspeeds_own_accumulation_whoever_divides():
    """By another number than that of the micro-batches the gradients are larger, and G by the
    square of it."""
    ways = [
        (mode, way, logits)
        for mode in ("z0", "z2", "z3")
        for way in WAYS
        for logits in (True, False)
    ]
    # DeepSpeed has it at stages 0 and 1
    ways = [case for case in ways if case[1] != "no_sync" or case[0] == "z0"]
    cases = covering(ways, lambda case: dict(zip(("mode", "way", "logits"), case, strict=True)))
    cases += [("z0", way, True) for way in (SUM, *OTHER)]
    of_mean = ("z0", "DeepSpeed", True)
    for found in run_ranks(
        "tests.deepspeed.test_own_boundaries:worker", world=2, payload=[of_mean, *cases]
    ):
        for case in cases:
            for key, expected in found[of_mean].items():
                if key.endswith("/G") or key == "norm/A":
                    expected = expected * (MANY / OTHER.get(case[1], MANY)) ** 2
                # a chain of products, and a sum over the rows
                close(found[case][key], expected, sums=100, condition=10, what=f"{case} {key}")
