"""K-FAC with every option, on one device in plain torch: the oracle of the tests. Its short form: ds_kfac/reference.py.

For a layer W a with inputs a (a 1 appended for the bias) and per-term output gradients g:

    A = mean a a^T                G = mean g g^T                  running averages, bias-corrected
    A = Q_A diag(alpha) Q_A^T     G = Q_G diag(beta) Q_G^T        now and then; see _iterated
    R = Q_G^T dW Q_A                                              every step: the gradient in the eigenbasis

    K-FAC gradient                V = Q_G [R / (e + lambda)] Q_A^T,   e = beta alpha^T,
                                  or e = running mean of M R^2 (corrected, EKFAC); with the method "inverse"
                                  V = (G + sqrt(lambda) / pi)^-1 dW (A + pi sqrt(lambda))^-1, pi^2 = mean A / mean G
                                  dW <- nu V, nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>))); then any optimizer
    KFACAdamW                     Adam on R: m, v; U = Q_G [m^ / (sqrt(v^) + eps)] Q_A^T, or its orthogonal factor;
                                  W <- W - lr (U + decay W); a layer whose dW is exactly 0 is not touched

autograd's gradient of a loss that is a mean over M terms is g / M, hence the factor M below.
After the backward of a whole batch: ``kfac.step(lr); optimizer.step()``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Use:
    """One module's rows. ``pairs``: (a [N, T, I], g [N, T, O]) of its calls in this step."""

    def __init__(self, owner: "ReferenceKFAC", module: Any) -> None:
        self.module, self.owner = module, owner
        self.bias = getattr(module, "bias", None) is not None
        self.inputs = isinstance(module, nn.Linear)  # a norm's A is made of gradients
        self.name = ""
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.outputs: list[tuple[Tensor, Tensor, torch.Size]] = []  # input, output, the output's shape
        module.register_forward_hook(self._capture)

    def _capture(self, module: Any, inputs: tuple, y: Tensor) -> None:
        if module.training and y.requires_grad:
            # On the node below a view, not on the tensor: an in-place activation would take the tensor's hook along.
            base = y._base if y._base is not None else y
            x = inputs[0].detach()
            if self.owner.fisher == "monte_carlo":
                self.outputs.append((x, base, y.shape))
            else:
                node: Any = base.grad_fn
                node.register_prehook(lambda g: self.add(x, g[0].reshape(y.shape)))

    def add(self, x: Tensor, g: Tensor) -> None:
        g = g.detach().float()
        g = g.reshape(len(g), -1, g.shape[-1])
        if isinstance(self.module, nn.Linear):
            a = x.float()
            a = torch.cat([a, torch.ones_like(a[..., :1])], -1) if self.bias else a
        elif isinstance(self.module, nn.LayerNorm):  # its rows are those of its parameters' own gradients
            a = torch.stack([F.layer_norm(x.float(), x.shape[-1:], eps=self.module.eps), torch.ones_like(x)], -1)
            a = (a * g.view(*x.shape, 1)).flatten(-2)
        else:
            eps = torch.finfo(torch.float32).eps if self.module.eps is None else self.module.eps
            a = F.rms_norm(x.float(), x.shape[-1:], eps=eps) * g.view(x.shape)
        self.pairs.append((a.reshape(len(g), -1, a.shape[-1]), g))

    def moments(self, seed: float) -> tuple[Tensor, Tensor, float]:
        """This step's mean a a^T and mean g g^T over loss terms, and M. Forgets the rows."""
        owner, rows_a, rows_g, terms = self.owner, [], [], 0.0
        only_a, only_g = (owner.only(self.name, side) for side in "AG") if owner.only else (None, None)
        for a, g in self.pairs:
            mask = a.new_ones(*a.shape[:2], 1) if owner.rows is None else owner.rows.reshape(*a.shape[:2], 1).float()
            if owner.sharing == "reduce":
                a, g = (a * mask).sum(1) / (mask.sum(1).clamp(min=1) if self.inputs else 1), (g * mask).sum(1)
                counts = (mask.sum(1) > 0).float()
            else:
                a, g, counts = (a * mask).flatten(0, 1), (g * mask).flatten(0, 1), mask.flatten(0, 1)
            terms = float(counts.sum()) if owner.terms is None else float(owner.terms)
            rows_a.append(torch.cat([a, counts], 1))
            rows_g.append(g * (terms / seed))
        self.pairs.clear()
        a, g = torch.cat(rows_a), torch.cat(rows_g)
        weigh_a, weigh_g = a.new_ones(len(a)), a.new_ones(len(a))
        if only_g is not None:
            weigh_a, weigh_g = (only.to(a).repeat_interleave(len(a) // len(only)) for only in (only_a, only_g))
        if self.inputs:
            A = (a[:, :-1].T * weigh_a) @ a[:, :-1] / (weigh_a * a[:, -1]).sum()
            return A, (g.T * weigh_g) @ g / terms, terms
        a = a[:, :-1] * (terms / seed)
        return (a.T * weigh_a) @ a / terms, a.new_ones(1, 1), terms


class _Layer:
    """How a module's parameters form a matrix [O, I]; which blocks of A and G are kept."""

    def __init__(self, use: _Use, block_A: int, block_G: int) -> None:
        self.use, self.module = use, use.module
        self.blocks = (block_A, block_G)
        self.norm = not use.inputs
        self.orthogonal = not self.norm
        self.params = [self.module.weight] + ([self.module.bias] if use.bias else [])
        self.factors: list[Tensor] = []  # A, G
        self.bases: list[tuple[Tensor, Tensor]] = []  # (alpha, Q_A), (beta, Q_G)
        self.k, self.updates = 0, 0
        self.S: Any = 0.0
        self.e: Any = 0.0
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.terms, self.damping = 1.0, 0.0  # of the last batch, at the last refresh

    def matrix(self) -> Tensor:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.float() for p in self.params]
        if self.norm:
            return torch.stack(grads, 1).view(1, -1)
        return grads[0] if len(grads) == 1 else torch.cat([grads[0], grads[1][:, None]], 1)

    def write(self, V: Tensor) -> None:
        if self.norm:
            parts = list(V.view(-1, len(self.params)).T)
        else:
            parts = [V[:, : self.module.in_features], V[:, -1]][: len(self.params)]
        for p, part in zip(self.params, parts, strict=True):
            p.grad = part.contiguous()

    def fold(self, seed: float, decay: float) -> None:
        """A batch into the running averages, none of it larger than 10 times the average once that stands on 10."""
        self.updates += 1
        r, batch = min(1 - 1 / self.updates, decay), self.batch(seed)
        for index, (old, new) in enumerate(zip(self.factors or batch, batch, strict=True)):
            batch[index] = r * old + (1 - r) * _limited(new, new.trace(), old.trace(), self.updates)
        self.factors = batch

    def batch(self, seed: float) -> list[Tensor]:
        A, G, self.terms = self.use.moments(seed)
        return [_blocks(A, self.blocks[0]), _blocks(G, self.blocks[1])]


def _limited(new: Tensor, size: Tensor, usual: Tensor, updates: int) -> Tensor:
    return new / (size / (10 * usual)).clamp(min=1) if updates > 10 and usual > 0 else new


def _blocks(C: Tensor, block: int) -> Tensor:
    """Diagonal blocks of a matrix, the rest zero; block 0: the identity."""
    index = torch.arange(len(C), device=C.device) // max(block, 1)
    return C * (index[:, None] == index[None, :]) if block else torch.eye(len(C), device=C.device)


def _eigh(C: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, block by block: of a diagonal or an identity the latter are the identity."""
    if block == 0:
        return C.new_ones(len(C)), torch.eye(len(C), device=C.device)
    parts = [torch.linalg.eigh(C[i : i + block, i : i + block]) for i in range(0, len(C), block)]
    return torch.cat([e for e, _ in parts]).clamp(min=0), torch.block_diag(*(q for _, q in parts))


def _iterated(C: Tensor, block: int, Q: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration from Q, block by block; by eigh where it leaves too much off the diagonal."""
    if block < 2:
        return _eigh(C, block)
    parts = []
    for i in range(0, len(C), block):
        c, q = C[i : i + block, i : i + block], Q[i : i + block, i : i + block]
        z = c @ q
        sizes = (q * z).sum(0)
        floor = max(8.0, len(c) ** 0.5) * torch.finfo(torch.float32).eps
        z = (z / sizes.max() + floor * q)[:, sizes.argsort(descending=True, stable=True)]
        q, r = torch.linalg.qr(z / z.norm(dim=0))
        q = q * r.diagonal().sign()
        values, order = (q * (c @ q)).sum(0).sort(stable=True)
        done = values.square().sum() >= 0.75 * c.square().sum()
        parts.append((values.clamp(min=0), q[:, order]) if done else _eigh(c, len(c)))
    return torch.cat([e for e, _ in parts]), torch.block_diag(*(q for _, q in parts))


def _orthogonalized(U: Tensor, whitening: Tensor, size: float) -> Tensor:
    X = U @ whitening
    X = X / X.norm()
    for _ in range(5):
        X = 3.4445 * X - 4.7750 * X @ X.T @ X + 2.0315 * X @ X.T @ X @ X.T @ X
    X = X @ whitening
    return size * max(X.shape) ** 0.5 * X / X.norm() * (U.square().mean().sqrt() / 0.03).clamp(max=1)


def _seen(values: Tensor, block: int) -> Tensor:
    """Whether an eigenvalue is more than fp32's rounding of the largest in its block, which a diagonal has not."""
    if block < 2:
        return torch.ones_like(values)
    eps = torch.finfo(torch.float32).eps
    found = [part >= max(64, len(part)) ** 0.5 * eps * part.max() for part in values.split(block)]
    return torch.cat(found).to(values)


class ReferenceKFAC:
    """See the module's docstring.

    ``types`` are layer types. Sides over ``dense_max`` are cut into blocks, over
    ``longest`` a diagonal, all of them identities if it is 0. ``parts`` is
    {linear: (A's block or None, G's block or None)}; a bias stays apart where A is cut. ``rows`` [N, T] and
    ``terms`` may be set before a step: which rows count, and the number of loss terms. So may ``only``: (layer, "A"
    or "G") -> [N] or [N T], for how many each example, or each row, stands; 0: it is not taken.
    """

    iterates: Any = frozenset({"cuda"})
    """Device types where KFACAdamW refreshes by a step of the iteration after the burn-in, but for every tenth time."""
    rows: Tensor | None = None
    terms: float | None = None
    only: Any = None

    def __init__(
        self, model: nn.Module, *, update_interval=1, refresh_interval=1, decay=0.95, damping=1e-3,
        damping_kind="tikhonov", kl_clip=1e-3, exclude=(), types=("Linear",), dense_max=None, longest=16384,
        corrected=None, sharing="expand", fisher="empirical", parts=(),
        method="eigen", burn_in=0,
    ):  # fmt: skip
        self.update_interval, self.refresh_interval, self.decay = update_interval, refresh_interval, decay
        self.burn_in = burn_in
        self.damping, self.damping_kind, self.kl_clip = damping, damping_kind, kl_clip
        self.corrected = corrected
        self.sharing, self.fisher, self.method = sharing, fisher, method
        self.steps = self.refreshed = 0
        self.nu = 1.0
        self.layers: dict[str, _Layer] = {}

        def block(dim: int, other: int) -> int:
            if not longest or dense_max is None or dim <= dense_max:
                return dim if longest else 0
            most = max(dense_max // 2, min(other, dense_max))
            return -(-dim // -(-dim // most)) if dim <= longest else 1

        named = {n: m for n, m in model.named_modules() if n not in exclude and getattr(m, "weight", None) is not None}
        for name, m in named.items():
            kind = type(m).__name__
            if not m.weight.requires_grad or kind not in types:
                continue
            if kind == "Linear":
                no_G = fisher == "activations_only"
                I, O = m.in_features + (m.bias is not None), m.out_features  # noqa: E741
                A, G = block(I, O), 0 if no_G else block(O, I)
                use = _Use(self, m)
                if name in parts:
                    A, G = (part or side for part, side in zip(parts[name], (A, G), strict=True))
                    use.bias = use.bias and not parts[name][0]
                self.layers[name] = _Layer(use, A, G)
            else:
                self.layers[name] = _Layer(_Use(self, m), 2 if kind == "LayerNorm" else 1, 0)
        for name, layer in self.layers.items():
            layer.use.name = name

    @property
    def factors(self) -> dict[str, list[Tensor]]:
        return {name: layer.factors for name, layer in self.layers.items()}

    def means(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean eigenvalues of A, of G and of the Fisher that damping is relative to."""
        layer = self.layers[name]
        return layer.bases[0][0].mean(), layer.bases[1][0].mean(), layer.e.mean()

    def sampled(self, loss: Tensor) -> None:
        """Monte-Carlo Fisher: G from a loss on labels drawn from the model, before the true backward."""
        uses = [layer.use for layer in self.layers.values()]
        outputs = [output for use in uses for output in use.outputs]
        gradients = iter(torch.autograd.grad(loss, [y for _, y, _ in outputs], retain_graph=True))
        for use in uses:
            for x, _, shape in use.outputs:
                use.add(x, next(gradients).view(shape))
            use.outputs.clear()

    def update(self, seed: float = 1.0) -> None:
        """Fold this step's rows into the factors and decompose them, if due."""
        self.fold(seed)
        self.refresh(self.steps)
        self.steps += 1

    def fold(self, seed: float) -> None:
        if self.steps % self.update_interval == 0:
            for layer in self.layers.values():
                if layer.use.pairs:
                    layer.fold(seed, self.decay)
        for layer in self.layers.values():
            layer.use.pairs.clear()

    def refresh(self, step: int, *, iterate: bool = False) -> None:
        """Decompose the factors, if due at ``step``; from the last bases, if ``iterate``."""
        if step % self.refresh_interval == 0:
            for layer in [layer for layer in self.layers.values() if layer.factors]:
                layer.damping = self.damping
                last = iterate and step >= self.burn_in and self.refreshed % 10 and layer.bases
                old = [Q for _, Q in layer.bases] or [torch.eye(len(C), device=C.device) for C in layer.factors]
                layer.bases = [
                    _iterated(*part, Q) if last else _eigh(*part)
                    for *part, Q in zip(layer.factors, layer.blocks, old, strict=True)
                ]
                RA, RG = (new.T @ before for (_, new), before in zip(layer.bases, old, strict=True))
                if isinstance(layer.m, Tensor):
                    layer.m = RG @ layer.m @ RA.T
            self.refreshed += step >= self.burn_in

    def step(self, lr: float, grad_scale: float = 1.0, seed: float = 1.0, clip: float = 1.0) -> None:
        """Replace every layer's ``.grad``, which will be divided by ``grad_scale``, by its K-FAC gradient. ``seed``
        scaled the loss that was differentiated, ``clip`` the gradients."""
        self.update(seed)
        results, rotated, quadratic = {}, {}, 0.0
        for name, layer in self.layers.items():
            dW, ((alpha, QA), (beta, QG)) = layer.matrix(), layer.bases
            R, layer.e = QG.T @ dW @ QA, torch.outer(beta, alpha)
            rotated[name] = dW, R
            if self.corrected:
                layer.k += 1
                r = min(1 - 1 / layer.k, self.corrected)
                new, old = layer.terms * (R / grad_scale / clip) ** 2, layer.S + torch.zeros_like(R)
                layer.S = layer.e = r * old + (1 - r) * _limited(new, new.sum(), old.sum(), layer.k)
        for name, layer in self.layers.items():
            (dW, R), ((alpha, QA), (beta, QG)) = rotated[name], layer.bases
            mean_A, mean_G, mean = self.means(name)
            mean = mean if self.damping_kind == "relative" else 1
            damped = layer.e + self.damping * mean
            if self.method == "inverse":  # either factor damped by itself
                root, pi = (layer.damping * mean) ** 0.5, (mean_A / mean_G) ** 0.5
                damped = torch.outer(beta + root / pi, alpha + pi * root)
            V = QG @ (R / damped) @ QA.T
            results[name] = V
            quadratic += float((V * dW).sum()) * (lr / grad_scale) ** 2
        self.nu = min(1.0, (self.kl_clip / quadratic) ** 0.5) if self.kl_clip and quadratic else 1.0
        for name, layer in self.layers.items():
            layer.write(self.nu * results[name])

    def adam(
        self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, *, seed: float = 1.0,
        orthogonal=(), size=27.0, base=128, whiten=0.125, ratio=1.0, heads=(), blocks=(),
    ) -> None:  # fmt: skip
        """KFACAdamW: replace every layer's ``.grad``, unscaled and clipped, by Adam's direction in its eigenbasis; by
        None where it is zero. ``orthogonal`` names the layers whose direction is orthogonalized, between A^-whiten,
        to singular values of that ``size``; others' is times ``ratio``, that of ``heads`` by the width to ``base``.
        ``blocks`` is {layer: for each row of its matrix the number of the map that it is of}."""
        on = next(iter(self.layers.values())).module.weight.device.type in self.iterates
        first = not self.steps
        self.fold(seed)
        if first:
            self.refresh(self.steps)
        self.steps += 1
        for name, layer in self.layers.items():
            dW = layer.matrix()
            if not dW.any():
                layer.module.zero_grad(set_to_none=True)
                continue
            plain = [(torch.ones(len(C)).to(C), torch.eye(len(C)).to(C)) for C in (dW.T, dW)]
            (alpha, QA), (beta, QG) = layer.bases or plain
            whitening = QA @ torch.diag((alpha / alpha.mean() + 0.01) ** -whiten) @ QA.T
            R = QG.T @ dW @ QA
            b1, b2, layer.k = *betas, layer.k + 1
            layer.m = b1 * layer.m + (1 - b1) * R
            layer.v = b2 * layer.v + (1 - b2) * R**2
            m = b1 * layer.m / (1 - b1 ** (layer.k + 1)) + (1 - b1) * R / (1 - b1**layer.k)
            U = m / ((layer.v / (1 - b2**layer.k)).sqrt() + eps)
            U = U * torch.outer(*map(_seen, (beta, alpha), reversed(layer.blocks)))
            U = QG @ U @ QA.T
            if name in orthogonal:
                of_map = torch.as_tensor(dict(blocks).get(name, [0] * len(U)), device=U.device)
                for block in of_map.unique():
                    U[of_map == block] = _orthogonalized(U[of_map == block], whitening, size)
            else:
                U = U * (max(ratio * base / U.shape[1], 1) if name in heads else ratio)
            layer.write(U)
        if not first:  # moments go with a basis, which is used from the next step on
            self.refresh(self.steps - 1, iterate=on)
