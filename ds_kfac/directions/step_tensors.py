"""Where a step reads its gradients and writes its results.

There are two cases. :class:`StepTensors` uses the tensors of the gradient exchange
(``ds_kfac/zero/exchange.py``). :class:`RecordedTensors` uses the same memory in every step, as
required by steps that are recorded as a CUDA graph (``ds_kfac/update/recorded.py``).
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
    """Whether a rank with these layers and this type of device records its steps."""
    numel = sum(layer.numel for layer in layers)
    is_small = 0 < numel <= min(RECORDED_NUMEL, len(layers) * RECORDED_LAYER)
    return is_small and plan.batched and device in RECORDERS and plan.config.ops.backend != "torch"


def kept_bytes(plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
    """Return the bytes that :class:`RecordedTensors` of these layers keep between steps."""
    if not is_recorded(plan, layers, device):
        return 0
    return torch.float32.itemsize * sum(layer.numel for layer in layers)


class StepTensors:
    """The tensors of a step that is not recorded. Gradients are copied only where necessary, and
    results are passed to the exchange immediately."""

    def __init__(self, gradients: Gradients, exchange: GradientExchange) -> None:
        self.gradients = gradients
        self.exchange = exchange

    def take(self, group: LayerGroup) -> tuple[Tensor, bool]:
        """Return the group's gradients. Call this once for each group.

        Returns the gradients, fp32 [n, O, I], and whether the caller may overwrite them. If not,
        they may be in DeepSpeed's own memory.
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
        """Return the tensor [layers, O, I] to which the caller must write the group's results after
        it has read the gradients. Return None if the caller must call :meth:`put` instead."""
        return self.exchange.memory(group.layers)

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        """Pass the group's results to the exchange. Call this once for each group."""
        self.exchange.put(group.layers, group.by_layer(x_nOI))


class RecordedTensors:
    """The tensors of a recorded step, with the methods of :class:`StepTensors`.

    A recording reads and writes fixed addresses. So the gradients are copied into the same memory
    in every step, and the results overwrite the copies.

    Attributes:
        matrices: dict from group to an fp32 tensor [n, O, I]. It holds the gradients of the group's
            matrices until the results overwrite them.
        gradients: dict from layer name to a view of the layer's gradient in ``matrices``.
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
    """Executes the steps of these groups. Once a few successive steps have used the same tensors
    and settings, the step is recorded as a CUDA graph, and later steps replay it.

    Args:
        inputs: dict from the name of an input to the tensor from which the recording reads it. An
            input is a number or vector that changes from step to step.
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
        """Run ``compute(tensors, **inputs)``, or its recording, and pass the results to the
        exchange. ``tensors`` is a :class:`RecordedTensors`.

        Args:
            compute: function that changes state in place and passes the result of each group to
                ``tensors.put``. It must decide nothing on the host, because a recording does not
                run the host's code.
            inputs: dict from the name of an input, as in the constructor's ``inputs``, to its value
                in this step. None counts as 0, so that steps with and without a value share a
                recording.
            values: settings on which ``compute`` depends. If they change, the step is recorded
                again.

        Returns the result of ``compute``.
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
    """Return a :class:`RecordedStep` of these groups, or None if their steps are not recorded."""
    layers = [layer for group in groups for layer in group.layers]
    if not is_recorded(plan, layers, exchange.device.type):
        return None
    return RecordedStep(groups, exchange, inputs)
