"""Eigenbasis of a factor, and what to do when a decomposition fails. Shape suffix: D the factor's side."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Eigenbasis:
    """factor = vectors diag(values) vectors^T.

    Attributes:
        vectors: fp32 [D, D], eigenvectors in columns.
        values: fp32 [D], ascending, clamped at 0 (a second moment has no negative ones but for rounding).
    """

    vectors: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.values.nbytes


def eigh(factor_DD: Tensor) -> Eigenbasis:
    """Exact decomposition in the dtype and on the device of ``factor_DD``; fp32 result on its device."""
    values, vectors = torch.linalg.eigh(factor_DD)
    return Eigenbasis(vectors.float().contiguous(), values.float().clamp(min=0))


EIGEN_METHODS: dict[str, Callable[[Tensor], Eigenbasis]] = {"eigh": eigh}


def _finite(basis: Eigenbasis) -> bool:
    return bool(torch.isfinite(basis.vectors).all() & torch.isfinite(basis.values).all())


def refresh(factor_DD: Tensor, *, method: str = "eigh") -> tuple[Eigenbasis | None, int]:
    """Decompose a finite factor, climbing a ladder on failure: as given, in float64, in float64 on the CPU.

    The input is checked by the caller (LAPACK returns NaN for NaN without a word, cuSOLVER raises).

    Returns the basis, or None when every rung failed, and the number of rungs that failed. Synchronises with
    the device, as every decomposition does; called on refresh steps only.
    """
    decompose = EIGEN_METHODS[method]
    rungs = [factor_DD, factor_DD.double()]
    if factor_DD.device.type != "cpu":
        rungs.append(factor_DD.double().cpu())
    for failures, matrix in enumerate(rungs):
        try:
            basis = decompose(matrix)
        except RuntimeError:  # LinAlgError, or cuSOLVER's own; the next rung is more exact, then elsewhere
            continue
        if _finite(basis):
            device = factor_DD.device
            return Eigenbasis(basis.vectors.to(device), basis.values.to(device)), failures
    return None, len(rungs)
