"""Backend ``triton``: whether and which of its ops can run on a device. This file imports triton only if it is there,
the others need it.
"""

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from ds_kfac.ops import check

MODULES = dict.fromkeys(("adam_scale_", "adam_fold_", "finish_direction_"), "scale")
MODULES["syrk_accumulate_"] = "syrk"
"""Op -> file."""


def unavailable(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``; None if it can. With TRITON_INTERPRET=1 a CPU will do, slowly."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from ds_kfac.ops.triton.scale import INTERPRET
    except Exception as failure:  # its own library may not load
        return f"triton is installed but does not import: {type(failure).__name__}: {failure}"
    if INTERPRET:
        return None
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler to launch kernels (gcc, clang or CC)"
    return check.gpu_problem(None if device.index is None else device)


def load() -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation. Raises RuntimeError: it cannot run, and why."""
    if reason := unavailable(torch.device("cuda")):
        raise RuntimeError(reason)
    return {op: getattr(importlib.import_module(f"{__name__}.{file}"), op) for op, file in MODULES.items()}
