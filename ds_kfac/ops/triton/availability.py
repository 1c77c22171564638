"""Whether Triton kernels can run on a device; imports triton only if it is there."""

from importlib.util import find_spec

import torch


def unavailable(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``; None if it can. With TRITON_INTERPRET=1 a CPU will do, slowly."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from ds_kfac.ops.triton.base import INTERPRET

    if INTERPRET:
        return None
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are checked for NVIDIA devices only"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"Triton kernels need compute capability 8.0, this device has {major}.{minor}"
