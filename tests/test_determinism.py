"""Deterministic mode: every op of every CPU backend gives the same bits again; C++ loops with any number of threads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from ds_kfac.ops import backends
from ds_kfac.ops.reference import packed_numel

DIM = 521
OF_TORCH = {"syrk_accumulate_", "block_syrk_accumulate_", "count_accumulate_", "patch_syrk_accumulate_"}
"""Products and counts are torch's in every CPU backend: its sums depend on the number of threads."""


@contextmanager
def deterministic(backend: str) -> Iterator[Mapping]:
    """Ops of a backend, in deterministic mode."""
    missing = backends.use(None, "cpu").missing
    if backend in missing:
        pytest.skip(f"no {backend} ops: {missing[backend]}")
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        yield backends.use(backend, "cpu").ops
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        backends.use(None, "cpu")


def results(ops, threads: int) -> dict[str, list[torch.Tensor]]:
    """Op -> what it gives and what it changes; large enough for several threads to share."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    numel, found = packed_numel(DIM), {}
    x, matrix, index = normal(1031, DIM), normal(DIM, DIM), torch.randint(-1, 50, (100_000,), generator=generator)
    values, averages, moments = normal(DIM).exp(), normal(numel), normal(DIM, DIM).square()
    packed, images = torch.zeros(numel), normal(4, 16, 32, 32)
    calls = {
        "syrk_accumulate_": ((torch.zeros(numel), x), {}),
        "block_syrk_accumulate_": ((torch.zeros(8 * packed_numel(64)), x[:, :512]), {"block": 64}),
        "count_accumulate_": ((torch.zeros(50), index), {}),
        "patch_syrk_accumulate_": ((torch.zeros(packed_numel(144)), images), {"kernel": (3, 3), "padding": (1, 1)}),
        "symmetric_pack_into_": ((packed, [0], [matrix]), {}),
        "symmetric_unpack_from": ((normal(numel), [0], [DIM]), {}),
        "ema_update_": (([averages], [normal(numel)], [torch.ones(())], [torch.ones(())], [0.9]), {}),
        "similarity": (([normal(numel)], [normal(numel)], [None], [DIM]), {}),
        "eigen_scale": ((matrix, values, values, 0.1), {}),
        "eigen_scale_dot": ((matrix, values, values, 0.1), {"split": DIM - 1}),
        "corrected_scale_dot": ((matrix, moments, 0.9, 2.0, 0.1), {}),
        "adam_scale": (
            (matrix, normal(DIM, DIM), moments, torch.ones(()), torch.tensor(True)),
            {"betas": (0.9, 0.99), "eps": 1e-8},
        ),
    }
    assert set(calls) == set(backends.OPS)
    for op, (arguments, options) in calls.items():
        given = ops[op][1](*arguments, **options)
        parts = [given] if isinstance(given, torch.Tensor) else list(given or ())
        found[op] = [*parts, *(averages, moments, packed)]
    return {op: [part.clone() for part in parts] for op, parts in found.items()}


def different(one: dict, other: dict) -> set[str]:
    return {
        op
        for op, parts in one.items()
        if not all(torch.equal(*(x.nan_to_num(nan=7.0) for x in pair)) for pair in zip(parts, other[op], strict=True))
    }


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_every_op_gives_the_same_bits_again(backend):
    with deterministic(backend) as ops:
        assert different(results(ops, 2), results(ops, 2)) == set()


def test_loops_in_cpp_give_the_same_bits_with_any_number_of_threads():
    with deterministic("cpp") as ops:
        alone = results(ops, 1)
        for threads in (2, 3):
            assert different(alone, results(ops, threads)) <= OF_TORCH
