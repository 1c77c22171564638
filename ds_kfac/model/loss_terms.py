"""How many terms the loss of a forward has, and the gradient that reaches it: read from what the model returned."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from ds_kfac.model.batch_info import BatchInfo
from ds_kfac.model.class_dim import class_dim
from ds_kfac.model.row_masks import fit

logger = logging.getLogger("ds_kfac")


@dataclass(eq=False)
class LossTerms:
    """What is known of the loss of one forward of the model. Holds no graph.

    Attributes:
        info: what its arguments show.
        terms: M, if labels or the model's output show it.
        seed: the gradient that reached the loss the model returned; measured only if ``info.items`` asks for it.
        guess: M where neither does: as many as the layer nearest to the loss has rows.
    """

    info: BatchInfo = field(default_factory=BatchInfo)
    terms: Tensor | int | None = None
    seed: Tensor | None = None
    guess: Tensor | int | None = None

    def returned(self, output: Any, *, weight_sharing: str) -> None:
        """The model returned ``output``. Labels go first."""
        self.terms = self.info.terms(weight_sharing=weight_sharing)
        if self.terms is None:
            self.terms = output_terms(output, self.info, weight_sharing=weight_sharing)
        loss = returned_loss(output) if self.info.items is not None else None
        if loss is not None and loss.grad_fn is not None:
            # of the node, not the tensor: DeepSpeed's hooks on what a forward returns have run by then
            index = loss.output_nr
            loss.grad_fn.register_prehook(lambda gradients: self._reached(gradients[index]))

    def _reached(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.seed = gradient.detach().float()


def _values(output: Any) -> Iterator[Tensor]:
    """Floating tensors of a model's output, ``logits`` first."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Tensor):
            yield from _values(value)


def returned_prediction(output: Any) -> Tensor | None:
    """What a loss is computed from: ``logits``, else the first tensor [N, .., C]; else [N]."""
    found = [value for value in _values(output) if value.ndim > 0]
    wide = [value for value in found if value.ndim > 1]
    return next(iter(wide or [value for value in found if len(value) > 1]), None)


def returned_loss(output: Any) -> Tensor | None:
    """The first scalar."""
    return next((value for value in _values(output) if value.ndim == 0), None)


def output_terms(output: Any, info: BatchInfo, *, weight_sharing: str) -> Tensor | int | None:
    """M of a loss that is computed outside of the model: a term for each prediction; of padded ones that the mask
    attends. None: the model returned no prediction."""
    prediction = returned_prediction(output)
    if prediction is None:
        return None
    shape = list(prediction.shape)
    if len(shape) > 1:
        del shape[class_dim(prediction)]
    found = fit(info.rows, tuple(shape))
    if found.mask is not None:
        mask = found.mask.flatten(1) if found.mask.ndim > 2 else found.mask
        counted = mask.any(dim=1 - found.examples) if weight_sharing == "reduce" and mask.ndim > 1 else mask
        return counted.sum().float()
    return shape[0] if weight_sharing == "reduce" else prod(shape)
