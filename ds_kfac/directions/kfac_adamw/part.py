"""Layers of one shape that go through a step of KFACAdamW together, and what the step knows of them so far."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_kfac.curvature.root import LayerRoot
from ds_kfac.model.layers.base import LayerSpec
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
        size: norm of what was orthogonalized, a scalar or [n]; None if nothing was.
    """

    layers: Sequence[LayerSpec]
    start: int
    x_OI: Tensor = field(init=False)
    fold: AdamFold = field(init=False)
    states: list[LayerState] = field(default_factory=list)
    rotation: Rotation | None = None
    root: LayerRoot | None = None
    size: Tensor | None = None

    @classmethod
    def of_all(cls, stacks: Iterable[Sequence[LayerSpec]]) -> "list[Part]":
        parts: list[Part] = []
        for layers in stacks:
            parts.append(cls(layers, parts[-1].start + len(parts[-1].layers) if parts else 0))
        return parts

    def of(self, values: Tensor) -> Tensor:
        """Of values of every layer of the step those of this one, a scalar, or of these, [n]."""
        count = len(self.layers)
        return values[self.start] if count == 1 else values[self.start : self.start + count]


def of_one_shape(parts: Sequence[Part], together: bool, limit: int = AT_ONCE) -> list[list[Part]]:
    """Parts whose matrices have the same sides, as they are or transposed, at most ``limit`` elements unless one alone
    has more; not ``together``: each alone."""
    groups: dict[Hashable, list[Part]] = {}
    full: list[list[Part]] = []
    for part in parts:
        key = tuple(sorted(part.x_OI.shape[-2:])) if together else part.start
        group = groups.setdefault(key, [])
        if group and sum(other.x_OI.numel() for other in group) + part.x_OI.numel() > limit:
            full.append(group)
            groups[key] = group = []
        group.append(part)
    return [*full, *groups.values()]
