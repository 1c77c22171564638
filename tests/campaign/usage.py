"""Programs that use an engine in unusual ways, which DeepSpeed alone survives.

Every program runs with K-FAC and without. What works without has to work with it; where ``exact``
says so, the weights must be to the bit those of the same run without the disturbance.
"""

import re

import torch
import torch.distributed as dist

from tests.campaign import programs
from tests.campaign.engines import (
    anywhere,
    engine_of,
    is_finite,
    listening,
    mode_of,
    state_is_finite,
)
from tests.campaign.harness import CRASH, LOUD, SILENT, SURVIVED, Case, NothingTried, Outcome
from tests.deepspeed.runs import weights

STAGES = {0: "AdamW", 2: "KFACAdamW", 3: "KFACAdamW"}
"""Stage -> the optimizer that a program runs with there."""


def cases() -> list[Case]:
    here = "tests.campaign.usage:run"
    return [
        Case("usage", f"{name}: z{stage}, {STAGES[stage]}", here, (name, stage), seconds=90)
        for name, program in programs.PROGRAMS.items()
        for stage in program.stages
    ]


def run(payload: tuple[str, int]) -> Outcome:
    name, stage = payload
    program = programs.PROGRAMS[name]
    plain, _ = _attempt(program, stage, plain=True)
    if isinstance(plain, str):
        raise NothingTried(f"DeepSpeed alone does not survive this program: {plain}")
    with listening() as said:
        found, state = _attempt(program, stage, plain=False)
        said = anywhere(said)
    if isinstance(found, str):
        return (LOUD if program.refused and re.search("ds_kfac|K-FAC", found) else CRASH), found
    noted = f" (said: {said[0][:100]})" if said else ""
    bad = LOUD if said else SILENT
    if not is_finite(found) and is_finite(plain):
        return bad, "weights not finite" + noted
    if not state:
        return bad, "K-FAC's state not finite" + noted
    if program.exact:
        expected, _ = _attempt(program, stage, plain=False, disturbed=False)
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
        if different := anywhere(different):
            return bad, f"other weights than without it: {different[0]}" + noted
    return SURVIVED, noted.strip()


def _attempt(program: "programs.Program", stage: int, *, plain: bool, disturbed: bool = True):
    """The weights at the end and whether K-FAC's state is finite; or the text of the error, agreed
    by all ranks."""
    torch.manual_seed(0)
    mode = mode_of(stage, STAGES[stage])

    def make(model=None, **over):
        return engine_of(mode, STAGES[stage], plain=plain, model=model, **over)

    error, engine = "", None
    try:
        engine = program.run(make, disturbed)
    except NothingTried:
        raise
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        if not dist.is_initialized():
            raise
    # A rank that failed alone has left the others waiting in a collective: then this one is not
    # entered by all either, and the campaign says hang.
    errors = [text for text in anywhere([error]) if text]
    if errors:
        alone = f" (on {len(errors)} of {dist.get_world_size()} ranks)"
        return errors[0] + alone, False
    if engine is None:
        return {}, True
    result = weights(engine), plain or not hasattr(engine, "kfac") or state_is_finite(engine)
    engine.destroy()
    return result
