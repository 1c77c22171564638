"""Losses on labels drawn from a model's own prediction, for a Monte-Carlo Fisher (Kunstner et al. 2019,
arXiv:1905.12558): a ready :class:`Sampler` for each of :data:`SAMPLERS`.

A sampler must form the same loss as the training does, a mean over the same terms, with drawn labels in place of the
true ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.loss import class_dim

Sampler = Callable[[Any, BatchInfo, torch.Generator], Tensor]
"""(prediction, batch, generator) -> scalar loss with gradients to the prediction.

The prediction is what the model returned, or the module that ``kfac.factor.prediction`` names. ``batch.labelled`` says
which terms have a loss. Draw from the generator only, so that a resumed run draws the same.
"""


def prediction_tensor(output: Any) -> Tensor:
    """The prediction in what a module returned: a tensor, or ``.logits`` of a Hugging Face output. Raises ValueError if
    it is neither, or a scalar, which is a loss."""
    tensor = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(tensor, tuple) and len(tensor) > 1:  # (loss, logits, ...)
        tensor = tensor[1]
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        got = "a scalar, a loss" if isinstance(tensor, Tensor) else type(output).__name__
        raise ValueError(
            f'kfac.factor.fisher "monte_carlo": the model returns no prediction to draw labels from (got {got}); name '
            "the module that computes it in kfac.factor.prediction, or set engine.kfac.sampler"
        )
    return tensor


def mean_of_terms(values: Tensor, batch: BatchInfo) -> Tensor:
    """Of a number for every term of the loss, those without a label left out."""
    labelled = batch.labelled
    if labelled is None or labelled.numel() != values.numel():
        return values.mean()
    weights = labelled.reshape(-1).to(values.dtype)
    return (values.reshape(-1) * weights).sum() / weights.sum().clamp(min=1)


def cross_entropy(output: Any, batch: BatchInfo, generator: torch.Generator) -> Tensor:
    """For language models and classifiers: labels from softmax(logits [N, C] or [N, T, C]; of convolutions [N, C, L]
    and [N, C, H, W]), their mean negative log-likelihood."""
    logits = prediction_tensor(output)
    logits = logits.movedim(class_dim(logits), -1)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    with torch.no_grad():
        # argmax of logits + Gumbel noise is a draw from the softmax, without a host synchronisation
        uniform = torch.rand(flat.shape, generator=generator, device=flat.device).clamp_(min=1e-20)
        drawn = (flat - torch.log(-torch.log(uniform))).argmax(dim=-1)
    return mean_of_terms(F.cross_entropy(flat, drawn, reduction="none"), batch)


def mse(output: Any, batch: BatchInfo, generator: torch.Generator) -> Tensor:
    """For regression with ``F.mse_loss``, a mean over all elements of predictions [N, C], [N, T, C] or [N, C, H, W].

    That loss is the negative log-likelihood of a Gaussian of variance C/2 around the prediction; so are the targets.
    """
    prediction = prediction_tensor(output).float()
    variance = (prediction.shape[class_dim(prediction)] if prediction.ndim > 1 else 1) / 2
    noise = torch.randn(prediction.shape, generator=generator, device=prediction.device) * variance**0.5
    return F.mse_loss(prediction, prediction.detach() + noise)


def squared_error(output: Any, batch: BatchInfo, generator: torch.Generator) -> Tensor:
    """For regression with squared errors summed over the outputs, a mean over predictions; see :func:`mse`, of which
    it is C times: the variance is 1/2."""
    prediction = prediction_tensor(output).float()
    outputs = prediction.shape[class_dim(prediction)] if prediction.ndim > 1 else 1
    noise = torch.randn(prediction.shape, generator=generator, device=prediction.device) * 0.5**0.5
    return F.mse_loss(prediction, prediction.detach() + noise) * outputs


SAMPLERS: dict[str, Sampler] = {"cross_entropy": cross_entropy, "mse": mse, "squared_error": squared_error}
