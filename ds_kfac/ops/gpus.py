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


def architectures() -> list[str]:
    """Of all GPUs here that kernels can run on, as nvcc names them, e.g. ``["80", "90a"]``: local ranks share a
    library."""
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    usable = sorted(capability for capability in found if capability >= CAPABILITY)
    return [f"{major}{minor}{'a' if major == 9 else ''}" for major, minor in usable]


def _number(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
