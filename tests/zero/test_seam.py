"""K-FAC runs at the inner optimizer's first step, once, whoever calls it. By which factor gradients
there are still multiplied is tested by every engine mode."""

from dataclasses import replace

import pytest
import torch

from tests.close import exact
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.models import make_net

pytestmark = pytest.mark.ranks(1)


class OwnAdamW(torch.optim.AdamW):
    """torch runs an optimizer's hooks in ``step`` of each class of which the process has an
    instance."""

    def step(self, closure=None):
        return super().step(closure)


def test_hooks_that_torch_runs_twice_are_one_step():
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    mode, finals = BY_NAME["z0"], []
    for kind in (torch.optim.AdamW, OwnAdamW):
        model = make_net()
        given = {"optimizer": kind(model.parameters(), lr=LR), "model_parameters": None}
        engine = build(mode, model=model, given=given, optimizer=None)
        train(engine, 1, steps=2)
        assert engine.kfac.preconditioner.steps == 2
        finals.append(weights(engine))
    exact(*finals)


OUTER = ["z0-noclip", "z0-bf16-fused", "z1-bf16-accum32", "z2-fp16", "z3-offload", "adam-z2"]


def test_the_optimizers_step_in_place_of_the_engines_gives_the_same_weights():
    for name in OUTER:
        mode, trained = replace(BY_NAME[name], groups="decay"), []
        for own in (False, True):
            engine = build(mode, 1)
            for x, y in (batch for step in range(3) for batch in micro_batches(step, 1)):
                with patched(mode):
                    engine.backward(engine(x.to(engine.get_data_types()[0]), y))
                if own:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                else:
                    engine.step()
            assert engine.kfac.preconditioner.steps == 3
            trained.append(weights(engine))
            engine.destroy()
        exact(*trained, what=name)


def test_a_second_step_after_one_backward_changes_nothing_at_stage_0():
    engine = build(BY_NAME["z0-noclip"], 1)  # clipping, DeepSpeed itself fails without gradients
    train(engine, 1, steps=2)
    before, kfac = weights(engine), engine.kfac.preconditioner
    factors = {key: factor.packed_P.clone() for key, factor in kfac.curvature.factors.items()}
    engine.step()
    assert kfac.steps == 2
    exact(weights(engine), before)
    exact({key: factor.packed_P for key, factor in kfac.curvature.factors.items()}, factors)


def test_a_step_past_the_wrapped_one_is_an_error_and_moves_nothing():
    """A program puts back the step of the optimizer that it kept from before attach."""
    for name in ("adam-z2", "z2", "z0-bf16"):
        engine = build(BY_NAME[name], 1)
        train(engine, 1, steps=1)
        before = weights(engine)
        engine.optimizer.step = type(engine.optimizer).step.__get__(engine.optimizer)
        with pytest.raises(RuntimeError, match=r"engine\.kfac\.detach\(\)"):
            train(engine, 1, steps=1, first=1)
        exact(weights(engine), before, what=name)
