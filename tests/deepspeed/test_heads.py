"""Programs whose layers see one input and get gradients of different rows, or a gradient that is
not of rows alone."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.models import cross_entropy
from tests.ranks import of_ranks

EVERY_STEP = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}
STILL = Mode("still", 0, kfac=EVERY_STEP, inner={"type": "SGD", "params": {"lr": 1e-30}})
WIDTH, ROWS = 12, 8


class Heads(nn.Module):
    """Two tasks on one trunk: both heads are computed, and one of them has a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(6, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, 5, bias=False), nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x):
        z = torch.tanh(self.trunk(x))
        return self.one(z), self.other(z)


def batch(step: int, micro: int, rank: int):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(ROWS, 6, generator=generator) + 2 * micro + rank, torch.arange(ROWS) % 5


TASK = {
    "micro-batch": lambda step, micro, rank: (micro % 2,),
    "rank": lambda step, micro, rank: (rank,),
    "step": lambda step, micro, rank: (0, 1) if not step else (step % 2,),
    "weight": lambda step, micro, rank: (micro % 2,),
    "weight by step": lambda step, micro, rank: (0, 1) if not step else (step % 2,),
}
"""Which heads have a loss; or one of a weight that is not zero."""


def factors_of(engine) -> dict:
    """A's name -> itself, on whichever rank it is, and its updates. Collective."""
    own = engine.kfac.preconditioner.curvature.factors.items()
    own = {k: (f.side.blocks(f.packed_P)[0][0], float(f.updates)) for k, f in own if "/A" in k}
    return {key: value for of_rank in of_ranks(own) for key, value in of_rank.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", TASK)
def test_each_A_has_the_rows_of_the_heads_that_have_a_gradient(who):
    """One of both heads those of either, if each gets one in turn after a step in which both had
    one."""
    engine = build(STILL, 2, model=Heads())
    rows: dict[str, list] = {"one": [], "other": [], "either": []}
    for step in range(3):
        for micro in range(2):
            x, y = batch(step, micro, dist.get_rank())
            tasks = TASK[who](step, micro, dist.get_rank())
            losses = [cross_entropy(head, y) for head in engine(x)]
            if "weight" in who:
                engine.backward(sum(float(at in tasks) * loss for at, loss in enumerate(losses)))
            else:
                engine.backward(sum(losses[at] for at in tasks))
            engine.step()
            for rank in range(2):
                inputs = torch.tanh(engine.module.trunk(batch(step, micro, rank)[0])).detach()
                for name, heads in (("one", {0}), ("other", {1}), ("either", {0, 1})):
                    if heads & set(TASK[who](step, micro, rank)):
                        rows[name].append(inputs)
    found = factors_of(engine)
    expected = {"one": "one", "other": "other"}
    if "step" in who:
        assert engine.kfac.preconditioner.observations.groups == (("one", "other"),)
        assert {key: updates for key, (_, updates) in found.items()} == {"trunk/A": 3, "one/A": 3}
        expected = {"one": "either"}
    for name, which in expected.items():
        x = torch.cat(rows[which])
        close(found[f"{name}/A"][0], x.T @ x / len(x), sums=3 * 4 * ROWS, what=name)


class Towers(nn.Module):
    """As many patches as tokens; only texts are padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.patches = nn.Linear(6, WIDTH, bias=False), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x, attention_mask, pixels):
        mask = attention_mask[..., None]
        text, image = (self.words(x) * mask).sum(1) / mask.sum(1), self.patches(pixels).mean(1)
        return cross_entropy(text @ image.T, torch.arange(len(x)))


@pytest.mark.ranks(1)
def test_a_mask_of_texts_leaves_out_no_patches():
    """They have a gradient, so that the mask, which fits them, leaves none of them out."""
    engine = build(STILL, model=Towers())
    torch.manual_seed(1)
    x, pixels = torch.randn(2, 4, 5, 6)
    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 4])[:, None]).long()
    for _ in range(3):
        engine.backward(engine(x, mask, pixels))
        engine.step()  # a layer that does not fit is an error
    found = factors_of(engine)
    for name, rows in (("words", x[mask.bool()]), ("patches", pixels.flatten(0, 1))):
        A, updates = found[f"{name}/A"]
        close(A, rows.T @ rows / len(rows), sums=20)
        assert updates == 3


@pytest.mark.ranks(1)
def test_a_layer_whose_gradient_is_later_not_of_its_rows_is_found_at_the_next_proof():
    """Captured steps 1 and 3 prove. The other head has its A in common with it."""
    with patch.object(proving, "RAISES", False):
        engine = build(STILL, model=Heads())
        for step in range(3):
            x, y = batch(step, 0, 0)
            loss = sum(cross_entropy(head, y) for head in engine(x))
            if step:  # its weight grows from zero
                loss = loss + step * engine.module.one.weight.square().sum()
            engine.backward(loss)
            engine.step()
            unfit = set(engine.kfac.preconditioner.proving.unfit)
            assert unfit == ({"one", "other"} if step == 2 else set()), step
