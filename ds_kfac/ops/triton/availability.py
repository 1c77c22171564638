"""Whether Triton kernels can run on a device; imports triton only if it is there."""

import os
import shutil
from importlib.util import find_spec

import torch

from ds_kfac.ops import gpus


def unavailable(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``; None if it can. With TRITON_INTERPRET=1 a CPU will do, slowly."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from ds_kfac.ops.triton.base import INTERPRET
    except Exception as failure:  # its own library may not load
        return f"triton is installed but does not import: {type(failure).__name__}: {failure}"
    if INTERPRET:
        return None
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler to launch kernels (gcc, clang or CC)"
    return gpus.problem(None if device.index is None else device)
