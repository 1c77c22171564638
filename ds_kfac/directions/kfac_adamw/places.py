"""A recorded step of KFACAdamW (``ds_kfac/update/recorded.py``): who has one, and where it reads and writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import torch
from torch import Tensor

from ds_kfac.directions.kfac_adamw.group_step import GroupStep
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.update.recorded import RECORDED_NUMEL, RECORDERS
from ds_kfac.update.state import PendingMoments
from ds_kfac.zero.exchange import GradientExchange

Taken = Callable[[GroupStep], tuple[Tensor, int]]
Send = Callable[[Sequence[LayerSpec], Sequence[Tensor]], None]


def is_recorded(plan: Plan, layers: Sequence[LayerSpec], device: str) -> bool:
    """Whether a rank's steps of these layers are recorded, on this type of device."""
    few = 0 < sum(layer.numel for layer in layers) <= RECORDED_NUMEL
    return few and plan.stacks and device in RECORDERS and plan.config.ops.backend != "torch"


def kept_bytes(plan: Plan, layers: Sequence[LayerSpec], device: str, *, in_place: bool) -> int:
    """What a rank's recorded steps of these layers keep beside the memory of a step: gradients, and results that may
    not take their places."""
    if not is_recorded(plan, layers, device):
        return 0
    arriving, leaving = plan.gradient_dtypes
    each = arriving.itemsize + (0 if in_place and leaving is arriving else torch.float32.itemsize)
    return each * sum(layer.numel for layer in layers)


@dataclass(frozen=True)
class Directions:
    """What the layers' steps are but for the results.

    Attributes:
        pending: of each group.
        numbers: of ``LocalResult``.
        replaced, unused: counts, fp32 scalars.
        left_out: bool [layers].
    """

    pending: list[PendingMoments]
    numbers: tuple[Tensor, ...]
    replaced: Tensor
    unused: Tensor
    left_out: Tensor


class Places:
    """Where a recorded step finds its gradients and puts its results, which take the gradients' places if they may be
    rounded to their dtype.

    Attributes:
        unscale, void: see :meth:`AdamDirection._directions`.
        dtypes: of each layer's gradient, as it arrives; a group's are in one that holds them all.
        gradients: of each layer, in the order of ``steps``.
        matrices, results: of each group, [n, O, I].
        rounded: groups whose results are in the dtype in which they are stored.
        borrowed: whether a result must be copied before others keep it.
    """

    def __init__(self, steps: Sequence[GroupStep], dtypes: list[torch.dtype], exchange: GradientExchange) -> None:
        device, layout, each = exchange.device, exchange.layout, iter(dtypes)
        self.dtypes = dtypes
        self.unscale = torch.ones((), dtype=torch.float64, device=device)
        self.void = torch.zeros((), dtype=torch.bool, device=device)
        shapes = {step: (step.group.n, *step.group.layers[0].shape[-2:]) for step in steps}
        kept = {step: reduce(torch.promote_types, islice(each, len(step.group.layers))) for step in steps}
        self.matrices = {step: torch.empty(shapes[step], dtype=kept[step], device=device) for step in steps}
        fits = layout.in_place and exchange.scatter_dtype is layout.dtype
        self.rounded = {step for step, dtype in kept.items() if fits and dtype is layout.dtype}
        self.borrowed = not layout.in_place
        self.results = {
            step: x if step in self.rounded else torch.empty(shapes[step], device=device, dtype=torch.float32)
            for step, x in self.matrices.items()
        }
        self.gradients, results = (
            [x for step in steps for x in step.group.by_layer(matrices[step])]
            for matrices in (self.matrices, self.results)
        )
        names = [layer.name for step in steps for layer in step.group.layers]
        self._result_of = dict(zip(names, results, strict=True))

    def taken(self, step: GroupStep) -> tuple[Tensor, int]:
        x = self.matrices[step]
        return x, x.data_ptr()

    def put(self, layers: Sequence[LayerSpec], results: Sequence[Tensor]) -> None:
        torch._foreach_copy_([self._result_of[layer.name] for layer in layers], list(results))
