"""A refresh by eigendecomposition against one by Cholesky inverse, from packed average to what is kept, on the CPU.

    python -m benchmarks.refresh_cpu [--threads 2] [--out benchmarks/results/refresh_cpu.csv]

Taken and checked as in ``kernels_cpu.py``: both take turns, and nothing is timed unless the inverse is that of the
eigenbasis.
"""

from typing import Any

import torch

from benchmarks.kernels_cpu import arguments_of, check, rounds, rows_of, write_csv
from ds_kfac.eigenbasis import refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.inverse import refresh_inverse
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
    arguments = arguments_of(__doc__.splitlines()[0], seconds=10.0)
    table = []
    for dim in SIDES:
        times = refreshes(dim, seconds=arguments.seconds, clock=arguments.clock)
        table += rows_of(f"refresh, side {dim}, Cholesky inverse", "cpu", times)
    if arguments.out:
        write_csv(table, arguments.out)


if __name__ == "__main__":
    main()
