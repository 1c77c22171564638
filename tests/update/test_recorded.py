"""Recorded steps: when they are recorded and when not, and that engines train with them as
without."""

from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from benchmarks.held import bytes_in
from ds_kfac.directions import step_tensors
from ds_kfac.update import recorded
from ds_kfac.update.recorded import ATTEMPTS, STEADY, Recorded
from tests.close import exact
from tests.deepspeed import runs
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.test_modes import check
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("operation not permitted\nmore"), "operation not permitted"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(error, told):
    function, said = Doubled(), list[str]()

    def fails(function):
        raise error

    calls = Recorded(fails, said.append)
    for value in range(9):
        function.x.fill_(value)
        exact(calls(function, [], 0), torch.full((3,), 2.0 * value))
    assert calls.replays == 0 and len(said) == 1
    assert said[0].endswith(f"slower: {told}")


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


@pytest.mark.parametrize("case", ["yes", "device", "alone", "backend", "many", "large", "none"])
def test_who_is_recorded(case):
    config = SimpleNamespace(ops=SimpleNamespace(backend="torch" if case == "backend" else None))
    plan = SimpleNamespace(batched=case != "alone", config=config)
    each, most = recorded.RECORDED_LAYER, recorded.RECORDED_NUMEL
    numel = {"large": each + 1, "none": 0}.get(case, each)
    layers = [SimpleNamespace(numel=numel)] * (
        1 if case == "large" else most // each + (case == "many")
    )
    assert step_tensors.is_recorded(plan, layers, "cpu" if case == "device" else "cuda") == (
        case == "yes"
    )


MODES = """
adam-z0-fp16 adam-z1-offload adam-z2-relative_damping adam-z2-bf16-clipped adam-z3
adam-z1-unrotated z0-noclip z0-groups z1-offload z2-relative_damping z2-fp16-corrected z3-clipped
z3-bf16-accum32-corrected
"""
REPLAYS = 3
"""Of four steps. The first is launched as it is. New eigenbases are copied to where the last ones
were."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODES.split())
def test_engines_with_recorded_steps_match_the_reference(name):
    with taped():
        result = runs.compared(name, 4)
    check((name, 4), result)
    assert result["replays"] == REPLAYS


def eventful(name: str, steady: int) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after a run with events, and the number of replays."""
    mode = BY_NAME[name]
    with taped(steady) as replays, TemporaryDirectory() as folder, runs.patched(mode):
        engine = runs.build(mode)
        runs.train(engine, 1, steps=12)
        infinite = float("inf") if "fp16" in name else 1.0
        for first, times in ((20, infinite), (21, 1.0)):  # a spike: DeepSpeed skips the step
            runs.train(engine, 1, steps=1, first=first, times=times)
        assert engine.skipped_steps == ("fp16" in name)
        engine.save_checkpoint(folder)
        runs.train(engine, 1, steps=6, first=30)
        engine.load_checkpoint(folder)
        for group in engine.optimizer.param_groups:
            if mode.adam:
                group["betas"] = (0.8, group["betas"][1])
            else:
                group["lr"] *= 0.5
        runs.train(engine, 1, steps=6, first=40)
        # its column of the direction is not zero
        engine.module.first.bias.requires_grad_(False)
        runs.train(engine, 1, steps=4, first=50)
        return runs.weights(engine), replays[0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["adam-z1-fp16", "adam-z2", "z1", "z2-fp16-corrected"])
def test_recorded_steps_are_those_of_a_run_without_to_the_bit(name):
    """Refreshes in place, a step that is skipped, betas or rates that change, a checkpoint that is
    loaded, a frozen bias."""
    (recorded, replays), (plain, launched) = (eventful(name, steady) for steady in (1, 10**6))
    assert replays > 20 and launched == 0
    exact(recorded, plain)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["adam-z2", "z2", "z2-bf16-corrected"])
def test_a_recorded_step_keeps_what_the_report_and_the_estimate_say(name):
    """Of corrected eigenvalues there is no second copy: those of a layer with a new eigenbasis
    change in place."""
    with taped():
        engine = runs.build(BY_NAME[name])
        runs.train(engine, 1, steps=4)
        kfac = engine.kfac.preconditioner
        kept = bytes_in([*kfac.direction.recorded.tensors.matrices.values()])
        assert kept == kfac.rule.facts.kept(kfac.plan, kfac.worker_layers, "cpu") > 0
