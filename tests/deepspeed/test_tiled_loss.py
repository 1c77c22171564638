"""DeepSpeed's TiledFusedLogitsLoss, whose backward runs in the model's forward, trains as the plain
loss does."""

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.models import Net, cross_entropy
from tests.ranks import run_ranks
from tests.spread import difference

pytestmark = pytest.mark.distributed
STEPS = 6


class Plain(Net):
    def forward(self, x, labels=None):
        return super().forward(x, labels)


class Tiled(Plain):
    def forward(self, x, labels=None):
        z = torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))

        def loss(own, z, y):
            return cross_entropy(own.head(z), y)

        return TiledFusedLogitsLoss.apply(
            loss, self, z, labels, None, 2, [self.head.weight, self.head.bias], "mean"
        )


def worker(names: list[str]) -> dict:
    found = {}
    for name in names:
        mode, ends, factors = BY_NAME[name], [], []
        for kind in (Plain, Plain, Tiled):
            torch.manual_seed(0)
            engine = build(
                mode,
                1,
                model=kind(),
                kfac={**mode.kfac_block, "eigenbasis": {"refresh_interval": 2}},
            )
            initial = weights(engine)
            if len(ends) == 1:  # what rounding makes of it
                with torch.no_grad():
                    for parameter in engine.module.parameters():
                        parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
            train(engine, 1, steps=STEPS)
            ends.append(weights(engine))
            states = engine.kfac.preconditioner.curvature.factors
            factors.append({key: float(state.updates) for key, state in states.items()})
            engine.destroy()
        rounding, error = (difference(other, ends[0], initial) for other in ends[1:])
        found[name] = error, rounding, factors[0], factors[2]
    return found


def test_a_loss_whose_backward_runs_in_the_forward_trains_as_the_plain_one():
    for found in run_ranks(
        "tests.deepspeed.test_tiled_loss:worker", world=1, payload=["adam-z0", "z0"]
    ):
        for name, (error, rounding, plain, tiled) in found.items():
            assert tiled == plain and set(tiled.values()) <= {0.0, float(STEPS)}, (name, tiled)
            # as much as the last bit of the weights makes, in any order of sums
            assert error < 100 * rounding + 1e-5, (name, error, rounding)
