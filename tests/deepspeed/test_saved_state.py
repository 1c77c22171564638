"""A checkpoint brings back all of the state, field by field: losses after resuming forgive what
acts later."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, train
from tests.models import FEATURES, Net, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS = 5
CASES = {
    "corrected": (
        "z2",
        {
            "preconditioner": {"eigenvalues": "corrected"},
            "eigenbasis": {"refresh_interval": 1},
        },
    ),
    "adam, adaptive": (
        "adam-z2-not_contiguous",
        {
            "eigenbasis": {"refresh_interval": 2},
            "adaptive": 0.9,
            "burn_in": {"steps": 0},
        },
    ),
}


def flat(value, name: str = "") -> dict:
    """Every tensor and plain number in dataclasses, sequences and mappings, by where it is."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    elif isinstance(value, (set, frozenset)):
        value = dict.fromkeys(sorted(value), True)
    if isinstance(value, dict):
        return {
            key: part
            for name_, own in value.items()
            for key, part in flat(own, f"{name}/{name_}").items()
        }
    return {name: value.clone() if isinstance(value, torch.Tensor) else value}


def state_of(kfac) -> dict:
    curvature = kfac.curvature
    return flat(
        {
            "steps": kfac.steps,
            "peak_lr": kfac.direction.state().get("peak_lr", {}),
            "layers": kfac.state,
            "factors": curvature.factors,
            "ready": curvature.ready,
            "clock": curvature.timetable.state(),
        }
    )


def worker(folder: str) -> dict:
    found = {}
    for name, (mode, blocks) in CASES.items():
        own = {
            key: {**KFAC.get(key, {}), **value}
            for key, value in blocks.items()
            if isinstance(value, dict)
        }
        kfac = {**KFAC, **blocks, **own}
        mode, path = (
            replace(BY_NAME[mode], orthogonal=False),
            str(Path(folder, name.replace(" ", "_"))),
        )
        first = build(mode, 1, kfac=kfac)
        train(first, 1, steps=STEPS)
        first.save_checkpoint(path)
        second = build(mode, 1, kfac=kfac, model=make_net(seed=99))
        fresh = state_of(second.kfac.preconditioner)
        second.load_checkpoint(path)
        saved, loaded = state_of(first.kfac.preconditioner), state_of(second.kfac.preconditioner)
        same = {key for key in saved if key in loaded and equal(saved[key], loaded[key])}
        found[name] = {
            "lost": sorted(saved.keys() ^ loaded.keys() | saved.keys() - same),
            "distinct": {
                key
                for key, value in saved.items()
                if key not in fresh or not equal(value, fresh[key])
            },
        }
        first.destroy()
        second.destroy()
    return found


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0)
        )
    return type(one) is type(other) and one == other


def test_every_field_comes_back(tmp_path):
    (result,) = run_ranks("tests.deepspeed.test_saved_state:worker", world=1, payload=str(tmp_path))
    for name, found in result.items():
        assert not found["lost"], (name, found["lost"])
    corrected, adaptive = (result[name]["distinct"] for name in CASES)
    for end in ("/peak_lr/0", "/terms", "/moments/second_OI", "/moments/updates"):
        assert any(key.endswith(end) for key in corrected), (
            f"{end} is what it is in a new engine, so it was not tested"
        )
    for end in (
        "/history/last",
        "/history/before",
        "/moments/first_OI",
        "/moments/updates",
        "/captured",
    ):
        assert any(key.endswith(end) for key in adaptive), (
            f"{end} is what it is in a new engine, so it was not tested"
        )


class Twin(Net):
    """Two layers share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x, y=None):
        return super().forward(x + torch.tanh(self.one(x)) * self.other(x), y)


def early_worker(folder: str) -> dict:
    """A save from before the layers were known to share, loaded when they are."""
    engine = build(BY_NAME["z0"], 1, model=make_net(Twin))
    kfac = engine.kfac.preconditioner
    engine.save_checkpoint(folder, tag="early")
    train(engine, 1, steps=2)
    known = kfac.observations.groups
    engine.load_checkpoint(folder, tag="early")
    found = {
        "known": known,
        "kept": kfac.observations.groups,
        "keys": set(kfac.curvature.factors) ^ set(kfac.curvature.specs),
    }
    train(engine, 1, steps=2)
    engine.save_checkpoint(folder, tag="late")  # of such factors only as there are
    engine.destroy()
    return found


def test_a_save_from_before_layers_shared_loads_when_they_do(tmp_path):
    (found,) = run_ranks(
        "tests.deepspeed.test_saved_state:early_worker", world=1, payload=str(tmp_path)
    )
    assert found == {"known": (("one", "other"),), "kept": (("one", "other"),), "keys": set()}
