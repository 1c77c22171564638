"""Recorded steps: when they are recorded and when not, and that engines train with them as
without."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from ds_kfac.directions import step_tensors
from ds_kfac.update import recorded
from ds_kfac.update.recorded import ATTEMPTS, STEADY, Recorded
from tests.close import exact
from tests.deepspeed.test_modes import check
from tests.ranks import run_ranks
from tests.tape import tape


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


CASES = {
    "adam": "z0-fp16 z0-clipped z1-offload z1-bf16 z2-fp16 z3 z2-relative_damping "
    "z2-bf16-clipped z2-bf16-accum32 z1-unrotated",
    "gradient": "z0-noclip z0-groups z1-offload z1-bf16 z2-relative_damping z2-fp16-corrected "
    "z2-bf16-corrected z3-clipped z3-fp16-corrected z3-bf16-accum32-corrected",
}
"""Modes that are recorded, by rule."""
REPLAYS = 3
"""Of four steps. The first is launched as it is. New eigenbases are copied to where the last ones
were."""


@pytest.mark.distributed
@pytest.mark.parametrize("rule", CASES)
def test_engines_with_recorded_steps_match_the_reference(rule):
    prefix = "adam-" if rule == "adam" else ""
    cases = [(prefix + name, 4) for name in CASES[rule].split()]
    results = run_ranks("tests.deepspeed.recorded:compare", world=2, payload=cases)[0]
    assert len(results) == len(cases)
    for case, result in results.items():
        check(case, result)
        assert result["replays"] == REPLAYS, case


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["adam-z1-fp16", "adam-z2", "z1", "z2-fp16-corrected"])
def test_recorded_steps_are_those_of_a_run_without_to_the_bit(name):
    """Refreshes in place, a step that is skipped, betas or rates that change, a checkpoint that is
    loaded, a frozen bias."""
    results = run_ranks("tests.deepspeed.recorded:eventful", world=1, payload=name)[0]
    assert results["recorded"] > 20 and results["plain"] == 0
    for name, (one, other) in results["weights"].items():
        exact(one, other, what=name)


@pytest.mark.distributed
def test_gradients_of_several_dtypes_keep_theirs():
    weights, replays = run_ranks("tests.deepspeed.recorded:mixed", world=1)[0]
    assert replays == 5
    for one, other in weights.values():
        exact(one, other)


@pytest.mark.distributed
def test_a_load_keeps_moments_where_a_recorded_step_finds_them():
    assert all(run_ranks("tests.deepspeed.recorded:loaded", world=1)[0])


@pytest.mark.distributed
def test_a_recorded_step_keeps_what_the_report_and_the_estimate_say():
    """Of corrected eigenvalues there is no second copy: those of a layer with a new eigenbasis
    change in place."""
    names = ["adam-z2", "z2", "z2-bf16-corrected"]
    (found,) = run_ranks("tests.deepspeed.recorded:kept", world=1, payload=names)
    for name, (kept, said) in found.items():
        assert kept == said > 0, name
