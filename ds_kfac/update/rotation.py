"""Rotate the matrices of several layers into their eigenbases and back. Layers of the same shape
are rotated by one batch of products.

Shape suffixes: n is the number of matrices. They have the same shape, and several of them may
belong to one layer. O and I are their sides. nOI stands for [n, O, I].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision, fp32_products
from ds_kfac.ops.functional import block_product

AT_ONCE = 1 << 22
"""A large matrix is rotated, or averaged into moments, at most this many elements at a time (16
MiB). On a CPU this is also the budget that :func:`chunk_budget` returns."""
BATCHED = 1 << 25
"""Limit on the directions that a GPU has in memory at the same time, in elements. A single layer
may exceed it. The limit of 128 MiB is enough for all layers of one shape in GPT-2 small. A layer
with more than an eighth of this number is not batched with other layers, because its products take
longer than their launches."""


def chunk_budget(*, batched: bool, numel: int) -> int:
    """Return the limit on the total number of elements of the directions that are in memory at the
    same time. A single layer may exceed this limit.

    Args:
        batched: whether layers of the same shape are processed in one batch, as on GPUs.
        numel: number of elements of the largest layer among those that are processed together.
    """
    if not batched:
        return AT_ONCE
    largest = BATCHED // 8
    return BATCHED if numel <= largest else largest


def is_large(x_nOI: Tensor) -> bool:
    """Whether ``x_nOI`` is a single large matrix. Such a matrix is processed a few rows at a time,
    to limit the memory of temporaries."""
    return len(x_nOI) == 1 and x_nOI.numel() > AT_ONCE


def row_chunks(*tensors_nOI: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors into chunks of rows. Each chunk is a tuple with a view of the same rows of
    every tensor. A view has at most :data:`AT_ONCE` elements, but at least one row."""
    rows = max(1, AT_ONCE // tensors_nOI[0].shape[-1])
    return list(zip(*(x.split(rows, dim=1) for x in tensors_nOI), strict=True))


WHITEN_DAMPING = 0.01
"""Damping of A's eigenvalues for whitening, relative to their mean."""
LEAST = 8.0
"""Smallest eigenvalue that is not considered a rounding error, in units of fp32's eps times the
largest eigenvalue. Sums over rows and their running average are rounded. Therefore an eigenvalue
that should be zero may be up to 5 in these units, even if the factor is narrow
(docs/explanation/formulas.md)."""
SEEN = 2.0**-10
"""Smallest mean square of the gradient along a null direction that is not considered a rounding
error, relative to the mean over all directions. If gradients are rounded to bf16, a mean square
that should be zero is about 2^-18."""


@dataclass(frozen=True)
class Rotation:
    """The eigenbases of n matrices [O, I].

    Attributes:
        G, A: eigenvectors Q_G and Q_A, by which matrices are multiplied from the left and from the
            right. For n matrices with dense sides, G is a tuple of one tensor [n, O, O], and A is a
            tuple of one tensor [n, I, I]. For a single layer both are as in ``Eigenbasis.vectors``,
            possibly in blocks. The tuple of a side without vectors is empty, because its Q is the
            identity.
        values_G, values_A: eigenvalues, fp32 [n, O] and [n, I].
        precision: precision of the products.
        maps: number of matrices of each layer. It is the number of groups of a grouped convolution,
            otherwise 1.
    """

    G: tuple[Tensor, ...]
    A: tuple[Tensor, ...]
    values_G: Tensor
    values_A: Tensor
    precision: Precision
    maps: int = 1
    _whitenings: dict[float, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, bases: Sequence[LayerBasis], precision: Precision = HIGHEST, *, maps: int = 1
    ) -> "Rotation":
        """Create the rotation of layers from their eigenbases.

        If there are several layers, each must have one matrix, and each side must be dense or
        without vectors. The eigenvectors and eigenvalues of several layers are copied. Those of a
        single layer are not copied.
        """
        G, values_G = _stacked([basis.G for basis in bases])
        A, values_A = _stacked([basis.A for basis in bases])
        matrices = len(bases) * maps
        return cls(G, A, values_G.view(matrices, -1), values_A.view(matrices, -1), precision, maps)

    def by_layer(self) -> list[LayerBasis]:
        """Return each layer's eigenbasis as a view. The layers must have one matrix each."""

        def of_matrix(index: int, vectors: tuple[Tensor, ...], values: Tensor) -> Eigenbasis:
            return Eigenbasis(tuple(v[index : index + 1] for v in vectors), values[index])

        return [
            LayerBasis(
                of_matrix(index, self.G, self.values_G), of_matrix(index, self.A, self.values_A)
            )
            for index in range(len(self.values_G))
        ]

    def whitening(self, power: float, columns_nI: Tensor, *, repeats: int = 1) -> Tensor:
        """Return the whitening factors s = (alpha / mean alpha + WHITEN_DAMPING)^-power, where
        alpha are A's eigenvalues. In the eigenbasis, multiplying columns by s applies a damped and
        scaled A^-power. s is 0 in columns that do not count.

        Args:
            columns_nI: 1 for columns that count, 0 for others, fp32 [n, I].
            repeats: number of times that each matrix's s is repeated, once for each block of its
                rows.

        Returns fp32 [2, n * repeats, I]. The first entry is ``columns_nI``, the second entry is s.
        """
        if power not in self._whitenings:
            self._whitenings[power] = self._whitening(power)
        whitening = self._whitenings[power] * columns_nI
        return whitening if repeats == 1 else whitening.repeat_interleave(repeats, dim=1)

    def _whitening(self, power: float) -> Tensor:
        mean = self.values_A.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        s = (self.values_A / mean + WHITEN_DAMPING) ** -power
        return torch.stack([torch.ones_like(s), s])

    def follow(self) -> None:
        """Update all cached tensors that are derived from the eigenvalues, in place. Call this
        after the eigenvalues have changed in place."""
        cached = self.__dict__  # cached_property stores a value here when it is first read
        if "range_A" in cached and self.A:
            self.range_A.copy_(range_mask(self.A, self.values_A))
        if "range_G" in cached and self.G:
            self.range_G.copy_(range_mask(self.G, self.values_G))
        for power, whitening in self._whitenings.items():
            whitening.copy_(self._whitening(power))

    @cached_property
    def range_A(self) -> Tensor:
        """Mask of A's range, fp32 in the shape of ``values_A``: 1 in the range, 0 in the null
        space."""
        return range_mask(self.A, self.values_A)

    @cached_property
    def range_G(self) -> Tensor:
        """Mask of G's range, fp32 in the shape of ``values_G``: 1 in the range, 0 in the null
        space. The G of a head has a null space, because the gradients of a softmax sum to zero over
        the classes."""
        return range_mask(self.G, self.values_G)

    def rows_with_gradients(self, second_nOI: Tensor) -> Tensor:
        """Return which rows of rotated gradients are more than rounding errors, fp32 [n, O]. The
        criteria are those of :meth:`columns_with_gradients`."""
        if not self.G:
            return self.range_G
        return _has_gradients(self.range_G, second_nOI.mean(dim=-1))

    def columns_with_gradients(self, second_nOI: Tensor) -> Tensor:
        """Return which columns of rotated gradients are more than rounding errors.

        These are the columns in A's range, and the columns in A's null space that nevertheless
        receive gradients. If no input has a component along a null direction, the gradient's
        component along this direction is only a rounding error, which Adam would scale up to a full
        step. A null direction may nevertheless receive gradients, because A lacks the inputs of the
        batches between its updates, and old inputs fade from A.

        Args:
            second_nOI: running mean of the squared rotated gradients.

        Returns fp32 [n, I], 1 for columns that count, 0 for others.
        """
        if not self.A:
            return self.range_A
        return _has_gradients(self.range_A, second_nOI.mean(dim=-2))

    def layer_mean(self, x_n: Tensor) -> Tensor:
        """Return ``x_n`` with each matrix's entry replaced by the mean over all matrices of the
        same layer."""
        return x_n if self.maps == 1 else repeated(x_n.view(-1, self.maps).mean(dim=1), self.maps)

    def rotate(self, x_nOI: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return Q_G^T x Q_A.

        Args:
            overwrite: whether x may be replaced by the result, see :meth:`_product`.
        """
        return self._product([vectors.mT for vectors in self.G], x_nOI, self.A, overwrite)

    def restore(
        self, x_nOI: Tensor, *, rows: bool = True, columns: bool = True, overwrite: bool = False
    ) -> Tensor:
        """Return Q_G x Q_A^T. If ``columns`` is False, return Q_G x. If ``rows`` is False, return x
        Q_A^T.

        Args:
            overwrite: whether x may be replaced by the result, see :meth:`_product`.
        """
        right = [vectors.mT for vectors in self.A] if columns else ()
        return self._product(self.G if rows else (), x_nOI, right, overwrite)

    def _product(
        self, left: Sequence[Tensor], x_nOI: Tensor, right: Sequence[Tensor], overwrite: bool
    ) -> Tensor:
        """Return left x right.

        Args:
            overwrite: whether x may be overwritten with the result. This is done only if x is one
                large matrix and ``left`` is empty. No product then mixes the rows of x, so x is
                processed a few rows at a time and is not in memory twice.
        """
        with fp32_products(self.precision.products, x_nOI.device):
            if left or not (overwrite and is_large(x_nOI)):
                return block_product(left, x_nOI, right)
            for (rows,) in row_chunks(x_nOI):
                rows.copy_(block_product((), rows, right))
        return x_nOI


def _stacked(sides: Sequence[Eigenbasis]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the (vectors, values) of one side of several layers, stacked. The tensors of a single
    layer are returned without a copy."""
    if len(sides) == 1:
        return sides[0].vectors, sides[0].values
    vectors: tuple[Tensor, ...] = ()
    if sides[0].vectors:
        vectors = (torch.cat([side.vectors[0] for side in sides]),)
    return vectors, torch.stack([side.values for side in sides])


def repeated(x_n: Tensor, times: int) -> Tensor:
    """Return a tensor [n * times, ..], in which each entry of the first dimension appears ``times``
    times in a row. The result is a copy, because our kernels do not support strides."""
    return x_n if times == 1 else x_n.repeat_interleave(times, dim=0)


def range_mask(vectors: Sequence[Tensor], values: Tensor) -> Tensor:
    """Return a mask in fp32 and in the shape of ``values``: 0 where an eigenvalue is a rounding
    error, else 1.

    In a block of width b, an eigenvalue counts as a rounding error if it is below max(8, sqrt(b))
    eps times the block's largest eigenvalue. All eigenvalues of a block of zeros get 1.

    Args:
        vectors: eigenvectors, [n, b, b] for each group of equal blocks; () for a diagonal side. The
            eigenvalues of a diagonal side are exact, so all of them get 1.
    """
    if not vectors:
        return torch.ones_like(values)
    masks = []
    sizes = [v.shape[0] * v.shape[1] for v in vectors]
    for group, part in zip(vectors, values.view(-1).split(sizes), strict=True):
        blocks = part.view(group.shape[:2])
        rounding = max(LEAST, group.shape[1] ** 0.5) * torch.finfo(torch.float32).eps
        masks.append((blocks >= rounding * blocks.amax(-1, keepdim=True)).view(-1))
    return torch.cat(masks).view(values.shape).to(values.dtype)


def _has_gradients(in_range: Tensor, energy: Tensor) -> Tensor:
    """Return 1 for each direction that is in the range, or whose mean squared gradient ``energy``
    exceeds :data:`SEEN` times the mean over all directions; 0 for all other directions."""
    seen = energy > SEEN * energy.mean(dim=-1, keepdim=True)
    return torch.where(seen, 1.0, in_range)


def mask_null_space(x_OI: Tensor, basis: LayerBasis) -> Tensor:
    """Return one layer's rotated matrix with zeros in the null spaces of its G and A, see
    :attr:`Rotation.range_A`.

    Args:
        x_OI: fp32 [O, I], or [groups, O, I] for a layer in groups.
    """
    *groups, O, I = x_OI.shape  # noqa: E741
    for side, shape in ((basis.G, (*groups, O, 1)), (basis.A, (*groups, 1, I))):
        if side.vectors:
            x_OI = x_OI * range_mask(side.vectors, side.values).view(shape)
    return x_OI


def change_basis_(x_nOI: Tensor, old: LayerBasis | None, new: LayerBasis) -> None:
    """Rotate one layer's matrix from one eigenbasis into another, in place.

    The products are always in fp32, even if steps use a lower precision, because an error would
    stay in the moments. A large matrix is processed a few rows at a time.

    Args:
        x_nOI: fp32 [O, I], or [groups, O, I] for a layer in groups; contiguous.
        old: current basis of the matrix; None: the layer's own coordinates.
    """
    x_nOI = x_nOI.view(-1, *x_nOI.shape[-2:])
    with torch.autocast(x_nOI.device.type, enabled=False), fp32_products("ieee", x_nOI.device):
        # Q_G'^T Q_G and Q_A^T Q_A', where Q' is new and Q is old, or () for a side that does not
        # change
        left = [vectors.mT for vectors in _overlap(None if old is None else old.G, new.G)]
        right = _overlap(None if old is None else old.A, new.A)
        if not is_large(x_nOI):
            x_nOI.copy_(block_product(left, x_nOI, right))
            return
        if left:
            x_nOI.copy_(block_product(left, x_nOI, ()))
        for (rows,) in row_chunks(x_nOI):
            rows.copy_(block_product((), rows, right))


def _overlap(old: Eigenbasis | None, new: Eigenbasis) -> Sequence[Tensor]:
    """Return Q^T Q' for an old Q and a new Q', as one tensor for each group of blocks. Return () if
    both are the same basis. A basis without vectors is the identity."""
    vectors = () if new is old else new.vectors
    if old is None or not old.vectors or not vectors:
        return vectors
    return [before.mT @ now for before, now in zip(old.vectors, vectors, strict=True)]


PIECE = 1 << 22
"""Number of elements that :func:`norms` processes at a time, which take 32 MiB in float64."""


def norms(x: Tensor) -> Tensor:
    """Return the norms of vectors [.., n] as float64 [..].

    The norms are computed in float64, because in fp32 the square of a finite number may be
    infinite. The vectors are processed in pieces, because torch may copy them to float64.
    """
    parts = [
        torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64)
        for piece in x.split(PIECE, dim=-1)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)
