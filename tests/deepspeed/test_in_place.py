"""Layers of one shape whose gradients lie at equal distances are stepped there: read without a
copy, results written over them. Weights are those of steps that copy."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ds_kfac.directions import step_tensors
from ds_kfac.update.groups import evenly_spaced
from ds_kfac.zero import exchange
from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
IN_PLACE = (
    "adam-z1",
    "adam-z1-bf16-accum32",
    "adam-z2",
    "adam-z2-not_contiguous",
    "adam-z2-bf16",
    "adam-z3",
    "adam-z3-bf16",
    "z2-bf16-corrected",
)
APART = ("adam-z0", "adam-z0-bf16")
"""Where each parameter has a gradient of its own; elsewhere a group's lie in one tensor when the
optimizer steps it."""
WIDTH, STEPS = 12, 5
KFAC = {"burn_in": {"steps": 0}, "report": "none", "plan": {"batched": True}}


class Net(nn.Module):
    """Blocks with a fused matrix, whose parts lie apart in a batch of them, and one with a bias,
    which is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.biased = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for fused, out in zip(self.fused, self.out, strict=True):
            q, k, v = fused(x).chunk(3, dim=-1)
            x = x + out(torch.tanh(q * k) + v)
        for layer in self.biased:
            x = x + layer(x)
        return x.float().square().mean()


def trained(name: str, counts: list[int] | None) -> dict[str, Tensor]:
    """``counts``: gets how many matrices each view of gradients has; None: without any."""
    mode = BY_NAME[name]

    def view(parts):
        x = None if counts is None else evenly_spaced(parts)
        if x is not None:
            counts.append(len(x))
        return x

    torch.manual_seed(0)
    with (
        patch.object(step_tensors, "evenly_spaced", view),
        patch.object(exchange, "evenly_spaced", view),
    ):
        engine = build(mode, 1, kfac=KFAC, model=Net())
        dtype = next(engine.module.parameters()).dtype
        for step in range(STEPS):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            engine.backward(engine(x))
            engine.step()
    return weights(engine)


def worker(_) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], list[int]]]:
    found = {}
    for name in (*IN_PLACE, *APART):
        counts: list[int] = []
        found[name] = trained(name, counts), trained(name, None), counts
    return found


def test_weights_are_those_of_steps_that_copy():
    for name, (in_place, copied, counts) in run_ranks(
        "tests.deepspeed.test_in_place:worker", world=1
    )[0].items():
        assert (3 in counts) == (name in IN_PLACE), f"{name}: views of {counts}"
        exact(in_place, copied, what=name)
