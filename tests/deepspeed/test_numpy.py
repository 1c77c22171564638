"""Both update rules in numpy, forward and backward included, written from the papers' formulas:
engines equal it.

Nothing of ds_kfac or tests/oracle.py takes part in what is expected.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import spread
from tests.deepspeed.features import merged
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build, weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import on_rank_0
from tests.spread import PLAIN, Variation, difference

WORLD, ACCUMULATION, ROWS, STEPS = 2, 2, 4, 7
UPDATE, REFRESH, DECAY, DAMPING, KL_CLIP = 2, 4, 0.9, 0.5, 5e-4
LR, BETAS, WEIGHT_DECAY, SIZE = 0.02, (0.8, 0.9), 0.1, 3.0
EPS = {"adamw": 0.01, "adamw, G": 1e-8}
"""The second as small as rounding: a head's gradient has nothing but that along the sum of its
classes."""
WHITEN, WHITEN_DAMPING, RATIO = 0.125, 0.01, 0.3
NAMES, BIAS = ("first", "middle", "head"), (True, False, True)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, 17), nn.Linear(17, 19, bias=False)
        self.head = nn.Linear(19, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def backward(Ws: list, x: np.ndarray, labels: np.ndarray) -> tuple[list, list, list]:
    """Of the mean cross entropy over rows x [N, FEATURES]: each layer's inputs a [N, I], gradients
    g [N, O] of its outputs, and dW [O, I]."""
    inputs, h = [], x
    for W, bias in zip(Ws, BIAS, strict=True):
        inputs.append(np.concatenate([h, np.ones_like(h[:, :1])], 1) if bias else h)
        h = np.tanh(inputs[-1] @ W.T)
    z = inputs[-1] @ Ws[-1].T
    p = np.exp(z - z.max(1, keepdims=True))
    g = p / p.sum(1, keepdims=True)
    g[np.arange(len(g)), labels] -= 1
    gradients = [g / len(g)]
    for W, a, bias in zip(Ws[:0:-1], inputs[:0:-1], BIAS[:0:-1], strict=True):
        width = a.shape[1] - bias  # a = tanh of the layer below, and perhaps a 1
        gradients.insert(0, (gradients[0] @ W[:, :width]) * (1 - a[:, :width] ** 2))
    return inputs, gradients, [g.T @ a for a, g in zip(inputs, gradients, strict=True)]


def gradient_factor(g: np.ndarray) -> np.ndarray:
    """G of the rows of all passes: K sum_p R_p sum g g^T. K is the number of backward passes over
    all ranks; R_p, the rows of the layer nearest to the loss, the head, is the same in each, as are
    the rows of g."""
    passes = np.split(g, WORLD * ACCUMULATION)
    return len(passes) * sum(len(rows) * (rows.T @ rows) for rows in passes)


def kfac_gradients(dWs: list, bases: list) -> list:
    """Damped by a part of the mean eigenvalue, and clipped together."""
    Vs = []
    for dW, ((alpha, Q_A), (beta, Q_G)) in zip(dWs, bases, strict=True):
        eigenvalues = np.outer(beta, alpha)
        damped = eigenvalues + DAMPING * eigenvalues.mean()
        Vs.append(Q_G @ ((Q_G.T @ dW @ Q_A) / damped) @ Q_A.T)
    size = LR**2 * sum((V * dW).sum() for V, dW in zip(Vs, dWs, strict=True))
    return [min(1, (KL_CLIP / size) ** 0.5) * V for V in Vs]


def adams_direction(name: str, dW, basis, m, v, k: int, eps: float) -> np.ndarray:
    """Adam's in the eigenbasis; of all but the head's the orthogonal factor. Changes m and v."""
    (alpha, Q_A), (beta, Q_G) = basis
    b1, b2 = BETAS
    R = Q_G.T @ dW @ Q_A
    m[:], v[:] = b1 * m + (1 - b1) * R, b2 * v + (1 - b2) * R**2
    nesterov = b1 * m / (1 - b1 ** (k + 1)) + (1 - b1) * R / (1 - b1**k)
    U = nesterov / (np.sqrt(v / (1 - b2**k)) + eps)
    for e, seen in ((alpha, U), (beta, U.T)):  # a head's gradients of outputs sum to zero
        seen[:, e < max(8, np.sqrt(len(e))) * np.finfo(np.float32).eps * e.max()] = 0
    if name == "head":
        return Q_G @ (U * max(RATIO * 128 / U.shape[1], 1)) @ Q_A.T
    s = (alpha / alpha.mean() + WHITEN_DAMPING) ** -WHITEN  # of each eigenvector of A
    X = U * s / np.linalg.norm(U * s)
    for _ in range(5):
        S = X @ X.T
        X = 3.4445 * X - 4.7750 * S @ X + 2.0315 * S @ S @ X
    X, fade = X * s, min(1, np.sqrt((U**2).mean()) / 0.03)
    return Q_G @ (SIZE / np.sqrt(min(X.shape)) * fade * X / np.sqrt((X**2).mean())) @ Q_A.T


def train(rule: str, start: dict[str, np.ndarray], variation: Variation) -> dict[str, Tensor]:
    """Weights after STEPS steps over the whole batch, in float64, or in the fp32 of a variation in
    other orders."""
    dtype = np.float64 if variation == PLAIN or variation.exact else np.float32
    Ws = []
    for name, bias in zip(NAMES, BIAS, strict=True):
        W = start[f"{name}.weight"]
        if bias:
            W = np.concatenate([W, start[f"{name}.bias"][:, None]], 1)
        Ws.append(W.astype(dtype))
    factors: list = [None] * len(Ws)
    bases: list = [None] * len(Ws)
    m, v = [np.zeros_like(W) for W in Ws], [np.zeros_like(W) for W in Ws]
    for step in range(STEPS):
        x, y = variation.rows(*make_batch(step, WORLD * ACCUMULATION * ROWS))
        rows = x.reshape(-1, FEATURES).numpy().astype(dtype)
        inputs, gradients, dWs = backward(Ws, rows, y.flatten().numpy())
        for i, (a, g) in enumerate(zip(inputs, gradients, strict=True)):
            if step % UPDATE == 0:
                G = np.eye(g.shape[1], dtype=dtype) if rule == "adamw" else gradient_factor(g)
                new = (a.T @ a / len(a), G)
                keep = min(1 - 1 / (step // UPDATE + 1), DECAY)
                old = factors[i] or new
                factors[i] = tuple(keep * o + (1 - keep) * n for o, n in zip(old, new, strict=True))
            if step % REFRESH == 0:
                old = bases[i]
                bases[i] = [(_, new_A), (_, new_G)] = [np.linalg.eigh(C) for C in factors[i]]
                if old:
                    (_, Q_A), (_, Q_G) = old
                    m[i] = new_G.T @ Q_G @ m[i] @ Q_A.T @ new_A
        if rule == "gradient":
            Ws = [W - LR * V for W, V in zip(Ws, kfac_gradients(dWs, bases), strict=True)]
            continue
        for i, name in enumerate(NAMES):
            U = adams_direction(name, dWs[i], bases[i], m[i], v[i], step + 1, EPS[rule])
            Ws[i] = (1 - LR * WEIGHT_DECAY) * Ws[i] - LR * U
    found = {}
    for name, bias, W in zip(NAMES, BIAS, map(torch.from_numpy, Ws), strict=True):
        found[f"{name}.weight"] = W[:, :-1] if bias else W
        if bias:
            found[f"{name}.bias"] = W[:, -1]
    return found


ADAM = {"lr": LR, "adam_lr": RATIO * LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
OPTIMIZER = {"gradient": {"type": "SGD", "params": {"lr": LR}}} | {
    rule: {"type": "KFACAdamW", "params": {**ADAM, "eps": eps}} for rule, eps in EPS.items()
}
KFAC = {
    "gradient": {"damping": {"value": DAMPING}, "preconditioner": {"kl_clip": KL_CLIP}},
    "adamw": {},
    "adamw, G": {"factor": {"fisher": "empirical"}},
}
OFTEN = {
    "factor": {"rows": "all", "update_interval": UPDATE, "decay": DECAY},
    "eigenbasis": {"refresh_interval": REFRESH},
    "burn_in": {"steps": 0},
}


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rule", OPTIMIZER)
def test_an_engine_equals_numpy(rule, stage):
    mode = Mode("numpy", stage, clip=0.0, inner=OPTIMIZER[rule], size=SIZE, base=128)
    engine = build(mode, ACCUMULATION, model=make_net(Mlp), kfac=merged(OFTEN, KFAC[rule]))
    start = weights(engine)
    for step in range(STEPS):
        x, y = make_batch(step, WORLD * ACCUMULATION * ROWS)
        for micro in range(ACCUMULATION):
            first = (dist.get_rank() * ACCUMULATION + micro) * ROWS
            rows = slice(first, first + ROWS)
            engine.backward(cross_entropy(engine(x[rows]), y[rows]))
            engine.step()
    arrays = {name: p.numpy() for name, p in start.items()}
    expected = on_rank_0(
        lambda: spread.expected(lambda variation: train(rule, arrays, variation), start)
    )
    assert expected.spread < 1e-2, "the bound must mean something"
    off = difference(weights(engine), expected.weights, start)
    assert not spread.within(rule, off, expected.bound)
