"""What programs of others do to an optimizer and its engine between steps, through the public API
alone.

Each program is compared with plain DeepSpeed, or with the run that it must equal.
"""

import copy
import threading

import deepspeed
import pytest
import torch
from torch import nn

import ds_kfac
from tests.close import close, exact
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC_ADAMW = {"type": "KFACAdamW", "params": {"lr": 0.01, "adam_lr": 0.01, "torch_adam": True}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make_engine(stage: int, optimizer=None, kfac=None, **extra):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": copy.deepcopy(optimizer or KFAC_ADAMW),
        "zero_force_ds_cpu_optimizer": False,
        **extra,
    }
    if kfac is not None:
        config["kfac"] = {"report": "none", **kfac}
    model = make_model()
    return ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 100 * torch.distributed.get_rank())
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def backward(engine, step: int) -> None:
    x, y = batch(step)
    engine.backward((engine(x) - y).square().mean())


def weights(engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found


# the norm that is reported


def norm_worker(stage: int) -> tuple[float, float]:
    norms = []
    for kfac in ({"enabled": False}, {}):
        engine = make_engine(stage, ADAMW, kfac)
        backward(engine, 0)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return norms[0], norms[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_that_an_engine_reports_is_the_raw_gradients_without_clipping_too(stage):
    for plain, ours in run_ranks(
        "tests.deepspeed.test_optimizer_programs:norm_worker", world=2, payload=stage
    ):
        close(ours, plain)


# DeepSpeed's log of communication


def straggler_worker(_) -> bool:
    logger = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}
    engine = make_engine(2, **logger)
    for step in range(2):
        backward(engine, step)
        engine.step()
    deepspeed.comm.log_summary(show_straggler=True)
    return True


def test_deepspeeds_log_of_stragglers_prints():
    assert run_ranks("tests.deepspeed.test_optimizer_programs:straggler_worker", world=2) == [
        True,
        True,
    ]


# states that a program sets to zero


def reset_worker(stage: int) -> str:
    engine = make_engine(stage)
    backward(engine, 0)
    engine.step()
    optimizer = engine.basic_optimizer
    ours = next(group for group in optimizer.param_groups if group["kfac"])
    try:
        # as ReLoRA does
        optimizer.state[ours["params"][0]]["exp_avg"] = torch.zeros_like(ours["params"][0])
    except ValueError as error:
        return str(error)
    return "set"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_state_that_is_set_by_hand_is_an_error_that_says_how_to_reset(stage):
    (said,) = run_ranks(
        "tests.deepspeed.test_optimizer_programs:reset_worker", world=1, payload=stage
    )
    assert "optimizer.state.clear()" in said


# a gradient that is not there


def missing_worker(which: str) -> tuple[dict, dict]:
    engine = make_engine(0)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    before = weights(engine)
    layer = engine.module[0]
    getattr(layer, which).grad = None
    engine.step()
    return before, weights(engine)


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_layer_one_of_whose_gradients_is_taken_away_stands_still(which):
    ((before, after),) = run_ranks(
        "tests.deepspeed.test_optimizer_programs:missing_worker", world=1, payload=which
    )
    for name in ("0.weight", "0.bias"):
        exact(after[name], before[name], what=name)
    assert not torch.equal(after["2.weight"], before["2.weight"])


# an evaluation in another thread


class ByUse(nn.Module):
    """Multiplies by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(
            torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) / 3
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.matrix))


def thread_worker(which: str) -> tuple[dict, dict]:
    runs = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = ByUse()
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": copy.deepcopy(KFAC_ADAMW),
            "gradient_clipping": 0.0,
            "zero_force_ds_cpu_optimizer": False,
            "kfac": {"report": "none", "factor": {"update_interval": 1}},
        }
        engine = ds_kfac.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        evaluated = copy.deepcopy(engine.module) if which == "copy" else engine.module
        stop = threading.Event()

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
    return runs[0], runs[1]


@pytest.mark.parametrize("which", ["model", "copy"])
def test_an_evaluation_in_another_thread_changes_nothing(which):
    ((alone, beside),) = run_ranks(
        "tests.deepspeed.test_optimizer_programs:thread_worker", world=1, payload=which
    )
    exact(beside, alone)
