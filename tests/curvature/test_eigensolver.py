"""Factors that are refreshed together: on a CPU as if alone, in stacks as right as alone."""

import pytest
import torch

from ds_kfac.curvature import eigen
from ds_kfac.curvature.eigen import Eigenbasis, Request, eigh, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.ops.functional import block_product
from tests.close import close
from tests.curvature.one_factor import refresh

SIDES = [
    Side.dense(63),
    Side.dense(1),
    Side.dense(129),
    Side(63, 20),
    Side.dense(2),
    Side.identity(5),
    Side.dense(63),
    Side.diagonal(9),
    Side(64, 2),
    Side.dense(257),
    Side(257, 64),
    Side.dense(20),
    Side.dense(129),
]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def factor(side: Side, seed: int, device: str = "cpu") -> KroneckerFactor:
    x = torch.randn(2 * side.dim, side.dim, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(0, -2, side.dim)  # eigenvalues well apart
    kept = KroneckerFactor(
        side, side.accumulate_(torch.zeros(side.numel), x) / len(x), torch.ones(())
    )
    return KroneckerFactor(side, kept.packed_P.to(device), kept.updates.to(device))


def matrix(kept: KroneckerFactor) -> torch.Tensor:
    blocks = [block for group in kept.side.blocks(kept.packed_P) for block in group]
    return (
        torch.block_diag(*blocks).double()
        if blocks
        else torch.eye(kept.side.dim, dtype=torch.float64)
    )


def dense_vectors(basis: Eigenbasis) -> torch.Tensor:
    return block_product(
        basis.vectors, torch.eye(len(basis.values), device=basis.values.device), ()
    ).double()


def residual(kept: KroneckerFactor, basis: Eigenbasis) -> float:
    """In float64: how far Q diag(values) Q^T is from C and Q from orthogonal, relatively."""
    Q, C = dense_vectors(basis), matrix(kept).to(basis.values.device)
    wrong = (C - Q @ torch.diag(basis.values.double()) @ Q.T).norm() / C.norm()
    return max(
        float(wrong), float((Q.T @ Q - torch.eye(len(Q), device=Q.device)).norm()) / len(Q) ** 0.5
    )


WRONG = 1e-4
"""A residual far above rounding; one of a wrong result is 1e-2 or more."""


def assert_solved(kept: KroneckerFactor, basis: Eigenbasis) -> None:
    """Into a tridiagonal matrix, its eigenvectors and back: four sums over a side."""
    close(residual(kept, basis), 0.0, scale=1.0, sums=4 * kept.side.block, dtype=torch.float32)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Stacks of up to 64."""
    monkeypatch.setattr(eigen, "GROUPED", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(eigen, "BATCHED_UP_TO", 64)


# --- which together ---


def batches(shapes, *, alone=(), **options) -> list[list[int]]:
    """Of [n, b] blocks each: which share a call."""
    sides = [Side(n * b, b) for n, b in shapes]
    requests = [
        Request(KroneckerFactor.empty(side), alone=i in alone) for i, side in enumerate(sides)
    ]
    return [[index for index, _ in call] for call, _ in eigen.calls(requests, **options)]


def test_small_ones_of_one_width_share_a_call_as_far_as_memory_allows(as_on_a_gpu, monkeypatch):
    shapes = [(1, 64), (1, 60), (3, 60), (1, 65), (1, 65), (1, 64), (2, 63), (1, 60)]
    assert sorted(batches(shapes, widest=64)) == [[0, 5], [1, 2, 7], [3], [4], [6]]
    monkeypatch.setattr(eigen, "BATCH_NUMEL", 2 * 60**2)
    assert sorted(batches(shapes, widest=64)) == [[0], [1], [2], [3], [4], [5], [6], [7]]
    monkeypatch.setattr(eigen, "BATCH_NUMEL", 4 * 60**2)
    assert [1, 2] in batches(shapes, widest=64), "one that is too large by itself is not cut"
    assert batches([]) == [] and batches(shapes[1:3], alone={1}) == [[0], [1]]


# --- results ---


def test_on_a_cpu_a_result_does_not_depend_on_what_else_is_refreshed():
    factors = [factor(side, seed) for seed, side in enumerate(SIDES)]
    together = refresh_all([Request(kept) for kept in factors])
    for kept, found in zip(factors, together, strict=True):
        alone = refresh(kept)
        plain = (
            [eigen.eigh(group) for group in kept.side.blocks(kept.packed_P)]
            if kept.side.block > 1
            else []
        )
        assert found.how == alone.how == ("eigh" if plain else "diagonal") and found.retries == 0
        assert torch.equal(found.basis.values, alone.basis.values)
        for (values, vectors), ours, others in zip(
            plain, found.basis.vectors, alone.basis.vectors, strict=True
        ):
            assert (
                torch.equal(vectors, ours)
                and torch.equal(ours, others)
                and torch.isin(values, found.basis.values).all()
            )


def test_stacks_give_what_single_calls_give(as_on_a_gpu, monkeypatch):
    shapes = []

    def watched(stack):
        shapes.append(tuple(stack.shape[:2]))
        assert not torch.is_grad_enabled()
        return eigh(stack)

    monkeypatch.setattr(eigen, "eigh", watched)
    factors = [factor(side, seed) for seed, side in enumerate(SIDES)]
    with torch.no_grad():
        found = refresh_all([Request(kept) for kept in factors])
    assert sorted(shapes) == [
        (1, 1),
        (1, 3),
        (1, 129),
        (1, 129),
        (1, 257),
        (2, 63),
        (4, 20),
        (4, 64),
        (33, 2),
    ]
    for kept, result in zip(factors, found, strict=True):
        assert_solved(kept, result.basis)
        assert result.retries == 0
        for tensor in (*result.basis.vectors, result.basis.values):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, (
                "a view would keep others' results alive"
            )


def breaking(how: str, bad: torch.Tensor):
    """eigh that fails in fp32 for stacks with that block in them."""

    def method(stack):
        values, vectors = eigh(stack)
        if stack.dtype == torch.float32 and stack.shape[1:] == bad.shape:
            hit = (stack == bad).flatten(1).all(-1)
            if how == "raises" and hit.any():
                raise torch.linalg.LinAlgError("did not converge")
            vectors = torch.where(
                hit[:, None, None], torch.nan if how == "nan" else vectors * 1.01, vectors
            )
        return values, vectors

    return method


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("how", ["raises", "nan", "not orthogonal"])
def test_a_bad_factor_spoils_no_other(as_on_a_gpu, monkeypatch, how, device):
    factors = [factor(Side.dense(20), seed, device) for seed in range(4)]
    (bad,) = factors[2].side.blocks(factors[2].packed_P)[0]
    monkeypatch.setattr(eigen, "eigh", breaking(how, bad))
    found = refresh_all([Request(kept) for kept in factors])
    assert [result.retries for result in found] == [0, 0, 1, 0] and {
        result.how for result in found
    } == {"eigh"}
    for kept, result in zip(factors, found, strict=True):
        assert_solved(kept, result.basis)


def test_without_any_way_a_factor_has_no_basis_and_the_others_have(as_on_a_gpu, monkeypatch):
    def method(stack):
        if (stack.diagonal(dim1=-2, dim2=-1).sum(-1) > 1e6).any():
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(stack)

    monkeypatch.setattr(eigen, "eigh", method)
    factors = [factor(Side.dense(20), seed) for seed in range(3)]
    factors[1] = KroneckerFactor(factors[1].side, 1e8 * factors[1].packed_P, factors[1].updates)
    found = refresh_all([Request(kept) for kept in factors])
    assert [result.how for result in found] == ["eigh", "failed", "eigh"] and found[1].retries == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@torch.no_grad()
def test_mixed_sizes(device, as_on_a_gpu):
    """Their inputs are dropped at once and written over."""
    large = (700, 1025, 600, 513) if device == "cuda" else (200, 130)
    sides = [*SIDES, *map(Side.dense, large)]
    originals = [factor(side, seed) for seed, side in enumerate(sides)]
    dues = [Request(factor(side, seed, device)) for seed, side in enumerate(sides)]
    found = refresh_all(dues)
    del dues
    junk = [torch.full((700, 700), torch.nan, device=device) for _ in range(20)]
    assert {result.how for result in found} == {"eigh", "diagonal"}
    assert max(residual(kept, r.basis) for kept, r in zip(originals, found, strict=True)) < WRONG
    assert sum(result.retries for result in found) == 0 and len(junk) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_same_factors_together_give_the_same_bits():
    dues = [
        Request(factor(side, seed, "cuda"))
        for seed, side in enumerate([*SIDES, Side.dense(700), Side.dense(1025)])
    ]
    first, second = refresh_all(dues), refresh_all(dues)
    for one, other in zip(first, second, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(one.basis.vectors, other.basis.vectors, strict=True)
        )
