"""K-FAC with every option, on one device in plain torch: the oracle of the tests. Its short form:
ds_kfac/reference.py.

For a layer W a with inputs a (a 1 appended for the bias) and gradients g of the loss with respect
to its outputs:

    A = mean a a^T                G = K sum_p R_p sum g g^T       running averages, bias-corrected
    A = Q_A diag(alpha) Q_A^T     G = Q_G diag(beta) Q_G^T        now and then; see _iterated
    R = Q_G^T dW Q_A              every step: the gradient in the eigenbasis

    K-FAC gradient
        V = Q_G [R / (e + lambda)] Q_A^T,   e = beta alpha^T, or the running mean of M R^2 (EKFAC)
        with the method "inverse":
        V = (G + sqrt(lambda) / pi)^-1 dW (A + pi sqrt(lambda))^-1,   pi^2 = mean A / mean G
        dW <- nu V,   nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>))); then any optimizer
    KFACAdamW
        Adam on R: m, v;   U = Q_G [m^ / (sqrt(v^) + eps)] Q_A^T, or its orthogonal factor
        W <- W - lr (U + decay W); a layer whose dW is exactly 0, not finite, or of norm 1e15 and
        more is not touched

tests/truth.py says which rows count and what K and R_p are. M, the number of terms, is the sum of
all R_p.

After the backward of a whole batch: ``kfac.step(lr); optimizer.step()``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.truth import CONVOLUTIONS, TRANSPOSED, Call, Truth


class _Layer:
    """A module, or a group of a convolution: its rows, its parameters as a matrix [O, I], and the
    sizes of the blocks of A and G that are kept."""

    def __init__(self, owner: "ReferenceKFAC", name: str, module: Any, group: int) -> None:
        self.owner, self.name, self.module, self.group = owner, name, module, group
        # a norm's A is made of gradients
        self.norm = not isinstance(module, (nn.Linear, *CONVOLUTIONS))
        bias = getattr(module, "bias", None) is not None and not isinstance(module, TRANSPOSED)
        sides, cut = owner.sides(module, bias), dict(owner.parts).get(name, (None, None))
        self.blocks = cut[0] or sides[0], cut[1] or sides[1]
        self.params = [module.weight, module.bias] if bias and not cut[0] else [module.weight]
        self.orthogonal = not self.norm
        if isinstance(module, CONVOLUTIONS):
            sides = module.in_channels // module.groups, module.out_channels // module.groups
            self.orthogonal = module.in_channels > 4 and not (module.groups > 1 and 1 in sides)
        self.factors: list[Tensor] = []  # A, G
        self.bases: list[tuple[Tensor, Tensor]] = []  # (alpha, Q_A), (beta, Q_G)
        self.k, self.updates = 0, 0
        self.S: Any = 0.0
        self.e: Any = 0.0
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.terms, self.damping = 1.0, 0.0  # of the last batch, at the last refresh

    @property
    def pairs(self) -> list[tuple[Call, int, Tensor]]:
        """(call, number of the pass, gradient) of this step, whose gradient is not zero."""
        own = [call for call in self.owner.passes.calls() if call.module is self.module]
        pairs = [(call, number, g) for call in own for number, g in call.gradients]
        return [pair for pair in pairs if pair[-1].any()]

    def rows(self, call: Call, g: Tensor) -> tuple[Tensor, Tensor]:
        """A call's a [N, T, I], without the bias' 1, and g [N, T, O]."""
        if not self.norm:
            return call.rows(g)[self.group]
        x, module = call.x, self.module
        # a norm's rows are those of its parameters' own gradients
        if isinstance(module, nn.LayerNorm):
            normal = F.layer_norm(x, x.shape[-1:], eps=module.eps)
            a = (torch.stack([normal, torch.ones_like(x)], -1) * g.unsqueeze(-1)).flatten(-2)
        elif isinstance(module, nn.RMSNorm):
            eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
            a = F.rms_norm(x, x.shape[-1:], eps=eps) * g
        else:
            sums = [(image_norm(module, x) * g).flatten(2).sum(-1), g.flatten(2).sum(-1)]
            a, g = torch.stack(sums, -1).flatten(1), sums[1]
        return tuple(part.reshape(len(g), -1, part.shape[-1]) for part in (a, g))

    def moments(self) -> tuple[Tensor, Tensor]:
        """This step's A and G."""
        owner, R = self.owner, self.owner.passes.terms()
        found = []
        for call, number, gradient in self.pairs:
            a, g, kept = call.taken(
                *self.rows(call, gradient),
                owner.sharing,
                bias=not self.norm and len(self.params) > 1,
                mean=not self.norm,
            )
            # K R_p goes to G, a square
            root = (len(R) * R[number]) ** 0.5 / owner.scale
            found.append((a * root if self.norm else a, g * root, kept.to(a)))
        a, g, kept = (torch.cat(parts) for parts in zip(*found, strict=True))
        weigh_a = weigh_g = torch.ones_like(kept)
        if owner.only is not None:
            weigh_a, weigh_g = (
                only.to(a).repeat_interleave(len(a) // len(only))
                for only in (owner.only(self.name, side) for side in "AG")
            )
        A = (a.T * weigh_a) @ a
        if self.norm:
            return A, a.new_ones(1, 1)
        return A / (weigh_a * kept).sum(), (g.T * weigh_g) @ g

    def of_group(self, parameter: Tensor) -> Tensor:
        """A weight's or a bias' matrix of the group, which is a view."""
        own = parameter.unflatten(0, (getattr(self.module, "groups", 1), -1))[self.group]
        if own.ndim == 1:
            return own[:, None]
        return own.flatten(1).mT if isinstance(self.module, TRANSPOSED) else own.flatten(1)

    def matrix(self) -> Tensor:
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad.float() for p in self.params]
        if self.norm:
            return torch.stack(grads, 1).view(1, -1)
        return torch.cat([self.of_group(grad) for grad in grads], 1)

    @torch.no_grad()
    def write(self, V: Tensor) -> None:
        grads = [p.grad for p in self.params]
        if self.norm:
            targets, parts = grads, V.view(-1, len(grads)).unbind(1)
        else:
            targets = [self.of_group(grad) for grad in grads]
            parts = V.split([target.shape[1] for target in targets], 1)
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def fold(self, decay: float) -> None:
        """A batch into the running averages, none of it larger than 10 times the average once that
        stands on 10."""
        self.updates += 1
        r, batch = min(1 - 1 / self.updates, decay), self.batch()
        for index, (old, new) in enumerate(zip(self.factors or batch, batch, strict=True)):
            batch[index] = r * old + (1 - r) * _limited(new, new.trace(), old.trace(), self.updates)
        self.factors = batch

    def refresh(self, iterate: bool) -> None:
        """Decompose both factors. Adam's first moment goes into the new bases; the second stays,
        but for the first bases, into which it goes as far as a diagonal can."""
        first = not self.bases
        eyes = [torch.eye(len(C), device=C.device) for C in self.factors]
        old = [Q for _, Q in self.bases] or eyes
        self.bases = [
            _iterated(C, block, Q) if iterate and not first else _eigh(C, block)
            for C, block, Q in zip(self.factors, self.blocks, old, strict=True)
        ]
        RA, RG = (new.T @ before for (_, new), before in zip(self.bases, old, strict=True))
        if isinstance(self.m, Tensor):
            self.m = RG @ self.m @ RA.T
            self.v = RG**2 @ self.v @ RA.T**2 if first else self.v

    def batch(self) -> list[Tensor]:
        A, G = self.moments()
        self.terms = float(sum(self.owner.passes.terms().values()))
        return [_blocks(A, self.blocks[0]), _blocks(G, self.blocks[1])]


def image_norm(module: Any, x: Tensor) -> Tensor:
    """What a BatchNorm or GroupNorm multiplies by its weight."""
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    moments = None, None
    if not module.training:
        moments = module.running_mean.to(x), module.running_var.to(x)
    return F.batch_norm(x, *moments, training=module.training, eps=module.eps)


def _limited(new: Tensor, size: Tensor, usual: Tensor, updates: int) -> Tensor:
    return new / (size / (10 * usual)).clamp(min=1) if updates > 10 and usual > 0 else new


def _blocks(C: Tensor, block: int) -> Tensor:
    """Diagonal blocks of a matrix, the rest zero; block 0: the identity."""
    index = torch.arange(len(C), device=C.device) // max(block, 1)
    return C * (index[:, None] == index[None, :]) if block else torch.eye(len(C), device=C.device)


def _eigh(C: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, block by block: of a diagonal or an identity the latter are the
    identity."""
    if block == 0:
        return C.new_ones(len(C)), torch.eye(len(C), device=C.device)
    parts = [torch.linalg.eigh(C[i : i + block, i : i + block]) for i in range(0, len(C), block)]
    return torch.cat([e for e, _ in parts]).clamp(min=0), torch.block_diag(*(q for _, q in parts))


def _iterated(C: Tensor, block: int, Q: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration from Q, block by block; by eigh where it leaves too much off
    the diagonal."""
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
    return (
        size * max(X.shape) ** 0.5 * X / X.norm() * (U.square().mean().sqrt() / 0.03).clamp(max=1)
    )


def _seen(values: Tensor, block: int, squares: Tensor | None = None) -> Tensor:
    """Whether an eigenvalue is more than fp32's rounding of the largest in its block, which a
    diagonal has not, or the gradients along its direction are more than rounding.

    ``squares``: mean square of the gradients along each direction; None: eigenvalues decide alone.
    """
    if block < 2:
        return torch.ones_like(values)
    eps = torch.finfo(torch.float32).eps
    found = [part >= max(64, len(part)) ** 0.5 * eps * part.max() for part in values.split(block)]
    kept = torch.cat(found)
    if squares is not None:
        kept = kept | (squares > squares.mean() / 1024)
    return kept.to(values)


class ReferenceKFAC:
    """See the module's docstring. Every group of a convolution is a layer of its own, named
    "<module>:<group>".

    Settings, of which a step reads those of its time:
        types: of layers; "BatchNorm" is that of images of any dimension.
        dense_max, longest: sides over ``dense_max`` are cut into blocks, over ``longest`` a
            diagonal, all of them identities if it is 0.
        parts: {linear: (A's block or None, G's block or None)}; a bias stays apart where A is cut.
        corrected: the decay of the running mean of M R^2; None: without it.
        iterates: device types where KFACAdamW refreshes by a step of the iteration after the
            burn-in, but for every tenth time.
        mask: [N, T], the attention mask.
        scale: by which the loss is multiplied.
        only: (layer, "A" or "G") -> [N] or [N T], for how many each example, or each row, stands;
            0: it is not taken.
    """

    update_interval = refresh_interval = 1
    burn_in = 0
    decay: float = 0.95
    damping: float = 1e-3
    damping_kind = "tikhonov"
    kl_clip: float = 1e-3
    types: Any = ("Linear",)
    dense_max: int | None = None
    longest = 16384
    parts: Any = ()
    corrected: float | None = None
    sharing, fisher, method = "expand", "empirical", "eigen"
    iterates: Any = frozenset({"cuda"})
    mask: Tensor | None = None
    scale = 1.0
    only: Any = None

    def __init__(self, model: nn.Module, *, exclude=(), **settings) -> None:
        assert all(hasattr(ReferenceKFAC, name) for name in settings), settings
        vars(self).update(settings)
        self.steps = self.refreshed = 0
        self.nu = 1.0
        self.layers: dict[str, _Layer] = {}
        for name, m in model.named_modules():
            kind, weight = type(m).__name__, getattr(m, "weight", None)
            is_chosen = name not in exclude and {kind, kind.rstrip("123d")} & set(self.types)
            if not is_chosen or weight is None or not weight.requires_grad:
                continue
            for group in range(getattr(m, "groups", 1)):
                own = f"{name}:{group}" if isinstance(m, CONVOLUTIONS) else name
                self.layers[own] = _Layer(self, own, m, group)
        self.passes = Truth(
            model,
            mask=lambda *_: self.mask,
            sharing=self.sharing,
            norms=[layer.module for layer in self.layers.values() if layer.norm],
            dtype=torch.get_default_dtype(),
        )
        self.passes.listens = self.fisher != "monte_carlo"
        self.passes.listen()

    def sides(self, m: Any, bias: bool) -> tuple[int, int]:
        """Sizes of the blocks of A and G."""
        if not isinstance(m, (nn.Linear, *CONVOLUTIONS)):
            return 1 + bias, 0
        one, other = len(m.weight) // getattr(m, "groups", 1), m.weight[0].numel()
        I, O = (one, other) if isinstance(m, TRANSPOSED) else (other + bias, one)  # noqa: E741
        return self.block(I, O), 0 if self.fisher == "activations_only" else self.block(O, I)

    def block(self, dim: int, other: int) -> int:
        if not self.longest or self.dense_max is None or dim <= self.dense_max:
            return dim if self.longest else 0
        most = max(self.dense_max // 2, min(other, self.dense_max))
        return -(-dim // -(-dim // most)) if dim <= self.longest else 1

    def means(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean eigenvalues of A, of G and of the Fisher that damping is relative to, of all groups
        of a convolution."""
        own = [each for each in self.layers.values() if each.module is self.layers[name].module]
        A, G = (torch.cat([each.bases[side][0] for each in own]).mean() for side in (0, 1))
        return A, G, torch.stack([each.e for each in own]).mean() if self.corrected else A * G

    def sampled(self, loss: Tensor) -> None:
        """Monte-Carlo Fisher: G from a loss on labels drawn from the model, before the true
        backward."""
        parameters = [p for layer in self.layers.values() for p in layer.params]
        self.passes.listens = True
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        self.passes.listens = False

    def update(self, *, iterate: bool = False) -> None:
        """Fold this step's rows into the factors, then decompose them, where due."""
        self.fold()
        self.refresh(iterate=iterate)
        self.steps += 1

    def fold(self) -> None:
        if self.steps % self.update_interval == 0:
            for layer in self.layers.values():
                if layer.pairs:
                    layer.fold(self.decay)
        self.passes.clear()

    def refresh(self, *, iterate: bool = False) -> None:
        """Decompose the factors, if due; from the last bases, if ``iterate``."""
        if self.steps % self.refresh_interval == 0:
            again = iterate and self.steps >= self.burn_in and self.refreshed % 10 > 0
            for layer in self.layers.values():
                if layer.factors:
                    layer.damping = self.damping
                    layer.refresh(again)
            self.refreshed += self.steps >= self.burn_in

    def step(self, lr: float) -> None:
        """Replace every layer's ``.grad``, unscaled and clipped, by its K-FAC gradient."""
        self.update()
        results, rotated, quadratic = {}, {}, 0.0
        for name, layer in self.layers.items():
            dW, ((alpha, QA), (beta, QG)) = layer.matrix(), layer.bases
            R, layer.e = QG.T @ dW @ QA, torch.outer(beta, alpha)
            rotated[name] = dW, R
            if self.corrected:
                layer.k += 1
                r = min(1 - 1 / layer.k, self.corrected)
                new, old = layer.terms * R**2, layer.S + torch.zeros_like(R)
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
            quadratic += float((V * dW).sum()) * lr**2
        self.nu = min(1.0, (self.kl_clip / quadratic) ** 0.5) if self.kl_clip and quadratic else 1.0
        for name, layer in self.layers.items():
            layer.write(self.nu * results[name])

    def adam(
        self,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        orthogonal=(),
        size=27.0,
        base=128,
        whiten=0.125,
        ratio=1.0,
        heads=(),
        blocks=(),
    ) -> None:
        """KFACAdamW: replace every layer's ``.grad``, unscaled and clipped, by Adam's direction in
        its eigenbasis; by None where it is zero. ``orthogonal`` names the layers whose direction is
        orthogonalized, between A^-whiten, to singular values of that ``size``; others' is times
        ``ratio``, that of ``heads`` by the width to ``base``. ``blocks`` is {layer: for each row of
        its matrix the number of the map that it is of}."""
        on = next(iter(self.layers.values())).module.weight.device.type in self.iterates
        self.update(iterate=on)
        for name, layer in self.layers.items():
            dW = layer.matrix()
            if not dW.any() or not dW.norm() < 1e15:
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
            kept_O = _seen(beta, layer.blocks[1], layer.v.mean(1))
            kept_I = _seen(alpha, layer.blocks[0], layer.v.mean(0))
            U = U * torch.outer(kept_O, kept_I)
            U = QG @ U @ QA.T
            if name in orthogonal:
                of_map = torch.as_tensor(dict(blocks).get(name, [0] * len(U)), device=U.device)
                for block in of_map.unique():
                    U[of_map == block] = _orthogonalized(U[of_map == block], whitening, size)
            else:
                U = U * (max(ratio * base / U.shape[1], 1) if name in heads else ratio)
            layer.write(U)
