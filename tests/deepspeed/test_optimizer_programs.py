"""What programs of others do to an optimizer and its engine between steps, through the public API
alone."""

import copy
import threading

import deepspeed
import pytest
import torch
from torch import nn

import ds_kfac
from tests.close import exact
from tests.deepspeed.runs import weights
from tests.deepspeed.said import error_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.distributed


class ByUse(nn.Module):
    """Also multiplies by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(8, 4)
        self.matrix = nn.Parameter(torch.randn(6, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(torch.tanh(self.first(x)) @ self.matrix))


def make_engine(stage: int, **more):
    torch.manual_seed(0)
    model = ByUse()
    params = {"lr": 0.01, "adam_lr": 0.01, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "KFACAdamW", "params": params},
        "kfac": {"report": "none", "factor": {"update_interval": 1}},
        **more,
    }
    return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def backward(engine, step: int) -> None:
    generator = torch.Generator().manual_seed(step + 100 * engine.global_rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
    engine.backward((engine(x) - y).square().mean())


@on_ranks(2)
def test_deepspeeds_log_of_stragglers_prints():
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    engine = make_engine(2, comms_logger=logger)
    for step in range(2):
        backward(engine, step)
        engine.step()
    deepspeed.comm.log_summary(show_straggler=True)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(1)
def test_a_state_that_is_set_by_hand_is_an_error_that_says_how_to_reset(stage):
    """As ReLoRA does."""
    engine = make_engine(stage)
    backward(engine, 0)
    engine.step()
    optimizer = engine.basic_optimizer
    parameter = next(group for group in optimizer.param_groups if group["kfac"])["params"][0]
    zeros = torch.zeros_like(parameter)
    said = error_of(lambda: optimizer.state[parameter].__setitem__("exp_avg", zeros))
    assert "optimizer.state.clear()" in said


@pytest.mark.parametrize("which", ["weight", "bias"])
@on_ranks(1)
def test_a_layer_one_of_whose_gradients_is_taken_away_stands_still(which):
    engine = make_engine(0, gradient_clipping=0.0)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    before = weights(engine)
    getattr(engine.module.first, which).grad = None
    engine.step()
    after = weights(engine)
    for name in ("first.weight", "first.bias"):
        exact(after[name], before[name], what=name)
    assert not torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("which", ["model", "copy"])
@on_ranks(1)
def test_an_evaluation_in_another_thread_changes_nothing(which):
    runs = []
    for evaluates in (False, True):
        engine, stop = make_engine(0), threading.Event()
        evaluated = copy.deepcopy(engine.module) if which == "copy" else engine.module

        def evaluate(evaluated=evaluated, stop=stop) -> None:
            while not stop.is_set():
                with torch.no_grad():
                    evaluated(torch.randn(16, 6))

        thread = threading.Thread(target=evaluate)
        if evaluates:
            thread.start()
        for step in range(6):
            backward(engine, step)
            engine.step()
        stop.set()
        if evaluates:
            thread.join()
        runs.append(weights(engine))
        engine.destroy()
    exact(*runs)
