"""Deterministic mode: every op on the CPU gives the same bits again."""

import pytest
import torch

from ds_kfac.ops import dispatch, functional
from ds_kfac.ops.functional import packed_numel

DIM = 385


@pytest.fixture
def deterministic():
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def results(threads: int) -> dict[str, list[torch.Tensor]]:
    """Op -> what it gives and what it changes; large enough for several threads to share."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    numel, found = packed_numel(DIM), {}
    x, matrix = normal(515, DIM), normal(DIM, DIM)
    averages, packed = normal(numel), torch.zeros(numel)
    counted, usable = torch.tensor([3.0, 5.0]), torch.tensor([True, False])
    several, scaled = (normal(2, DIM, DIM), normal(2, DIM, DIM).square()), normal(2, DIM, DIM)
    out, waiting = torch.empty(2, DIM, DIM), torch.empty(2, DIM, DIM, dtype=torch.bfloat16)
    calls = {
        "syrk_accumulate_": ((torch.zeros(numel), x), {}),
        "block_syrk_accumulate_": ((torch.zeros(6 * packed_numel(64)), x[:, :384]), {"block": 64}),
        "symmetric_pack_into_": ((packed, [0], [matrix]), {}),
        "symmetric_unpack_from": ((normal(numel), [0], [DIM]), {}),
        "ema_update_": (([averages], [normal(numel)], [torch.ones(())], [torch.ones(())], [0.9]), {}),
        "adam_scale_": (
            (out, waiting, normal(2, DIM, DIM), *several, counted, usable, 0.5),
            {"betas": (0.9, 0.99), "eps": 1e-8},
        ),
        "adam_fold_": ((*several, counted, normal(2, DIM, DIM), usable), {"betas": (0.9, 0.99)}),
        "finish_direction_": ((scaled, *[counted] * 4, torch.tensor([9.0, 0.0]), counted, 0.5), {}),
    }
    assert set(calls) == set(dispatch.OPS)
    for op, (arguments, options) in calls.items():
        given = getattr(functional, op)(*arguments, **options)
        parts = [given] if isinstance(given, torch.Tensor) else list(given or ())
        found[op] = [*parts, *(averages, packed, out, waiting, *several, scaled, counted)]
    return {op: [part.clone() for part in parts] for op, parts in found.items()}


def different(one: dict, other: dict) -> set[str]:
    return {
        op
        for op, parts in one.items()
        if not all(torch.equal(*(x.nan_to_num(nan=7.0) for x in pair)) for pair in zip(parts, other[op], strict=True))
    }


def test_every_op_gives_the_same_bits_again(deterministic):
    assert different(results(2), results(2)) == set()
