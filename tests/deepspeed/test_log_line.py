"""What a framework's logs say of steps and curvature, against weights and eigenvalues
themselves."""

import contextlib
import io
import re
import statistics
from pathlib import Path

import deepspeed
import pytest
import torch

from ds_kfac.metrics import STAGES, SUMMARY, TIMER, Metrics
from ds_kfac.step.counters import FAILURES, counters, health
from tests.close import close, near
from tests.deepspeed import expert_runs
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, train, weights

pytestmark = pytest.mark.distributed
LR = 0.01
OPTIMIZER = {"type": "KFACAdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}}
EXPERTS = Mode("moe", 0, adam=True, clip=0.0, extra={"optimizer": OPTIMIZER})


def check_step_to_weight(engine, step, bound: float = 0.05) -> None:
    """What is logged of a step is the distance that it goes, over all layers."""
    before = weights(engine)
    step()
    after = weights(engine)
    layers = [layer for kfac in engine.kfac.job.preconditioners for layer in kfac.layers]
    names = [name for layer in layers for name in layer.parameters]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in names)
    ratio = (moved / sum(float(after[n].double().square().sum()) for n in names)) ** 0.5
    logged = engine.kfac.log_line()["kfac/step_to_weight"]
    near(logged, ratio, bound * ratio, "of the weights before or after the step, or of a half")


@pytest.mark.ranks(1)
def test_the_logs_say_how_far_a_step_goes_and_how_spread_curvature_is():
    for name in ("adam-z0", "adam-z2", "adam-z3", "z2"):
        engine = build(BY_NAME[name], 1, **({} if name == "z2" else {"optimizer": OPTIMIZER}))
        train(engine, 1, steps=2)
        if name == "z2":
            train(engine, 1, steps=1, first=2)
        else:
            check_step_to_weight(engine, lambda: train(engine, 1, steps=1, first=2))  # noqa: B023
        logged = {**engine.kfac.log_line(), **engine.kfac.log_constants()}
        assert {f"kfac/{key}" for key in engine.kfac.counters()} >= {"kfac/steps", *logged}
        assert (logged["kfac/stepped"], logged["kfac/curved"]) == (1.0, 1.0)
        states = engine.kfac.preconditioner.state.values()
        values = [state.basis.A.values.tolist() for state in states]
        spread = statistics.median_low(max(own) / statistics.fmean(own) for own in values)
        close(logged["kfac/eigenvalue_spread"], spread, sums=20, dtype=torch.float32, what=name)
        # else the user's optimizer decides on the step
        assert ("kfac/step_to_weight" in logged) == (name != "z2")


@pytest.mark.ranks(1)
def test_the_size_of_a_step_is_of_all_domains_where_there_are_several():
    """Of dense layers and experts together."""
    engine = expert_runs.make_engine(EXPERTS, expert_runs.DistributedNet(1))
    expert_runs.train(engine, 2)
    check_step_to_weight(engine, lambda: expert_runs.train(engine, 1))


@pytest.mark.ranks(2)
def test_shares_of_the_weights_are_known_on_several_ranks():
    engine = build(BY_NAME["adam-z3"], 1, optimizer=OPTIMIZER)
    train(engine, 1, steps=2)
    # a rank knows the mean square of its half of the weights
    check_step_to_weight(engine, lambda: train(engine, 1, steps=1, first=2), bound=0.5)


RATES = {"kfac/stepped", "kfac/curved", "kfac/lr_heads", "kfac/lr_others"}
SPREAD, COUNTERS = (
    "kfac/eigenvalue_spread",
    ("captures", "statistics_fraction", "refreshes", "steps"),
)
WRITTEN = {f"kfac/{name}" for name in (*COUNTERS, "sent_bytes_proof", "calls_proof", "nu")}
LINES = {  # mode, report: names of a line, of constants, and others in the monitor
    ("adam-z2", "summary"): ({"kfac/step_to_weight", SPREAD}, RATES, set()),
    ("adam-z2", "none"): (set(), set(), set()),
    ("z2", "summary"): (
        {"kfac/nu", "kfac/kl", SPREAD},
        {"kfac/stepped", "kfac/curved"},
        WRITTEN | {"kfac/not_finite_layers"},
    ),
}


@pytest.mark.ranks(1)
def test_a_line_has_few_numbers_failures_where_there_are_any_and_the_monitors_names(tmp_path):
    for (name, report), (line, constants, others) in LINES.items():
        folder = tmp_path / f"{name}-{report}"
        monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
        own = {"optimizer": OPTIMIZER} if name != "z2" else {}
        engine = build(BY_NAME[name], 1, kfac={"report": report}, csv_monitor=monitor, **own)
        train(engine, 1, steps=2)
        assert engine.kfac.log_line().keys() == line
        assert engine.kfac.log_constants().keys() == constants
        engine.kfac.metrics.summary[list(SUMMARY).index("refresh_failures")] = 2
        failures = {"kfac/refresh_failures": 2.0} if line else {}
        assert {k: v for k, v in engine.kfac.log_line().items() if k not in line} == failures
        files = {path.stem: path for path in folder.rglob("*.csv")}
        assert {key.replace("/", "_") for key in line | constants | others} <= files.keys()
        if constants:
            lines = files["kfac_stepped"].read_text().splitlines()
            assert len(lines) == 2, "a heading and one value"


@pytest.mark.ranks(1)
def test_stages_are_timers_of_deepspeeds_breakdown_until_detach():
    engine = build(BY_NAME["z2"], 1, wall_clock_breakdown=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(engine, 1, steps=5)
    ours, timers = {TIMER + stage for stage in STAGES}, engine.engine_timers
    assert ours <= set(timers.global_timers)
    cached = engine.get_wall_clock_timers()
    assert all(cached[TIMER + stage] > 0 for stage in ("relayout", "precondition"))
    assert TIMER + "precondition" in printed.getvalue()
    engine.kfac.detach()
    assert not ours & set(timers.global_timers)


@pytest.mark.ranks(2)
def test_deepspeeds_log_of_stragglers_prints():
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    train(build(BY_NAME["adam-z2"], 1, comms_logger=logger), 1, steps=2)
    deepspeed.comm.log_summary(show_straggler=True)


@pytest.mark.ranks(2)
def test_all_counters_are_there_as_zeros_from_attach_on():
    # there is nothing to measure before a step
    measured = {"nu", "kl", "step_to_weight", "eigenvalue_spread"}
    of_self_test = ("calls_", "sent_bytes_", "received_bytes_")
    for name in ("z2", "adam-z0"):
        engine = build(BY_NAME[name], 1)
        before = engine.kfac.counters()
        train(engine, 1, steps=3)
        after = engine.kfac.counters()
        assert before.keys() == after.keys() - measured, name
        assert before["steps"] == 0 and after["steps"] == 3, name
        not_zero = {k for k, value in before.items() if value and not k.startswith(of_self_test)}
        assert {f"kfac/{key}" for key in not_zero} <= RATES, name


def test_every_counter_has_a_row():
    """Those that a docstring names, too: not each is of every run."""
    page = Path(__file__).parents[2] / "docs/reference/counters.md"
    table = page.read_text().split("## One layer")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    docstrings = f"{Metrics.__doc__} {counters.__doc__} {health.__doc__}"
    told = re.findall(r'"([a-z_]+(?:<\w+>)?)"', docstrings)
    counted = {*SUMMARY, *FAILURES, *told, "nu", "kl", "stepped", "curved"}
    counted |= {f"seconds_{stage}" for stage in STAGES}
    patterns = {row: re.compile(re.sub("<.*>", ".+", row) + "$") for row in rows}
    missing = [n for n in counted if not any(p.match(n) for p in patterns.values())]
    assert not missing and len(told) > 10
    for row, pattern in patterns.items():  # nor is there a row of none
        assert row.startswith("lr_") or any(map(pattern.match, counted)), row
