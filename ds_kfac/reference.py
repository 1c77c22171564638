"""K-FAC on one page: what ds_kfac computes for nn.Linear layers, on one device, in plain torch.

A layer W [O, I] sees N rows of a batch (examples times tokens). A row has an input a [I], to which
a 1 is appended for the bias, and the gradient g [O] of the loss with respect to the output. M is
the number of rows of the layer nearest to the loss, which is the layer whose gradient arrives
first. If the loss is a mean over M terms, the gradient of one term is M g.

    A = mean a a^T                 G = M sum g g^T                running averages over batches
    A = Q_A diag(alpha) Q_A^T      G = Q_G diag(beta) Q_G^T       every refresh_interval steps
    R = Q_G^T dW Q_A               every step: the gradient in the eigenbasis

    K-FAC gradient   lambda = damping mean(beta) mean(alpha)
                     V = Q_G [R / (beta alpha^T + lambda)] Q_A^T
                     dW <- nu V,   nu = min(1, sqrt(kl_clip / (lr^2 sum over layers <V, dW>)))
    KFACAdamW        m, v: Adam's moments of R
                     U = m / (sqrt(v) + eps), with bias correction; 0 where both an eigenvalue
                         and the gradient along its direction are only rounding errors
                     S = diag(alpha / mean(alpha) + c)^-p
                     U <- orthogonal(U S) S, scaled to norm = size * sqrt(max(O, I))
                     W <- W - lr (Q_G U Q_A^T + weight_decay W)

After ``loss.backward()`` of a batch that went through every layer once, call one of

    kfac.precondition(lr); optimizer.step()           # .grad becomes the K-FAC gradient
    kfac.adamw(lr); optimizer_of_other_params.step()  # updates the nn.Linear layers itself

``tests/oracle.py`` implements the algorithm with every option, and ``tests/oracle_images.py`` adds
convolutions and the norms of image models. Tests check that these files agree with ds_kfac.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Layer:
    """One nn.Linear: its rows of this step, its factors, eigenbases and Adam moments."""

    def __init__(self, module: nn.Linear, kfac: "KFAC") -> None:
        self.module = module
        self.kfac = kfac
        self.factors: list[Tensor] = []  # A [I, I], G [O, O]
        self.bases: list[tuple[Tensor, Tensor]] = []  # (alpha, Q_A), (beta, Q_G)
        self.m = self.v = torch.zeros(
            module.out_features, module.in_features + (module.bias is not None)
        )
        module.register_forward_hook(self.forward_hook)

    def forward_hook(self, module: nn.Module, inputs: tuple, y: Tensor) -> None:
        a = inputs[0].detach().flatten(0, -2)  # [N, I]
        self.a = a if self.module.bias is None else torch.cat([a, torch.ones_like(a[:, :1])], 1)
        # the autograd node of the matrix product, even if y was changed in place
        node: Any = (y if y._base is None else y._base).grad_fn
        node.register_prehook(self.backward_hook)

    def backward_hook(self, gradients: tuple) -> None:
        self.g = gradients[0].flatten(0, -2)  # [N, O]
        # the first gradient that arrives belongs to the layer nearest to the loss
        self.kfac.M = self.kfac.M or len(self.g)

    def gradient(self) -> Tensor:
        """Return dW [O, I] with the bias gradient as its last column."""
        grads: list[Any] = [p.grad for p in self.module.parameters()]
        return torch.cat([g.view(len(g), -1) for g in grads], 1)

    def parts(self, W: Tensor) -> zip:
        """Return the pairs (weight, the weight's part of W [O, I]) and (bias, the bias's part)."""
        return zip(
            self.module.parameters(), (W[:, : self.module.in_features], W[:, -1]), strict=False
        )

    def update_factors(self, batches: int, decay: float, identity_G: bool) -> None:
        """Add a batch to the running averages. From the eleventh batch on, a batch is scaled down
        if its trace exceeds ten times the trace of the average."""
        A = self.a.T @ self.a / len(self.a)
        G = self.kfac.M * self.g.T @ self.g
        if identity_G:
            G = torch.eye(len(G)).to(G)
        keep = min(1 - 1 / batches, decay)
        new = [A, G]
        for i, old in enumerate(self.factors):
            if batches > 10:
                new[i] = new[i] / (new[i].trace() / (10 * old.trace())).clamp(min=1)
            new[i] = keep * old + (1 - keep) * new[i]
        self.factors = new

    def refresh(self, iterate: bool) -> None:
        """Decompose both factors. Adam's first moment is rotated into the new bases. The second
        moment stays as it is, as in SOAP."""
        old = [Q for _, Q in self.bases]
        if old and iterate:
            self.bases = [one_step(C, Q) for C, Q in zip(self.factors, old, strict=True)]
        else:
            self.bases = [torch.linalg.eigh(C) for C in self.factors]
        if old:
            old_QA, old_QG = old
            QA, QG = (Q for _, Q in self.bases)
            self.m = (QG.T @ old_QG) @ self.m @ (old_QA.T @ QA)


class KFAC:
    """K-FAC for all nn.Linear layers of a model. If ``identity_G``, G is I, as in KFACAdamW."""

    iterates = False  # whether nine of ten refreshes use one_step, as ds_kfac does on a GPU

    def __init__(
        self, model, update_interval=10, refresh_interval=50, decay=0.95, identity_G=False
    ):
        self.layers = {
            name: Layer(m, self) for name, m in model.named_modules() if isinstance(m, nn.Linear)
        }
        self.update_interval = update_interval
        self.refresh_interval = refresh_interval
        self.decay = decay
        self.identity_G = identity_G
        self.steps = 0
        self.M = 0  # M of this step's batch; 0 until a gradient arrives

    def update(self) -> None:
        """Update the factors every ``update_interval`` steps, and refresh the eigenbases every
        ``refresh_interval`` steps. The first step does both."""
        refreshes, off = divmod(self.steps, self.refresh_interval)
        for layer in self.layers.values():
            if self.steps % self.update_interval == 0:
                layer.update_factors(
                    self.steps // self.update_interval + 1, self.decay, self.identity_G
                )
            if not off:
                layer.refresh(self.iterates and refreshes % 10 > 0)
        self.steps += 1
        self.M = 0

    @torch.no_grad()
    def precondition(self, lr: float, damping: float = 1.0, kl_clip: float = 1e-3) -> None:
        """Replace every layer's ``.grad`` by its K-FAC gradient."""
        self.update()
        results = []
        quadratic = 0.0
        for layer in self.layers.values():
            dW = layer.gradient()
            (alpha, QA), (beta, QG) = layer.bases
            R = QG.T @ dW @ QA
            V = QG @ (R / (torch.outer(beta, alpha) + damping * beta.mean() * alpha.mean())) @ QA.T
            quadratic += float((V * dW).sum()) * lr**2
            results.append(V)
        nu = min(1.0, (kl_clip / quadratic) ** 0.5)
        for layer, V in zip(self.layers.values(), results, strict=True):
            for p, part in layer.parts(nu * V):
                p.grad = part

    @torch.no_grad()
    def adamw(
        self,
        lr: float,
        betas=(0.9, 0.999),
        eps=1e-8,
        decay=0.01,
        size=27,
        p=0.125,
        c=0.01,
        ratio=8,
        heads=(),
    ):
        """Take a step of KFACAdamW. The layers named in ``heads`` keep Adam's direction. Their
        learning rate is lr * max(``ratio`` * 128 / number of inputs, 1)."""
        self.update()
        b1, b2 = betas
        k = self.steps
        for name, layer in self.layers.items():
            (alpha, QA), (beta, QG) = layer.bases
            S = torch.diag((alpha / alpha.mean() + c) ** -p)
            R = QG.T @ layer.gradient() @ QA
            layer.m = b1 * layer.m + (1 - b1) * R
            layer.v = b2 * layer.v + (1 - b2) * R**2
            # with Nesterov's momentum
            m = b1 * layer.m / (1 - b1 ** (k + 1)) + (1 - b1) * R / (1 - b1**k)
            # zero where an eigenvalue and the gradient along its direction are rounding errors
            kept = [
                (e >= max(64, len(e)) ** 0.5 * 2**-23 * e.max()) | (square > square.mean() / 1024)
                for e, square in ((beta, layer.v.mean(1)), (alpha, layer.v.mean(0)))
            ]
            U = torch.outer(*kept) * m / ((layer.v / (1 - b2**k)).sqrt() + eps)
            U = U * max(ratio * 128 / U.shape[1], 1) if name in heads else orthogonal(U, S, size)
            for weight, part in layer.parts(QG @ U @ QA.T):
                weight.mul_(1 - lr * decay).sub_(lr * part)


def one_step(C: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Return (eigenvalues, eigenvectors) of C after one step of orthogonal iteration, starting from
    the eigenvectors Q of the previous refresh (``curvature/iteration.py``)."""
    sizes = (Q * (C @ Q)).sum(0)
    # the added term keeps vectors in place if their eigenvalues are only rounding errors of C
    Z = C @ Q / sizes.max() + max(64, len(C)) ** 0.5 * 2**-23 * Q
    Q, R = torch.linalg.qr(Z[:, sizes.argsort(descending=True, stable=True)])
    Q = Q * R.diagonal().sign()
    values, order = (Q * (C @ Q)).sum(0).sort(stable=True)
    return values, Q[:, order]


def orthogonal(U: Tensor, S: Tensor, size: float) -> Tensor:
    """Return X S, scaled. X is the orthogonal factor of U S, computed by Newton-Schulz as in
    Muon."""
    X = U @ S / (U @ S).norm()
    for _ in range(5):
        X = 3.4445 * X - 4.7750 * X @ X.T @ X + 2.0315 * X @ X.T @ X @ X.T @ X
    # scale to the norm size * sqrt(max(O, I)), or to a smaller one if U has tiny entries
    X = X @ S
    return (
        size * max(X.shape) ** 0.5 * X / X.norm() * (U.square().mean().sqrt() / 0.03).clamp(max=1)
    )
