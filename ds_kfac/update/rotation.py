"""Matrices of layers of one shape into their eigenbases and back, all in one product.

Shape suffixes: n matrices of one shape, which may be those of one layer; O, I their sides; nOI
stands for [n, O, I].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ds_kfac.curvature.eigen import HIGHEST, Eigenbasis, LayerBasis, Precision, fp32_products
from ds_kfac.ops.functional import block_product

AT_ONCE = 1 << 22
"""Elements of a single large matrix that are rotated, or folded into moments, at once; on a CPU
also the elements of the layers whose directions are in memory together: 16 MiB."""
BATCHED = 1 << 25
"""Elements of the layers whose directions a GPU has in memory together, unless one layer has more:
128 MiB, all of one shape of GPT-2 small. A layer of more than an eighth of it is alone: its
products take longer than their launches."""


def chunk_budget(*, batched: bool, numel: int) -> int:
    """Elements of the layers whose directions are in memory together, unless one layer has more.

    Args:
        batched: whether layers of one shape are stepped in one batch, as on GPUs.
        numel: of the largest layer.
    """
    if not batched:
        return AT_ONCE
    largest = BATCHED // 8
    return BATCHED if numel <= largest else largest


def is_large(x_nOI: Tensor) -> bool:
    """Whether this is a single matrix that is taken some rows at a time, which bounds the
    temporaries."""
    return len(x_nOI) == 1 and x_nOI.numel() > AT_ONCE


def row_chunks(*tensors_nOI: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of the same rows of each tensor, :data:`AT_ONCE` elements of one at most, but at least
    one row."""
    rows = max(1, AT_ONCE // tensors_nOI[0].shape[-1])
    return list(zip(*(x.split(rows, dim=1) for x in tensors_nOI), strict=True))


WHITEN_DAMPING = 0.01
"""Added to A's eigenvalues for whitening, in units of their mean."""
LEAST = 8.0
"""In eps, of what is not rounding. Sums over rows and their running average leave of a null
eigenvalue up to 5 eps of the largest, also where a factor is narrow
(docs/explanation/formulas.md)."""


@dataclass(frozen=True)
class Rotation:
    """The eigenbases of n matrices [O, I].

    Attributes:
        G, A: eigenvectors of the rows and of the columns. Of n matrices with dense sides one
            tensor, [n, O, O] and [n, I, I]; of a single matrix as in ``Eigenbasis.vectors``, which
            may have blocks; () where Q is the identity.
        values_G, values_A: eigenvalues, fp32 [n, O] and [n, I].
        maps: matrices of a layer: the groups of a grouped convolution, else 1.
    """

    G: tuple[Tensor, ...]
    A: tuple[Tensor, ...]
    values_G: Tensor
    values_A: Tensor
    precision: Precision
    maps: int = 1
    _whitenings: dict[tuple[float, int], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, bases: Sequence[LayerBasis], precision: Precision = HIGHEST, *, maps: int = 1
    ) -> "Rotation":
        """Of several layers a copy of their eigenvectors and eigenvalues, of one layer its own.
        Several must have dense sides or sides without vectors, and one matrix each."""
        sides = [basis.G for basis in bases], [basis.A for basis in bases]
        if len(bases) == 1:
            G, A = (side[0].vectors for side in sides)
        else:
            G, A = (
                side[0].vectors and (torch.cat([basis.vectors[0] for basis in side]),)
                for side in sides
            )
        values_G, values_A = (
            torch.stack([basis.values for basis in side]) if len(side) > 1 else side[0].values
            for side in sides
        )
        matrices = len(bases) * maps
        return cls(G, A, values_G.view(matrices, -1), values_A.view(matrices, -1), precision, maps)

    def by_layer(self) -> list[LayerBasis]:
        """Views: the eigenbases of several layers with one matrix each."""
        halves = ((self.G, self.values_G), (self.A, self.values_A))
        return [
            LayerBasis(
                *(
                    Eigenbasis(tuple(v[index : index + 1] for v in Q), values[index])
                    for Q, values in halves
                )
            )
            for index in range(len(self.values_G))
        ]

    def whitening(self, power: float, *, repeats: int = 1) -> Tensor:
        """s = (alpha / mean alpha + WHITEN_DAMPING)^-power, which is A^-power as it is in the
        eigenbasis, and 0 in A's null space. fp32 [2, n * repeats, I]: whether s is above 0, as a
        number, and s.

        Args:
            repeats: how often each matrix's is repeated: for blocks of its rows.
        """
        if (power, repeats) not in self._whitenings:
            self._whitenings[power, repeats] = self._whitening(power, repeats)
        return self._whitenings[power, repeats]

    def _whitening(self, power: float, repeats: int) -> Tensor:
        mean = self.values_A.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        s = (self.values_A / mean + WHITEN_DAMPING) ** -power * self.range_A
        return torch.stack([repeated(self.range_A, repeats), repeated(s, repeats)])

    def follow(self) -> None:
        """What is derived from eigenvalues, in its place, once they have changed."""
        for name, vectors, values in (
            ("range_A", self.A, self.values_A),
            ("range_G", self.G, self.values_G),
        ):
            if name in self.__dict__ and vectors:
                self.__dict__[name].copy_(range_mask(vectors, values))
        for arguments, kept in self._whitenings.items():
            kept.copy_(self._whitening(*arguments))

    @cached_property
    def range_A(self) -> Tensor:
        """1 in A's range, 0 in its null space, fp32 like ``values_A``. No input, hence no gradient,
        has a component in the null space: anything there is rounding error, which Adam would scale
        up to full size."""
        return range_mask(self.A, self.values_A)

    @cached_property
    def range_G(self) -> Tensor:
        """:attr:`range_A` of the outputs' gradients, like ``values_G``: those of a softmax sum to
        zero over classes."""
        return range_mask(self.G, self.values_G)

    def mask_null_space_(self, x_nOI: Tensor, *, columns: bool = True) -> None:
        """Zero, in place, the components of rotated matrices in the null spaces of G and, if
        ``columns``, of A."""
        if self.G:
            x_nOI.mul_(self.range_G[:, :, None])
        if self.A and columns:
            x_nOI.mul_(self.range_A[:, None, :])

    def layer_mean(self, x_n: Tensor) -> Tensor:
        """[n], the mean over the matrices of a layer at each of them."""
        return x_n if self.maps == 1 else repeated(x_n.view(-1, self.maps).mean(dim=1), self.maps)

    def rotate(self, x_nOI: Tensor, *, overwrite: bool = False) -> Tensor:
        """Q_G^T x Q_A, see :meth:`_product`."""
        return self._product([vectors.mT for vectors in self.G], x_nOI, self.A, overwrite)

    def restore(
        self, x_nOI: Tensor, *, rows: bool = True, columns: bool = True, overwrite: bool = False
    ) -> Tensor:
        """Q_G x Q_A^T, or one of its two halves."""
        right = [vectors.mT for vectors in self.A] if columns else ()
        return self._product(self.G if rows else (), x_nOI, right, overwrite)

    def _product(
        self, left: Sequence[Tensor], x_nOI: Tensor, right: Sequence[Tensor], overwrite: bool
    ) -> Tensor:
        """left x right. ``overwrite``: a large matrix whose rows no basis mixes may be replaced by
        the result, some rows at a time, so that it is not in memory twice."""
        with fp32_products(self.precision.products, x_nOI.device):
            if left or not (overwrite and is_large(x_nOI)):
                return block_product(left, x_nOI, right)
            for (rows,) in row_chunks(x_nOI):
                rows.copy_(block_product((), rows, right))
        return x_nOI


def repeated(x_n: Tensor, times: int) -> Tensor:
    """Each entry of the first dimension so many times in a row, [n * times, ..]. A copy: kernels
    take no strides."""
    return x_n if times == 1 else x_n.repeat_interleave(times, dim=0)


def range_mask(vectors: Sequence[Tensor], values: Tensor) -> Tensor:
    """0 where an eigenvalue of a factor is rounding error, below max(8, sqrt(b)) eps of the largest
    of its block of width b, else 1; fp32 like ``values``. All 1 in a zero block, and of a side
    without vectors, whose values are exact.

    Args:
        vectors: [n, b, b] per group of equal blocks.
    """
    if not vectors:
        return torch.ones_like(values)
    masks = []
    for group, part in zip(
        vectors, values.view(-1).split([v.shape[0] * v.shape[1] for v in vectors]), strict=True
    ):
        blocks = part.view(group.shape[:2])
        rounding = max(LEAST, group.shape[1] ** 0.5) * torch.finfo(torch.float32).eps
        masks.append((blocks >= rounding * blocks.amax(-1, keepdim=True)).view(-1))
    return torch.cat(masks).view(values.shape).to(values.dtype)


def mask_null_space(x_OI: Tensor, basis: LayerBasis) -> Tensor:
    """One layer's rotated matrix, 0 along the null spaces of its G and A, see
    :attr:`Rotation.range_A`.

    Args:
        x_OI: fp32 [O, I], or [groups, O, I] of a layer in groups.
    """
    *groups, O, I = x_OI.shape  # noqa: E741
    for side, shape in ((basis.G, (*groups, O, 1)), (basis.A, (*groups, 1, I))):
        if side.vectors:
            x_OI = x_OI * range_mask(side.vectors, side.values).view(shape)
    return x_OI


def change_basis_(x_nOI: Tensor, old: LayerBasis | None, new: LayerBasis) -> None:
    """Out of one layer's eigenbasis (None: its own coordinates) into another, in place, a large
    matrix some rows at a time. In fp32 whatever the precision of steps: an error would stay in the
    moments.

    Args:
        x_nOI: fp32 [O, I], or [groups, O, I] of a layer in groups; contiguous.
    """
    olds = (None, None) if old is None else (old.G, old.A)
    x_nOI = x_nOI.view(-1, *x_nOI.shape[-2:])
    with torch.autocast(x_nOI.device.type, enabled=False), fp32_products("ieee", x_nOI.device):
        # Q_G'^T Q_G and Q_A^T Q_A' for the new Q'; () for a side that stays
        overlaps = [_overlap(before, now) for before, now in zip(olds, (new.G, new.A), strict=True)]
        left, right = [vectors.mT for vectors in overlaps[0]], overlaps[1]
        if not is_large(x_nOI):
            x_nOI.copy_(block_product(left, x_nOI, right))
            return
        if left:
            x_nOI.copy_(block_product(left, x_nOI, ()))
        for (rows,) in row_chunks(x_nOI):
            rows.copy_(block_product((), rows, right))


def _overlap(old: Eigenbasis | None, new: Eigenbasis) -> Sequence[Tensor]:
    vectors = () if new is old else new.vectors
    if old is None or not old.vectors or not vectors:
        return vectors
    return [before.mT @ now for before, now in zip(old.vectors, vectors, strict=True)]


PIECE = 1 << 22
"""Elements, 32 MiB in float64."""


def norms(x: Tensor) -> Tensor:
    """Norms of vectors [.., n], float64 [..]: the square of a finite number may be infinite in
    fp32.

    Piece by piece, because of each a copy in float64 may be made.
    """
    parts = [
        torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64)
        for piece in x.split(PIECE, dim=-1)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).norm(dim=0)
