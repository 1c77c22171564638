"""Who sends which elements of flattened parameters to whom: a frozen plan, the same on every rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter


@dataclass(frozen=True, order=True)
class Move:
    """Elements start .. start + numel of a flattened parameter travel from ``source`` to ``target``."""

    param: int
    start: int
    numel: int
    source: int
    target: int


def in_order(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Sorted. Of millions; a dataclass's own comparison takes several times as long."""
    return tuple(sorted(moves, key=attrgetter("param", "start", "numel", "source", "target")))


@dataclass(frozen=True)
class RelayoutPlan:
    """Every piece that changes ranks; pieces already in place are not in it. The same on every rank."""

    world: int
    moves: tuple[Move, ...]

    @cached_property
    def _order(self) -> Mapping[tuple[int, int], tuple[Move, ...]]:
        order: dict[tuple[int, int], list[Move]] = {}
        for move in in_order(self.moves):
            order.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in order.items()}

    def between(self, source: int, target: int) -> tuple[Move, ...]:
        """Moves from ``source`` to ``target`` in the order in which they lie in the message."""
        return self._order.get((source, target), ())

    def numel(self, source: int, target: int) -> int:
        return sum(move.numel for move in self.between(source, target))

    @property
    def total_numel(self) -> int:
        """Elements on the wire, summed over all ranks."""
        return sum(move.numel for move in self.moves)
