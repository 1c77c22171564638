"""K-FAC on one device in plain torch: the whole algorithm on one page, and the oracle of all tests.

For a layer W a with inputs a (a 1 appended for the bias) and per-term output gradients g:

    A = mean a a^T                G = mean g g^T                  running averages, bias-corrected
    A = Q_A diag(alpha) Q_A^T     G = Q_G diag(beta) Q_G^T        now and then
    V = Q_G [ (Q_G^T dW Q_A) / (beta alpha^T + lambda) ] Q_A^T    every step
    dW <- nu V,  nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>)))

autograd's gradient of a loss that is a mean over M terms is g / M, hence the factor M below.

    kfac = ReferenceKFAC(model, ...)
    loss = criterion(model(x), y); loss.backward()     # the whole batch at once
    kfac.step(lr); optimizer.step()
"""

from typing import Any

import torch
from torch import Tensor, nn


class ReferenceKFAC:
    """See the module's docstring. Layers: every nn.Linear of ``model`` with a trainable weight."""

    def __init__(
        self, model: nn.Module, *, update_interval=1, refresh_interval=1, decay=0.95, damping=1e-3,
        damping_kind="tikhonov", kl_clip=1e-3, exclude=(),
    ):  # fmt: skip
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer.weight.requires_grad and name not in exclude
        }
        self.update_interval, self.refresh_interval, self.decay = update_interval, refresh_interval, decay
        self.damping, self.damping_kind, self.kl_clip = damping, damping_kind, kl_clip
        self.steps = 0
        self.nu = 1.0
        self.rows: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in self.layers}
        self.factors: dict[str, list[Tensor]] = {}  # name -> [A, G]
        self.bases: dict[str, list[tuple[Tensor, Tensor]]] = {}  # name -> [(alpha, Q_A), (beta, Q_G)]
        for name, layer in self.layers.items():
            layer.register_forward_hook(lambda layer, x, y, rows=self.rows[name]: self._capture(layer, x[0], y, rows))

    def _capture(self, layer: nn.Module, x: Tensor, y: Tensor, rows: tuple[list[Tensor], list[Tensor]]) -> None:
        if layer.training and y.requires_grad:
            a = x.detach().float().reshape(-1, x.shape[-1])
            rows[0].append(torch.cat([a, a.new_ones(len(a), 1)], 1) if layer.bias is not None else a)
            # On the node below a view, not on the tensor: an in-place activation would take the tensor's hook along.
            node: Any = (y._base if y._base is not None else y).grad_fn
            node.register_prehook(lambda g: rows[1].append(g[0].float().reshape(-1, y.shape[-1])))

    def step(self, lr: float, grad_scale: float = 1.0, seed: float = 1.0) -> None:
        """Precondition every layer's ``.grad`` in place.

        ``seed`` scaled the loss that was differentiated, ``grad_scale`` is what ``.grad`` will be divided by.
        """
        if self.steps % self.update_interval == 0:
            k = self.steps // self.update_interval + 1
            r = min(1 - 1 / k, self.decay)
            for name, (inputs, gradients) in self.rows.items():
                a, g = torch.cat(inputs), torch.cat(gradients) * (len(inputs[0]) / seed)  # M = rows of one call
                batch = [a.T @ a / len(a), g.T @ g / len(inputs[0])]
                old = self.factors.get(name, batch)
                self.factors[name] = [r * o + (1 - r) * b for o, b in zip(old, batch, strict=True)]
        if self.steps % self.refresh_interval == 0:
            for name, factors in self.factors.items():
                self.bases[name] = [(e.clamp(min=0), q) for e, q in map(torch.linalg.eigh, factors)]
        preconditioned, quadratic = {}, 0.0
        for name, layer in self.layers.items():
            grads = [p.grad.float() for p in layer.parameters() if p.grad is not None]
            dW = grads[0] if len(grads) == 1 else torch.cat([grads[0], grads[1][:, None]], 1)
            (alpha, QA), (beta, QG) = self.bases[name]
            damping = self.damping * (alpha.mean() * beta.mean() if self.damping_kind == "relative" else 1)
            V = QG @ ((QG.T @ dW @ QA) / (torch.outer(beta, alpha) + damping)) @ QA.T
            preconditioned[name] = V
            quadratic += float((V * dW).sum()) * (lr / grad_scale) ** 2
        self.nu = min(1.0, (self.kl_clip / quadratic) ** 0.5) if self.kl_clip and quadratic else 1.0
        for name, layer in self.layers.items():
            V = self.nu * preconditioned[name]
            layer.weight.grad = V[:, : layer.in_features].contiguous()
            if layer.bias is not None:
                layer.bias.grad = V[:, -1].contiguous()
        for inputs, gradients in self.rows.values():
            inputs.clear()
            gradients.clear()
        self.steps += 1
