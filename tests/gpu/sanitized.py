"""Small calls of every GPU op, to be run by compute-sanitizer: ``python -m tests.gpu.sanitized
triton cuda``.

Results are compared on the CPU, so that on the GPU there are copies and the ops alone.
"""

import sys

import torch

from ds_kfac.ops.dispatch import BACKENDS
from tests.ops.calls import Sizes, calls_of, copied, problems

SIZES = Sizes((1, 129), (1, 63, 129, 576), (1, 63, 129, 300), ((1, 1), (63, 129), (257, 600)))
"""Odd ones, and one that has several tiles and whole descriptors."""


def run(backend: str, device: str = "cuda") -> tuple[int, list[str]]:
    """Number of calls, and what was wrong."""
    count, wrong = 0, []
    for op, function in BACKENDS[backend].load().items():
        for call in calls_of(op, "cpu", SIZES):
            arguments, options = copied((call.arguments, call.options), device=device)
            results = copied((function(*arguments, **options), arguments), device="cpu")
            count += 1
            wrong += [f"{op}: {text}" for text in problems(call, *results)]
    return count, wrong


def main(backends: list[str]) -> int:
    status = 0
    for backend in backends:
        count, wrong = run(backend)
        print(f"{backend}: {count} calls, {len(wrong)} wrong", *wrong, sep="\n")
        status |= bool(wrong) or not count
    torch.cuda.synchronize()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
