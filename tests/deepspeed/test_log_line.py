"""What a framework's logs say of steps and curvature, against weights and eigenvalues
themselves."""

import contextlib
import importlib
import io
import re
import statistics
import sys
import types
from pathlib import Path

import pytest
import torch

from ds_kfac.metrics import STAGES, SUMMARY, TIMER, Metrics
from ds_kfac.step.counters import FAILURES, counters, health
from tests.close import close, near
from tests.deepspeed import expert_runs
from tests.deepspeed.modes import BY_NAME, Mode
from tests.deepspeed.runs import build, train, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
LR = 0.01
OPTIMIZER = {"type": "KFACAdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}}
EXPERTS = Mode("moe", 0, adam=True, clip=0.0, extra={"optimizer": OPTIMIZER})


def worker(modes: list[str]) -> dict:
    found = {}
    for name in modes:
        engine = build(BY_NAME[name], 1, **({} if name == "z2" else {"optimizer": OPTIMIZER}))
        train(engine, 1, steps=2)
        before = weights(engine)
        train(engine, 1, steps=1, first=2)
        after, kfac = weights(engine), engine.kfac.preconditioner
        own = [parameter for layer in kfac.layers for parameter in layer.parameters]
        moved = sum(float((after[n] - before[n]).double().square().sum()) for n in own)
        whole = sum(float(after[n].double().square().sum()) for n in own)
        values = {layer: state.basis.A.values.tolist() for layer, state in kfac.state.items()}
        spreads = [max(own) / statistics.fmean(own) for own in values.values()]
        logged = {**engine.kfac.log_line(), **engine.kfac.log_constants()}
        assert {f"kfac/{key}" for key in engine.kfac.counters()} >= {"kfac/steps", *logged}
        found[name] = (moved / whole) ** 0.5, statistics.median_low(spreads), logged
        engine.destroy()
    return found


def test_the_logs_say_how_far_a_step_goes_and_how_spread_curvature_is():
    modes = ["adam-z0", "adam-z2", "adam-z3", "z2"]
    for name, (ratio, spread, logged) in run_ranks(
        "tests.deepspeed.test_log_line:worker", world=1, payload=modes
    )[0].items():
        assert (logged["kfac/stepped"], logged["kfac/curved"]) == (1.0, 1.0)
        close(logged["kfac/eigenvalue_spread"], spread, sums=20, dtype=torch.float32, what=name)
        if name == "z2":
            assert "kfac/step_to_weight" not in logged, "the user's optimizer decides on the step"
        else:
            near(
                logged["kfac/step_to_weight"],
                ratio,
                0.05 * ratio,
                "of the weights before or after the step",
            )


def experts_worker(_) -> tuple[float, float]:
    """Logged and true, of dense layers and experts together."""
    engine = expert_runs.make_engine(EXPERTS, expert_runs.DistributedNet(1))
    expert_runs.train(engine, 2)
    before = weights(engine)
    expert_runs.train(engine, 1)
    after = weights(engine)
    stepped = [
        parameter
        for kfac in engine.kfac.job.preconditioners
        for layer in kfac.layers
        for parameter in layer.parameters
    ]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in stepped)
    whole = sum(float(after[n].double().square().sum()) for n in stepped)
    return engine.kfac.log_line()["kfac/step_to_weight"], (moved / whole) ** 0.5


def test_the_size_of_a_step_is_of_all_domains_where_there_are_several():
    ((logged, ratio),) = run_ranks("tests.deepspeed.test_log_line:experts_worker", world=1)
    near(logged, ratio, 0.05 * ratio, "of the weights before or after the step")


COUNTERS = (
    "captures",
    "statistics_fraction",
    "refreshes",
    "steps",
    "sent_bytes_proof",
    "calls_proof",
)
CONSTANTS = {"kfac/stepped", "kfac/curved", "kfac/lr_heads", "kfac/lr_others"}


def names_worker(folder: str) -> dict:
    found = {}
    for name, report in (("adam-z2", "summary"), ("adam-z2", "none"), ("z2", "summary")):
        monitor = {
            "csv_monitor": {
                "enabled": True,
                "output_path": f"{folder}/{name}-{report}",
                "job_name": "run",
            }
        }
        own = {"optimizer": OPTIMIZER} if name != "z2" else {}
        engine = build(BY_NAME[name], 1, kfac={"report": report}, **own, **monitor)
        train(engine, 1, steps=2)
        line, first = set(engine.kfac.log_line()), set(engine.kfac.log_constants())
        engine.kfac.metrics.summary[list(SUMMARY).index("refresh_failures")] = 2
        found[name, report] = (
            line,
            first,
            {k: v for k, v in engine.kfac.log_line().items() if k not in line},
        )
        engine.destroy()
    return found


def test_a_line_has_few_numbers_failures_where_there_are_any_and_the_monitors_names(tmp_path):
    found = run_ranks("tests.deepspeed.test_log_line:names_worker", world=1, payload=str(tmp_path))[
        0
    ]
    line, first, failed = found["adam-z2", "summary"]
    assert line == {"kfac/step_to_weight", "kfac/eigenvalue_spread"} and first == CONSTANTS
    assert failed == {"kfac/refresh_failures": 2.0}
    assert found["adam-z2", "none"] == (set(), set(), {})
    line, first, _ = found["z2", "summary"]
    assert line == {"kfac/nu", "kfac/kl", "kfac/eigenvalue_spread"} and first == {
        "kfac/stepped",
        "kfac/curved",
    }
    own = {"kfac/nu", "kfac/not_finite_layers", *(f"kfac/{name}" for name in COUNTERS)}
    for (name, report), names in {
        ("adam-z2", "summary"): CONSTANTS,
        ("z2", "summary"): own,
    }.items():
        written = {
            path.stem: path.read_text().splitlines()
            for path in (tmp_path / f"{name}-{report}").rglob("*.csv")
        }
        assert {key.replace("/", "_") for key in found[name, report][0] | names} <= set(written), (
            written.keys()
        )
        assert len(written["kfac_stepped"]) == 2, "a heading and one value"


def timers_worker(_) -> dict:
    engine, printed = build(BY_NAME["z2"], 1, wall_clock_breakdown=True), io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(engine, 1, steps=5)
    during, cached = list(engine.engine_timers.global_timers), engine.get_wall_clock_timers()
    engine.kfac.detach()
    return {
        "during": during,
        "cached": cached,
        "left": list(engine.engine_timers.global_timers),
        "printed": printed.getvalue(),
    }


def test_stages_are_timers_of_deepspeeds_breakdown_until_detach():
    (found,) = run_ranks("tests.deepspeed.test_log_line:timers_worker", world=1)
    ours = {TIMER + stage for stage in STAGES}
    assert ours <= set(found["during"]) and not ours & set(found["left"])
    assert all(found["cached"][TIMER + stage] > 0 for stage in ("relayout", "precondition"))
    assert TIMER + "precondition" in found["printed"]


def test_every_counter_has_a_row():
    """Those that a docstring names, too: not each is of every run."""
    page = (
        (Path(__file__).parents[2] / "docs/reference/counters.md")
        .read_text()
        .split("## One layer")[0]
    )
    rows = [
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    ]
    told = re.findall(
        r'"([a-z_]+(?:<\w+>)?)"', f"{Metrics.__doc__} {counters.__doc__} {health.__doc__}"
    )
    counted = {
        *SUMMARY,
        *FAILURES,
        *told,
        *(f"seconds_{stage}" for stage in STAGES),
        "nu",
        "kl",
        "stepped",
        "curved",
    }
    patterns = [re.compile(re.sub("<.*>", ".+", row) + "$") for row in rows]
    assert (
        not [name for name in counted if not any(row.match(name) for row in patterns)]
        and len(told) > 10
    )
    for row in rows:  # nor is there a row of none
        assert row.startswith("lr_") or any(
            re.match(re.sub("<.*>", ".+", row) + "$", name) for name in counted
        ), row


def before_worker(names: list[str]) -> dict:
    found = {}
    for name in names:
        engine = build(BY_NAME[name], 1)
        before = engine.kfac.counters()
        train(engine, 1, steps=3)
        found[name] = before, engine.kfac.counters()
        engine.destroy()
    return found


def test_all_counters_are_there_as_zeros_from_attach_on():
    # there is nothing to measure before a step
    measured = {"nu", "kl", "step_to_weight", "eigenvalue_spread"}
    for found in run_ranks(
        "tests.deepspeed.test_log_line:before_worker", world=2, payload=["z2", "adam-z0"]
    ):
        for name, (before, after) in found.items():
            assert before.keys() == after.keys() - measured, name
            assert before["steps"] == 0 and after["steps"] == 3, name
            not_zero = {f"kfac/{key}" for key, value in before.items() if value}
            of_self_test = {key for key in not_zero if key.startswith(TRAFFIC)}
            assert not_zero - of_self_test <= CONSTANTS, (name, not_zero)


TRAFFIC = ("kfac/calls_", "kfac/sent_bytes_", "kfac/received_bytes_")


class Callback:
    """In place of transformers' own, where it is not installed."""


def test_the_trainers_first_line_has_what_stays_and_the_others_do_not(monkeypatch):
    stub = types.ModuleType("transformers")
    stub.Trainer, stub.TrainerCallback = object, Callback
    monkeypatch.setitem(sys.modules, "transformers", stub)
    monkeypatch.delitem(sys.modules, "ds_kfac.integrations.transformers", raising=False)
    door = importlib.import_module("ds_kfac.integrations.transformers")
    attachment = types.SimpleNamespace(
        log_line=lambda: {"kfac/nu": 1.0}, log_constants=lambda: {"kfac/stepped": 0.5}
    )
    monkeypatch.setattr(door, "attached", lambda model: attachment)
    callback, state = door.KFACCallback(), types.SimpleNamespace(log_history=[])
    for step in range(3):
        logs = {"loss": 1.0} if step != 1 else {"eval_loss": 1.0}
        state.log_history.append({**logs, "step": step})
        callback.on_log(None, state, None, logs=logs)
    assert [set(entry) - {"step"} for entry in state.log_history] == [
        {"loss", "kfac/nu", "kfac/stepped"},
        {"eval_loss"},
        {"loss", "kfac/nu"},
    ]
    monkeypatch.delitem(sys.modules, "ds_kfac.integrations.transformers")


def test_shares_of_the_weights_are_known_on_several_ranks():
    first, second = run_ranks("tests.deepspeed.test_log_line:worker", world=2, payload=["adam-z3"])
    for found in (first, second):
        ratio, _, logged = found["adam-z3"]
        near(
            logged["kfac/step_to_weight"],
            ratio,
            0.5 * ratio,
            "the mean square of its half of the weights",
        )
