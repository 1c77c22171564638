"""The curvature of a loss in the model's prediction, for quadratic models of a step.

For these losses it does not depend on the labels: L(z) = phi(z) - <z, T(labels)>, so its Hessian is that of phi, the
Fisher matrix in the prediction (Martens 2020, arXiv:1412.1193, sec. 9.2), and

    L(z + d) - L(z) = <dL/dz, d> + phi(z + d) - phi(z) - <phi'(z), d>

needs the gradient, which a backward has brought, but no labels. Predictions z are fp32 [.., C], those of
convolutions with C moved to the end, or [N]; the losses are those of :mod:`ds_kfac.model.sampled_loss`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.model.batch_info import BatchInfo


@dataclass(frozen=True)
class OutputLoss:
    """A line of :data:`OUTPUT_LOSSES`; all results are fp32 scalars on the device.

    Attributes:
        product: (z, u, v, batch) -> u^T H v.
        excess: (z, d, batch) -> phi(z + d) - phi(z) - <phi'(z), d>.
    """

    product: Callable[[Tensor, Tensor, Tensor, BatchInfo], Tensor]
    excess: Callable[[Tensor, Tensor, BatchInfo], Tensor]


def _terms(z: Tensor) -> Tensor:
    """[.., C] of a prediction, a row for every term of the loss."""
    return z if z.ndim > 1 else z[:, None]


def _mean(values: Tensor, batch: BatchInfo) -> Tensor:
    """Of a number for every term, those without a label left out."""
    labelled = batch.labelled
    if labelled is None or labelled.numel() != values.numel():
        return values.mean()
    weights = labelled.reshape(-1).to(values.dtype)
    return (values.reshape(-1) * weights).sum() / weights.sum().clamp(min=1)


def _softmax_product(z: Tensor, u: Tensor, v: Tensor, batch: BatchInfo) -> Tensor:
    p, u, v = _terms(z).softmax(dim=-1), _terms(u), _terms(v)
    return _mean((p * u * v).sum(-1) - (p * u).sum(-1) * (p * v).sum(-1), batch)


def _softmax_excess(z: Tensor, d: Tensor, batch: BatchInfo) -> Tensor:
    z, d = _terms(z), _terms(d)
    p = z.log_softmax(dim=-1)
    # log sum p exp(d) is phi(z + d) - phi(z), and exact where d is small
    return _mean(torch.logsumexp(p + d, dim=-1) - (p.exp() * d).sum(-1), batch)


def _square_product(z: Tensor, u: Tensor, v: Tensor, batch: BatchInfo) -> Tensor:
    return 2 * _mean((_terms(u) * _terms(v)).sum(-1), batch)


def _square_excess(z: Tensor, d: Tensor, batch: BatchInfo) -> Tensor:
    return _mean(_terms(d).square().sum(-1), batch)


def _mean_product(z: Tensor, u: Tensor, v: Tensor, batch: BatchInfo) -> Tensor:
    return 2 * (u * v).mean()


def _mean_excess(z: Tensor, d: Tensor, batch: BatchInfo) -> Tensor:
    return d.square().mean()


OUTPUT_LOSSES: dict[str, OutputLoss] = {
    "cross_entropy": OutputLoss(_softmax_product, _softmax_excess),
    "mse": OutputLoss(_mean_product, _mean_excess),
    "squared_error": OutputLoss(_square_product, _square_excess),
}
"""By ``factor.sampler``."""
