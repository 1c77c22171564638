"""The GPUs of this machine, as far as kernels must know them."""

import torch

CAPABILITY = (8, 0)
"""The least compute capability that kernels are compiled and checked for."""


def problem(device: torch.device | None = None) -> str | None:
    """Why no kernel of ours can run on a GPU (None: torch's current one); None if they can."""
    if torch.version.hip is not None:
        return "our kernels are for NVIDIA GPUs, torch is built for AMD's"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    found = torch.cuda.get_device_capability(device)
    if found >= CAPABILITY:
        return None
    return f"needs compute capability {_number(CAPABILITY)}, {torch.cuda.get_device_name(device)} has {_number(found)}"


def architecture() -> str:
    """Of torch's current GPU, as nvcc names it, e.g. ``90a``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major == 9 else ''}"


def _number(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
