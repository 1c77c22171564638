"""A new update rule, and a new method of factors, is one file and one line of a table: no other
file knows them. That they train like their oracles is in tests/deepspeed/features.py."""

from unittest.mock import patch

import pytest
import torch

from ds_kfac.step import proving
from tests.close import close
from tests.deepspeed.features import with_toy
from tests.deepspeed.modes import LR, Mode
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of
from tests.deepspeed.toys import ToyRule, ToySGD
from tests.models import make_net


class Miscounting(ToyRule):
    numbers = 2


@pytest.mark.ranks(2)
def test_a_rule_of_one_layer_need_not_know_layers_without_a_basis():
    """A hook of every layer failed: the steps are those of plain SGD."""
    model, sgd = make_net(), {"type": "SGD", "params": {"lr": LR}}
    mode = Mode("toy", 2, clip=0.0, inner=sgd)
    plain = build(mode, kfac={"enabled": False})
    train(plain, 1, 2)
    with with_toy(), patch.object(proving, "RAISES", False):
        given = {"optimizer": ToySGD(model.parameters(), lr=LR), "model_parameters": None}
        engine = build(mode, model=model, given=given, optimizer=None)
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
