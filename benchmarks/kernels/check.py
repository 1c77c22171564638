"""Which op runs by which backend, and what the check at first use says: ``python -m
benchmarks.kernels.check``."""

import sys
import time

import torch

from ds_kfac.ops import dispatch


def main() -> int:
    """1 if a backend cannot run or an op is wrong."""
    device, start = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    choice = dispatch.use(None, device)
    for op, (name, _) in choice.ops.items():
        print(op, name, flush=True)
    for what, why in choice.missing.items():
        print(f"not {what}: {why}", flush=True)
    print(
        f"{device}: built and checked in {time.perf_counter() - start:.1f} s, "
        f"{len(choice.missing)} missing"
    )
    return 1 if choice.missing else 0


if __name__ == "__main__":
    sys.exit(main())
