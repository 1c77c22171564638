"""A device's cost model, measured once and kept in a file. Links between ranks are not measured, but given."""

import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.costs import BUILTIN, CostModel, from_dict
from ds_kfac.inverse import cholesky_inverse
from ds_kfac.ops.backends import chosen
from ds_kfac.ops.dispatch import syrk_accumulate_
from ds_kfac.ops.reference import packed_numel

VERSION = 2
"""Of the file; to be raised with every change of what is measured or built in."""
EIGH_SIZES = (64, 256, 512, 1024)
LARGE_EIGH_SIZES = (2048, 4096)
"""Beside those on an accelerator, where n^3 is not yet reached at 1024."""
GEMM_SIZE = {"cpu": 512, "cuda": 4096}
COPY_NUMEL = {"cpu": 1 << 22, "cuda": 1 << 26}


def measure(device: torch.device | str = "cpu") -> CostModel:
    """Time eigh and inverses at several sizes, a QR, a product, a second moment and a copy; about two seconds on a CPU.

    The builtin numbers of the device's type fill in the links.
    """
    device = torch.device(device)
    kind = "cpu" if device.type == "cpu" else "cuda"
    generator = torch.Generator().manual_seed(0)

    def rows(n: int, d: int) -> Tensor:
        return torch.randn(n, d, generator=generator).to(device)

    def seconds(size: int, work: Callable[[Tensor], object] = torch.linalg.eigh) -> float:
        x = rows(2 * size, size)
        matrix = (x.mT @ x / len(x)).unsqueeze(0)
        return _seconds(lambda: work(matrix), device, 3 if size < 1024 else 1)

    sizes = EIGH_SIZES + (() if kind == "cpu" else LARGE_EIGH_SIZES)
    eigh = tuple((size, seconds(size)) for size in sizes)
    damping = torch.ones((), device=device)
    cholesky = tuple((size, seconds(size, lambda matrix: cholesky_inverse(matrix, added=damping))) for size in sizes)
    size = GEMM_SIZE[kind]
    x = rows(size, size)
    sum_P = torch.zeros(packed_numel(size), device=device)
    source = torch.ones(COPY_NUMEL[kind], device=device)
    target, scalar = torch.empty_like(source), source[:1]
    return replace(
        BUILTIN[kind],
        eigh_seconds=eigh,
        qr_of_eigh=seconds(sizes[-1], torch.linalg.qr) / eigh[-1][1],
        cholesky_seconds=cholesky,
        gemm_flops=2 * size**3 / _seconds(lambda: x @ x, device, 5),
        syrk_flops=size * size * (size + 1) / _seconds(lambda: syrk_accumulate_(sum_P, x), device, 5),
        copy_bytes=2 * source.nbytes / _seconds(lambda: target.copy_(source), device, 5),
        call_seconds=_seconds(lambda: [scalar + 1 for _ in range(100)], device, 5) / 100,
    )


def _seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Median, after one unmeasured run."""
    found = []
    for _ in range(times + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cached(device: torch.device | str = "cpu", folder: Path | None = None) -> CostModel:
    """The kept measurement of this kind of device, threads and backend; measures and keeps it if there is none.

    A file that cannot be read, or is of another version, is measured again; a folder that cannot be written, every
    time. Ranks must not each call this: their plans would differ.
    """
    device = torch.device(device)
    ops = chosen(device.type).ops["syrk_accumulate_"][0]
    name = f"costs-{device_name(device)}-{torch.get_num_threads()}-{ops}.json"
    path = (cache_folder() if folder is None else folder) / name
    try:
        kept = json.loads(path.read_text())
        if kept["version"] == VERSION and kept["costs"].keys() == BUILTIN["cpu"].to_dict().keys():
            return from_dict(kept["costs"], BUILTIN["cpu" if device.type == "cpu" else "cuda"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    costs = measure(device)
    _write(path, json.dumps({"version": VERSION, "costs": costs.to_dict()}, indent=1))
    return costs


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ds_kfac"


def device_name(device: torch.device) -> str:
    """Of the model of the device, fit for a file name."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name() or platform.processor() or platform.machine()
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower() or device.type


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def _write(path: Path, text: str) -> None:
    """All of it or nothing: another job may read or write the same file now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_text(text)
            os.replace(whole, path)
    except OSError:
        return  # measured again next time
