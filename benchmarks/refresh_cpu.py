"""A refresh by eigendecomposition against one by Cholesky inverse, from packed average to what is kept, on the CPU.

    python benchmarks/refresh_cpu.py [--threads 2] [--out benchmarks/results/refresh_cpu.csv]

Taken and checked as in ``kernels_cpu.py``: both take turns, and nothing is timed unless the inverse is that of the
eigenbasis.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_cpu import CLOCKS, check, rounds, rows_of
from ds_kfac.eigenbasis import refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.inverse import refresh_inverse
from ds_kfac.ops import backends
from ds_kfac.side import Side

SIDES = (512, 1024, 2048)
DAMPING = {"damping": 0.1, "damping_kind": "relative"}


def refreshes(dim: int, **how: Any) -> dict[str, list[float]]:
    side, x = Side.dense(dim), torch.randn(2 * dim, dim, generator=torch.Generator().manual_seed(dim))
    factor = KroneckerFactor(side, side.accumulate_(torch.zeros(side.numel), x) / len(x), torch.ones(()))
    basis, inverse = refresh(factor).basis, refresh_inverse(factor, None, **DAMPING).basis
    assert basis is not None and inverse is not None
    damped = basis.values + DAMPING["damping"] ** 0.5 * basis.values.mean()
    probe = torch.randn(dim, 3, generator=torch.Generator().manual_seed(1))
    check(f"refresh {dim}", inverse.apply(probe), basis.restore(basis.rotate(probe) / damped[:, None]))
    return rounds({"ours": lambda: refresh_inverse(factor, None, **DAMPING), "eigh": lambda: refresh(factor)}, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long each comparison takes")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on a busy machine")
    parser.add_argument("--out", type=Path, help="csv to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.clock} clock")
    print(f"ops: {backends.use(None, 'cpu')}")
    table = []
    for dim in SIDES:
        times = refreshes(dim, seconds=arguments.seconds, clock=arguments.clock)
        table += rows_of(f"refresh, side {dim}, Cholesky inverse", "cpu", times)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
