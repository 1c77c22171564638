"""Where a step of this rank's layers takes its gradients and puts its results: as they come, or,
where the step is recorded (``ds_kfac/update/recorded.py``), always in the same places."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
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
    """Whether a rank's steps of these layers are recorded, on this type of device."""
    few = (
        0
        < sum(layer.numel for layer in layers)
        <= min(RECORDED_NUMEL, len(layers) * RECORDED_LAYER)
    )
    return few and plan.batched and device in RECORDERS and plan.config.ops.backend != "torch"


def kept_bytes(plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
    """What a rank's recorded steps of these layers keep beside the memory of a step: gradients,
    whose places results take."""
    if not is_recorded(plan, layers, device):
        return 0
    return torch.float32.itemsize * sum(layer.numel for layer in layers)


class StepTensors:
    """Gradients as they come, and results that go to where they belong at once."""

    def __init__(self, gradients: Gradients, exchange: GradientExchange) -> None:
        self.gradients, self.exchange = gradients, exchange

    def take(self, group: LayerGroup) -> tuple[Tensor, bool]:
        """The group's gradients, fp32 [n, O, I], and whether they may be overwritten: else they may
        be DeepSpeed's own memory, of which layers that lie at equal distances are a view. Call it
        once for each group."""
        is_copy = self.gradients.is_copy(group.names[0])
        parts = [self.gradients.pop(name) for name in group.names]
        if len(parts) == 1:
            return group.matrices(parts), is_copy
        together = evenly_spaced(parts)
        return (group.matrices(parts), True) if together is None else (together, False)

    def memory(self, group: LayerGroup) -> Tensor | None:
        """[layers, O, I], to which the caller writes the group's results, once its gradients have
        been read. None: they are to be :meth:`put`."""
        return self.exchange.memory(group.layers)

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        """Take the group's results. Call it once for each group."""
        self.exchange.put(group.layers, group.by_layer(x_nOI))


class RecordedTensors:
    """:class:`StepTensors` of a recorded step, always in the same places. Results take the
    gradients' places.

    Attributes:
        matrices: of each group, fp32 [n, O, I].
        gradients: layer name -> its part of these.
    """

    def __init__(self, groups: Sequence[LayerGroup], device: torch.device) -> None:
        shapes = {group: (group.n, *group.layers[0].shape[-2:]) for group in groups}
        self.matrices = {
            group: torch.empty(x, dtype=torch.float32, device=device) for group, x in shapes.items()
        }
        of_groups = (
            zip(group.names, group.by_layer(x), strict=True) for group, x in self.matrices.items()
        )
        self.gradients = dict(chain.from_iterable(of_groups))

    def take(self, group: LayerGroup) -> tuple[Tensor, bool]:
        return self.matrices[group], True

    def memory(self, group: LayerGroup) -> Tensor:
        x = self.matrices[group]
        return x.view(len(group.layers), -1, x.shape[-1])

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        self.matrices[group].copy_(x_nOI)


class RecordedStep(Recorded[T]):
    """A step of these groups that is recorded once it is the same as the one before.

    Args:
        inputs: name -> place of a number or vector that changes from step to step.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], exchange: GradientExchange, inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(RECORDERS[exchange.device.type], logger.warning)
        self.groups, self.exchange, self.inputs = groups, exchange, inputs
        self.tensors = RecordedTensors(groups, exchange.device)
        for group in groups:
            group.stays = True

    def step(
        self,
        compute: Callable[..., T],
        gradients: Gradients,
        inputs: Mapping[str, Tensor | float],
        values: Any,
    ) -> T:
        """``compute(step tensors, **inputs)``: it decides nothing on the host, changes state in
        place, and gives a result for each group.

        Args:
            values: settings by which it computes: other ones are recorded anew.
        """
        tensors = self.tensors
        names = [*tensors.gradients]
        torch._foreach_copy_([*tensors.gradients.values()], [gradients.pop(name) for name in names])
        places = {name: self.inputs[name] for name in inputs}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                places[name].copy_(value)
            else:
                places[name].fill_(value)
        read = [group.rotation for group in self.groups]
        found = self(partial(compute, tensors, **places), read, (*places, values))
        for group in self.groups:
            self.exchange.put(group.layers, group.by_layer(tensors.matrices[group]))
        return found


def recorded_step(
    plan: Plan,
    groups: Sequence[LayerGroup],
    exchange: GradientExchange,
    inputs: Mapping[str, Tensor],
) -> RecordedStep | None:
    """None where steps are launched as they are."""
    layers = [layer for group in groups for layer in group.layers]
    return (
        RecordedStep(groups, exchange, inputs)
        if is_recorded(plan, layers, exchange.device.type)
        else None
    )
