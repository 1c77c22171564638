"""K-FAC can be attached to an engine that has already trained. What DeepSpeed has made in these
steps, such as a loss scale, changes nothing."""

import pytest

import ds_kfac
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, train

pytestmark = pytest.mark.ranks
MODES = ("z0", "z2", "z3", "z0-bf16", "z1-bf16-accum32", "z2-fp16", "z3-fp16")
AUTOCAST = [f"z{stage}-autocast_float16" for stage in (0, 1, 2, 3)]


def attach_late(name: str) -> None:
    engine = build(BY_NAME[name])
    engine.kfac.detach()
    train(engine, 1, steps=2)
    ds_kfac.attach(engine, {"report": "none"})
    train(engine, 1, steps=2)
    assert engine.kfac.counters()["steps"] == 2


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("name", MODES)
def test_an_engine_that_has_trained_can_be_attached_to(name, world):
    attach_late(name)


@pytest.mark.parametrize(("world", "dtype"), [(2, "float16")])
@pytest.mark.parametrize("name", AUTOCAST)
def test_an_engine_that_has_trained_under_autocast_can_be_attached_to(name, world, dtype):
    attach_late(name)
