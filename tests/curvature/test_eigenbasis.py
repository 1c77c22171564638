"""Decomposition, rotation, and its fallbacks when it fails."""

import pytest
import torch

from ds_kfac.curvature import eigen as eigenbasis
from ds_kfac.curvature.eigen import Eigenbasis, LayerBasis, Refreshed, eigh
from ds_kfac.curvature.factor import KroneckerFactor, Side
from ds_kfac.curvature.methods import EIGEN
from ds_kfac.ops.functional import block_product
from ds_kfac.update.rotation import change_basis_
from tests.close import close, exact
from tests.curvature.one_factor import refresh

SIDES = [
    Side.dense(1),
    Side.dense(63),
    Side.dense(130),
    Side(63, 20),
    Side(64, 2),
    Side.diagonal(9),
    Side.identity(9),
]


def factor(side: Side, rank: int | None = None) -> KroneckerFactor:
    x = torch.randn(
        rank or 2 * side.dim, side.dim, generator=torch.Generator().manual_seed(side.dim)
    )
    return KroneckerFactor(
        side, side.accumulate_(torch.zeros(side.numel), x) / len(x), torch.ones(())
    )


def matrix(kept: KroneckerFactor) -> torch.Tensor:
    """The whole side: its blocks on a diagonal, or the identity."""
    blocks = [block for group in kept.side.blocks(kept.packed_P) for block in group]
    return torch.block_diag(*blocks) if blocks else torch.eye(kept.side.dim)


def dense_vectors(basis: Eigenbasis) -> torch.Tensor:
    return block_product(basis.vectors, torch.eye(len(basis.values)), ())


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_basis_reproduces_the_factor(side):
    kept = factor(side)
    refreshed = refresh(kept)
    basis = refreshed.basis
    Q = dense_vectors(basis)
    assert (refreshed.how, refreshed.retries) == ("eigh" if side.block > 1 else "diagonal", 0)
    close(Q @ torch.diag(basis.values) @ Q.T, matrix(kept), sums=4 * kept.side.dim)
    # into a tridiagonal matrix, its vectors, back; this product
    close(Q.T @ Q, torch.eye(side.dim), sums=4 * side.dim)


@pytest.mark.parametrize("side_A", SIDES, ids=str)
@pytest.mark.parametrize("side_G", [Side.dense(5), Side(7, 3), Side.identity(4)], ids=str)
def test_rotating_is_a_product_with_both_bases_and_restoring_undoes_it(side_A, side_G):
    basis = LayerBasis(refresh(factor(side_G)).basis, refresh(factor(side_A)).basis)
    x = torch.randn(side_G.dim, side_A.dim)
    expected = dense_vectors(basis.G).T @ x @ dense_vectors(basis.A)
    close(basis.rotate(x), expected, sums=side_G.dim + side_A.dim)
    close(basis.restore(basis.rotate(x)), x, sums=5 * (side_G.dim + side_A.dim))


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_a_change_of_basis_takes_old_coordinates_to_new_ones(side):
    still, x = Eigenbasis((), torch.ones(3)), torch.randn(side.dim, 3)
    old, new = (
        LayerBasis(refresh(factor(side, rank)).basis, still) for rank in (None, 3 * side.dim + 1)
    )

    def turned(x_OI: torch.Tensor, old: LayerBasis | None) -> torch.Tensor:
        change_basis_(found := x_OI.clone(), old, new)
        return found

    close(turned(old.rotate(x), old), new.rotate(x), sums=5 * side.dim)
    close(turned(x, None), new.rotate(x), sums=side.dim)
    exact(turned(x, new), x)
    close(dense_vectors(new.squared().G).sum(dim=0), torch.ones(side.dim), sums=5 * side.dim)


def test_values_are_not_negative():
    # rank deficient: rounding makes some slightly negative
    basis = refresh(factor(Side.dense(40), rank=3)).basis
    assert basis.values.min() >= 0


@pytest.mark.parametrize("broken", ["raises", "nan"])
def test_a_failure_is_retried_in_float64(monkeypatch, broken):
    def fails_in_fp32(matrix):
        if matrix.dtype == torch.float32:
            if broken == "raises":
                raise torch.linalg.LinAlgError("did not converge")
            return matrix.diagonal(dim1=-2, dim2=-1), torch.full_like(matrix, float("nan"))
        return eigh(matrix)

    monkeypatch.setattr(eigenbasis, "eigh", fails_in_fp32)
    kept = factor(Side.dense(9))
    refreshed = refresh(kept)
    basis = refreshed.basis
    assert (refreshed.how, refreshed.retries) == ("eigh", 1) and basis.vectors[
        0
    ].dtype == torch.float32
    Q = dense_vectors(basis)
    close(Q @ torch.diag(basis.values) @ Q.T, matrix(kept), sums=4 * kept.side.dim)


def test_failing_in_every_attempt_gives_no_basis(monkeypatch):
    def always_fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(eigenbasis, "eigh", always_fails)
    assert refresh(factor(Side.dense(4))) == Refreshed(None, "failed", 2)


def test_other_errors_are_not_swallowed(monkeypatch):
    def is_a_bug(matrix):
        raise TypeError("a bug")

    monkeypatch.setattr(eigenbasis, "eigh", is_a_bug)
    with pytest.raises(TypeError, match="a bug"):
        refresh(factor(Side.dense(4)))


@pytest.mark.parametrize("side", [Side.dense(5), Side(7, 3), Side.diagonal(4), Side.dense(1)])
def test_flat_vectors_and_back_also_with_a_last_block_of_one(side):
    basis = refresh(factor(side)).basis
    flat = EIGEN.parts[0].flat(basis) if basis.vectors else None
    assert side.basis_numel == (0 if flat is None else len(flat))
    back = EIGEN.joined(side, flat, basis.values)
    assert [v.shape for v in back.vectors] == [v.shape for v in basis.vectors]
    x = torch.rand(side.dim, 3)
    assert torch.equal(block_product(back.vectors, x, ()), block_product(basis.vectors, x, ()))
