"""Layers that see the same input, such as q, k, v or gate, up, share one A. They are found by tensor identity in the
first captured step. Of a group, the layer whose gradient arrives first gives the rows of an input; the others add
nothing for that input. In a later step in which they had different inputs, the common A would be of none of them: it
gets no rows of this rank.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.layers import LayerSpec, key_of

UNWATCHED = -1
"""Number of an input of a layer that is no candidate."""


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
        # layer -> (number of the input, whether the gradient is not zero) of each call whose gradient arrived
        self._arrived: dict[str, list[tuple[int, Tensor | None]]] = {}
        self._given: set[tuple[tuple[str, ...], int]] = set()
        self._met: dict[tuple[str, ...], dict[str, set[int]]] = {}  # group -> layer -> inputs whose gradient arrived

    def end_pass(self) -> None:
        """A backward pass has ended. Another one may bring the same rows again."""
        self._given.clear()

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
        """A call's gradient has arrived. ``alive``: whether it is not zero, a bool scalar; None: it is not known."""
        if self.searching and number != UNWATCHED:
            self._arrived.setdefault(layer, []).append((number, alive))
        if (group := self._group.get(layer)) is not None:
            self._met.setdefault(group, {}).setdefault(layer, set()).add(number)

    def found(self) -> dict[str, tuple[tuple[int, bool], ...]]:
        """Layer -> (number of the input, whether the gradient was not zero) of its calls; layers with equal entries
        share their inputs. Waits for the device."""
        flags = [alive for calls in self._arrived.values() for _, alive in calls if alive is not None]
        known = dict(zip(map(id, flags), torch.stack(flags).tolist() if flags else (), strict=True))
        return {
            layer: tuple((number, known.get(id(alive), True)) for number, alive in calls)
            for layer, calls in self._arrived.items()
        }

    def parted(self) -> list[tuple[str, ...]]:
        """Groups whose layers got gradients for different inputs in this step. A layer that got none is left aside."""
        return [group for group, met in self._met.items() if len(set(map(frozenset, met.values()))) > 1]

    def key(self, layer: LayerSpec) -> str:
        """Key of the factor to which a layer's inputs go."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def gives(self, layer: LayerSpec, number: int) -> bool:
        """Whether a call with this input gives its rows to A: the first one of a group whose gradient arrives."""
        group = self._group.get(layer.name)
        if group is None:
            return True
        is_first = (group, number) not in self._given
        self._given.add((group, number))
        return is_first

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; these groups share their A from now on."""
        self.searching = False
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.begin_step()


def agreed(found: Sequence[Mapping[str, tuple]], kinds: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs on all ranks.

    Args:
        found: :meth:`SharedInputs.found` of every rank.
        kinds: layer -> other properties that must be equal in a group, such as its side; gives the order of layers.
    """
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in found)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
