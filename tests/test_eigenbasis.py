"""Decomposition and the ladder of what happens when it fails."""

import pytest
import torch

from ds_kfac import eigenbasis
from ds_kfac.eigenbasis import Eigenbasis, refresh


def factor(dim: int, rank: int | None = None) -> torch.Tensor:
    x = torch.randn(rank or 2 * dim, dim, generator=torch.Generator().manual_seed(dim))
    return x.T @ x / len(x)


@pytest.mark.parametrize("dim", [1, 2, 63, 130])
def test_basis_reproduces_the_factor(dim):
    C = factor(dim)
    basis, failures = refresh(C)
    assert failures == 0
    torch.testing.assert_close(basis.vectors @ torch.diag(basis.values) @ basis.vectors.T, C, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(basis.vectors.T @ basis.vectors, torch.eye(dim), rtol=0, atol=1e-5)


def test_values_are_not_negative():
    basis, _ = refresh(factor(40, rank=3))  # rank deficient: rounding makes some slightly negative
    assert basis.values.min() >= 0


@pytest.mark.parametrize("broken", ["raises", "nan"])
def test_a_failure_is_retried_in_float64(monkeypatch, broken):
    def fails_in_fp32(matrix):
        if matrix.dtype == torch.float32:
            if broken == "raises":
                raise torch.linalg.LinAlgError("did not converge")
            return Eigenbasis(torch.full_like(matrix, float("nan")), matrix.diagonal())
        return eigenbasis.eigh(matrix)

    monkeypatch.setitem(eigenbasis.EIGEN_METHODS, "eigh", fails_in_fp32)
    C = factor(9)
    basis, failures = refresh(C)
    assert failures == 1 and basis.vectors.dtype == torch.float32
    torch.testing.assert_close(basis.vectors @ torch.diag(basis.values) @ basis.vectors.T, C, rtol=1e-4, atol=1e-5)


def test_failing_on_every_rung_gives_no_basis(monkeypatch):
    def always_fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setitem(eigenbasis.EIGEN_METHODS, "eigh", always_fails)
    assert refresh(factor(4)) == (None, 2)


def test_other_errors_are_not_swallowed(monkeypatch):
    def is_a_bug(matrix):
        raise TypeError("a bug")

    monkeypatch.setitem(eigenbasis.EIGEN_METHODS, "eigh", is_a_bug)
    with pytest.raises(TypeError, match="a bug"):
        refresh(factor(4))
