"""KFACAdamW with a G: directions of outputs in which there are only roundings are not stepped
along.

Gradients of a softmax's inputs sum to zero over the classes, so of dW there is only rounding along
that sum, of which Adam makes entries of size one. What weights that differ by 1e-7 may change of a
step is derived here, from the problem in float64: :func:`allowed`.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.close import near
from tests.deepspeed.runs import weights
from tests.deepspeed.test_kfac_adamw import config, start
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
SHIFT, EPS, BETA = 1e-7, 1e-8, 0.9
FEATURES, WIDTH, STEPS = 13, 5, 10
HEADS = {
    "softmax": (5, 64),
    "two classes": (2, 64),
    "label smoothing": (5, 64),
    "masked class": (5, 64),
    "few rows": (9, 6),
    "two softmaxes, G in blocks": (6, 64),
    "two maps in one": (6, 64),
}
"""Outputs and rows."""
KFAC: dict[str, dict] = {
    "two softmaxes, G in blocks": {"factor": {"dense_max": 3}},
    "two maps in one": {"adam": {"blocks": {"head": 2}}},
}
"""The last one is orthogonalized outside of G's eigenbasis."""
MASKED = 1
"""A class whose logit is -inf."""


class Classifier(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.first, self.head, self.kind = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, HEADS[head][0]),
            head,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(torch.tanh(self.first(x)))
        if self.kind == "masked class":
            z = z.masked_fill(torch.arange(z.shape[1]) == MASKED, -torch.inf)
        if self.kind == "two softmaxes, G in blocks":
            z, y = z.view(-1, 3), torch.stack([y % 3, y // 2], 1).flatten()
        return nn.functional.cross_entropy(
            z, y, label_smoothing=0.1 if self.kind == "label smoothing" else 0.0
        )


def batch(head: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    classes, rows = HEADS[head]
    x, y = (
        torch.randn(rows, FEATURES, generator=generator),
        torch.randint(classes, (rows,), generator=generator),
    )
    return x, torch.where(y == MASKED, 0, y) if head == "masked class" else y


def classifier(head: str, shift: float) -> Classifier:
    torch.manual_seed(1)
    model = Classifier(head)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


def steps(head: str, shift: float, orthogonal: bool) -> list[Tensor]:
    """What the first and the tenth step change of the head, [O, I], the bias as last column, over
    lr."""
    lr = 2.0**-10
    params = {
        "lr": lr,
        "adam_lr": lr,
        "weight_decay": 0.0,
        "eps": EPS,
        "betas": [BETA, 0.99],
        "torch_adam": True,
    }
    settings = config(
        optimizer={"type": "KFACAdamW", "params": params},
        train_micro_batch_size_per_gpu=HEADS[head][1],
    )
    kept = {"except_layers": [] if orthogonal else ["head"]}
    factor = {"rows": "all", "fisher": "empirical", **KFAC.get(head, {}).get("factor", {})}
    settings["kfac"] = {"factor": factor, "adam": kept | KFAC.get(head, {}).get("adam", {})}
    engine, *_ = start(settings, model=classifier(head, shift))
    found = []
    for step in range(STEPS):
        before = weights(engine)
        engine.backward(engine(*batch(head, step)))
        engine.step()
        moved = {name: (W - before[name]) / lr for name, W in weights(engine).items()}
        found.append(torch.cat([moved["head.weight"], moved["head.bias"][:, None]], 1))
    engine.destroy()
    return [found[0], found[-1]]


def engines(cases: list) -> dict:
    """Case -> by how much the first and the tenth step change, relatively."""
    found = {}
    for case in cases:
        pairs = zip(*(steps(*case[:1], shift, *case[1:]) for shift in (0.0, SHIFT)), strict=True)
        found[case] = [float((after - before).norm() / before.norm()) for before, after in pairs]
    return found


def problem(head: str, shift: float) -> tuple[Tensor, Tensor]:
    """In float64: inputs a [N, I] of the head in the first step, and gradients g [N, O] of a row's
    own loss."""
    model, kept = classifier(head, shift).double(), []
    model.head.register_forward_hook(lambda _, inputs, z: kept.extend([inputs[0].detach(), z]))
    x, y = batch(head, 0)
    loss = model(x.double(), y)
    a, z = kept
    return torch.cat([a, torch.ones_like(a[:, :1])], 1), len(x) * torch.autograd.grad(loss, z)[0]


def turned(C: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors Q [D, D] of a factor; which of them are more than rounding, 0 or 1; and how far
    they turn between the factor and another that was rounded: of Q' = Q (1 + X) at most |X|.

        |X_ij| <= |Q^T (C' - C) Q|_ij / |c_i - c_j|

    to first order, but for turns among null directions.
    """
    values, Q = torch.linalg.eigh(C)
    rounding = torch.finfo(torch.float32).eps * values.max()
    seen = (values > 1e-3 * rounding).double()  # null ones are rounding in float64
    assert ((values > 1e3 * rounding) == seen.bool()).all(), (
        "a gap of six orders: there is no doubt about any"
    )
    change = (Q.T @ (other - C) @ Q).abs() + rounding
    X = change / (values[:, None] - values).abs().fill_diagonal_(torch.inf)
    return Q, seen, torch.where(torch.outer(1 - seen, 1 - seen) > 0, 0.0, X)


def allowed(head: str) -> float:
    """Of the first step along Adam's direction, U = c R / (|R| + eps): by how much it may change,
    relatively.

        |U' - U| <= 2 c |R' - R| / (|R| + eps)                    entry by entry, at most 2 c
        |R' - R| <= |Q_G^T (dW' - dW) Q_A| + |X_G|^T |R| + |R| |X_A|
        |change of Q_G U Q_A^T| <= |U' - U| + |X_G| |U| + |U| |X_A|

    and twice that for what is of higher order.
    """
    (a, g), (a_, g_) = problem(head, 0.0), problem(head, SHIFT)
    Q_A, seen_A, X_A = turned(a.T @ a / len(a), a_.T @ a_ / len(a))
    Q_G, seen_G, X_G = turned(g.T @ g / len(a), g_.T @ g_ / len(a))
    dW, dW_, seen = g.T @ a / len(a), g_.T @ a_ / len(a), torch.outer(seen_G, seen_A)
    rounding = torch.finfo(torch.float32).eps * (a.norm(dim=1) * g.norm(dim=1)).mean()
    R, change = Q_G.T @ dW @ Q_A, (Q_G.T @ (dW_ - dW) @ Q_A).abs() + rounding
    change = change + X_G.T @ R.abs() + R.abs() @ X_A
    c = 1 + BETA / (1 + BETA)
    U = c * R.abs() / (R.abs() + EPS) * seen
    moved = (2 * change / (R.abs() + EPS)).clamp(max=2) * c * seen
    return 2 * float((moved + X_G @ U + U @ X_A).norm() / U.norm())


CASES = [(head, orthogonal) for head in HEADS for orthogonal in (False, True)]


@pytest.fixture(scope="module")
def found() -> dict:
    return run_ranks("tests.deepspeed.test_null_directions:engines", world=1, payload=CASES)[0]


@pytest.mark.parametrize("head, orthogonal", CASES)
def test_weights_that_differ_by_rounding_take_the_same_step(found, head, orthogonal):
    """Along the null directions of G these would be 0.1 to 1.3."""
    first, tenth = found[head, orthogonal]
    bound = allowed(head) if not orthogonal and head not in KFAC else 0.01
    assert bound <= 0.01, "the bound must mean something"
    near(first, 0.0, bound, "see allowed(); five steps of Newton-Schulz lift small ones")
    near(
        tenth,
        0.0,
        0.01,
        "weights have moved apart a little, and entries near zero have changed their sign",
    )
