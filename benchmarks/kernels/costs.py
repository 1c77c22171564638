"""Measure the seconds of decompositions and products on this machine, by size.

    python -m benchmarks.kernels.costs [--device cuda] [--max-dim 8192] --out costs.json

Plans, and ``python -m ds_kfac estimate --costs costs.json``, are then made from them. On a CPU it
uses as many threads as it is started with.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cases import Settings
from benchmarks.kernels.solvers import cholesky_inverse, second_moments
from benchmarks.kernels.timing import CACHE_BYTES, Clock
from ds_kfac.curvature.eigen import choose, fp32_products
from ds_kfac.ops.dispatch import syrk_accumulate_
from ds_kfac.ops.functional import packed_numel

DIMS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
PRODUCT_DIMS = (64, 128, 256, 512, 1024, 2048, 4096)
FIELDS = tuple(
    """
    eigh_seconds cholesky_seconds product_flops gemm_flops syrk_flops copy_bytes
    call_seconds
    """.split()
)
ROWS, SIDE = 4096, 1024
"""Rows and side of the second moment that is timed."""


def measured(settings: Settings, seconds: float) -> dict[str, Any]:
    """Fields of the cost model."""
    device = torch.device(settings.device)
    clock, precision = Clock(settings.device), choose(None, device)
    dims = [dim for dim in DIMS if dim <= settings.max_dim]

    def time(function: Callable[[], Any]) -> float:
        return clock.compare({"": function}, seconds)[""].median

    found: dict[str, Any] = {"eigh_seconds": [], "cholesky_seconds": [], "product_flops": []}
    for dim in dims:
        C = second_moments(settings, 1, dim)[0] + 1e-3 * torch.eye(dim, device=device)
        found["eigh_seconds"].append([dim, time(lambda C=C: torch.linalg.eigh(C))])
        found["cholesky_seconds"].append([dim, time(lambda C=C: cholesky_inverse(C))])
    with fp32_products(precision.products, device):
        for dim in PRODUCT_DIMS:
            if dim <= settings.max_dim:
                x = settings.normal(dim, dim)
                found["product_flops"].append([dim, 2 * dim**3 / time(lambda x=x: x @ x)])
    found["gemm_flops"] = found["product_flops"][-1][1]
    side = min(SIDE, settings.max_dim)
    rows, sum_P = (
        settings.normal(ROWS, side).to(settings.dtype),
        torch.zeros(packed_numel(side), device=device),
    )
    found["syrk_flops"] = ROWS * side * (side + 1) / time(lambda: syrk_accumulate_(sum_P, rows))
    x, one = torch.zeros(CACHE_BYTES // 4, device=device), torch.zeros(1, device=device)
    found["copy_bytes"] = (
        2 * x.nbytes / time(lambda: x * 0.5)
    )  # into new memory, as most of our passes
    found["call_seconds"] = time(lambda: one.mul_(0.5))
    return {name: found[name] for name in FIELDS}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--max-dim", type=int, help="largest matrix; 8192 on a GPU, 1024 on a CPU")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each function and size")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if gpu else torch.float32
    settings = Settings(options.device, ROWS, 1, options.max_dim or (8192 if gpu else 1024), dtype)
    name = (
        torch.cuda.get_device_name()
        if gpu
        else f"{platform.processor()}, {torch.get_num_threads()} threads"
    )
    found = {"machine": f"{name}, torch {torch.__version__}", **measured(settings, options.seconds)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{options.out}: {', '.join(found)}")


if __name__ == "__main__":
    main()
