"""Which ranks give a factor the rows of its batch: as many as it needs, near its decomposer, others at every update.

A factor of side D is an average over many updates, of which each needs a few rows per column, whatever the number of
ranks. So what statistics cost a rank falls with the number of ranks: each captures, sums and sends its part only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.model.rows import phase

ROWS_PER_COLUMN = 4
"""Rows of an update per column of a factor, where the config names no number."""


def rows_needed(factor: FactorSpec, rows: int | None) -> int:
    """Of one update. ``rows``: what the config asks for; None: in proportion to the widest block."""
    return rows or ROWS_PER_COLUMN * (factor.side.block if factor.side.block > 1 else factor.side.dim)


@dataclass(frozen=True)
class Contributors:
    """Pure, the same on every rank.

    Attributes:
        world: ranks.
        node_size: consecutive ranks of a node.
        everywhere: whether they are of all nodes alike, or of the decomposer's node first.
        counts: factor key -> how many at an update; those that are missing have all ranks.
    """

    world: int
    node_size: int = 1
    everywhere: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    def count(self, key: str) -> int:
        return self.counts.get(key, self.world)

    def of(self, key: str, owner: int, step: int) -> Sequence[int]:
        """Ranks that contribute to a factor at ``step``, ascending.

        Args:
            owner: its decomposer.
        """
        count = self.count(key)
        if count >= self.world:
            return self._all
        if self.everywhere:
            first = owner + phase(step, self.world)
            return tuple(sorted((first + place) % self.world for place in range(count)))
        start = owner - owner % self.node_size
        node = range(start, min(start + self.node_size, self.world))
        found = [owner, *_turned([rank for rank in node if rank != owner], count - 1, owner, step)]
        if len(found) < count:
            others = [rank for rank in self._all if rank not in node]
            found += _turned(others, count - len(found), owner, step)
        return tuple(sorted(found))

    @cached_property
    def _all(self) -> range:
        return range(self.world)


def _turned(ranks: Sequence[int], count: int, owner: int, step: int) -> list[int]:
    """``count`` of them at most, from a place that visits all of them alike as steps go by, another one for every
    decomposer."""
    if count >= len(ranks):
        return list(ranks)
    first = owner + phase(step, len(ranks))
    return [ranks[(first + place) % len(ranks)] for place in range(count)]


def counted(
    factors: Sequence[FactorSpec], rows: Mapping[str, float], world: int, *, wanted: int | None
) -> Mapping[str, int]:
    """Factor key -> ranks that have the rows of an update.

    Args:
        rows: factor key -> rows of a rank in a step; factors that are missing take all ranks.
        wanted: rows of an update, see :func:`rows_needed`.
    """
    counts = {}
    for factor in factors:
        here = rows.get(factor.key, 0.0)
        if here > 0:
            counts[factor.key] = max(1, min(world, int(-(-rows_needed(factor, wanted) // here))))
    return {key: count for key, count in counts.items() if count < world}
