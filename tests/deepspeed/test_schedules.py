"""Schedules and a burn-in in a real engine, against tests/oracle.py with its settings changed by
hand."""

import pytest
import torch.distributed as dist

from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, expected, train, weights
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS = 8
BLOCK = {
    "factor": {
        "rows": "all",
        "update_interval": 1,
        "decay": {"schedule": "linear", "start": 0.1, "end": 0.9, "steps": 4},
    },
    "eigenbasis": {"refresh_interval": {"schedule": "piecewise", "values": [4, 1], "steps": [6]}},
    "burn_in": {"steps": 3},
    "damping": {
        "kind": "tikhonov",
        "value": {"schedule": "exponential", "start": 0.01, "end": 1, "steps": 4},
    },
    "preconditioner": {
        "kl_clip": {"schedule": "piecewise", "values": [0.0005, 0.002, 0], "steps": [3, 7]}
    },
}
# by hand, not by the code under test
DECAY = [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9]
DAMPING = [0.01, 0.01 * 100**0.25, 0.1, 0.01 * 100**0.75, 1, 1, 1, 1]
KL_CLIP = [0.0005] * 3 + [0.002] * 4 + [0]
REFRESHES = {0, 2, 3, 6, 7}  # 2: burn-in, 3: its end, 6: shorter interval at once


def settings_by_hand(kfac, step: int) -> None:
    kfac.decay, kfac.damping, kfac.kl_clip = DECAY[step], DAMPING[step], KL_CLIP[step]
    kfac.refresh_interval = 1 if step in REFRESHES else STEPS  # it refreshes at multiples of it


def worker(names) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        engine = build(mode, 1, kfac=BLOCK)
        initial = weights(engine)
        found = None
        if dist.get_rank() == 0:  # every rank has the same weights in the end
            found = expected(
                mode, 1, 2, initial, steps=STEPS, kfac_config=KFAC, before_step=settings_by_hand
            )
        train(engine, 1, STEPS)
        final = weights(engine)
        kfac = engine.kfac.preconditioner
        results[name] = {
            "difference": difference(final, found.weights, initial) if found else 0.0,
            "bound": found.bound if found else 1.0,
            "refreshes": (
                kfac.metrics.counts["refreshes"],
                len(REFRESHES) * len(kfac.curvature.factors),
            ),
            "nu": kfac.metrics.nu,
            "report": engine.kfac.report,
        }
        engine.destroy()
    return results


def test_schedules_match_reference():
    for result in run_ranks(
        "tests.deepspeed.test_schedules:worker", world=2, payload=["z0", "z2", "z3"]
    ):
        for name, of_mode in result.items():
            assert not within(name, of_mode["difference"], of_mode["bound"]), of_mode
            assert of_mode["refreshes"][0] == of_mode["refreshes"][1], name
            assert of_mode["nu"] is None, "kl-clip is 0 in the last step"
            for text in (
                "factors every 1 steps, eigenbases every N steps, N = 4, 1 from step 6",
                "factors: decay linear 0.1 -> 0.9 over 4 steps",
                "tikhonov damping exponential 0.01 -> 1 over 4 steps",
                "burn-in: 3 steps with intervals 1 and 2",
            ):
                assert text in of_mode["report"]
