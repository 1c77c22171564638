"""Where a step of this rank's layers takes its gradients and puts its results: as they come, or, where the step is
recorded (``ds_kfac/update/recorded.py``), always in the same places."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac.log import logger
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import LayerGroup, evenly_spaced
from ds_kfac.update.recorded import RECORDED_LAYER, RECORDED_NUMEL, RECORDERS, Recorded
from ds_kfac.zero.exchange import GradientExchange, Outbox

T = TypeVar("T")


def is_recorded(plan: Plan, layers: Sequence[LayerSpec], device: str) -> bool:
    """Whether a rank's steps of these layers are recorded, on this type of device."""
    few = 0 < sum(layer.numel for layer in layers) <= min(RECORDED_NUMEL, len(layers) * RECORDED_LAYER)
    return few and plan.batched and device in RECORDERS and plan.config.ops.backend != "torch"


def kept_bytes(plan: Plan, layers: Sequence[LayerSpec], device: str, *, in_place: bool) -> int:
    """What a rank's recorded steps of these layers keep beside the memory of a step: gradients, and results that may
    not take their places."""
    if not is_recorded(plan, layers, device):
        return 0
    arriving, leaving = plan.gradient_dtypes
    each = arriving.itemsize + (0 if in_place and leaving is arriving else torch.float32.itemsize)
    return each * sum(layer.numel for layer in layers)


class StepTensors:
    """Gradients as they come, and results that go to the outbox at once.

    Args:
        gradients: layer name -> matrix, until it is taken.
    """

    def __init__(self, gradients: dict[str, Tensor], outbox: Outbox) -> None:
        self.gradients, self.outbox = gradients, outbox

    def take(self, group: LayerGroup) -> tuple[Tensor, int]:
        """The group's gradients [n, O, I] in their dtype, and an address: the memory there may be DeepSpeed's own and
        must not be written to. Of layers that lie at equal distances in that memory they are a view. Call it once for
        each group."""
        parts = [self.gradients.pop(name) for name in group.names]
        x = evenly_spaced(parts) if len(parts) > 1 else None
        return group.matrices(parts) if x is None else x, parts[0].data_ptr()

    def claim(self, group: LayerGroup) -> Tensor | None:
        """[layers, O, I], to which the caller writes the group's results, once its gradients have been read. None: they
        are to be :meth:`put`."""
        return self.outbox.claim(group.layers)

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        """Take the group's results. Call it once for each group."""
        self.outbox.add(group.layers, group.by_layer(x_nOI))


class RecordedTensors:
    """:class:`StepTensors` of a recorded step. Results take the gradients' places if they may be rounded to their
    dtype.

    Attributes:
        dtypes: of each layer's gradient, as it arrives. A group's tensor has the widest of its layers'.
        gradients: layer name -> gradient.
        matrices, results: of each group, [n, O, I].
        rounded: groups whose results are in the dtype in which they are stored.
        borrowed: whether a result must be copied before others keep it.
    """

    def __init__(self, groups: Sequence[LayerGroup], dtypes: list[torch.dtype], exchange: GradientExchange) -> None:
        device, layout, each = exchange.device, exchange.layout, iter(dtypes)
        self.dtypes = dtypes
        shapes = {group: (group.n, *group.layers[0].shape[-2:]) for group in groups}
        kept = {group: reduce(torch.promote_types, islice(each, len(group.layers))) for group in groups}
        self.matrices = {group: torch.empty(shapes[group], dtype=kept[group], device=device) for group in groups}
        fits = layout.in_place and exchange.scatter_dtype is layout.dtype
        self.rounded = {group for group, dtype in kept.items() if fits and dtype is layout.dtype}
        self.borrowed = not layout.in_place
        self.results = {
            group: x if group in self.rounded else torch.empty(shapes[group], dtype=torch.float32, device=device)
            for group, x in self.matrices.items()
        }
        of_groups = (zip(group.names, group.by_layer(x), strict=True) for group, x in self.matrices.items())
        self.gradients = dict(chain.from_iterable(of_groups))

    def take(self, group: LayerGroup) -> tuple[Tensor, int]:
        x = self.matrices[group]
        return x, x.data_ptr()

    def claim(self, group: LayerGroup) -> Tensor:
        x = self.results[group]
        return x.view(len(group.layers), -1, x.shape[-1])

    def put(self, group: LayerGroup, x_nOI: Tensor) -> None:
        self.results[group].copy_(x_nOI)


class RecordedStep(Recorded[T]):
    """A step of these groups that is recorded once it is the same as the one before.

    Args:
        inputs: name -> place of a number or vector that changes from step to step.
    """

    def __init__(self, groups: Sequence[LayerGroup], exchange: GradientExchange, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(RECORDERS[exchange.device.type], logger.warning)
        self.groups, self.exchange, self.inputs = groups, exchange, inputs
        self.tensors: RecordedTensors | None = None
        for group in groups:
            group.stays = True

    def step(
        self, compute: Callable[..., T], gradients: dict[str, Tensor], outbox: Outbox,
        inputs: Mapping[str, Tensor | float], values: Any,
    ) -> T:  # fmt: skip
        """``compute(step tensors, **inputs)``: it decides nothing on the host, leaves moments as they are, and puts a
        result for each group.

        Args:
            values: settings by which it computes: other ones are recorded anew.
        """
        # fresh eigenbases lie beside those that the recording reads, which a skipped step must leave as they were
        if not all(group.at_home for group in self.groups):
            return compute(StepTensors(gradients, outbox), **inputs)
        names = [name for group in self.groups for name in group.names]
        dtypes = [gradients[name].dtype for name in names]
        if self.tensors is None or self.tensors.dtypes != dtypes:
            self.tensors = RecordedTensors(self.groups, dtypes, self.exchange)
        tensors = self.tensors
        torch._foreach_copy_([*tensors.gradients.values()], [gradients.pop(name) for name in names])
        places = {name: self.inputs[name] for name in inputs}
        for name, value in inputs.items():
            place = places[name]
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        read = [tensors, *(part for group in self.groups for part in (group.rotation, group.moments))]
        found = self(partial(compute, tensors, **places), read, (*places, values))
        for group in self.groups:
            x = tensors.results[group].clone() if tensors.borrowed else tensors.results[group]
            outbox.add(group.layers, group.by_layer(x), x if group in tensors.rounded else None)
        return found


def recorded_step(
    plan: Plan, groups: Sequence[LayerGroup], exchange: GradientExchange, inputs: Mapping[str, Tensor]
) -> RecordedStep | None:
    """None where steps are launched as they are."""
    layers = [layer for group in groups for layer in group.layers]
    return RecordedStep(groups, exchange, inputs) if is_recorded(plan, layers, exchange.device.type) else None
