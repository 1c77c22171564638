"""The plan of a run: who does what, when, and how it travels. Pure, the same on every rank, made before training."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ds_kfac.adaptive import AdaptiveRule
from ds_kfac.assignment import Assignment
from ds_kfac.factor_spec import factor_specs, tied_factors
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.registry import SHARDS
from ds_kfac.schedule import Schedule
from ds_kfac.timetable import Timetable
from ds_kfac.warm_start import WarmStart
from ds_kfac.work import Work


@dataclass(frozen=True)
class Plan:
    """See the module's docstring.

    Attributes:
        work: what the pieces of the assignment cost.
        offsets: factor key -> steps by which its refreshes are displaced; empty: all at once.
        lag: steps after which a refresh takes effect.
        wire: dtype of batch sums and eigenvectors on the wire.
        gradient_dtypes: of gradients to their workers and of results back.
        shares: whether layers that see the same input are to share A.
        reasons: what was chosen, and why; for the report.
        paired: whether a factor's refresh needs its partner, which is then on the same rank.
    """

    layers: tuple[LayerSpec, ...]
    schedule: Schedule
    assignment: Assignment
    work: Work
    offsets: Mapping[str, int]
    lag: int
    adaptive: AdaptiveRule | None
    warm_start: WarmStart | None
    wire: torch.dtype
    gradient_dtypes: tuple[torch.dtype, torch.dtype]
    shares: bool
    reasons: tuple[str, ...] = ()
    paired: bool = False

    @property
    def method(self) -> str:
        """What is kept of a factor: "eigen" or "inverse"."""
        return self.work.method

    @property
    def workers(self) -> int:
        """Gradient workers of a layer."""
        return max(len(ranks) for ranks in self.assignment.workers.values())

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that get each other's results: together they are gradient workers of every layer once."""
        world = self.assignment.world
        width = world // self.workers
        return tuple(tuple(range(start, start + width)) for start in range(0, world, width))

    @property
    def sharing_candidates(self) -> Mapping[str, Hashable]:
        """See :func:`sharing_candidates`; none if layers are not to share."""
        return sharing_candidates(self.layers, self.method) if self.shares else {}

    @cached_property
    def together(self) -> Mapping[str, tuple[str, ...]]:
        """Unit -> its factors: the two of a tied layer are made of the same sums and are due together."""
        tied = {keys[0]: keys for keys in tied_factors(self.layers, self.assignment.factors)}
        followers = {key for keys in tied.values() for key in keys[1:]}
        return {f.key: tied.get(f.key, (f.key,)) for f in self.assignment.factors if f.key not in followers}

    @cached_property
    def unit(self) -> Mapping[str, str]:
        """Factor key -> its unit."""
        return {key: unit for unit, keys in self.together.items() for key in keys}

    def expanded(self, units: frozenset[str]) -> frozenset[str]:
        """The factors of some units."""
        return frozenset(key for unit in units for key in self.together[unit])

    def timetable(self) -> Timetable:
        """Of the units."""
        offsets = {unit: self.offsets[unit] for unit in self.together if unit in self.offsets}
        return Timetable(self.schedule, tuple(self.together), offsets=offsets, adaptive=self.adaptive)

    def sharing(self, groups: Sequence[Sequence[str]]) -> "Plan":
        """With one A for each group of layers. Nothing moves: its decomposer is that of the group's first layer."""
        factors = factor_specs(self.layers, groups)
        kept = {factor.key for factor in factors}
        assignment = Assignment.of(
            replace(self.work, factors=factors), self.assignment.workers, self.assignment.decomposers
        )
        offsets = {key: offset for key, offset in self.offsets.items() if key in kept}
        return replace(self, assignment=assignment, offsets=offsets)


def sharing_candidates(layers: Sequence[LayerSpec], method: str) -> Mapping[str, Hashable]:
    """Layers that may share A, and what must be equal for it: the side, and whether a bias's 1 is in it; of inverses
    also whether G is the identity, whose damping is in A's."""
    return {
        layer.name: (layer.A, layer.uses[0].bias, method == "inverse" and layer.G.block == 0)
        for layer in layers
        if (layer.rows is None or layer.rows[0] == 0)  # other row blocks follow the first one
        and len(layer.uses) == 1
        and SHARDS.get(layer.kind, layer.kind) in ("Linear", "Conv1D")
        and layer.A.block
    }
