"""Losses on labels that are drawn from a model's prediction, for a Monte-Carlo Fisher (Kunstner et al. 2019,
arXiv:1905.12558): :data:`SAMPLERS`.

A sampler must compute the training's loss, a mean over the same terms, with drawn labels in place of the true ones.
Shape suffixes: N examples, T positions, C outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.output import logits_of, outputs_of, returned_prediction
from ds_kfac.model.prediction import class_place

Sampler = Callable[[Any, BatchInfo, torch.Generator], Tensor]
"""(prediction, batch, generator) -> scalar loss with gradients to the prediction.

The prediction is what the model returned, or the module that ``kfac.factor.prediction`` names. ``batch.labelled`` says
which terms have a loss. Draw from the generator only, so that a resumed run draws the same.
"""


def prediction_tensor(output: Any) -> Tensor:
    """The prediction in a module's output: a tensor, ``logits`` of a Hugging Face output, or what
    :func:`returned_prediction` finds in a tuple. Raises ValueError if there is none, or only a scalar, which is a loss.
    """
    tensor = output if isinstance(output, Tensor) else logits_of(output)
    if tensor is None and isinstance(output, tuple):
        tensor = returned_prediction(output)
    if tensor is None or tensor.ndim == 0:
        got = type(output).__name__ if tensor is None else "a scalar, a loss"
        raise ValueError(
            f'kfac.factor.fisher "monte_carlo": the model returns no prediction to draw labels from (got {got}); name '
            "the module that computes it in kfac.factor.prediction, or set engine.kfac.sampler"
        )
    return tensor


def mean_of_terms(values: Tensor, batch: BatchInfo) -> Tensor:
    """The mean of the terms of a loss, without those that have no label."""
    labelled = batch.labelled
    if labelled is None or labelled.numel() != values.numel():
        return values.mean()
    weights = labelled.reshape(-1).to(values.dtype)
    return (values.reshape(-1) * weights).sum() / weights.sum().clamp(min=1)


def cross_entropy(output: Any, batch: BatchInfo, generator: torch.Generator) -> Tensor:
    """For language models and classifiers: mean negative log-likelihood of labels drawn from softmax(logits), for
    logits [N, C] or [N, T, C], of convolutions [N, C, L] or [N, C, H, W]."""
    logits = prediction_tensor(output)
    dim = class_place(logits).dim
    logits = logits if dim is None else logits.movedim(dim, -1)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    with torch.no_grad():
        # argmax of logits + Gumbel noise is a draw from the softmax, without a host synchronisation
        uniform = torch.rand(flat.shape, generator=generator, device=flat.device, dtype=torch.float32).clamp_(min=1e-20)
        drawn = (flat - torch.log(-torch.log(uniform))).argmax(dim=-1)
    return mean_of_terms(F.cross_entropy(flat, drawn, reduction="none"), batch)


def squared_error(output: Any, batch: BatchInfo, generator: torch.Generator, *, mean: bool = False) -> Tensor:
    """For regression with squared errors that are summed over the outputs of predictions [N, C], [N, T, C] or
    [N, C, H, W], a mean over predictions; with ``mean`` over outputs, too, as ``F.mse_loss``.

    Up to a constant that loss is the mean over predictions of a Gaussian's negative log-likelihood, with variance 1/2,
    with ``mean`` C/2; targets are drawn from this Gaussian around the prediction.
    """
    prediction = prediction_tensor(output).float()
    outputs = outputs_of(prediction)
    variance = outputs / 2 if mean else 0.5
    noise = torch.randn(prediction.shape, generator=generator, device=prediction.device, dtype=torch.float32)
    return F.mse_loss(prediction, prediction.detach() + noise * variance**0.5) * (1 if mean else outputs)


mse: Sampler = partial(squared_error, mean=True)

SAMPLERS: dict[str, Sampler] = {"cross_entropy": cross_entropy, "mse": mse, "squared_error": squared_error}
