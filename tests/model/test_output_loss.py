"""Curvature of the losses in the prediction, against autograd's Hessian of the training's loss."""

import pytest
import torch
from torch.nn import functional as F

from ds_kfac.engine.quadratic import excess, product
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.samplers import SAMPLERS
from tests.close import close, near

N, T, C = 3, 4, 5
LABELLED = torch.tensor([[True, True, False, True], [True, False, True, True], [True, True, True, True]])


def targets(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def labels():
    return torch.randint(C, (N, T), generator=torch.Generator().manual_seed(3)).masked_fill(~LABELLED, -100)


LOSSES = {
    "cross_entropy": (
        (N, T, C), BatchInfo(), lambda z: F.cross_entropy(z.flatten(0, 1), labels().clamp(min=0).flatten())
    ),
    "cross_entropy, some ignored": (
        (N, T, C), BatchInfo(labelled=LABELLED), lambda z: F.cross_entropy(z.flatten(0, 1), labels().flatten())
    ),
    "cross_entropy of pixels": (
        (N, 2, 3, C), BatchInfo(), lambda z: F.cross_entropy(z.movedim(-1, 1), torch.ones(N, 2, 3).long())
    ),
    "mse": ((N, C), BatchInfo(), lambda z: F.mse_loss(z, targets(z.shape))),
    "squared_error": ((N, C), BatchInfo(), lambda z: (z - targets(z.shape)).square().sum(1).mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_product_and_excess_are_those_of_the_loss(name):
    shape, batch, loss = LOSSES[name]
    generator = torch.Generator().manual_seed(1)
    z, u, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    own = name.split(",")[0].split(" ")[0]
    hessian = torch.autograd.functional.hessian(loss, z).reshape(z.numel(), z.numel())
    expected = u.flatten() @ hessian @ v.flatten()
    size = u.flatten().abs() @ hessian.abs() @ v.flatten().abs()
    close(product(own, z, u, v, batch), expected, sums=z.numel() ** 2, scale=size)
    gradient = torch.autograd.functional.jacobian(loss, z)
    expected = loss(z + u) - loss(z) - (gradient * u).sum()
    size = loss(z + u).abs() + loss(z).abs() + (gradient * u).abs().sum()
    close(excess(own, z, u, batch), expected, sums=z.numel(), scale=size)


def test_the_curvature_of_every_sampled_loss_is_tested():
    assert {name.split(",")[0].split(" ")[0] for name in LOSSES} == SAMPLERS.keys()


def test_the_sampled_squared_error_has_the_curvature_of_its_loss():
    """Its gradients' second moment is the Fisher, 2 I for every term."""
    z = torch.zeros(20_000, C, requires_grad=True)
    loss = SAMPLERS["squared_error"](z, BatchInfo(), torch.Generator().manual_seed(0))
    (g,) = torch.autograd.grad(loss, z)
    g = g * len(z)
    near(g.T @ g / len(z), 2 * torch.eye(C), 6 * 8**0.5 / len(z) ** 0.5, "6 standard deviations of a mean of draws")
