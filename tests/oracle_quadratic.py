"""tests/oracle.py with rate, momentum and damping from the quadratic model: the oracle of preconditioner.step.

q(w) = b w + w^T M w / 2 of delta = w_1 d_1 + w_2 d_2; w minimises it with damping lambda; p += lr delta
lambda *= 0.95^k where the loss fell by more than 3/4 of q, /= 0.95^k where by less than 1/4, every k steps
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import ReferenceKFAC

EPSILON = 1e-3


class QuadraticOracle:
    """Of a model whose loss is cross entropy of ``network(x)``; every parameter is of a K-FAC layer."""

    def __init__(self, network: nn.Module, loss, *, value: float, interval: int, **options: Any) -> None:
        self.kfac = ReferenceKFAC(network, damping_kind="adaptive", damping=value, kl_clip=0.0, **options)
        self.network, self.loss, self.interval, self.steps = network, loss, interval, 0
        self.params = list(network.parameters())
        self.last = [torch.zeros_like(p) for p in self.params]

    def derivative(self, x: Tensor, direction: list[Tensor]) -> Tensor:
        """Of the prediction, by a finite difference."""
        size = sum(d.square().sum() for d in direction) ** 0.5
        if not size:
            return torch.zeros_like(self.network(x))
        eps = EPSILON * sum(p.square().sum() for p in self.params) ** 0.5 / size
        before, f = [p.clone() for p in self.params], self.network(x)
        for p, d in zip(self.params, direction, strict=True):
            p.add_(eps * d)
        moved = (self.network(x) - f) / eps
        for p, value in zip(self.params, before, strict=True):
            p.copy_(value)
        return moved

    def step(self, x: Tensor, y: Tensor, lr: float) -> None:
        self.network.zero_grad()
        loss = self.loss(self.network(x), y)
        loss.backward()
        gradient = [p.grad.clone() for p in self.params]
        self.kfac.step(lr)
        with torch.no_grad():
            directions = [p.grad.clone() for p in self.params], self.last
            p = self.network(x).softmax(-1)
            J = [self.derivative(x, d) for d in directions]
            J = [j.flatten(0, -2).double() for j in J]
            p = p.flatten(0, -2).double()
            M = torch.stack([
                torch.stack([((p * u * v).sum(-1) - (p * u).sum(-1) * (p * v).sum(-1)).mean() for v in J]) for u in J
            ])  # fmt: skip
            D = torch.stack([torch.stack([_dot(u, v) for v in directions]) for u in directions])
            b = torch.stack([_dot(gradient, d) for d in directions])
            damped = M + self.kfac.damping * self.kfac.scale * D
            w = torch.stack([-b[0] / damped[0, 0], torch.zeros_like(b[0])])
            if _dot(self.last, self.last) > 0:
                w = -torch.linalg.solve(damped, b)
            self.last = [float(w[0]) * d + float(w[1]) * e for d, e in zip(*directions, strict=True)]
            for param, d in zip(self.params, self.last, strict=True):
                param.add_(lr * d)
            self.steps += 1
            if self.steps % self.interval == 0:
                actual = (self.loss(self.network(x), y) - loss.detach()).double()
                predicted = lr * (b @ w) + lr**2 * (w @ M @ w) / 2
                rho = float(actual / predicted)
                self.kfac.scale *= 0.95**self.interval if rho > 0.75 else 0.95**-self.interval if rho < 0.25 else 1


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]).sum()
