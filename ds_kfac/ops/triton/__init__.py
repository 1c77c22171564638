"""Backend ``triton``: which ops it has, and whether they can run on a device. This is the only file
of the folder that can be imported without triton."""

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ds_kfac.ops import check

MODULES = {"adam_step_": "scale", "finish_direction_": "scale", "syrk_accumulate_": "syrk"}
"""dict from op to the module of this folder that implements it."""


def unavailable() -> str | None:
    """Return why Triton kernels cannot run here, or None if they can. With TRITON_INTERPRET=1 they
    run without a GPU, but slowly."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from ds_kfac.ops.triton.scale import INTERPRET
    except Exception as failure:  # triton's own library may not load
        return f"triton is installed but cannot be imported: {type(failure).__name__}: {failure}"
    if INTERPRET:
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler to launch kernels (gcc, clang or CC)"
    return check.gpu_problem()


def load() -> Mapping[str, Callable[..., Any]]:
    """Return a mapping from op to implementation. Raise RuntimeError with the reason if Triton
    cannot run here."""
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    return {
        op: getattr(importlib.import_module(f"{__name__}.{file}"), op)
        for op, file in MODULES.items()
    }
