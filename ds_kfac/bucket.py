"""One step's batch sums in one flat fp32 buffer, ordered by the rank that averages them. Pure layout, no communication.

A rank's segment starts with one count per slot, then the packed sums follow; every part is aligned. Where layers share
factors, every segment of the last bucket has one number more after its counts: whether they still may.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ds_kfac.calls import BatchSum, UseSums
from ds_kfac.factor_spec import FactorSpec, factors_by_layer
from ds_kfac.layers.base import LayerSpec

ALIGNMENT = 32
"""Elements; every slot starts at a multiple, so that vectorised kernels may assume it."""


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Slot:
    """Where the sum over one side of one use of a layer lies.

    Attributes:
        factor: key of the factor it belongs to.
        count: place of the number of summands.
        start, numel: of the packed sum.
    """

    factor: str
    layer: str
    use: int
    side: str
    count: int
    start: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """The part of one rank: elements ``start .. stop``, counts before ``body``, and maybe the place of a flag."""

    start: int
    body: int
    stop: int
    slots: tuple[Slot, ...]
    flag: int | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FactorBucket:
    """The layout of the sums of some factors; the same on every rank."""

    segments: tuple[Segment, ...]

    @classmethod
    def plan(
        cls,
        layers: Sequence[LayerSpec],
        factors: Sequence[FactorSpec],
        decomposers: Mapping[str, int],
        *,
        world: int,
        keys: Collection[str] | None = None,
        flagged: bool = False,
    ) -> "FactorBucket":
        """Lay out the sums of the factors in ``keys`` (None: all). Layers that share an input have one slot.

        Args:
            flagged: with a flag in every segment.
        """
        by_layer, segments, end = factors_by_layer(factors), [], 0
        parts: list[list[tuple[str, str, int, str, int]]] = [[] for _ in range(world)]
        for layer in layers:
            for which, factor in by_layer.get(layer.name, {}).items():
                if factor.layers[0] != layer.name or (keys is not None and factor.key not in keys):
                    continue
                for index, use in enumerate(layer.uses):
                    numel = (use.A if which == "A" else use.G).numel
                    parts[decomposers[factor.key]].append((factor.key, layer.name, index, which, numel))
        for own in parts:
            start, body = end, end + aligned(len(own) + flagged)
            end, slots = body, []
            for place, (key, name, index, which, numel) in enumerate(own):
                slots.append(Slot(key, name, index, which, start + place, end, numel))
                end += aligned(numel)
            segments.append(Segment(start, body, end, tuple(slots), start + len(own) if flagged else None))
        return cls(tuple(segments))

    @property
    def numel(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for segment in self.segments for slot in segment.slots)

    def views(self, flat: Tensor, *, rank: int | None = None) -> dict[str, list[UseSums]]:
        """Layer name -> the sums of its uses, as views of ``flat``: the whole buffer, or one rank's segment."""
        slots = self.slots if rank is None else self.segments[rank].slots
        base = 0 if rank is None else self.segments[rank].start
        found: dict[str, list[UseSums]] = {}
        for slot in slots:
            sum_ = BatchSum(flat.narrow(0, slot.start - base, slot.numel), flat.narrow(0, slot.count - base, 1)[0])
            uses = found.setdefault(slot.layer, [])
            while len(uses) <= slot.use:
                uses.append(UseSums(None, None))
            uses[slot.use] = uses[slot.use].having(slot.side, sum_)
        return found


def step_buckets(
    layers: Sequence[LayerSpec],
    factors: Sequence[FactorSpec],
    decomposers: Mapping[str, int],
    *,
    world: int,
    keys: frozenset[str],
    halved: bool,
) -> tuple[FactorBucket, ...]:
    """Layouts of the sums of the factors in ``keys``, in the order in which they leave; empty ones left out.

    Args:
        halved: two of them, that of the upper layers first, instead of one.
    """
    halves = _halves(layers, factors, keys) if halved else (keys,)
    parts = tuple(part for part in halves if any(factor.key in part for factor in factors))
    shared = any(len(factor.layers) > 1 and factor.key in keys for factor in factors)
    return tuple(
        FactorBucket.plan(
            layers, factors, decomposers, world=world, keys=part, flagged=shared and index == len(parts) - 1
        )
        for index, part in enumerate(parts)
    )


def _halves(
    layers: Sequence[LayerSpec], factors: Sequence[FactorSpec], keys: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Factors of the upper layers, about half of the elements, and the rest. A layer's factors stay together."""
    numel: Counter[str] = Counter()
    for factor in factors:
        if factor.key in keys:
            numel[factor.layers[0]] += factor.side.numel
    upper: set[str] = set()
    taken, total = 0, sum(numel.values())
    for layer in reversed(layers):
        if 2 * taken >= total:
            break
        upper.add(layer.name)
        taken += numel[layer.name]
    first = frozenset(f.key for f in factors if f.key in keys and f.layers[0] in upper)
    return first, keys - first
