"""Backend ``triton``: which ops the kernels of this folder do."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_kfac.ops.triton.availability import unavailable

MODULES = {
    "syrk_accumulate_": "syrk",
    "eigen_scale_dot": "eigen_scale",
    "corrected_scale_dot": "corrected_scale",
    "adam_scale": "adam_scale",
}
"""Op -> file."""


def load() -> Mapping[str, Callable[..., Any]]:
    """Op name -> implementation.

    Raises:
        RuntimeError: it cannot run, and why.
    """
    reason = unavailable(torch.device("cuda"))
    if reason is not None:
        raise RuntimeError(reason)
    return {op: getattr(importlib.import_module(f"ds_kfac.ops.triton.{file}"), op) for op, file in MODULES.items()}
