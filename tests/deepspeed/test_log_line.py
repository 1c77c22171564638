"""What a framework's logs say of steps and curvature, against weights and eigenvalues themselves."""

import statistics

import pytest
import torch

from tests.close import close, near
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
LR = 0.01
OPTIMIZER = {"type": "KFACAdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}}


def worker(modes: list[str]) -> dict:
    found = {}
    for name in modes:
        engine = build(BY_NAME[name], 1, **({} if name == "z2" else {"optimizer": OPTIMIZER}))
        train(engine, 1, steps=2)
        before = weights(engine)
        train(engine, 1, steps=1, first=2)
        after, kfac = weights(engine), engine.kfac.preconditioner
        own = [parameter for layer in kfac.layers for parameter in layer.parameters]
        moved = sum(float((after[n] - before[n]).double().square().sum()) for n in own)
        whole = sum(float(after[n].double().square().sum()) for n in own)
        values = {layer: state.basis.A.values.tolist() for layer, state in kfac.state.items()}
        spreads = [max(own) / statistics.fmean(own) for own in values.values()]
        found[name] = (moved / whole) ** 0.5, statistics.median_low(spreads), engine.kfac.log_line()
        engine.destroy()
    return found


def test_the_logs_say_how_far_a_step_goes_and_how_spread_curvature_is():
    modes = ["adam-z0", "adam-z2", "adam-z3", "z2"]
    for name, (ratio, spread, logged) in run_ranks("tests.deepspeed.test_log_line:worker", world=1, payload=modes)[
        0
    ].items():
        assert (logged["kfac/stepped"], logged["kfac/curved"]) == (1.0, 1.0)
        close(logged["kfac/eigenvalue_spread"], spread, sums=20, dtype=torch.float32, what=name)
        if name == "z2":
            assert "kfac/step_to_weight" not in logged, "the user's optimizer decides on the step"
        else:
            near(logged["kfac/step_to_weight"], ratio, 0.05 * ratio, "of the weights before or after the step")


def test_shares_of_the_weights_are_known_on_several_ranks():
    first, second = run_ranks("tests.deepspeed.test_log_line:worker", world=2, payload=["adam-z3"])
    for found in (first, second):
        ratio, _, logged = found["adam-z3"]
        near(logged["kfac/step_to_weight"], ratio, 0.5 * ratio, "the mean square of its half of the weights")
