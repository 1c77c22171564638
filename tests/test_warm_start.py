"""Refreshes from the last basis: every rung is reached, and each is as good as it says, against float64."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ds_kfac import eigenbasis
from ds_kfac.eigenbasis import Eigenbasis, refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.side import Side
from ds_kfac.warm_start import ITERATIONS, WarmStart

SIDES = [Side.dense(63), Side.dense(257), Side(63, 20), Side(64, 2), Side(257, 64)]  # the last ends in a block of 1
TOLERANCES = WarmStart(keep=1e-3, values=1e-2, qr=1e-1)


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
    """What WarmStart bounds, in float64: |B - diag B| / |B|, and |C - Q diag(values) Q^T| / |C|."""
    Q, C = dense_vectors(basis), matrix(kept)
    B = Q.T @ C @ Q
    off = (B - torch.diag(B.diagonal())).norm() / B.norm()
    return float(off), float((C - Q @ torch.diag(basis.values.double()) @ Q.T).norm() / C.norm())


@pytest.mark.parametrize("side", SIDES, ids=str)
@pytest.mark.parametrize(
    ("turn", "scale", "how"),
    [(0, 1, "kept"), (2e-4, 1, "kept"), (0, 1.01, "values"), (0, 1e-6, "values"), (3e-3, 1, "values"), (1, 1, "eigh")],
)
def test_the_turn_decides_what_is_done(side, turn, scale, how):
    """The expected rung follows from the bounds in float64; where a turn is drawn at random it may lie near one."""
    previous = refresh(factor_of(side)).basis
    turned = factor_of(side, turn=turn, scale=scale)
    result = refresh(turned, previous=previous, tolerances=TOLERANCES)
    assert result.how == how and result.retries == 0
    off, residual = off_and_residual(turned, result.basis)
    if how == "kept":
        assert result.basis is previous and residual < TOLERANCES.keep
    elif how == "values":
        assert result.basis.vectors is previous.vectors and result.basis.values.min() >= 0
        assert off == pytest.approx(residual, rel=1e-2, abs=1e-6) and off < TOLERANCES.values
        expected = (dense_vectors(previous).T @ matrix(turned) @ dense_vectors(previous)).diagonal().clamp(min=0)
        torch.testing.assert_close(result.basis.values.double(), expected, rtol=1e-4, atol=scale * 1e-6)
    else:
        assert residual < 1e-5


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_an_orthogonal_iteration_catches_up_with_a_larger_turn(side, monkeypatch):
    previous = refresh(factor_of(side)).basis
    turned = factor_of(side, turn=0.02)
    assert TOLERANCES.values < off_and_residual(turned, previous)[0] < TOLERANCES.qr
    monkeypatch.setattr(eigenbasis, "EIGEN_METHODS", {})  # no decomposition to be had
    result = refresh(turned, previous=previous, tolerances=TOLERANCES)
    assert result.how == "qr"
    off, residual = off_and_residual(turned, result.basis)
    assert off < TOLERANCES.values and residual < 1.01 * TOLERANCES.values
    Q = dense_vectors(result.basis)
    torch.testing.assert_close(Q.T @ Q, torch.eye(side.dim, dtype=torch.float64), rtol=0, atol=1e-5)
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
    result = refresh(turned, previous=previous, tolerances=WarmStart(values=1e-3, qr=0.5))
    assert result.how == "qr"
    overlap = previous.vectors[0][0].T @ result.basis.vectors[0][0]
    assert overlap.abs().argmax(dim=0).tolist() == list(range(7))


def test_near_repeated_eigenvalues_are_no_trouble():
    """Vectors of a cluster are arbitrary inside it: turning them there is no turn at all."""
    side = Side.dense(64)
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q
    values = torch.cat([torch.ones(32), 1e-2 * torch.ones(32)]).double()
    values = values * (1 + 1e-6 * torch.rand(64, generator=generator, dtype=torch.float64))
    mixed = torch.block_diag(
        *(torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    )
    kept = KroneckerFactor(side, packed(side, Q @ torch.diag(values) @ Q.T), torch.ones(()))
    previous = Eigenbasis(((Q @ mixed).float().unsqueeze(0),), values.float())
    assert refresh(kept, previous=previous, tolerances=TOLERANCES).how == "kept"
    skew = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    R = torch.linalg.matrix_exp(0.02 * (skew - skew.T) / 128**0.5)
    turned = KroneckerFactor(side, packed(side, R @ Q @ torch.diag(values) @ Q.T @ R.T), torch.ones(()))
    result = refresh(turned, previous=previous, tolerances=WarmStart(values=1e-3, qr=1e-1))
    assert result.how == "qr" and off_and_residual(turned, result.basis)[1] < 2e-3


def test_a_flat_spectrum_that_iterations_cannot_follow_is_decomposed():
    side = Side.dense(63)
    previous = refresh(factor_of(side, decay=0.5)).basis
    turned = factor_of(side, decay=0.5, turn=0.3)
    tolerances = WarmStart(values=1e-3, qr=0.5)
    assert tolerances.values < off_and_residual(turned, previous)[0] < tolerances.qr
    result = refresh(turned, previous=previous, tolerances=tolerances)
    assert result.how == "eigh" and off_and_residual(turned, result.basis)[1] < 1e-5


def test_a_rank_deficient_factor_keeps_an_orthogonal_basis():
    side = Side.dense(40)
    size = torch.tensor([[1.0], [0.2], [0.04]])
    x, noise = (size * torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    old, new = (KroneckerFactor(side, packed(side, rows.T @ rows), torch.ones(())) for rows in (x, x + 0.03 * noise))
    result = refresh(new, previous=refresh(old).basis, tolerances=WarmStart(values=1e-3, qr=0.3))
    assert result.how == "qr" and result.basis.values.min() >= 0
    Q = dense_vectors(result.basis)
    torch.testing.assert_close(Q.T @ Q, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-5)
    assert off_and_residual(new, result.basis)[1] < 2e-3


@pytest.mark.parametrize(
    ("tolerances", "turn", "how"),
    [
        (WarmStart(), 0, "eigh"),
        (WarmStart(values=1e-2, qr=1e-1), 0, "values"),
        (WarmStart(keep=1e-3, qr=1e-1), 0, "kept"),
        (WarmStart(keep=1e-3, values=1e-2), 0.02, "eigh"),
        (WarmStart(keep=5e-3, qr=1e-1), 0.02, "qr"),  # until off is below keep
        (WarmStart(qr=1e-1), 0, "qr"),  # an iteration at least
    ],
)
def test_a_tolerance_of_zero_turns_its_rung_off(tolerances, turn, how):
    previous = refresh(factor_of(Side.dense(63))).basis
    assert refresh(factor_of(Side.dense(63), turn=turn), previous=previous, tolerances=tolerances).how == how


@pytest.mark.parametrize("wrong", [(2e-2, 1e-2, 1e-1), (1e-3, 0.0, 1e-4), (-1e-3, 0.0, 0.0)])
def test_tolerances_ascend(wrong):
    with pytest.raises(ValueError, match="must ascend"):
        WarmStart(*wrong)


@pytest.mark.parametrize("side", [Side.dense(1), Side.diagonal(9), Side.identity(9)], ids=str)
def test_a_diagonal_is_always_read_anew(side):
    kept = KroneckerFactor(side, torch.ones(side.numel), torch.ones(()))
    previous = refresh(kept).basis
    changed = KroneckerFactor(side, torch.full((side.numel,), 1.0001), torch.ones(()))
    result = refresh(changed, previous=previous, tolerances=WarmStart(0.5, 0.6, 0.7))
    assert result.how == "diagonal" and torch.equal(result.basis.values, refresh(changed).basis.values)


def test_without_a_previous_basis_or_tolerances_it_decomposes():
    kept = factor_of(Side.dense(63))
    previous = refresh(kept, tolerances=TOLERANCES)
    assert previous.how == "eigh" and refresh(kept, previous=previous.basis).how == "eigh"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_basis_is_replaced(broken):
    kept = factor_of(Side(63, 20))
    previous = refresh(kept).basis
    damaged = Eigenbasis((previous.vectors[0] * broken, previous.vectors[1]), previous.values)
    assert refresh(kept, previous=damaged, tolerances=WarmStart(0.5, 0.6, 0.7)).how == "eigh"


class Products(TorchFunctionMode):
    """The dtypes of all matrix products inside."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul):
            self.dtypes.append((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "dtype"), [("highest", torch.float32), ("high", torch.float64)])
def test_products_are_exact_whatever_the_process_allows(precision, dtype):
    """ "high" is TF32 on a GPU; and a user may be under autocast."""
    side = Side(63, 20)
    previous, turned = refresh(factor_of(side)).basis, factor_of(side, turn=0.02)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with Products() as products, torch.autocast("cpu"):
            result = refresh(turned, previous=previous, tolerances=TOLERANCES)
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.how == "qr" and set(products.dtypes) == {(dtype, dtype)}
    assert 2 * len(side.groups) * 2 <= len(products.dtypes) <= 2 * len(side.groups) * (1 + ITERATIONS)
    assert {part.dtype for part in (*result.basis.vectors, result.basis.values)} == {torch.float32}
    assert off_and_residual(turned, result.basis)[1] < 1.01 * TOLERANCES.values
