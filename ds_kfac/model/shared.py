"""Layers that see the same input share one A, for example q, k and v, or gate and up.

In the first step that updates factors, groups of such layers are found by comparing the memory of
their inputs. The rows of a shared input are added to A once, when the gradients of all calls with
this input have arrived. A row has a gradient if it has one in any of these calls.
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
"""Used in place of an input's number if the layer may not share its A."""


@dataclass(frozen=True, eq=False)
class Input:
    """An input whose rows are to be added to A.

    Attributes:
        call: one of the calls that had this input.
        x: rows [.., I], or images.
        with_gradient: bool, of the rows' leading shape: whether a row has a gradient in any of the
            calls. For images, a bool scalar.
        alive: bool scalar, whether any row has a gradient.
    """

    call: Call
    x: Tensor
    with_gradient: Tensor
    alive: Tensor

    def joined(self, other: "Input") -> "Input":
        """Combine two calls: a row has a gradient if it has one in either call."""
        with_gradient = self.with_gradient | other.with_gradient.reshape(self.with_gradient.shape)
        return replace(self, with_gradient=with_gradient, alive=self.alive | other.alive)


@dataclass(frozen=True)
class InputOfGroup:
    """One input of a group of layers.

    Attributes:
        group: names of the layers.
        number: identifies the input, see :meth:`SharedInputs.number`.
        recomputed: whether a recomputation made the calls.
    """

    group: tuple[str, ...]
    number: int
    recomputed: bool


@dataclass(frozen=True, eq=False)
class Waiting:
    """An input of several calls. The gradients of some of these calls have not arrived yet.

    Attributes:
        gradients: number of gradients that have arrived.
        input: the input, combined over the calls whose gradients have arrived.
    """

    gradients: int
    input: Input


@dataclass(frozen=True, eq=False)
class SeenInput:
    """An input of a call whose gradient has arrived.

    Attributes:
        number: identifies the input, see :meth:`SharedInputs.number`.
        alive: whether the gradient is not zero, a bool scalar on the device; None if this was not
            computed.
    """

    number: int
    alive: Tensor | None


class SharedInputs:
    """Assigns numbers to the inputs of captured calls, and finds groups of layers that share
    inputs.

    Args:
        candidates: names of the layers that may form groups. Without candidates, the object does
            nothing.

    Attributes:
        searching: whether groups are still to be found.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching = bool(candidates)
        self._watched = frozenset(candidates)
        self._group: dict[str, tuple[str, ...]] = {}  # layer -> names of its group
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the calls of the previous step."""
        # memory of an input -> its storage, and its number
        self._inputs: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._total = 0
        # layer -> inputs of its calls whose gradient has arrived
        self._arrived: dict[str, list[SeenInput]] = {}
        # layer of a group -> numbers of the inputs whose gradient has arrived
        self._numbers: dict[str, set[int]] = {}
        # input -> number of its calls that may get a gradient
        self._calls: Counter[InputOfGroup] = Counter()
        self._waiting: dict[InputOfGroup, Waiting] = {}

    def end_pass(self) -> list[Input]:
        """End a backward pass. Returns the inputs that still wait, because not all of their calls
        got a gradient."""
        waiting = [waiting.input for waiting in self._waiting.values()]
        self._waiting.clear()
        return waiting

    def called(self, call: Call) -> None:
        """Record a call that may get a gradient."""
        if call.layer.name in self._group:
            self._calls[self._input_of_group(call)] += 1

    def _input_of_group(self, call: Call) -> InputOfGroup:
        return InputOfGroup(self._group[call.layer.name], call.input, call.rows.recomputed)

    def number(self, layer: str, x: Tensor) -> int:
        """Return the number that identifies a call's input. Calls with the same input have equal
        numbers in a step."""
        if layer not in self._watched:
            return UNWATCHED
        # inputs are told apart by their memory, not by their Python object, because ZeRO-3 makes
        # views
        storage = StorageWeakRef(x.untyped_storage())
        memory = storage.cdata, x.storage_offset(), tuple(x.shape), x.stride(), x._version
        if memory in self._inputs:
            earlier, number = self._inputs[memory]
            if not earlier.expired():
                return number
            # the earlier input was freed, and its memory holds another tensor now
        number = self._total
        self._total += 1
        self._inputs[memory] = storage, number
        return number

    def arrived(self, layer: str, number: int, alive: Tensor | None) -> None:
        """Record that a call's gradient has arrived.

        Args:
            layer: name of the layer.
            number: number of the call's input.
            alive: whether the gradient is not zero, a bool scalar; None if this was not computed.
        """
        if self.searching and number != UNWATCHED:
            self._arrived.setdefault(layer, []).append(SeenInput(number, alive))

    def inputs_seen(self) -> dict[str, tuple[tuple[int, bool], ...]]:
        """Return a dict from layer name to a tuple with one pair (number of the input, whether the
        gradient was not zero) for each of the layer's calls.

        Layers with equal entries share their inputs. Waits for the device.
        """
        calls = [(layer, seen) for layer, inputs in self._arrived.items() for seen in inputs]
        # all flags in one tensor, to wait once; a flag that nobody computed counts as true
        flags = [seen.alive for _, seen in calls if seen.alive is not None]
        values = iter(torch.stack(flags).tolist() if flags else ())
        inputs_of: dict[str, tuple[tuple[int, bool], ...]] = {}
        for layer, seen in calls:
            is_alive = True if seen.alive is None else next(values)
            inputs_of[layer] = (*inputs_of.get(layer, ()), (seen.number, is_alive))
        return inputs_of

    def parted(self) -> set[tuple[str, ...]]:
        """Return the groups whose layers do not share all their inputs.

        A layer need not get a gradient for every input. So the layers of a group are compared with
        a reference, the layer that got gradients for the most inputs. The group is returned if any
        layer got a gradient for an input for which the reference got none.
        """
        parted = set()
        for group in set(self._group.values()):
            inputs = [self._numbers[layer] for layer in group if layer in self._numbers]
            widest = max(inputs, key=len, default=set())
            if any(not numbers <= widest for numbers in inputs):
                parted.add(group)
        return parted

    def key(self, layer: LayerSpec) -> str:
        """Return the key of the factor A that a layer's inputs go to."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def complete(self, arrived: Input) -> Input | None:
        """Return the input of a call whose gradient has arrived, if its rows are complete.

        The rows are complete if the gradients of all calls with that input have arrived. Otherwise
        the input waits, and the result is None. The result is also None for a layer
        whose A gets its rows from another layer.
        """
        layer = arrived.call.layer
        # the parts of a cut layer share one A, which gets its rows from the first part
        if layer.name not in self._group:
            return arrived if layer.shares is None else None
        self._numbers.setdefault(layer.name, set()).add(arrived.call.input)
        place = self._input_of_group(arrived.call)
        gradients = 1
        if place in self._waiting:
            waiting = self._waiting.pop(place)
            gradients += waiting.gradients
            arrived = waiting.input.joined(arrived)
        if gradients >= self._calls[place]:
            return arrived
        self._waiting[place] = Waiting(gradients, arrived)
        return None

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search for groups. From now on, the layers of each of these groups share one
        A."""
        self.searching = False
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.begin_step()


def agreed(
    inputs_of_ranks: Sequence[Mapping[str, tuple]], properties: Mapping[str, object]
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of layers that share their inputs on all ranks.

    Args:
        inputs_of_ranks: :meth:`SharedInputs.inputs_seen` of every rank.
        properties: dict from layer name to further properties, such as the side of A, that must be
            equal within a group. The groups keep the order of this mapping.
    """
    groups: dict[tuple, list[str]] = {}
    for layer, properties_of_layer in properties.items():
        inputs = tuple(rank.get(layer, ()) for rank in inputs_of_ranks)
        if any(inputs):
            groups.setdefault((properties_of_layer, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
