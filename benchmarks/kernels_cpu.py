"""CPU ops against straightforward torch: the whole factor path, pack / unpack of many layers, Adam's step.

    python benchmarks/kernels_cpu.py --threads 2 [--out benchmarks/results/kernels_cpu_2threads.csv]

Every comparison checks both results against each other first. Contestants take turns within one run, so that a busy
machine disturbs both; median and the quartiles' distance are given. On a machine that others use, take one thread and
``--clock cpu``: the processor time of this process, without the time in which others ran.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops import backends, dispatch, functional
from ds_kfac.ops.reference import packed_numel

FACTOR_SIDES = (256, 768, 1024, 2048)
ROWS = 2048
DECAY = 0.95
ADAM_SHAPES = ((128, 129), (512, 129), (768, 769), (3072, 769))
"""Of the matrices of layers."""
LAYER_SIDES = {
    "GPT-2 small": (769, 2304, 769, 768, 769, 3072, 3073, 768) * 2,
    "ResNet-50 stage": (64, 64, 577, 64, 65, 256) * 4,
    "many of 128": (128,) * 48,
}
"""Sides of the factors of some layers; the first two blocks of a model stand for all."""


def indexed_factor(average_P: Tensor, x_ND: Tensor) -> None:
    """X^T X, symmetrised, averaged as a matrix, and its lower triangle indexed: one rank, one batch."""
    dim = x_ND.shape[1]
    product = x_ND.t() @ x_ND / len(x_ND)
    product = (product + product.t()) / 2
    average_DD = torch.empty(dim, dim)
    rows, columns = torch.tril_indices(dim, dim)
    average_DD[rows, columns] = average_P
    average_DD[columns, rows] = average_P
    average_DD.lerp_(product, 1 - DECAY)
    average_P.copy_(average_DD[rows, columns])


def kept_dense_factor(average_DD: Tensor, x_ND: Tensor) -> Tensor:
    """The same for an average that is kept as a matrix; returns the triangle that would travel."""
    product = x_ND.t() @ x_ND / len(x_ND)
    product = (product + product.t()) / 2
    average_DD.lerp_(product, 1 - DECAY)
    rows, columns = torch.tril_indices(*average_DD.shape)
    return average_DD[rows, columns]


def packed_factor(average_P: Tensor, updates: Tensor, x_ND: Tensor) -> None:
    """Ours: rows into a packed sum, the sum into the running average, with the check of its values."""
    sum_P = torch.zeros_like(average_P)
    dispatch.syrk_accumulate_(sum_P, x_ND)
    count = torch.tensor(float(len(x_ND)))
    dispatch.ema_update_([average_P], [sum_P], [count], [updates], [DECAY])


def indexed_pack(out: Tensor, starts: Sequence[int], matrices: Sequence[Tensor]) -> None:
    for start, x in zip(starts, matrices, strict=True):
        rows, columns = torch.tril_indices(*x.shape)
        out[start : start + len(rows)] = x[rows, columns].to(out.dtype)


def indexed_unpack(packed: Tensor, starts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    found = []
    for start, dim in zip(starts, dims, strict=True):
        rows, columns = torch.tril_indices(dim, dim)
        x = torch.empty(dim, dim)
        values = packed[start : start + len(rows)].float()
        x[rows, columns] = values
        x[columns, rows] = values
        found.append(x)
    return found


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def rounds(contestants: dict[str, Callable[[], object]], *, seconds: float, clock: str) -> dict[str, list[float]]:
    """Times of each, taking turns for about so long, after an unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end = None
    while end is None or time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, work in contestants.items():
            start = CLOCKS[clock]()
            work()
            times[name].append(CLOCKS[clock]() - start)
        if end is None:
            end, times = time.perf_counter() + seconds, {name: [] for name in contestants}
    return times


def check(what: str, actual: Tensor, expected: Tensor) -> None:
    worst = float((actual - expected).abs().max() / expected.abs().max())
    if not worst < 1e-5:
        raise SystemExit(f"{what}: results differ by {worst:.1e}; nothing is timed")


def factor_path(dim: int, backend: str, **how: Any) -> dict[str, list[float]]:
    backends.use(backend, "cpu")
    x = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(dim))
    start = torch.randn(packed_numel(dim), generator=torch.Generator().manual_seed(1))
    (dense,) = dispatch.symmetric_unpack_from(start, [0], [dim])
    ours, theirs, updates = start.clone(), start.clone(), torch.tensor(1e6)
    packed_factor(ours, updates, x)
    indexed_factor(theirs, x)
    check(f"factor path {dim}", ours, theirs)
    check(f"factor path {dim}, kept dense", kept_dense_factor(dense, x), theirs)
    return rounds(
        {
            "ours": lambda: packed_factor(ours, updates, x),
            "indexed": lambda: indexed_factor(theirs, x),
            "kept dense": lambda: kept_dense_factor(dense, x),
            "product alone": lambda: x.t() @ x,
        },
        **how,
    )


def pack_unpack(dims: Sequence[int], dtype: torch.dtype, backend: str, **how: Any) -> dict[str, dict]:
    backends.use(backend, "cpu")
    starts = [sum(packed_numel(dim) for dim in dims[:place]) for place in range(len(dims))]
    matrices = [(x := torch.randn(dim, dim)) + x.T for dim in dims]
    ours, theirs = (torch.zeros(starts[-1] + packed_numel(dims[-1]), dtype=dtype) for _ in range(2))
    dispatch.symmetric_pack_into_(ours, starts, matrices)
    indexed_pack(theirs, starts, matrices)
    check("pack", ours.float(), theirs.float())
    for a, b in zip(
        dispatch.symmetric_unpack_from(ours, starts, dims), indexed_unpack(ours, starts, dims), strict=True
    ):
        check("unpack", a, b)
    pack = {
        "ours": lambda: dispatch.symmetric_pack_into_(ours, starts, matrices),
        "indexed": lambda: indexed_pack(theirs, starts, matrices),
    }
    unpack = {
        "ours": lambda: dispatch.symmetric_unpack_from(ours, starts, dims),
        "indexed": lambda: indexed_unpack(ours, starts, dims),
    }
    return {"pack": rounds(pack, **how), "unpack": rounds(unpack, **how)}


def adam_step(rows: int, columns: int, backend: str, **how: Any) -> dict[str, list[float]]:
    backends.use(backend, "cpu")
    x, first, second = (torch.randn(rows, columns) for _ in range(3))
    state = (first, second.square(), torch.tensor(10.0), torch.tensor(True))
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    work = {"ours": dispatch.adam_scale, "passes": functional.adam_scale}
    for ours, theirs in zip(*(op(x, *state, **options) for op in work.values()), strict=True):
        check(f"Adam's step {rows} x {columns}", ours, theirs)
    return rounds({name: lambda op=op: op(x, *state, **options) for name, op in work.items()}, **how)


def rows_of(case: str, backend: str, times: dict[str, list[float]]) -> list[dict[str, str]]:
    """A table row per contestant; the ratio is of medians, other over ours."""
    ours, found = statistics.median(times["ours"]), []
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        median = statistics.median(values)
        found.append(
            {
                "case": case, "backend": backend, "contestant": name, "milliseconds": f"{1e3 * median:.3f}",
                "spread": f"{1e3 * (high - low):.3f}", "times": str(len(values)), "of ours": f"{median / ours:.2f}",
            }
        )  # fmt: skip
        print(
            "{case:32} {backend:6} {contestant:14} {milliseconds:>10} ms +- {spread:>8} {of ours:>7} x".format(
                **found[-1]
            )
        )
    return found


def arguments_of(description: str, *, seconds: float) -> argparse.Namespace:
    """Of a command that compares; sets the threads and says what is measured with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=seconds, help="about how long each comparison takes")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on a busy machine")
    parser.add_argument("--out", type=Path, help="csv to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.clock} clock")
    print(f"ops: {backends.use(None, 'cpu')}")
    return arguments


def write_csv(table: Sequence[dict[str, str]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


def main() -> None:
    arguments = arguments_of(__doc__.splitlines()[0], seconds=5.0)
    torch.manual_seed(0)
    names = ["torch"] if "cpp" in backends.chosen("cpu").missing else ["cpp", "torch"]
    table = []
    for backend in names:
        for dim in FACTOR_SIDES:
            times = factor_path(dim, backend, seconds=arguments.seconds, clock=arguments.clock)
            table += rows_of(f"factor path, side {dim}", backend, times)
        for model, dims in LAYER_SIDES.items():
            for dtype in (torch.float32, torch.bfloat16):
                found = pack_unpack(dims, dtype, backend, seconds=arguments.seconds, clock=arguments.clock)
                for op, times in found.items():
                    table += rows_of(f"{op}, {model}, {str(dtype)[6:]}", backend, times)
        for rows, columns in ADAM_SHAPES:
            times = adam_step(rows, columns, backend, seconds=arguments.seconds, clock=arguments.clock)
            table += rows_of(f"Adam's step, {rows} x {columns}", backend, times)
    if arguments.out:
        write_csv(table, arguments.out)


if __name__ == "__main__":
    main()
