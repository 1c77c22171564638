"""Where a step takes the gradients of this rank's layers from and where it puts the results.

There are two cases. :class:`StepTensors` passes tensors on as they come. :class:`RecordedTensors`
uses the same memory in every step, which a recorded step (``ds_kfac/update/recorded.py``) needs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.log import logger
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import LayerGroup, evenly_spaced
from ds_kfac.update.recorded import RECORDED_LAYER, RECORDED_NUMEL, RECORDERS, Recorded
from ds_kfac.zero.exchange import GradientExchange, Gradients

T = TypeVar("T")


def is_recorded(plan: Plan, layers: Sequence[LayerSpec], device: str) -> bool:
    """Whether the steps of these layers of a rank are recorded on this type of device."""
    numel = sum(layer.numel for layer in layers)
    is_small = 0 < numel <= min(RECORDED_NUMEL, len(layers) * RECORDED_LAYER)
    return is_small and plan.batched and device in RECORDERS and plan.config.ops.backend != "torch"


def kept_bytes(plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
    """Return the bytes that :class:`RecordedTensors` of these layers keep between steps."""
    if not is_recorded(plan, layers, device):
        return 0
    return torch.float32.itemsize * sum(layer.numel for layer in layers)


class StepTensors:
    """The tensors of a step that is not recorded: gradients where they are, and results that go to
    their destination at once."""

    def __init__(self, gradients: Gradients, exchange: GradientExchange) -> None:
        self.gradients = gradients
        self.exchange = exchange

    def take(self, group: LayerGroup) -> tuple[Tensor, bool]:
        """Take the group's gradients. Call this once for each group.

        Returns fp32 [n, O, I], and whether the caller may overwrite it. A tensor that must not be
        overwritten may be DeepSpeed's own memory.
        """
        is_copy = self.gradients.is_copy(group.names[0])
        parts = [self.gradients.pop(name) for name in group.names]
        if len(parts) == 1:
            return group.matrices(parts), is_copy
        view = evenly_spaced(parts)
        if view is not None:
            return view, False
        return group.matrices(parts), True

    def memory(self, group: LayerGroup) -> Tensor | None:
        """Return the memory [layers, O, I] to which the caller writes the group's results once it
        has read the gradients. None: the caller has to :meth:`put` the results."""
        return self.exchange.memory(group.layers)

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        """Send the group's results to their destination. Call this once for each group."""
        self.exchange.put(group.layers, group.by_layer(x_nOI))


class RecordedTensors:
    """The tensors of a recorded step, with the methods of :class:`StepTensors`.

    A recording reads and writes fixed addresses. So the gradients are copied into the same memory
    in every step, and the results overwrite them there.

    Attributes:
        matrices: group -> fp32 [n, O, I].
        gradients: layer name -> the layer's view of these.
    """

    def __init__(self, groups: Sequence[LayerGroup], device: torch.device) -> None:
        self.matrices: dict[LayerGroup, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        for group in groups:
            shape = (group.n, *group.layers[0].shape[-2:])
            x_nOI = torch.empty(shape, dtype=torch.float32, device=device)
            self.matrices[group] = x_nOI
            self.gradients |= zip(group.names, group.by_layer(x_nOI), strict=True)

    def take(self, group: LayerGroup) -> tuple[Tensor, bool]:
        return self.matrices[group], True

    def memory(self, group: LayerGroup) -> Tensor:
        x = self.matrices[group]
        return x.view(len(group.layers), -1, x.shape[-1])

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        self.matrices[group].copy_(x_nOI)


class RecordedStep(Recorded[T]):
    """A step of these groups that is recorded as soon as it repeats the step before.

    Args:
        inputs: name -> the memory of a number or vector that changes from step to step. The
            recording reads it there.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], exchange: GradientExchange, inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(RECORDERS[exchange.device.type], logger.warning)
        self.groups = groups
        self.exchange = exchange
        self.inputs = inputs
        self.tensors = RecordedTensors(groups, exchange.device)
        for group in groups:
            group.stays = True

    def step(
        self,
        compute: Callable[..., T],
        gradients: Gradients,
        inputs: Mapping[str, Tensor | float | None],
        values: Any,
    ) -> T:
        """Run ``compute(step tensors, **inputs)``, or its recording, and send the results.

        Args:
            compute: changes state in place, puts a result for each group, and decides nothing on
                the host, because a recording does not run the host's code.
            inputs: values of this step, by the names of the constructor's ``inputs``. None: 0.
                So steps with and without the value have one recording.
            values: settings that ``compute`` depends on. If they change, the step is recorded anew.

        Returns what ``compute`` returns.
        """
        tensors = self.tensors
        arrived = [gradients.pop(name) for name in tensors.gradients]
        torch._foreach_copy_([*tensors.gradients.values()], arrived)
        places = {name: self.inputs[name] for name in inputs}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                places[name].copy_(value)
            else:
                places[name].fill_(0.0 if value is None else value)
        rotations = [group.rotation for group in self.groups]
        result = self(partial(compute, tensors, **places), rotations, (*places, values))
        for group in self.groups:
            self.exchange.put(group.layers, group.by_layer(tensors.matrices[group]))
        return result


def recorded_step(
    plan: Plan,
    groups: Sequence[LayerGroup],
    exchange: GradientExchange,
    inputs: Mapping[str, Tensor],
) -> RecordedStep | None:
    """Return a :class:`RecordedStep` of these groups; None if their steps are not recorded."""
    layers = [layer for group in groups for layer in group.layers]
    if not is_recorded(plan, layers, exchange.device.type):
        return None
    return RecordedStep(groups, exchange, inputs)
