"""Layers of one shape that go through a step of KFACAdamW together, and what the step knows of them so far."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.curvature.root import LayerRoot
from ds_kfac.model.layers import LayerSpec
from ds_kfac.update.layer_state import LayerState
from ds_kfac.update.moments import AdamFold
from ds_kfac.update.rotation import AT_ONCE, Rotation


@dataclass
class Part:
    """One layer, or n of equal [O, I].

    Attributes:
        start: place of the first layer among all of the step.
        x_OI: fp32 [O, I] or [n, O, I], the direction as far as it has come.
        fold: of their gradients.
        rotation: into the eigenbasis; None before it is known, and with a form that has none.
        root: what whitens in its place, of one layer.
        sizes: norms of what was orthogonalized, a scalar or [n] of each block; None if nothing was, or is scaled.
    """

    layers: Sequence[LayerSpec]
    start: int
    x_OI: Tensor = field(init=False)
    fold: AdamFold = field(init=False)
    states: list[LayerState] = field(default_factory=list)
    rotation: Rotation | None = None
    root: LayerRoot | None = None
    sizes: list[Tensor] | None = None

    @classmethod
    def of_all(cls, stacks: Iterable[Sequence[LayerSpec]]) -> "list[Part]":
        parts: list[Part] = []
        for layers in stacks:
            parts.append(cls(layers, parts[-1].start + len(parts[-1].layers) if parts else 0))
        return parts

    def of(self, values: Tensor, places: slice | None = None) -> Tensor:
        """Of values of every layer of the step, or of the layers at some ``places``, those of this one, a scalar, or
        of these, [n]."""
        start, count = self.start - (places.start if places else 0), len(self.layers)
        return values[start] if count == 1 else values[start : start + count]


@dataclass
class Block:
    """Rows of a part's matrices that are one map, or all of them: what is orthogonalized together.

    Attributes:
        x_OI: fp32 [rows, I] or [n, rows, I]: a view of the part's, or a copy where its rows lie apart.
        size: norm that it had, a scalar or [n].
    """

    part: Part
    x_OI: Tensor
    size: Tensor | None = None

    @property
    def norm(self) -> Tensor:
        """The size, of one that is known."""
        assert self.size is not None
        return self.size


def blocks_of(part: Part) -> list[Block]:
    """Of a part as it is now."""
    return [Block(part, rows.flatten(-3, -2)) for rows in row_blocks(part.x_OI, part.layers[0].blocks)]


def put_back(blocks: Sequence[Block]) -> None:
    """The blocks of one part, in order, where they were taken from."""
    part = blocks[0].part
    for rows, block in zip(row_blocks(part.x_OI, part.layers[0].blocks), blocks, strict=True):
        if rows.data_ptr() != block.x_OI.data_ptr():
            rows.copy_(block.x_OI.view(rows.shape))


def row_blocks(x_OI: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views [.., repeats, size, I] of a matrix's rows, see :attr:`LayerSpec.blocks`; of all of them without sizes."""
    sizes = list(sizes) or [x_OI.shape[-2]]
    return list(x_OI.unflatten(-2, (-1, sum(sizes))).split(sizes, dim=-2))


def of_one_shape(blocks: Sequence[Block], together: bool, limit: int = AT_ONCE) -> list[list[Block]]:
    """Blocks with the same sides, as they are or transposed, at most ``limit`` elements unless one alone has more; not
    ``together``: each alone."""
    groups: dict[Hashable, list[Block]] = {}
    full: list[list[Block]] = []
    for index, block in enumerate(blocks):
        key = tuple(sorted(block.x_OI.shape[-2:])) if together else index
        group = groups.setdefault(key, [])
        if group and sum(other.x_OI.numel() for other in group) + block.x_OI.numel() > limit:
            full.append(group)
            groups[key] = group = []
        group.append(block)
    return [*full, *groups.values()]
