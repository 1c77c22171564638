"""How far KFACAdamW carries layers that get little: towers that die out, rare experts, phases; AdamW is the measure."""

import copy
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch import nn

from ds_kfac.directions.kfac_adamw import direction
from tests.deepspeed.test_kfac_adamw import OURS, PLAIN, config, start
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
WIDTH, TOKENS, STEPS, LAST = 12, 64, 120, 20
RATE = 3e-3


class Towers(nn.Module):
    """Towers, each weighted by a factor and seeing some of the tokens, both as the step says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, y, factors, tokens):
        h = torch.tanh(self.stem(x))
        parts = [torch.zeros_like(h) for _ in self.towers]
        for part, tower, factor, share in zip(parts, self.towers, factors, tokens, strict=True):
            if share.stop > share.start:
                part[share] = factor * torch.tanh(tower(h[share]))
        return nn.functional.cross_entropy(self.head(h + sum(parts)), y)


EVERY = slice(0, TOKENS)
CASES = {  # of the second tower: what it is multiplied by, and which tokens it sees, from step LAST on
    "conditional": lambda step: (0.0, EVERY),
    "never called": lambda step: (1.0, slice(0, 0)),
    "dying": lambda step: (1e-6, EVERY),
    "every fifth step": lambda step: (1.0 if step % 5 == 0 else 0.0, EVERY),
    "rare": lambda step: (1.0, slice(0, 1) if step % 4 == 0 else slice(0, 0)),
}


def walk(ours: bool, case: str) -> tuple[float, float]:
    """What the first and the second tower have moved since step LAST, in multiples of their own norm then."""
    torch.manual_seed(0)
    settings = config(optimizer=copy.deepcopy(OURS if ours else PLAIN), zero_optimization={"stage": 0})
    kfac: dict = {}
    settings |= {"kfac": kfac} if ours else {}
    settings["optimizer"]["params"] |= {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.0}
    settings["optimizer"]["params"] |= {"adam_lr": RATE} if ours else {}
    # entries of Adam's size: the default is for models of some width
    with patch.object(direction, "SIZE", 0.3 * WIDTH**0.5), patch.object(direction, "BASE", WIDTH):
        made = start(settings, model=Towers()) if ours else deepspeed.initialize(model=Towers(), config=settings)
    engine = made[0]
    teacher = torch.randn(WIDTH, 5)
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH)
        y = (x @ teacher + torch.randn(TOKENS, 5)).argmax(-1)
        factor, share = CASES[case](step) if step >= LAST else (1.0, EVERY)
        if step == LAST:
            before = [tower.weight.detach().clone() for tower in engine.module.towers]
        engine.backward(engine(x, y, (1.0, factor), (EVERY, share)))
        engine.step()
    pairs = zip(engine.module.towers, before, strict=True)
    moved = tuple(float((tower.weight - old).norm() / old.norm()) for tower, old in pairs)
    engine.destroy()
    return moved


def worker(_) -> dict:
    return {case: (walk(True, case), walk(False, case)) for case in CASES}


def test_what_gets_little_is_not_carried_further_than_by_adamw():
    found = run_ranks("tests.deepspeed.test_little_used:worker", world=1)[0]
    for case in ("conditional", "never called"):
        assert found[case][0][1] == 0 < found[case][1][1], "AdamW at least drifts on"
    for case, (ours, adamw) in found.items():
        assert ours[0] > 0.1 and adamw[0] > 0.1, "the tower that is always used learns"
        assert ours[1] <= 3 * adamw[1], (case, ours, adamw)
        assert ours[1] < ours[0], (case, "further than the tower that has everything", ours)
