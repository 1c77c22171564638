"""Both update rules in numpy, forward and backward included, written from the papers' formulas:
engines equal it.

Nothing of ds_kfac or tests/oracle.py takes part in what is expected.
"""

import contextlib
import io
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_kfac
from tests import spread
from tests.deepspeed.runs import weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch
from tests.ranks import run_ranks
from tests.spread import PLAIN, Variation, difference

pytestmark = pytest.mark.distributed
WORLD, ACCUMULATION, MICRO_ROWS, STEPS = 2, 2, 4, 7
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


def train(rule: str, start: dict[str, np.ndarray], variation: Variation) -> dict[str, Tensor]:
    """Weights after STEPS steps over the whole batch, in float64, or in the fp32 of a variation in
    other orders."""
    dtype = np.float64 if variation == PLAIN or variation.exact else np.float32
    Ws = [
        np.concatenate([start[f"{n}.weight"], start[f"{n}.bias"][:, None]], 1)
        if bias
        else start[f"{n}.weight"]
        for n, bias in zip(NAMES, BIAS, strict=True)
    ]
    Ws = [W.astype(dtype) for W in Ws]
    factors: list = [None] * len(Ws)
    bases: list = [None] * len(Ws)
    m, v = [np.zeros_like(W) for W in Ws], [np.zeros_like(W) for W in Ws]
    for step in range(STEPS):
        x, y = variation.rows(*make_batch(step, WORLD * ACCUMULATION * MICRO_ROWS))
        inputs, gradients, dWs = backward(
            Ws, x.reshape(-1, FEATURES).numpy().astype(dtype), y.flatten().numpy()
        )
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
            Vs = []
            for dW, ((alpha, Q_A), (beta, Q_G)) in zip(dWs, bases, strict=True):
                eigenvalues = np.outer(beta, alpha)
                Vs.append(
                    Q_G
                    @ ((Q_G.T @ dW @ Q_A) / (eigenvalues + DAMPING * eigenvalues.mean()))
                    @ Q_A.T
                )
            size = LR**2 * sum((V * dW).sum() for V, dW in zip(Vs, dWs, strict=True))
            Ws = [W - LR * min(1, (KL_CLIP / size) ** 0.5) * V for W, V in zip(Ws, Vs, strict=True)]
            continue
        (b1, b2), k = BETAS, step + 1
        for i, (W, dW, ((alpha, Q_A), (beta, Q_G))) in enumerate(zip(Ws, dWs, bases, strict=True)):
            R = Q_G.T @ dW @ Q_A
            m[i], v[i] = b1 * m[i] + (1 - b1) * R, b2 * v[i] + (1 - b2) * R**2
            nesterov = b1 * m[i] / (1 - b1 ** (k + 1)) + (1 - b1) * R / (1 - b1**k)
            U = nesterov / (np.sqrt(v[i] / (1 - b2**k)) + EPS[rule])
            for e, seen in ((alpha, U), (beta, U.T)):  # a head's gradients of outputs sum to zero
                seen[:, e < max(8, np.sqrt(len(e))) * np.finfo(np.float32).eps * e.max()] = 0
            if NAMES[i] != "head":
                s = (alpha / alpha.mean() + WHITEN_DAMPING) ** -WHITEN  # of each eigenvector of A
                X = U * s / np.linalg.norm(U * s)
                for _ in range(5):
                    S = X @ X.T
                    X = 3.4445 * X - 4.7750 * S @ X + 2.0315 * S @ S @ X
                X, fade = X * s, min(1, np.sqrt((U**2).mean()) / 0.03)
                U = SIZE / np.sqrt(min(X.shape)) * fade * X / np.sqrt((X**2).mean())
            else:
                U = U * max(RATIO * 128 / U.shape[1], 1)
            U = Q_G @ U @ Q_A.T
            Ws[i] = (1 - LR * WEIGHT_DECAY) * W - LR * U
    parts = zip(NAMES, BIAS, (torch.from_numpy(W) for W in Ws), strict=True)
    found = [(n, W[:, :-1], W[:, -1]) if bias else (n, W, None) for n, bias, W in parts]
    return {f"{n}.weight": W for n, W, _ in found} | {
        f"{n}.bias": b for n, _, b in found if b is not None
    }


ADAM = {"lr": LR, "adam_lr": RATIO * LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
OPTIMIZER = {"gradient": {"type": "SGD", "params": {"lr": LR}}} | {
    rule: {"type": "KFACAdamW", "params": {**ADAM, "eps": eps}} for rule, eps in EPS.items()
}
KFAC = {
    "gradient": {"damping": {"value": DAMPING}, "preconditioner": {"kl_clip": KL_CLIP}},
    "adamw": {},
    "adamw, G": {"factor": {"fisher": "empirical"}},
}


def engines(cases: list) -> dict:
    """[(rule, stage)] -> {case: weights before and after training}."""
    found = {}
    for rule, stage in cases:
        config = {
            "train_micro_batch_size_per_gpu": MICRO_ROWS,
            "gradient_accumulation_steps": ACCUMULATION,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "optimizer": OPTIMIZER[rule],
            "kfac": {
                "eigenbasis": {"refresh_interval": REFRESH},
                "burn_in": {"steps": 0},
                **KFAC[rule],
                "factor": {
                    "rows": "all",
                    "update_interval": UPDATE,
                    "decay": DECAY,
                    **KFAC[rule].get("factor", {}),
                },
            },
        }
        torch.manual_seed(0)
        model = Mlp()
        sized = patch("ds_kfac.directions.kfac_adamw.group_step.SIZE", SIZE)
        with contextlib.redirect_stdout(io.StringIO()), sized:
            engine, *_ = ds_kfac.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
        before = weights(engine)
        for step in range(STEPS):
            x, y = make_batch(step, WORLD * ACCUMULATION * MICRO_ROWS)
            for micro in range(ACCUMULATION):
                first = (dist.get_rank() * ACCUMULATION + micro) * MICRO_ROWS
                rows = slice(first, first + MICRO_ROWS)
                engine.backward(cross_entropy(engine(x[rows]), y[rows]))
                engine.step()
        found[rule, stage] = before, weights(engine)
        engine.destroy()
    return found


CASES = [(rule, stage) for rule in OPTIMIZER for stage in (0, 2, 3)]


@pytest.fixture(scope="module")
def found() -> dict:
    return run_ranks("tests.deepspeed.test_numpy:engines", world=WORLD, payload=CASES)[0]


@pytest.mark.parametrize("rule, stage", CASES)
def test_an_engine_equals_numpy(found, rule, stage):
    start, after = found[rule, stage]
    arrays = {name: p.numpy() for name, p in start.items()}
    expected = spread.expected(lambda variation: train(rule, arrays, variation), start)
    assert expected.spread < 1e-2, "the bound must mean something"
    assert not spread.within(rule, difference(after, expected.weights, start), expected.bound)
