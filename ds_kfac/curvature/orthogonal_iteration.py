"""A refresh by one step of orthogonal iteration from the last eigenbasis, between exact ones.

Shape suffixes: n blocks of width b.
"""

import torch
from torch import Tensor

from ds_kfac.curvature.precision import SWITCH


def iterated(blocks: Tensor, vectors: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration, as SOAP takes (Vyas et al. 2024): Q <- qr(C Q), values <- diag(Q^T C Q).

    20/3 b^3 FLOPs a block where an eigh has 9. Does not synchronise with the host; a result that is not finite is the
    caller's to find.

    Args:
        blocks: C, fp32 [n, b, b].
        vectors: last eigenvectors, fp32 [n, b, b]; every new one stays near the old one at its place.
        values: last eigenvalues, fp32 [n, b].

    Returns:
        (values [n, b], vectors [n, b, b]), fp32.
    """
    with torch.autocast(blocks.device.type, enabled=False):
        new = _orthonormal(_exact_product(blocks, vectors).float(), values)
        diagonal = (_exact_product(blocks, new) * new).sum(dim=-2)
    return diagonal.float().clamp(min=0), new


def _exact_product(blocks: Tensor, vectors: Tensor) -> Tensor:
    """In fp32, or float64 where the process allows less for fp32."""
    with SWITCH:  # the thread that preconditions may allow TF32 for a moment
        exact = torch.float32 if _full_precision() else torch.float64
        return blocks.to(exact) @ vectors.to(exact)


def _full_precision() -> bool:
    """Whether fp32 products are fp32: TF32's or bf16's three digits would drown small eigenvalues.

    Where they are not, ours run in float64: the switch belongs to the whole process, and other threads are at work.
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set backend by backend, torch >= 2.9
        return False


def _orthonormal(product: Tensor, values: Tensor) -> Tensor:
    """qr(C Q), every column near where it was.

    Orthogonal iteration turns a column away from those on its left only, so it converges with the largest value first;
    the columns go back to their places afterwards, because moments are kept by place. The order is that of the values
    of Q's own factor: in diag(Q^T C Q) a turn adds its square times the largest value to the smallest.

    Args:
        product: C Q [n, b, b].
        values: [n, b].
    """
    order = values.argsort(dim=-1, descending=True, stable=True)
    largest_first = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    orthonormal = torch.linalg.qr(largest_first).Q
    places = order.argsort(dim=-1).unsqueeze(-2).expand_as(product)
    return orthonormal.gather(-1, places).contiguous()
