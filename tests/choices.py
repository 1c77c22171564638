"""What ds_kfac chooses inside, chosen by a test: a block "plan" in addition to those of the
config."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import ds_kfac.directions.base
from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.resolve import resolve
from ds_kfac.curvature.eigen import choose
from ds_kfac.curvature.methods import EIGEN
from ds_kfac.model import scan
from ds_kfac.plan import plan as planning

CPU = torch.device("cpu")
STAGGERED = {"LONG_REFRESH": -1.0}
"""Of "plan": refreshes are spread over steps, however short they are."""
AT_ONCE = {"LONG_REFRESH": math.inf}
"""They are not, however long."""
HALF = {"gradient_dtypes": (torch.bfloat16, torch.bfloat16)}
"""Of "plan": gradients travel in bf16, also those of a model in fp32."""


def resolved(block: Mapping[str, Any]) -> KFACConfig:
    """A "kfac" block as a run has it, for another optimizer than ours."""
    return resolve(parse(block), fisher="empirical")[0]


def planned(block: Mapping[str, Any], *, batched: bool = False, device: torch.device = CPU) -> Any:
    """What a direction reads of a plan."""
    config = resolved(block)
    precision = choose(config.preconditioner.precision, device)
    return SimpleNamespace(
        config=config, layers=(), precision=precision, batched=batched, method=EIGEN
    )


@contextmanager
def chosen(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The "kfac" block without "plan", whose keys are functions and constants of
    ``ds_kfac/plan/plan.py``, and the scan's ``LONGEST``, in effect here; and whatever the
    optimizer, with Kronecker eigenvalues if the block does not say otherwise."""
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(ds_kfac.directions.base, "adaptive", lambda optimizer: False)
        )
        for name, value in block.get("plan", {}).items():
            module = scan if hasattr(scan, name) else planning
            plain = callable(value) or not callable(getattr(module, name))
            made = value if plain else lambda *_, value=value: value
            stack.enter_context(patch.object(module, name, made))
        yield {key: value for key, value in block.items() if key != "plan"}
