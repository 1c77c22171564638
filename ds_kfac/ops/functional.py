"""Backend ``torch``: all ops, for every device. The docstrings define what other backends compute.

Shape suffixes: N rows, D the side of a factor, P = D(D+1)/2 the length of a packed triangle, O and
I the sides of a layer's matrix.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

Scalar = Tensor | float
Tensors = Sequence[Tensor]
BLOCK_ROWS = 128
"""Number of rows of the lower triangle that one matrix product computes. Blocks above the diagonal
are not computed."""
NARROW, CHUNK_ROWS = 16, 1024
"""If rows have fewer than NARROW columns, a CPU's matrix library adds up the rows one after the
other. After 200,000 rows, rounding errors may have turned an eigenvalue of zero into 1,000 eps
times the largest eigenvalue. Summing CHUNK_ROWS rows at a time reduces this to a few eps and takes
a millisecond more."""


def packed_numel(dim: int) -> int:
    """Return the number of elements of a packed symmetric D x D matrix, D(D+1)/2."""
    return dim * (dim + 1) // 2


def block_product(left: Sequence[Tensor], x_OI: Tensor, right: Sequence[Tensor]) -> Tensor:
    """Return the product left @ x @ right for block-diagonal ``left`` and ``right``. ``x`` is one
    matrix [O, I] or n matrices [n, O, I].

    Args:
        left, right: one tensor [blocks, b, b] for each run of consecutive blocks of one size b. If
            x is n matrices, the blocks of the first matrix come first. An empty sequence stands for
            the identity.
    """
    for matrices, columns in ((left, False), (right, True)):
        # each matrix has exactly one block
        if len(matrices) == 1 and len(matrices[0]) == (len(x_OI) if x_OI.ndim > 2 else 1):
            # torch.bmm with a batch of one is slower than torch.mm
            matrix, x = (
                (matrices[0], x_OI)
                if len(matrices[0]) > 1
                else (matrices[0][0], x_OI.view(x_OI.shape[-2:]))
            )
            x_OI = (x @ matrix if columns else matrix @ x).view(x_OI.shape)
        elif matrices:
            transposed = x_OI.mT if columns else x_OI
            parts = transposed.flatten(0, -2).split(
                [len(blocks) * blocks.shape[-1] for blocks in matrices]
            )
            products = []
            for blocks, part in zip(matrices, parts, strict=True):
                blocks = blocks.mT if columns else blocks
                single = len(blocks) == 1
                if single:
                    product = blocks[0] @ part
                else:
                    product = (blocks @ part.reshape(*blocks.shape[:2], -1)).flatten(0, 1)
                products.append(product)
            transposed = (products[0] if len(products) == 1 else torch.cat(products)).view(
                transposed.shape
            )
            x_OI = transposed.mT if columns else transposed
    return x_OI


# The index takes 8 P bytes for each distinct side, and all ops share it. Building it in every call
# would cost as much as the product.
@cache
def _lower_index(start: int, stop: int, device: torch.device) -> Tensor:
    """Return int64 indices of the lower triangle's entries in rows start..stop. They index the
    flattened, row-major block [stop - start, stop]."""
    rows, columns = torch.tril_indices(stop - start, stop, offset=start, device=device)
    return rows * stop + columns


def symmetric_pack_into_(out: Tensor, starts: Sequence[int], matrices_DD: Tensors) -> None:
    """Write the lower triangles of several fp32 matrices into one flat tensor, in the dtype of that
    tensor (fp32, bf16 or fp16).

    Values are rounded to nearest, ties to even. Elements of ``out`` between the triangles do not
    change.

    Args:
        starts: index in ``out`` of the first element of each triangle.
    """
    for start, x_DD in zip(starts, matrices_DD, strict=True):
        dim = len(x_DD)
        if x_DD.shape != (dim, dim):
            raise ValueError(
                f"symmetric_pack_into_: expected a square matrix, got shape {tuple(x_DD.shape)}"
            )
        for first in range(0, dim, BLOCK_ROWS):
            stop = min(first + BLOCK_ROWS, dim)
            index = _lower_index(first, stop, x_DD.device)
            out[start : start + len(index)].copy_(
                x_DD[first:stop, :stop].reshape(-1).index_select(0, index)
            )
            start += len(index)


def symmetric_unpack_from(
    packed: Tensor, starts: Sequence[int], dims: Sequence[int]
) -> list[Tensor]:
    """Return symmetric fp32 matrices from their lower triangles, which are stored in a flat tensor
    of any floating dtype."""
    matrices = []
    for start, dim in zip(starts, dims, strict=True):
        lower_DD = torch.zeros(dim, dim, device=packed.device, dtype=torch.float32)
        for first in range(0, dim, BLOCK_ROWS):
            stop = min(first + BLOCK_ROWS, dim)
            index = _lower_index(first, stop, packed.device)
            block = lower_DD.new_zeros((stop - first) * stop)
            block.index_copy_(0, index, packed[start : start + len(index)].float())
            lower_DD[first:stop, :stop] = block.view(stop - first, stop)
            start += len(index)
        matrices.append(lower_DD + lower_DD.tril(-1).T)
    return matrices


def ema_update_(
    averages_P: Tensors, sums_P: Tensors, counts: Tensors, updates: Tensors, decays: Sequence[float]
) -> Tensor:
    """Fold one batch into the running averages of several factors, in place.

        updates <- updates + 1
        average <- r average + (1 - r) sum / max(count, 1)    with r = min(1 - 1 / updates, decay)

    If a factor's count is 0 or its sum is not finite, its average and ``updates`` do not change.
    All tensors are fp32.

    Returns bool [n]: whether each factor's sum was used.
    """
    used = []
    for average_P, sum_P, count, update, decay in zip(
        averages_P, sums_P, counts, updates, decays, strict=True
    ):
        usable = (count > 0) & torch.isfinite(sum_P).all()
        update += usable
        keep = torch.clamp(1 - 1 / update.clamp(min=1), max=decay)
        new_P = (sum_P / count.clamp(min=1)).mul_(1 - keep).add_(average_P * keep)
        torch.where(usable, new_P, average_P, out=average_P)
        used.append(usable)
    return torch.stack(used)


def syrk_accumulate_(
    sum_P: Tensor,
    x_ND: Tensor,
    *,
    kept: Tensor | None = None,
    bias: bool = False,
    scale: Scalar = 1.0,
) -> Tensor:
    """Add a second moment to a packed fp32 sum: ``sum_P += scale * pack(X^T diag(kept) X)``.

    X is ``x_ND``. If ``bias`` is True, X also has a last column of ones.

    Args:
        kept: bool [N], whether each row counts; None: all rows count. A row that does not count
            adds nothing to any column, not even to the bias column, and may hold NaN or infinity.
        bias: whether the layer has a bias. The bias is treated as an input of 1.
        scale: a number, or a 0-d tensor on the device so that the host need not wait for its value.
            It is applied after the product, so 16-bit rows are not rounded a second time.

    For large D this takes half the FLOPs of X^T X, and X is not copied to add the column of ones.
    The product is in fp32, also under autocast.
    """
    dim = x_ND.shape[1]
    check_syrk(sum_P, x_ND, kept, bias)
    # autocast would run the product in 16 bits
    with torch.autocast(x_ND.device.type, enabled=False):
        x_ND = _kept_rows(x_ND, kept)
        for start in range(0, dim, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, dim)
            block = _product(x_ND[:, start:stop], x_ND[:, :stop])
            lower = block.reshape(-1).index_select(0, _lower_index(start, stop, x_ND.device))
            sum_P[packed_numel(start) : packed_numel(stop)].add_(_times_(lower, scale))
        if bias:  # the bias row lies contiguously at the end: [column sums, number of counted rows]
            tail = sum_P[packed_numel(dim) :]
            tail[:dim].add_(_times_(x_ND.sum(dim=0), scale))
            count = len(x_ND) if kept is None else kept.sum(dtype=torch.float32)
            tail[dim].add_(count * scale)
    return sum_P


def check_syrk(sum_P: Tensor, x_ND: Tensor, kept: Tensor | None, bias: bool) -> None:
    """Raise ValueError unless the arguments of :func:`syrk_accumulate_` fit together."""
    dim = x_ND.shape[1]
    numel = packed_numel(dim + bias)
    if sum_P.dtype != torch.float32 or sum_P.shape != (numel,):
        raise ValueError(
            f"syrk_accumulate_: sum_P must be fp32 of shape ({numel},) for rows of "
            f"{dim}{' and a bias' if bias else ''}, got {sum_P.dtype} {tuple(sum_P.shape)}"
        )
    check_kept("syrk_accumulate_", x_ND, kept)


def check_kept(op: str, x_ND: Tensor, kept: Tensor | None) -> None:
    """Raise ValueError unless ``kept`` is None or has one bool for each row of ``x_ND``."""
    if kept is not None and (kept.dtype != torch.bool or kept.shape != x_ND.shape[:1]):
        raise ValueError(
            f"{op}: kept must be bool of shape ({len(x_ND)},), one for each row, got {kept.dtype} "
            f"{tuple(kept.shape)}"
        )


def _kept_rows(x_ND: Tensor, kept: Tensor | None) -> Tensor:
    """Return the rows in fp32. Rows that do not count are replaced by zeros, even if they hold
    NaN."""
    if kept is None:
        return x_ND.float()
    return torch.where(kept[:, None], x_ND, 0.0).float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T @ right for rows [.., N, D]. Narrow products on a CPU are summed in chunks, see
    :data:`NARROW`."""
    if left.shape[-1] >= NARROW or left.device.type != "cpu":
        return left.mT @ right
    chunks = zip(left.split(CHUNK_ROWS, dim=-2), right.split(CHUNK_ROWS, dim=-2), strict=True)
    return torch.stack([a.mT @ b for a, b in chunks]).sum(dim=0)


def _times_(x: Tensor, scale: Scalar) -> Tensor:
    return x.mul_(scale) if isinstance(scale, Tensor) or scale != 1.0 else x


def block_syrk_accumulate_(
    sum_P: Tensor, x_ND: Tensor, *, block: int, kept: Tensor | None = None, scale: Scalar = 1.0
) -> Tensor:
    """Add ``scale`` times the diagonal blocks of X^T X to a fp32 sum. The sum holds the packed
    triangles of the blocks, one after the other.

    All blocks are computed by one batched product. D must be a multiple of ``block``.

    Args:
        kept: bool [N], whether each row counts, as in :func:`syrk_accumulate_`.
    """
    rows, dim = x_ND.shape
    if dim % block or sum_P.shape != (dim // block * packed_numel(block),):
        raise ValueError(
            f"block_syrk_accumulate_: rows of {dim} in blocks of {block} need a sum of shape "
            f"({dim // block * packed_numel(block)},) and a whole number of blocks, got "
            f"{tuple(sum_P.shape)}"
        )
    check_kept("block_syrk_accumulate_", x_ND, kept)
    x_ND = _kept_rows(x_ND, kept)
    if block == 1:
        return sum_P.add_(_times_(x_ND.square().sum(dim=0), scale))
    with torch.autocast(x_ND.device.type, enabled=False):
        x_nNb = x_ND.view(rows, dim // block, block).transpose(0, 1)
        products = _product(x_nNb, x_nNb).view(dim // block, -1)
        lower = products.index_select(1, _lower_index(0, block, x_ND.device))
    return sum_P.add_(_times_(lower.view(-1), scale))


def adam_step_(
    direction_nOI: Tensor,
    x_nOI: Tensor,
    first_nOI: Tensor,
    second_nOI: Tensor,
    updates_n: Tensor,
    usable_n: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Fold n gradients into Adam's moments, in place, and write Adam's direction with Nesterov's
    momentum.

        k <- k + 1      m <- b1 m + (1 - b1) x      v <- b2 v + (1 - b2) x^2
        direction = numerator / (sqrt(v / (1 - b2^k)) + eps)
        numerator = b1 m / (1 - b1^(k + 1)) + (1 - b1) x / (1 - b1^k)

    In the direction, x has the weight that it will have in m one step later (NAdam, Dozat 2016).

    Args:
        direction_nOI: fp32, overwritten. The direction of a matrix that is not usable becomes zero.
            The tensor may be ``x_nOI`` itself.
        x_nOI: fp32, the gradients.
        first_nOI, second_nOI: fp32, the moments m and v, without bias correction.
        updates_n: fp32, the numbers k: how many gradients were folded into each matrix's moments.
        usable_n: bool. Where it is False, x is ignored and may be NaN, and the moments and k do not
            change.
        betas: b1 and b2. They are rounded to fp32 first.

    Source: Kingma & Ba 2015 (arXiv:1412.6980).
    """
    beta1, beta2 = in_fp32(betas)
    k = (updates_n + 1)[:, None, None]
    usable = usable_n[:, None, None].to(k.dtype)
    weight_in_first = (1 - beta1) * usable
    weight_in_second = (1 - beta2) * usable
    power = beta1**k
    of_first = beta1 / (1 - beta1 * power) * usable
    of_x = (1 - beta1) / (1 - power)
    of_second = usable / (1 - beta2**k)
    # If a matrix is not usable, its direction is 0 / (1 + eps). Without the 1, it would be 0 / 0 if
    # eps is 0.
    added = 1 - usable + eps
    ignored = usable == 0
    for direction, x, first, second in in_chunks(direction_nOI, x_nOI, first_nOI, second_nOI):
        x = x.masked_fill(ignored, 0.0)
        first.lerp_(x, weight_in_first)
        square = x.square()
        second.lerp_(square, weight_in_second)
        divisor = torch.mul(second, of_second, out=square).sqrt_().add_(added)
        torch.mul(x, of_x, out=direction).addcmul_(first, of_first).div_(divisor)
    updates_n.add_(usable_n)


SMALLEST = 1e-15
"""Smallest norm by which a matrix is divided. The squares in a smaller norm underflow, and the
quotient would blow up."""


def scale_to(target: Tensor | float, *, size: Tensor, norm: Tensor, full: Tensor | float) -> Tensor:
    """Return the factor that scales an orthogonal matrix to the norm ``target``. The factor is
    smaller if ``size`` is below ``full``.

    Args:
        target: a Frobenius norm.
        size: norm of the direction before it was orthogonalized. A direction of norm 0 gets the
            factor 0.
        norm: norm of the orthogonal matrix, in any basis.
        full: ``newton_schulz.FULL`` times the square root of the number of entries.
    """
    return target * (size / full).clamp(max=1) / norm.clamp(min=SMALLEST)


def finish_direction_(
    out_nOI: Tensor,
    x_nOI: Tensor,
    norm_n: Tensor,
    size_n: Tensor | None,
    target_n: Tensor,
    full_n: Tensor,
    used_n: Tensor,
) -> None:
    """Write n directions with their final norm. Directions that must not be used become zeros.

        scale = target min(size / full, 1) / max(norm, SMALLEST)    or target, if size is None
        out <- scale x   where used and norm is finite, else 0

    Args:
        out_nOI: overwritten. Results are rounded to its dtype. It may be ``x_nOI`` itself. There
            may be gaps between its matrices, and one of its matrices may consist of several
            matrices of x, one below the other.
        x_nOI: fp32. A matrix that is not used may hold anything, even NaN.
        norm_n: fp32, the Frobenius norms of x.
        size_n: fp32, the norms of the directions before they were orthogonalized; None: they were
            not orthogonalized.
        target_n: fp32, the final norms. If ``size_n`` is None, x is multiplied by these numbers
            instead.
        full_n: fp32. A direction whose ``size_n`` is at least this large gets the whole target. Not
            used if ``size_n`` is None.
        used_n: bool, False for directions that must not be used.
    """
    if size_n is None:
        scale = target_n
    else:
        scale = scale_to(target_n, size=size_n, norm=norm_n, full=full_n)
    zero = ~(used_n & (norm_n < math.inf))  # NaN is not below infinity
    parts = len(x_nOI) // len(out_nOI)
    if len(out_nOI) == 1:  # equal blocks or the groups of a convolution: all are scaled at once
        parts = 1
        out_nOI = out_nOI.view(x_nOI.shape)
    for part, out_part in enumerate(out_nOI.chunk(parts, dim=1)):
        part_scale, part_zero = (of_matrix[part::parts, None, None] for of_matrix in (scale, zero))
        for out, x in in_chunks(out_part, x_nOI[part::parts]):
            in_place = out.dtype is torch.float32
            scaled = torch.mul(x, part_scale, out=out if in_place else None).masked_fill_(
                part_zero, 0.0
            )
            if not in_place:
                out.copy_(scaled)


def in_fp32(betas: tuple[float, float]) -> tuple[float, float]:
    """Return the betas rounded to fp32. Moments are averaged in fp32, and the bias corrections must
    use the same numbers."""
    return ctypes.c_float(betas[0]).value, ctypes.c_float(betas[1]).value


CPU_CHUNK, CHUNK = 1 << 16, 1 << 22
"""Number of elements that a series of elementwise operations processes at a time: CPU_CHUNK on a
CPU, and CHUNK on other devices. On a CPU a chunk fits into a core's cache. On other devices each
temporary takes at most 16 MiB."""


def in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views [n, rows, I] of tensors [n, O, I], with a few rows at a time."""
    n, _, columns = tensors[0].shape
    rows = max(1, (CPU_CHUNK if tensors[0].device.type == "cpu" else CHUNK) // max(1, n * columns))
    return zip(*(x.split(rows, dim=1) for x in tensors), strict=True)
