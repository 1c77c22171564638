"""``python -m ds_kfac report``: what is installed and found here, for a bug report."""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch
from deepspeed.accelerator import get_accelerator

from ds_kfac.engine.refusals import REFUSALS
from ds_kfac.engine.report import columns
from ds_kfac.model.registry import TYPES
from ds_kfac.ops import build
from ds_kfac.ops.check import gpu_architecture, gpu_problem
from ds_kfac.ops.dispatch import BACKENDS, chosen
from ds_kfac.zero.registry import SHARD_LAYOUTS

PACKAGES = ("ds_kfac", "torch", "deepspeed", "triton", "ninja", "numpy", "pydantic")


def report(_: object = None) -> str:
    """What is installed and found here, and what ds_kfac can do with it, as a table each."""
    versions = [*((name, _version(name)) for name in PACKAGES), ("python", platform.python_version())]
    tables: dict[str, Sequence[tuple[str, ...]]] = {
        "ds_kfac: installed": [*versions, ("nvcc", _compiler("nvcc"))],
        "accelerator": _accelerator(),
        "op libraries: installed if compiled ahead of time, else compiled at first use if compatible": build.status(
            None if gpu_problem() else gpu_architecture()
        ),
        "backends of ops": [("backend", "device", "runs here"), *map(_backend, BACKENDS)],
        "supported": _support(),
    }
    lines = [line for title, rows in tables.items() for line in (title, *columns(rows))]
    return "\n".join([*lines, "refused at attach", *(f"  {mode}: {advice}" for mode, (_, advice) in REFUSALS.items())])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(sys.modules.get(package), "__version__", None)  # imported from its sources
        return f"{version}, not installed but imported" if version else "not installed"


def _compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "not chosen in PATH"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        return f"{path}: does not run ({problem})"
    lines = [line for line in said.splitlines() if line.strip()]
    chosen = [line for line in lines if "release" in line] or lines[:1]
    return f"{chosen[0].strip()} ({path})" if chosen else path


def _accelerator() -> list[tuple[str, str]]:
    accelerator = get_accelerator()
    kind, count, backends = accelerator.device_name(), accelerator.device_count(), torch.distributed
    name = torch.cuda.get_device_name() if kind == "cuda" and count else platform.processor() or platform.machine()
    known = ("gloo", "nccl", "mpi") if backends.is_available() else ()
    has = ", ".join(name for name in known if getattr(backends, f"is_{name}_available")())
    return [
        ("DeepSpeed's", f"{kind} ({name}), {count} of them"),
        ("torch sees", f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"),
        ("threads", str(torch.get_num_threads())),
        ("communication", f"{accelerator.communication_backend_name()}; torch has {has or 'none'}"),
    ]


def _backend(name: str) -> tuple[str, str, str]:
    device = BACKENDS[name].device
    reason = chosen(device).missing.get(name) if device else None
    return name, device or "any", f"no: {reason}" if reason else "yes"


def _support() -> list[tuple[str, str]]:
    accelerator, kind = get_accelerator(), get_accelerator().device_name()
    tested = "tested" if kind == "cpu" else "runs through torch, but is not tested yet"
    return [
        ("device", f"{kind}: {tested}"),
        ("ops", str(chosen(kind))),
        ("decomposition", "torch.linalg.eigh, or Cholesky with inverses: LAPACK on a CPU, cuSOLVER on a GPU"),
        ("bf16", "yes" if accelerator.is_bf16_supported() else "no"),
        ("fp16", "yes" if accelerator.is_fp16_supported() else "no"),
        ("layers", ", ".join(TYPES)),
        ("engines", ", ".join(["bare torch optimizer (stage 0)", *(wrapper.__name__ for wrapper in SHARD_LAYOUTS)])),
    ]
