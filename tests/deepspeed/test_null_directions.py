"""KFACAdamW with a G: directions of outputs in which there are only roundings are not stepped
along.

Gradients of a softmax's inputs sum to zero over the classes, so of dW there is only rounding along
that sum, of which Adam makes entries of size one.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.close import near
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build, weights

SHIFT, FEATURES, WIDTH, STEPS = 1e-7, 13, 5, 10
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
LR = 2.0**-10
PARAMS = {
    "lr": LR,
    "adam_lr": LR,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "betas": [0.9, 0.99],
    "torch_adam": True,
}


class Classifier(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(FEATURES, WIDTH), head
        self.head = nn.Linear(WIDTH, HEADS[head][0])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(torch.tanh(self.first(x)))
        if self.kind == "masked class":
            z = z.masked_fill(torch.arange(z.shape[1]) == MASKED, -torch.inf)
        if self.kind == "two softmaxes, G in blocks":
            z, y = z.view(-1, 3), torch.stack([y % 3, y // 2], 1).flatten()
        smoothing = 0.1 if self.kind == "label smoothing" else 0.0
        return nn.functional.cross_entropy(z, y, label_smoothing=smoothing)


def batch(head: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    classes, rows = HEADS[head]
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(classes, (rows,), generator=generator)
    return x, torch.where(y == MASKED, 0, y) if head == "masked class" else y


def steps(head: str, shift: float, orthogonal: bool) -> list[Tensor]:
    """What the first and the tenth step change of the head, [O, I], the bias as last column, over
    lr."""
    torch.manual_seed(1)
    model = Classifier(head)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    blocks = KFAC.get(head, {})
    kfac = {
        "factor": {"rows": "all", "fisher": "empirical", **blocks.get("factor", {})},
        "adam": {"except_layers": [] if orthogonal else ["head"], **blocks.get("adam", {})},
    }
    optimizer = {"type": "KFACAdamW", "params": PARAMS}
    engine = build(Mode("null", 2), model=model, optimizer=optimizer, kfac=kfac)
    found = []
    for step in range(STEPS):
        before = weights(engine)
        engine.backward(engine(*batch(head, step)))
        engine.step()
        moved = {name: (W - before[name]) / LR for name, W in weights(engine).items()}
        found.append(torch.cat([moved["head.weight"], moved["head.bias"][:, None]], 1))
    return [found[0], found[-1]]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_weights_that_differ_by_rounding_take_the_same_step(head, orthogonal):
    pairs = zip(steps(head, 0.0, orthogonal), steps(head, SHIFT, orthogonal), strict=True)
    why = "weights differ by 1e-7, entries near zero change sign; along null directions 0.1 to 1.3"
    for before, after in pairs:
        near(float((after - before).norm() / before.norm()), 0.0, 0.01, why)
