"""Layers that see the same input, such as q, k, v or gate, up: found by tensor identity, and verified from then on."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.layers import LayerSpec, key_of

Fingerprint = tuple[StorageWeakRef, Any, tuple[int, ...], tuple[int, ...], int]
"""Memory and version of a tensor, not the Python object: ZeRO-3 hands every module a view of its own."""


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    # memory that was given back may hold another tensor by now
    return not a[0].expired() and a[0].cdata == b[0].cdata and a[1:] == b[1:]


class SharedInputs:
    """Watches the inputs of captured calls: first it looks for groups, then it checks that the groups in use hold.

    The rows of a group's A are those of the layer of it that is called first in a forward.

    Args:
        candidates: names of layers that may form groups; none: it does nothing.

    Attributes:
        found: layer -> number of each of its inputs so far; layers with equal ones share them.
        broken: groups in use that did not hold in this step.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching = bool(candidates)
        self.broken: set[tuple[str, ...]] = set()
        self._watched = frozenset(candidates)
        self.found: dict[str, tuple[int, ...]] = {}
        self._inputs: list[tuple[int, Fingerprint]] = []  # those of this micro-batch
        self._total = 0
        self._group: dict[str, tuple[str, ...]] = {}
        self._calls: dict[tuple[str, ...], list[Fingerprint]] = {}  # of the layer that was first to call so often
        self._counts: Counter[str] = Counter()
        self._giving: dict[tuple[str, ...], str] = {}

    def key(self, layer: LayerSpec) -> str:
        """Of the factor that a layer's inputs are for."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def gives(self, layer: LayerSpec) -> bool:
        """Whether the rows of this call of a layer are to be counted for its group."""
        group = self._group.get(layer.name)
        return self._giving.setdefault(group, layer.name) == layer.name if group else layer.shares is None

    def see(self, layer: str, x: Tensor) -> None:
        """A layer was called with ``x``. If it is in a group and another one of it was called with something else, the
        group is broken."""
        if layer not in self._watched:
            return
        mark = StorageWeakRef(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x._version
        if self.searching:
            number = next((number for number, other in self._inputs if _same(other, mark)), None)
            if number is None:
                number, self._total = self._total, self._total + 1
                self._inputs.append((number, mark))
            self.found[layer] = (*self.found.get(layer, ()), number)
            return
        calls = self._calls.setdefault(self._group[layer], [])
        self._counts[layer] += 1
        if len(calls) < self._counts[layer]:
            calls.append(mark)
        elif not _same(calls[self._counts[layer] - 1], mark):
            self.broken.add(self._group[layer])

    def begin_batch(self) -> None:
        """The next inputs are those of another micro-batch; the last one may have been given up half way."""
        self._inputs, self._counts, self._calls, self._giving = [], Counter(), {}, {}

    def end_batch(self) -> None:
        """A group is broken where those of its layers that were called were not called equally often."""
        for group, seen in self._calls.items():
            if any(0 < self._counts[name] < len(seen) for name in group):
                self.broken.add(group)
        self.begin_batch()

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; from now on every batch is checked against these groups."""
        self.searching = False
        self.broken.clear()
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.found = {}
        self.begin_batch()


def agreed(found: Sequence[Mapping[str, tuple[int, ...]]], kinds: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs wherever they were called, in the order of ``kinds``: layer -> what has
    to be equal too, such as its side. ``found``: of every rank."""
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in found)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
