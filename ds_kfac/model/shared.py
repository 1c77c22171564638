"""Layers that see the same input, such as q, k, v or gate, up, share one A. They are found by
tensor identity in the first captured step. The rows of an input then count once, when the gradients
of all calls with it have arrived, and a row has a gradient if it has one in any of these calls.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.calls import Call
from ds_kfac.model.layers import LayerSpec, key_of

UNWATCHED = -1
"""Number of an input of a layer that is no candidate."""


@dataclass(frozen=True, eq=False)
class Input:
    """An input whose rows are to be added to A.

    Attributes:
        call: one of the calls that had it.
        x: rows [.., I], or images.
        with_gradient: bool of the rows' leading shape, whether a row has a gradient in any of the
            calls; of images a scalar.
        alive: bool scalar, whether any row has one.
    """

    call: Call
    x: Tensor
    with_gradient: Tensor
    alive: Tensor

    def joined(self, other: "Input") -> "Input":
        """This input, with the gradients of another call, too."""
        with_gradient = self.with_gradient | other.with_gradient.reshape(self.with_gradient.shape)
        return replace(self, with_gradient=with_gradient, alive=self.alive | other.alive)


Place = tuple[tuple[str, ...], int, bool]
"""A group of layers, the number of an input, and whether a recomputation made the calls."""


class SharedInputs:
    """Numbers the inputs of captured calls, and finds the groups of layers that share theirs.

    Args:
        candidates: names of layers that may form groups; none: it does nothing.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching = bool(candidates)
        self._watched = frozenset(candidates)
        self._group: dict[str, tuple[str, ...]] = {}  # layer -> its group
        self.begin_step()

    def begin_step(self) -> None:
        self._inputs: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._total = 0
        # layer -> (number of the input, whether the gradient is not zero) of each call whose
        # gradient arrived
        self._arrived: dict[str, list[tuple[int, Tensor | None]]] = {}
        self._numbers: dict[str, set[int]] = {}  # layer of a group -> its inputs
        self._calls: Counter[Place] = Counter()
        # (number of gradients that have arrived, the input)
        self._waiting: dict[Place, tuple[int, Input]] = {}

    def end_pass(self) -> list[Input]:
        """A backward pass has ended. Returns the inputs that still waited, as not all of their
        calls got a gradient."""
        waiting = [waiting for _, waiting in self._waiting.values()]
        self._waiting.clear()
        return waiting

    def called(self, call: Call) -> None:
        """A call was made whose gradient may arrive."""
        if call.layer.name in self._group:
            self._calls[self._place(call)] += 1

    def _place(self, call: Call) -> Place:
        return self._group[call.layer.name], call.input, call.rows.recomputed

    def number(self, layer: str, x: Tensor) -> int:
        """Number of a call's input; equal for calls with the same input in a step."""
        if layer not in self._watched:
            return UNWATCHED
        # not the Python object, as ZeRO-3 makes views
        storage = StorageWeakRef(x.untyped_storage())
        place = storage.cdata, x.storage_offset(), tuple(x.shape), x.stride(), x._version
        known, number = self._inputs.get(place, (None, UNWATCHED))
        if known is None or known.expired():  # freed memory may hold another tensor by now
            number = self._total
            self._total += 1
            self._inputs[place] = storage, number
        return number

    def arrived(self, layer: str, number: int, alive: Tensor | None) -> None:
        """A call's gradient has arrived. ``alive``: whether it is not zero, a bool scalar; None: it
        is not known."""
        if self.searching and number != UNWATCHED:
            self._arrived.setdefault(layer, []).append((number, alive))

    def found(self) -> dict[str, tuple[tuple[int, bool], ...]]:
        """Layer -> (number of the input, whether the gradient was not zero) of its calls; layers
        with equal entries share their inputs. Waits for the device."""
        flags = [
            alive for calls in self._arrived.values() for _, alive in calls if alive is not None
        ]
        known = dict(zip(map(id, flags), torch.stack(flags).tolist() if flags else (), strict=True))
        return {
            layer: tuple((number, known.get(id(alive), True)) for number, alive in calls)
            for layer, calls in self._arrived.items()
        }

    def parted(self) -> set[tuple[str, ...]]:
        """Return the groups whose layers do not share all their inputs.

        These are groups in which each of two layers got a gradient for an input for which the other
        got none. A layer may get no gradient for an input of its own, so if only one of the two
        lacks some, nothing is known.
        """
        parted = set()
        for group in set(self._group.values()):
            inputs = [self._numbers[layer] for layer in group if layer in self._numbers]
            widest = max(inputs, key=len, default=set())
            if any(not numbers <= widest for numbers in inputs):
                parted.add(group)
        return parted

    def key(self, layer: LayerSpec) -> str:
        """Key of the factor to which a layer's inputs go."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def complete(self, arrived: Input) -> Input | None:
        """The input of a call whose gradient has arrived, if it is the last one with this input;
        else it waits."""
        layer = arrived.call.layer
        # of the parts of a layer the first gives the rows of their common A
        if layer.name not in self._group:
            return arrived if layer.shares is None else None
        self._numbers.setdefault(layer.name, set()).add(arrived.call.input)
        place = self._place(arrived.call)
        gradients = 1
        if place in self._waiting:
            before, waiting = self._waiting.pop(place)
            gradients += before
            arrived = waiting.joined(arrived)
        if gradients >= self._calls[place]:
            return arrived
        self._waiting[place] = gradients, arrived
        return None

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; these groups share their A from now on."""
        self.searching = False
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.begin_step()


def agreed(
    found: Sequence[Mapping[str, tuple]], kinds: Mapping[str, object]
) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs on all ranks.

    Args:
        found: :meth:`SharedInputs.found` of every rank.
        kinds: layer -> other properties that must be equal in a group, such as its side; gives the
            order of layers.
    """
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in found)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
