"""A QR step from the last basis, against float64."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ds_kfac.curvature.eigenbasis import Eigenbasis, Refreshed, Request, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.side import Side
from tests.close import close
from tests.curvature.one_factor import refresh

SIDES = [Side.dense(63), Side.dense(257), Side(63, 20), Side(64, 2), Side(257, 64)]  # the last ends in a block of 1


def factor_of(side: Side, *, turn: float = 0.0, scale: float = 1.0, decay: float = 20.0) -> KroneckerFactor:
    """Q diag Q^T with eigenvalues from 1 to exp(-decay); ``turn`` rotates Q by about that angle, at random."""
    generator = torch.Generator().manual_seed(side.dim)
    whole = torch.zeros(side.dim, side.dim, dtype=torch.float64)
    start = 0
    for count, width in side.groups:
        for _ in range(count):
            x = torch.randn(width, width, generator=generator, dtype=torch.float64)
            Q = torch.linalg.qr(x).Q
            skew = torch.randn(width, width, generator=generator, dtype=torch.float64)
            Q = torch.linalg.matrix_exp(turn * (skew - skew.T) / (2 * width) ** 0.5) @ Q
            values = torch.exp(-decay * torch.rand(width, generator=generator, dtype=torch.float64))
            whole[start : start + width, start : start + width] = scale * Q @ torch.diag(values) @ Q.T
            start += width
    return KroneckerFactor(side, packed(side, whole), torch.ones(()))


def packed(side: Side, whole: torch.Tensor) -> torch.Tensor:
    pieces, start = [], 0
    for count, width in side.groups:
        rows, columns = torch.tril_indices(width, width)
        for _ in range(count):
            pieces.append(whole[start + rows, start + columns])
            start += width
    return torch.cat(pieces).float()


def matrix(kept: KroneckerFactor) -> torch.Tensor:
    return torch.block_diag(*(block for group in kept.side.blocks(kept.packed_P) for block in group)).double()


def dense_vectors(basis: Eigenbasis) -> torch.Tensor:
    return basis.restore(torch.eye(len(basis.values))).double()


def off_and_residual(kept: KroneckerFactor, basis: Eigenbasis) -> tuple[float, float]:
    """In float64, with B = Q^T C Q: |B - diag B| / |B|, and |C - Q diag(values) Q^T| / |C|."""
    Q, C = dense_vectors(basis), matrix(kept)
    B = Q.T @ C @ Q
    off = (B - torch.diag(B.diagonal())).norm() / B.norm()
    return float(off), float((C - Q @ torch.diag(basis.values.double()) @ Q.T).norm() / C.norm())


def qr_step(kept: KroneckerFactor, previous: Eigenbasis) -> Refreshed:
    """The refresh after an exact one."""
    (result,) = refresh_all([Request(kept, previous)], exact_every=2)
    return result


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_a_step_catches_up_with_a_turn(side):
    previous = refresh(factor_of(side)).basis
    turned = factor_of(side, turn=0.02)
    result = qr_step(turned, previous)
    assert result.how == "qr" and result.retries == 0
    assert off_and_residual(turned, result.basis)[0] < off_and_residual(turned, previous)[0] / 2
    assert off_and_residual(turned, result.basis)[1] < off_and_residual(turned, previous)[1] / 2
    Q = dense_vectors(result.basis)
    close(Q.T @ Q, torch.eye(side.dim), sums=2 * side.dim)
    assert all(new.is_contiguous() for new in result.basis.vectors)


def test_an_iteration_leaves_columns_in_their_places():
    """Moments are kept by place. Eigenvalues far apart, so that every new vector has one old one."""
    side = Side.dense(7)
    spread = torch.diag(torch.tensor([1e-3, 1, 1e-5, 0.1, 10, 1e-4, 1e-2], dtype=torch.float64))
    shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    previous = Eigenbasis((torch.eye(7)[:, shuffled].unsqueeze(0),), spread.diagonal()[shuffled].float())
    skew = torch.randn(7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    turn = torch.linalg.matrix_exp(0.02 * (skew - skew.T))
    turned = KroneckerFactor(side, packed(side, turn @ spread @ turn.T), torch.ones(()))
    result = qr_step(turned, previous)
    assert result.how == "qr"
    overlap = previous.vectors[0][0].T @ result.basis.vectors[0][0]
    assert overlap.abs().argmax(dim=0).tolist() == list(range(7))


def test_a_rank_deficient_factor_keeps_an_orthogonal_basis():
    side = Side.dense(40)
    size = torch.tensor([[1.0], [0.2], [0.04]])
    x, noise = (size * torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    old, new = (KroneckerFactor(side, packed(side, rows.T @ rows), torch.ones(())) for rows in (x, x + 0.03 * noise))
    result = qr_step(new, refresh(old).basis)
    assert result.how == "qr" and result.basis.values.min() >= 0
    Q = dense_vectors(result.basis)
    close(Q.T @ Q, torch.eye(40), sums=2 * 40)
    assert off_and_residual(new, result.basis)[1] < off_and_residual(new, refresh(old).basis)[1]


@pytest.mark.parametrize("side", [Side.diagonal(9), Side.identity(9)], ids=str)
def test_a_diagonal_is_always_read_anew(side):
    kept = KroneckerFactor(side, torch.ones(side.numel), torch.ones(()))
    previous = refresh(kept).basis
    changed = KroneckerFactor(side, torch.full((side.numel,), 1.0001), torch.ones(()))
    result = qr_step(changed, previous)
    assert result.how == "diagonal" and torch.equal(result.basis.values, refresh(changed).basis.values)


class Products(TorchFunctionMode):
    """The dtypes of all matrix products inside."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
            self.dtypes.append((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))
