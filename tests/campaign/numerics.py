"""Values that should not be: in one step of a run, on all ranks or on one; against the same run
without K-FAC.

What plain DeepSpeed with the same optimizer survives, K-FAC has to. After the fault the run goes
on; at its end weights and K-FAC's state must be finite and every layer must move about as in a run
without the fault, or it was said.
"""

from functools import cache

import torch
import torch.distributed as dist

from tests.campaign.engines import (
    anywhere,
    engine_of,
    everywhere,
    is_finite,
    listening,
    mode_of,
    state_is_finite,
)
from tests.campaign.harness import LOUD, SILENT, SURVIVED, Case, Outcome
from tests.deepspeed.runs import micro_batches, patched, weights

STEPS, AT, LAST = 60, 12, 6
"""Steps of a run, where the fault is (a refresh is due, and factors stand on more than
``factor.SETTLED`` batches: in those nothing is called a spike yet), and over how many last steps
movement is measured: so late that SGD's momentum has forgotten the clipped step itself, 0.9 ** 42 =
0.01 of it, and what is left is lasting."""
STILL, WILD = 0.1, 10.0
"""A layer that moves less or more than this part of what it does without fault has stalled or run
away..."""
CALM = 3.0
"""...unless plain DeepSpeed's moves by another factor than this, too."""


def _scaled(factor: float, on: str = "all"):
    def fault(x, y, loss_of):
        here = on == "all" or dist.get_rank() == 1
        return loss_of(x, y) * (factor if here else 1.0)

    return fault


def _inputs(value: float, on: str = "all"):
    def fault(x, y, loss_of):
        if on == "all" or dist.get_rank() == 1:
            x = x.clone()
            x[0, 0, 0] = value
        return loss_of(x, y)

    return fault


FAULTS = {
    "loss NaN": _scaled(float("nan")),
    "loss inf": _scaled(float("inf")),
    "loss NaN on one rank": _scaled(float("nan"), "one"),
    "NaN in the inputs": _inputs(float("nan")),
    "inf in the inputs of one rank": _inputs(float("inf"), "one"),
    "1e20 in the inputs": _inputs(1e20),
    "spike 1e3": _scaled(1e3),
    "spike 1e20": _scaled(1e20),
    "spike 1e30": _scaled(1e30),
    "loss times 0": _scaled(0.0),
    "inputs all 0": lambda x, y, loss_of: loss_of(torch.zeros_like(x), y),
}
LOW = ("loss NaN", "loss inf", "loss NaN on one rank", "spike 1e3", "spike 1e20", "loss times 0")
SOME = ("loss NaN", "inf in the inputs of one rank", "spike 1e3", "spike 1e20", "inputs all 0")
STORM = {
    "fp16": {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 3, "hysteresis": 1}
}


# every fault; and every stage, precision, optimizer and clipping with faults of every kind
COVERED: tuple[tuple[int, str, str, float, tuple[str, ...]], ...] = (
    (2, "KFACAdamW", "fp32", 0.5, tuple(FAULTS)),
    (2, "KFACAdamW", "fp32", 0.0, SOME),
    (3, "KFACAdamW", "fp32", 0.5, SOME),
    (0, "KFACAdamW", "fp32", 0.0, SOME),
    (2, "AdamW", "fp32", 0.5, SOME),
    (3, "AdamW", "fp32", 0.0, SOME),
    (0, "SGD", "fp32", 0.5, SOME),
    (3, "KFACAdamW", "bf16", 0.5, LOW),
    (2, "SGD", "bf16", 0.5, LOW),
    (2, "KFACAdamW", "fp16", 0.5, ("overflow storm", *LOW[:3])),
    (3, "KFACAdamW", "fp16", 0.5, ("overflow storm", "loss inf")),
    (0, "SGD", "fp16", 0.5, ("overflow storm", *LOW[:3])),
    (2, "AdamW", "fp16", 0.5, ("overflow storm", "spike 1e3")),
)


def cases() -> list[Case]:
    return [_case(*mode, fault) for *mode, faults in COVERED for fault in faults]


def _case(stage: int, optimizer: str, dtype: str, clip: float, fault: str) -> Case:
    name = f"{fault}: {optimizer}, z{stage}, {dtype}, {'clipped' if clip else 'not clipped'}"
    return Case(
        "numerics", name, "tests.campaign.numerics:run", (stage, optimizer, dtype, clip, fault)
    )


def run(payload: tuple[int, str, str, float, str]) -> Outcome:
    *settings, fault = payload
    faulted, finite, said = _train(*settings, fault, plain=False)
    plain, _, _ = _train(*settings, fault, plain=True)
    calm, _, _ = _undisturbed(*settings, plain=False)
    plain_calm, _, _ = _undisturbed(*settings, plain=True)
    noted = f" (said: {said[0][:100]})" if said else ""
    bad = LOUD if said else SILENT
    if not is_finite(faulted):
        if not is_finite(plain):
            return SURVIVED, "weights not finite, as with DeepSpeed alone"
        return bad, "weights not finite" + noted
    if not finite:
        return bad, "state not finite" + noted
    for name, moved in faulted.items():
        ratio, usual = _ratio(moved, calm[name]), _ratio(plain[name], plain_calm[name])
        as_usual = 1 / CALM <= usual <= CALM
        if ratio < STILL and (as_usual or (ratio == 0 and usual >= STILL)):
            return (
                bad,
                f"{name} moves {ratio:.3f} of what it did (DeepSpeed alone: {usual:.3f})" + noted,
            )
        if ratio > WILD and usual < CALM:
            return (
                bad,
                f"{name} moves {ratio:.1f} times what it did (DeepSpeed alone: {usual:.3f})"
                + noted,
            )
    return SURVIVED, noted.strip()


def _ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a.norm() / b.norm().clamp(min=1e-12))


@cache
def _undisturbed(stage: int, optimizer: str, dtype: str, clip: float, *, plain: bool):
    return _train(stage, optimizer, dtype, clip, None, plain=plain)


def _train(stage: int, optimizer: str, dtype: str, clip: float, fault: str | None, *, plain: bool):
    """How every parameter moved in the last steps, whether K-FAC's state is finite, and what was
    said."""
    storm = fault == "overflow storm"
    extra = (
        {}
        if dtype != "fp16"
        else STORM
        if storm
        else {"fp16": {"enabled": True, "initial_scale_power": 8}}
    )
    mode = mode_of(stage, optimizer, dtype, clip, **extra)
    act, half = (
        FAULTS.get(fault or ""),
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32),
    )
    with listening() as said, patched(mode):
        engine = engine_of(mode, optimizer, plain=plain)
        said.clear()
        for step in range(STEPS + 20 * storm):
            if step == STEPS + 20 * storm - LAST:
                before = weights(engine)
            for x, y in micro_batches(step, 1):
                disturbed = act is not None and step == AT
                loss = act(x.to(half), y, engine) if disturbed else engine(x.to(half), y)
                if storm and step % 8 in (5, 6, 7) and step < STEPS:
                    loss = loss * float("inf")
                engine.backward(loss)
                engine.step()
        after = weights(engine)
        finite = everywhere(plain or state_is_finite(engine))
        engine.destroy()
        noted = anywhere(said)
    return {name: after[name] - before[name] for name in after}, finite, noted
