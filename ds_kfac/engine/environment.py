"""What is installed and found here, and what ds_kfac can do with it: ``python -m ds_kfac report``."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys

import torch
from deepspeed.accelerator import get_accelerator

from ds_kfac.engine.refusals import REFUSALS
from ds_kfac.model.registry import TYPES
from ds_kfac.ops import build, check
from ds_kfac.ops.dispatch import BACKENDS, chosen
from ds_kfac.text import columns
from ds_kfac.zero.registry import SHARD_LAYOUTS

PACKAGES = ("ds_kfac", "torch", "deepspeed", "triton", "ninja", "numpy", "pydantic")
COMPILERS = ("nvcc",)


def environment_report() -> str:
    """Versions, accelerator and support, as a table each."""
    rows = [(name, _version(name)) for name in PACKAGES]
    rows += [("python", platform.python_version())] + [(name, _compiler(name)) for name in COMPILERS]
    return "\n".join(
        [
            "ds_kfac: installed",
            *columns(rows),
            "accelerator",
            *columns(_accelerator()),
            "op libraries: installed if compiled ahead of time, else compiled at first use if compatible",
            *columns(build.rows(build.CUDABuilder(None if check.gpu_problem() else check.gpu_architecture()))),
            "backends of ops",
            *columns(_backends_of_ops()),
            "supported",
            *columns(_support()),
            "refused at attach",
            *(f"  {mode}: {refusal.remedy}" for mode, refusal in REFUSALS.items()),
        ]
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    version = getattr(sys.modules.get(package), "__version__", None)  # imported from its sources
    return f"{version}, not installed but imported" if version else "not installed"


def _compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "not found in PATH"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        return f"{path}: does not run ({problem})"
    lines = [line for line in said.splitlines() if line.strip()]
    found = [line for line in lines if "release" in line] or lines[:1]
    return f"{found[0].strip()} ({path})" if found else path


def _accelerator() -> list[tuple[str, str]]:
    accelerator = get_accelerator()
    kind = accelerator.device_name()
    count = accelerator.device_count()
    name = torch.cuda.get_device_name() if kind == "cuda" and count else platform.processor() or platform.machine()
    backend = accelerator.communication_backend_name()
    return [
        ("DeepSpeed's", f"{kind} ({name}), {count} of them"),
        ("torch sees", f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"),
        ("threads", str(torch.get_num_threads())),
        ("communication", f"{backend}; torch has {', '.join(_backends()) or 'none'}"),
    ]


def _backends_of_ops() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("backend", "device", "runs here")]
    for name, backend in BACKENDS.items():
        reason = chosen(backend.device).missing.get(name) if backend.device else None
        rows.append((name, backend.device or "any", f"no: {reason}" if reason else "yes"))
    return rows


def _backends() -> list[str]:
    if not torch.distributed.is_available():
        return []
    checks = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    return [name for name, check in checks.items() if getattr(torch.distributed, check)()]


def _support() -> list[tuple[str, str]]:
    kind = get_accelerator().device_name()
    tested = "tested" if kind == "cpu" else "runs through torch, but is not tested yet"
    return [
        ("device", f"{kind}: {tested}"),
        ("ops", str(chosen(kind))),
        ("decomposition", "torch.linalg.eigh, or Cholesky with inverses: LAPACK on a CPU, cuSOLVER on a GPU"),
        ("bf16", "yes" if get_accelerator().is_bf16_supported() else "no"),
        ("fp16", "yes" if get_accelerator().is_fp16_supported() else "no"),
        ("layers", ", ".join(TYPES)),
        ("engines", ", ".join(["bare torch optimizer (stage 0)", *(wrapper.__name__ for wrapper in SHARD_LAYOUTS)])),
    ]
