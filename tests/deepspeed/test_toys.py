"""A new update rule, and a new method of factors, is one file and one line of a table: no other
file knows them. That they train like their oracles is in tests/deepspeed/features.py."""

from unittest.mock import patch

import deepspeed
import pytest
import torch

from ds_kfac.step import proving
from tests.close import close, exact
from tests.deepspeed.features import with_rule
from tests.deepspeed.modes import KFAC, LR, Mode
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of
from tests.deepspeed.toys import ToyRule, ToySGD
from tests.models import make_net

NAMED = Mode("toy", 2, clip=0.0, inner={"type": "ToySGD", "params": {"lr": LR}})


def toy_engine(**overrides):
    """An engine by an object of the toy's optimizer."""
    model = make_net()
    given = {"optimizer": ToySGD(model.parameters(), lr=LR), "model_parameters": None}
    return build(NAMED, model=model, given=given, optimizer=None, **overrides)


@pytest.mark.ranks(2)
def test_a_config_names_the_toys_optimizer():
    with with_rule(ToyRule):
        by_name, by_object = build(NAMED), toy_engine()
        for engine in (by_name, by_object):
            train(engine, 1, 2)
    shown = repr(by_name.kfac)
    assert shown.startswith("<ds_kfac.Attachment: ToySGD, ZeRO stage 2") and "2 steps" in shown
    assert "step: the update rule's direction, applied by ToySGD" in by_name.kfac.report
    exact(weights(by_name), weights(by_object))


class Miscounting(ToyRule):
    numbers = 2


@pytest.mark.ranks(2)
def test_a_rule_of_one_layer_need_not_know_layers_without_a_basis():
    """A hook of every layer failed: the steps are those of plain SGD."""
    model = make_net()
    config = {key: value for key, value in NAMED.config(1).items() if key != "kfac"}
    del config["optimizer"]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    plain, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    train(plain, 1, 2)
    with with_rule(ToyRule), patch.object(proving, "RAISES", False):
        engine = toy_engine(kfac=KFAC)
        kfac = engine.kfac.preconditioner
        for layer in kfac.layers:
            kfac.capture.fail(layer, TypeError("no matrix"))
        train(engine, 1, 2)
        close(weights(engine), weights(plain), sums=2 * 60, dtype=torch.float32)
        assert engine.kfac.counters()["unpreconditioned_layers"] == 3
        assert "ToySGD, along their own gradients" in engine.kfac.report, "of norms"
        kfac.totals.rule = Miscounting()
        assert "Miscounting.numbers is 2, but its Direction.step gave 0 scalars" in error_of(
            lambda: train(engine, 1, 1)
        )
