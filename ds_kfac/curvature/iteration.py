"""Refresh an eigenbasis without an eigendecomposition, by one step of orthogonal iteration that
starts from the previous eigenbasis Q.

    Z = C Q,  columns sorted by diag(Q^T C Q), the largest first
    Q' = the orthogonal factor of Z = Q' R
    values = diag(Q'^T C Q'),  columns sorted by them, the smallest first, as eigh does

R has a positive diagonal, so each column of Q' keeps its sign. Between two refreshes a running
average changes little, so one step tracks its eigenvectors closely enough for preconditioning.
Clusters of eigenvalues are harmless, because no step divides by a difference of eigenvalues.
Source: SOAP, Vyas et al. 2024 (arXiv:2409.11321); orthogonal iteration: Golub & Van Loan, 8.2.4.

Only GPUs use this step. It was tested on an H100 (docs/gpu.md). eigh would leave much of a GPU
idle. Q' only needs products, a Cholesky factor and a triangular solve, each batched over all sides
of one width. On a CPU, LAPACK's QR takes as long as eigh up to width 2,048 (docs/notes/kernels.md),
so CPUs use eigh.

Cholesky-QR squares the condition number of Z, so three measures are needed. Columns of Q along
which C is smaller than its rounding errors stay as they are. The columns of Z are scaled to norm
one, which does not change Q'. Cholesky-QR runs twice, the first time with a shift (Fukaya et al.
2020, arXiv:1809.11085). If a step fails its checks, eigh is used instead.

Shape suffixes: n blocks of width b.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_kfac.curvature import eigen
from ds_kfac.curvature.eigen import (
    TOLERANCE,
    BlockEigh,
    Place,
    Refreshed,
    Request,
    fp32_products,
    grouped,
    probe,
)

EXACT_EVERY = 10
"""One in this many refreshes uses eigh."""
FLOPS = 4 + 2 * (2 + 1 / 3 + 1)
"""FLOPs of a step, divided by b^3. A step computes C Q and C Q', and twice computes Z^T Z, its
Cholesky factor and a triangular solve."""
OFF = 0.5
"""Limit on |off-diagonal of Q'^T C Q'| / |C| in Frobenius norms. A step that exceeds the limit is
rejected."""
EPS = torch.finfo(torch.float32).eps


def refresh_from_last(requests: Sequence[Request]) -> list[Refreshed]:
    """Decompose factors by one step of the iteration, or by eigh.

    A factor on a GPU takes a step of the iteration if its request has the factor's previous
    eigenbasis. If the step fails its checks, the factor is decomposed by eigh, which counts as a
    retry. All other factors are decomposed by eigh directly. Synchronises with the device once, and
    again in :func:`ds_kfac.curvature.eigen.refresh_all`, which calls eigh.
    """
    suited = [
        index
        for index, request in enumerate(requests)
        if grouped(request.factor.packed_P.device) and _has_last_basis(request)
    ]
    results = dict(zip(suited, _iterated([requests[index] for index in suited]), strict=True))
    failed = {index for index, result in results.items() if result.basis is None}
    by_eigh = [index for index in range(len(requests)) if index not in results or index in failed]
    exact = eigen.refresh_all([requests[index] for index in by_eigh])
    for index, result in zip(by_eigh, exact, strict=True):
        results[index] = replace(result, retries=result.retries + (index in failed))
    return [results[index] for index in range(len(requests))]


def orthogonal_iteration(C_nbb: Tensor, Q_nbb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of the iteration that the file's docstring describes. Does not synchronise.

    Args:
        C_nbb: fp32, the blocks. They are symmetric, finite, and positive semidefinite up to
            rounding errors.
        Q_nbb: fp32, the eigenvectors from the previous refresh, in columns. They are orthogonal up
            to rounding errors, which may be those of a 16-bit dtype.

    Returns three tensors: the eigenvalues [n, b], ascending and at least 0; the eigenvectors
    [n, b, b]; and bool [n], whether each block's step passed its checks.
    """
    with fp32_products("ieee", C_nbb.device):
        Z_nbb = C_nbb @ Q_nbb
        sizes_nb = (Q_nbb * Z_nbb).sum(-2)
        top = sizes_nb.amax(-1)[:, None, None]
        top = torch.where(top > 0, top, 1)
        # If C along a column of Q is smaller than the added term, it is only rounding error (as in
        # update/rotation.py). The added term then dominates in Z, so the column stays as it is.
        Z_nbb = Z_nbb / top + max(8.0, C_nbb.shape[-1] ** 0.5) * EPS * Q_nbb
        Z_nbb = _columns(Z_nbb, sizes_nb.argsort(dim=-1, descending=True, stable=True))
        Z_nbb = Z_nbb / torch.linalg.vector_norm(Z_nbb, dim=-2, keepdim=True)
        valid_n = torch.ones(len(C_nbb), dtype=torch.bool, device=C_nbb.device)
        for shift in (_shift(C_nbb.shape[-1]), 0.0):
            gram_nbb = Z_nbb.mT @ Z_nbb
            gram_nbb.diagonal(dim1=-2, dim2=-1).add_(shift)
            lower_nbb, failed = torch.linalg.cholesky_ex(gram_nbb)
            valid_n &= failed == 0
            Z_nbb = torch.linalg.solve_triangular(lower_nbb.mT, Z_nbb, upper=True, left=False)
        values_nb = (Z_nbb * (C_nbb @ Z_nbb)).sum(-2)
    size_n1 = torch.linalg.matrix_norm(C_nbb)[:, None]
    # |diagonal|^2 / |C|^2
    on_n = (values_nb / torch.where(size_n1 > 0, size_n1, 1)).square().sum(-1)
    x_b = probe(C_nbb)
    rotated_nb = (Z_nbb * x_b[:, None]).sum(-2)
    strayed = torch.linalg.vector_norm((Z_nbb * rotated_nb[:, None, :]).sum(-1) - x_b, dim=-1)
    # a comparison with NaN is false
    valid_n &= (strayed <= TOLERANCE * x_b.norm()) & ((on_n >= 1 - OFF**2) | (size_n1[:, 0] == 0))
    values_nb, order_nb = values_nb.sort(dim=-1, stable=True)
    return values_nb.clamp(min=0), _columns(Z_nbb, order_nb), valid_n


def _shift(width: int) -> float:
    """Return a shift just above the rounding error of Z^T Z, where Z has columns of norm one."""
    return 4 * width**0.5 * EPS


def _columns(x_nbb: Tensor, order_nb: Tensor) -> Tensor:
    return x_nbb.take_along_dim(order_nb[:, None, :], dim=-1)


def _has_last_basis(request: Request) -> bool:
    """Return whether the request has a previous eigenbasis (``last``) with the same blocks as the
    factor."""
    side = request.factor.side
    last = request.last
    if side.block < 2 or last is None:
        return False
    return [tuple(vectors.shape[:2]) for vectors in last.vectors] == [*map(tuple, side.groups)]


def _iterated(requests: Sequence[Request]) -> list[Refreshed]:
    """Take one step of the iteration for each request. All requests must have a previous
    eigenbasis.

    Returns the results in the order of the requests. A result has no basis if a block of its factor
    failed a check.
    """
    places: list[Place] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    valid: list[Tensor] = []
    for call, blocks in eigen.calls(requests):
        last_vectors = []
        for index, group in call:
            last = requests[index].last
            assert last is not None
            last_vectors.append(last.vectors[group])
        sizes = [len(block) for block in blocks]
        step = orthogonal_iteration(torch.cat(blocks), torch.cat(last_vectors))
        values, vectors, passed = (part.split(sizes) for part in step)
        places += call
        for group_values, group_vectors in zip(values, vectors, strict=True):
            # copies, because a view would keep the batch in memory, and in checkpoints
            pairs.append((group_values.clone(), group_vectors.clone()))
        valid += [part.all() for part in passed]
    # one wait for the device, for the checks of all calls
    is_valid = torch.stack(valid).tolist() if valid else []
    solved: dict[Place, BlockEigh] = {
        place: (pair if ok else None, 0)
        for place, pair, ok in zip(places, pairs, is_valid, strict=True)
    }
    return eigen.joined(requests, solved, "iteration")
