"""A refresh without an eigendecomposition: one step of orthogonal iteration from the last eigenbasis.

    Z = C Q,  columns sorted by diag(Q^T C Q), the largest first         Q' = the orthogonal factor of Z = Q' R
    values = diag(Q'^T C Q'),  columns sorted by them, the smallest first, as eigh does

R has a positive diagonal, so a column keeps the sign of the one that it comes from. Between two refreshes a running
average changes little, and a step is as much of an eigendecomposition as a direction in the basis needs. It leaves no
cluster of eigenvalues worse than it was, where methods that divide by gaps fail. Source: SOAP, Vyas et al. 2024
(arXiv:2409.11321); orthogonal iteration: Golub & Van Loan, 8.2.4.

On a GPU alone (none has run it yet): Q' comes by products, a Cholesky factor and a triangular solve, batched over all
sides of one width, where eigh leaves the device idle. On a CPU LAPACK's QR takes as long as eigh up to 2,048
(docs/notes/kernels.md): eigh stays.

Cholesky-QR squares the condition of Z, so: what is below rounding in C is not iterated, its columns of Q stay; columns
of Z are scaled to norm one, which changes nothing of Q'; and there are two passes, the first with a shift (Fukaya et
al. 2020, arXiv:1809.11085). What goes wrong all the same is seen, and decomposed by eigh.

Shape suffixes: n blocks of width b.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import (
    STACK_NUMEL,
    TOLERANCE,
    Eigenbasis,
    Refreshed,
    Request,
    fp32_products,
    grouped,
    probe,
    refresh_all,
)

EXACT_EVERY = 10
"""Refreshes, one of which is by eigh."""
FLOPS = 4 + 2 * (2 + 1 / 3 + 1)
"""In b^3: C Q and C Q'; twice Z^T Z, its Cholesky factor and a triangular solve."""
OFF = 0.5
"""|off-diagonal of Q'^T C Q'| / |C| above which one step was too little."""
EPS = torch.finfo(torch.float32).eps

Place = tuple[int, int]
"""A request and a group of equal blocks in its factor."""


def refresh_from_last(requests: Sequence[Request]) -> list[Refreshed]:
    """As :func:`ds_kfac.curvature.eigen.refresh_all`, by a step of the iteration where a request has a last basis and
    the device is a GPU, and by eigh where a guard says so, which counts as a retry. Synchronises once more than that.
    """
    results = dict[int, Refreshed]()
    if requests and grouped(requests[0].factor.packed_P.device):
        results |= _iterated({index: request for index, request in enumerate(requests) if _fits(request)})
    others = [index for index in range(len(requests)) if index not in results or results[index].basis is None]
    exact = refresh_all([requests[index] for index in others])
    for index, found in zip(others, exact, strict=True):
        results[index] = replace(found, retries=found.retries + (index in results))
    return [results[index] for index in range(len(requests))]


def orthogonal_iteration(C_nbb: Tensor, Q_nbb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step, see the file's docstring. Does not synchronise.

    Args:
        C_nbb: fp32, symmetric, finite; positive semidefinite but for rounding.
        Q_nbb: fp32, the last eigenvectors in columns, orthogonal but for rounding, be it to 16 bits.

    Returns values [n, b], ascending, not below 0; vectors [n, b, b]; and bool [n], whether they can be used.
    """
    with fp32_products("ieee", C_nbb.device):
        Z_nbb = C_nbb @ Q_nbb
        sizes_nb = (Q_nbb * Z_nbb).sum(-2)
        top = sizes_nb.amax(-1)[:, None, None]
        top = torch.where(top > 0, top, 1)
        # the level at which directions of a factor are taken for rounding, see not_rounding in update/rotation.py
        Z_nbb = Z_nbb / top + max(8.0, C_nbb.shape[-1] ** 0.5) * EPS * Q_nbb
        Z_nbb = _columns(Z_nbb, sizes_nb.argsort(dim=-1, descending=True, stable=True))
        Z_nbb = Z_nbb / torch.linalg.vector_norm(Z_nbb, dim=-2, keepdim=True)
        right = torch.ones(len(C_nbb), dtype=torch.bool, device=C_nbb.device)
        for shift in (_shift(C_nbb.shape[-1]), 0.0):
            gram_nbb = Z_nbb.mT @ Z_nbb
            gram_nbb.diagonal(dim1=-2, dim2=-1).add_(shift)
            lower_nbb, failed = torch.linalg.cholesky_ex(gram_nbb)
            right &= failed == 0
            Z_nbb = torch.linalg.solve_triangular(lower_nbb.mT, Z_nbb, upper=True, left=False)
        values_nb = (Z_nbb * (C_nbb @ Z_nbb)).sum(-2)
    size_n1 = torch.linalg.matrix_norm(C_nbb)[:, None]
    on_n = (values_nb / torch.where(size_n1 > 0, size_n1, 1)).square().sum(-1)  # |diagonal|^2 / |C|^2
    x_b = probe(C_nbb)
    rotated_nb = (Z_nbb * x_b[:, None]).sum(-2)
    strayed = torch.linalg.vector_norm((Z_nbb * rotated_nb[:, None, :]).sum(-1) - x_b, dim=-1)
    # a comparison with NaN is false
    right &= (strayed <= TOLERANCE * x_b.norm()) & ((on_n >= 1 - OFF**2) | (size_n1[:, 0] == 0))
    values_nb, order_nb = values_nb.sort(dim=-1, stable=True)
    return values_nb.clamp(min=0), _columns(Z_nbb, order_nb), right


def _shift(width: int) -> float:
    """Above what rounds in a Gram matrix of columns of norm one."""
    return 4 * width**0.5 * EPS


def _columns(x_nbb: Tensor, order_nb: Tensor) -> Tensor:
    return x_nbb.take_along_dim(order_nb[:, None, :], dim=-1)


def _fits(request: Request) -> bool:
    """Whether there is a last basis, of the factor as it is blocked now."""
    side, last = request.factor.side, request.last
    return side.block > 1 and last is not None and [v.shape[:2] for v in last.vectors] == [*map(tuple, side.groups)]


def _calls(requests: dict[int, Request]) -> list[list[Place]]:
    """Blocks of one width together, as far as memory allows."""
    calls: list[list[Place]] = []
    filling: dict[int, tuple[list[Place], int]] = {}
    for index, request in requests.items():
        for group, (count, width) in enumerate(request.factor.side.groups):
            call, held = filling.get(width, ([], 0))
            if not call or request.alone or (held + count) * width**2 > STACK_NUMEL:
                call, held = [], 0
                calls.append(call)
            call.append((index, group))
            if not request.alone:
                filling[width] = call, held + count
    return calls


def _iterated(requests: dict[int, Request]) -> dict[int, Refreshed]:
    """Of each; a basis of None where a guard says no, of any block."""
    found: dict[Place, tuple[Tensor, Tensor]] = {}
    flags: dict[Place, Tensor] = {}
    for call in _calls(requests):
        factors, groups = [requests[index].factor for index, _ in call], [group for _, group in call]
        lasts = [basis for index, _ in call if (basis := requests[index].last) is not None]
        C_nbb = torch.cat([own.side.group(own.packed_P, group) for own, group in zip(factors, groups, strict=True)])
        Q_nbb = torch.cat([last.vectors[group] for last, group in zip(lasts, groups, strict=True)])
        counts = [own.side.groups[group][0] for own, group in zip(factors, groups, strict=True)]
        parts = (part.split(counts) for part in orthogonal_iteration(C_nbb, Q_nbb))
        for place, values, vectors, right in zip(call, *parts, strict=True):
            # copies: a view would keep the whole stack in memory, and in checkpoints
            found[place], flags[place] = (values.clone(), vectors.clone()), right.all()
    if not flags:
        return {}
    usable = dict(zip(flags, torch.stack([*flags.values()]).tolist(), strict=True))
    results: dict[int, Refreshed] = {}
    for index, request in requests.items():
        places = [(index, group) for group in range(len(request.factor.side.groups))]
        if not all(usable[place] for place in places):
            results[index] = Refreshed(None, "failed")
            continue
        values = torch.cat([found[place][0].reshape(-1) for place in places])
        results[index] = Refreshed(Eigenbasis(tuple(found[place][1] for place in places), values), "iteration")
    return results
