"""Recorded steps: when they are recorded and when not, and that engines train with them as
without."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.held import bytes_in
from ds_kfac.update import recorded
from ds_kfac.update.recorded import ATTEMPTS, STEADY, Recorded
from tests.close import exact
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, compared, patched, train, weights
from tests.deepspeed.test_modes import check
from tests.models import Net, make_net
from tests.tape import tape, taped


class Doubled:
    """A function of a tensor in a fixed place, and how often the host ran it."""

    def __init__(self) -> None:
        self.x, self.runs = torch.zeros(3), 0

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        return 2 * self.x


def test_what_changes_all_the_time_is_recorded_a_few_times_only():
    function, calls = Doubled(), Recorded(tape, pytest.fail)
    for value in range(10 * ATTEMPTS):
        for _ in range(STEADY + 1):
            function.x.fill_(value)
            exact(calls(function, [], value), torch.full((3,), 2.0 * value))
    assert calls.replays == ATTEMPTS


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once():
    function, said = Doubled(), list[str]()

    def fails(function):
        raise RuntimeError("operation not permitted\nmore")

    calls = Recorded(fails, said.append)
    for value in range(9):
        function.x.fill_(value)
        exact(calls(function, [], 0), torch.full((3,), 2.0 * value))
    assert calls.replays == 0 and len(said) == 1
    assert said[0].endswith("slower: operation not permitted")


def test_after_a_capture_that_fails_at_its_end_the_stream_is_the_one_before():
    """torch's context manager ends the capture before it leaves the stream, and does not leave it
    if that raises."""
    current = ["default"]

    @contextmanager
    def graph(*args, **kwargs):
        current[0] = "capture"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {"graph": graph, "CUDAGraph": SimpleNamespace, "current_stream": lambda: current[0]}
    with patch.multiple(
        torch.cuda, **fakes, set_stream=lambda stream: current.__setitem__(0, stream)
    ):
        with pytest.raises(RuntimeError, match="previous error"):
            recorded.cuda_graph(lambda: None)
    assert current == ["default"]


MODES = """
adam-z0-fp16 adam-z0-clipped adam-z1-offload adam-z2-bf16-accum32 adam-z3 adam-z2-relative_damping
adam-z1-unrotated
z0-noclip z0-groups z1-offload z2-relative_damping z2-fp16-corrected z3-bf16-accum32-corrected
"""
REPLAYS = 3
"""Of four steps. The first is launched as it is. New eigenbases are copied to where the last ones
were."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODES.split())
def test_engines_with_recorded_steps_match_the_reference(name):
    with taped():
        result = compared(name, 4)
    check((name, 4), result)
    assert result["replays"] == REPLAYS


class Mixed(Net):
    """Its largest matrix, whose gradient comes first, is in bf16."""

    def __init__(self):
        super().__init__()
        self.middle.to(torch.bfloat16)
        self.middle.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        self.middle.register_forward_hook(lambda module, args, output: output.float())


def eventful(name: str, records: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after a run with events, and how many of its steps were replayed."""
    mode, folder = BY_NAME[name], shared_folder()
    with taped() as replays, patched(mode):
        engine = build(mode, model=make_net(Mixed if mode.stage == 0 else Net))
        if not records:
            engine.kfac.preconditioner.direction.recorded = None
        train(engine, 1, steps=4, times=0.0)  # no layer has a basis
        train(engine, 1, steps=12)
        infinite = float("inf") if "fp16" in name else 1.0
        for first, times in ((20, infinite), (21, 1.0)):  # a spike: DeepSpeed skips the step
            train(engine, 1, steps=1, first=first, times=times)
        assert engine.skipped_steps == ("fp16" in name)
        engine.save_checkpoint(folder)
        train(engine, 1, steps=6, first=30)
        engine.load_checkpoint(folder)
        for group in engine.optimizer.param_groups:
            if mode.adam:
                group["betas"] = (0.8, group["betas"][1])
            else:
                group["lr"] *= 0.5
        train(engine, 1, steps=6, first=40)
        # its column of the direction is not zero
        engine.module.first.bias.requires_grad_(False)
        train(engine, 1, steps=4, first=50)
        return weights(engine), replays[0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "name", ["adam-z0-noclip", "adam-z1-fp16", "adam-z2", "z1", "z2-fp16-corrected"]
)
def test_recorded_steps_are_those_of_a_run_without_to_the_bit(name):
    """Refreshes in place, a step that is skipped, betas or rates that change, a checkpoint that is
    loaded, a frozen bias, gradients of several dtypes; the first steps are without a basis."""
    (one, replays), (other, launched) = eventful(name, True), eventful(name, False)
    assert replays > 20 and launched == 0
    exact(one, other)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["adam-z2", "z2-bf16-corrected"])
def test_a_recorded_step_keeps_what_the_report_and_the_estimate_say(name):
    """Of corrected eigenvalues there is no second copy: those of a layer with a new eigenbasis
    change in place."""
    with taped():
        engine = build(BY_NAME[name])
        train(engine, 1, steps=4)
        kfac = engine.kfac.preconditioner
        kept = bytes_in([*kfac.direction.recorded.tensors.matrices.values()])
        assert kept == kfac.rule.facts.kept(kfac.plan, kfac.worker_layers, "cpu") > 0
