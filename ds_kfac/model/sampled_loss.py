"""Losses on labels that are drawn from a model's prediction, for a Monte-Carlo Fisher.

:data:`SAMPLERS` lists them. Kunstner et al. 2019 (arXiv:1905.12558) explain the method.

A sampler computes the training loss with drawn labels in place of the true labels. It averages over
the terms that the true loss also has. The true loss has a term wherever its gradient with respect
to the prediction is not zero.

Shape suffixes: N examples, T positions, C outputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Sampler = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""A function (prediction, reached, generator) -> scalar loss, differentiable with respect to the
prediction.

``reached`` is a bool tensor of the prediction's shape, True where the true loss has a gradient. All
random numbers must come from the generator, so that a resumed run draws the same numbers.
"""


def prediction_tensor(output: Any) -> Tensor:
    """Return the prediction in a module's output.

    An output that is a tensor is itself the prediction. In a tuple or list, the prediction is the
    first floating-point tensor that is not a scalar. In a mapping or any other object, it is
    ``logits``.

    Raises:
        ValueError: there is no prediction, or only a scalar, which is a loss.
    """
    tensor = output
    if isinstance(output, Mapping):
        tensor = output.get("logits")
    elif isinstance(output, (tuple, list)):
        tensor = next(
            (x for x in output if isinstance(x, Tensor) and x.ndim > 0 and x.is_floating_point()),
            None,
        )
    elif not isinstance(output, Tensor):
        tensor = getattr(output, "logits", None)
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        got = "a scalar, a loss" if isinstance(tensor, Tensor) else type(output).__name__
        raise ValueError(
            'kfac.factor.fisher "monte_carlo": the model returns no prediction to draw labels from '
            f"(got {got}); set kfac.factor.prediction to the name of the module that computes the "
            "prediction, or set engine.kfac.sampler"
        )
    return tensor


def mean_of_terms(values: Tensor, reached: Tensor) -> Tensor:
    """Return the mean of a loss over the terms that the true loss also has."""
    weights = reached.reshape(-1).to(values.dtype)
    return (values.reshape(-1) * weights).sum() / weights.sum().clamp(min=1)


def cross_entropy(prediction: Tensor, reached: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mean negative log-likelihood of labels drawn from softmax(logits), for language
    models and classifiers.

    The prediction is logits [N, C], [N, T, C], or [N, C, H, W] for images.
    """
    dim = 1 if prediction.ndim > 3 else -1
    logits = prediction.movedim(dim, -1)
    flat = logits.reshape(-1, logits.shape[-1]).float()
    with torch.no_grad():
        # argmax of logits + Gumbel noise is a draw from the softmax, without a host synchronisation
        uniform = torch.rand(
            flat.shape, generator=generator, device=flat.device, dtype=torch.float32
        ).clamp_(min=1e-20)
        drawn = (flat - torch.log(-torch.log(uniform))).argmax(dim=-1)
    return mean_of_terms(F.cross_entropy(flat, drawn, reduction="none"), reached.any(dim=dim))


def squared_error(
    prediction: Tensor, reached: Tensor, generator: torch.Generator, *, mean: bool = False
) -> Tensor:
    """Return the squared error between the prediction and targets that are drawn around it, for
    regression.

    The error is summed over the C outputs, and averaged over predictions [N, C], [N, T, C] or
    [N, C, H, W]. Up to a constant this is the negative log-likelihood of a Gaussian with variance
    1/2, so targets are drawn from that Gaussian.

    Args:
        mean: whether to average also over the outputs, as ``F.mse_loss`` does. The variance is then
            C/2.
    """
    dim = 1 if prediction.ndim > 3 else -1
    outputs = prediction.movedim(dim, -1).float()
    variance = outputs.shape[-1] / 2 if mean else 0.5
    noise = torch.randn(
        outputs.shape, generator=generator, device=outputs.device, dtype=torch.float32
    )
    errors = (outputs - (outputs.detach() + noise * variance**0.5)).square()
    terms = errors.mean(dim=-1) if mean else errors.sum(dim=-1)
    return mean_of_terms(terms, reached.any(dim=dim))


mse: Sampler = partial(squared_error, mean=True)

SAMPLERS: dict[str, Sampler] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "squared_error": squared_error,
}
