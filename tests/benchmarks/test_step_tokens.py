"""The cost of a step by its tokens: what is measured in which order, what a call leaves to the
next, and the table."""

import argparse
import math
import os
import subprocess
import sys

import pytest

from benchmarks import step_gpu, step_tokens
from benchmarks.step_tokens import AT_ONCE, DEFAULT, Cell
from tests.close import close, near
from tests.ranks import ROOT


def arguments(out, **more) -> argparse.Namespace:
    own = {
        "tokens": (10, 40),
        "tiny": True,
        "costs": None,
        "seconds": math.inf,
        "dry_run": False,
        "out": out,
    }
    return argparse.Namespace(**own, context=5, micro=10, **more)


@pytest.mark.distributed
def test_every_method_and_plan_is_measured_over_a_whole_interval_beside_its_prediction(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "step_tokens.py"),
        "--tiny",
        "--tokens",
        "40",
        "--out",
    ]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "MASTER_PORT": "0",
        "PYTHONPATH": str(ROOT),
    }
    command.append(str(tmp_path))
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all measurements are done" in done.stdout
    rows = step_tokens.read(tmp_path / "tokens.csv")
    assert step_tokens.done(rows) == set(step_tokens.cells([40])) and not any(
        row["problem"] for row in rows
    )
    of = {(*step_tokens.cell_of(row), row["what"]): row for row in rows}
    for model in ("gpt2_small", "gpt2_medium"):
        base = float(of[model, 40, "AdamW", "", "step"]["median_ms"])
        assert int(of[model, 40, "AdamW", "", "step"]["count"]) == step_tokens.PLAIN_STEPS
        for method in ("KFACAdamW", "K-FAC into AdamW"):
            at_once = {
                what: row
                for (*cell, what), row in of.items()
                if cell == [model, 40, method, AT_ONCE]
            }
            # steps 2 to 51: factors at 10, 20, 30, 40, 50, of which the last is a refresh
            assert [int(at_once[kind]["count"]) for kind in step_gpu.WEIGHTS] == [45, 4, 1]
            for plan in (DEFAULT, AT_ONCE):
                mean = of[model, 40, method, plan, step_tokens.ROW]
                assert int(mean["count"]) == 50 and float(mean["predicted_kfac_ms"]) > 0
                near(
                    float(mean["kfac_ms"]),
                    float(mean["median_ms"]) - base,
                    1e-3 * base + 1e-3,
                    "digits written",
                )
    assert (tmp_path / "tokens.png").stat().st_size > 0
    assert (
        len(
            [
                line
                for line in (tmp_path / "tokens.md").read_text().splitlines()
                if "K-FAC into" in line
            ]
        )
        == 4
    )


def test_steps_are_of_as_many_tokens_as_named():
    options = argparse.Namespace(tiny=False, context=1024, micro=32_768)
    for tokens in step_tokens.TOKENS:
        own = step_tokens.sizes(options, Cell("gpt2_small", tokens, "AdamW", ""))
        assert (
            own.accumulation * own.rows * own.context == tokens and own.rows * own.context <= 32_768
        )
    assert step_tokens.sizes(options, Cell("gpt2_medium", 32_768, "AdamW", "")).width == 1024


@pytest.fixture
def measured(monkeypatch) -> list[Cell]:
    """What was measured; AdamW's step is a second, others two; Muon fails the first time."""
    found: list[Cell] = []

    def measure(options, cell, ends):
        found.append(cell)
        if cell.method == "Muon" and found.count(cell) == 1:
            raise RuntimeError("out of memory\nmore")
        return [
            (
                "step" if cell.method in ("AdamW", "Muon") else "refresh",
                1.0 + (cell.method != "AdamW"),
            )
        ] * 2, 7.0

    monkeypatch.setattr(step_tokens, "measure", measure)
    monkeypatch.setattr(
        step_tokens, "predicted", lambda options, cell: argparse.Namespace(seconds=0.5)
    )
    monkeypatch.setattr(step_gpu, "start", lambda: False)
    return found


def test_the_next_call_makes_what_failed_and_nothing_twice(tmp_path, measured):
    assert step_tokens.run(arguments(tmp_path)) == 3
    assert measured == step_tokens.cells((10, 40))
    assert step_tokens.run(arguments(tmp_path)) == 0
    again = measured[18:]
    assert {cell.method for cell in again} == {"Muon"} and len(again) == 3
    assert step_tokens.run(arguments(tmp_path)) == 0 and len(measured) == 21
    text = (tmp_path / "tokens.md").read_text()
    assert (
        "| gpt2_small | 40 | Muon |  | 2000 | +100.0% | 0.007 |  |  |  |" in text
        and "out of memory" not in text
    )
    # K-FAC adds a second, half of it is predicted
    assert (
        "| gpt2_medium | 10 | KFACAdamW | all at once | 2000 | +100.0% | 0.007 | 1e+03 | 500 | "
        "0.50 |" in text
    )


def test_no_measurement_is_begun_for_which_there_is_no_time(tmp_path, measured, capsys):
    options = arguments(tmp_path)
    options.tiny, options.seconds = False, 30.0  # by AdamW's second: a step of 40 tokens takes four
    step_tokens.run(options)
    assert Cell("gpt2_small", 10, "AdamW", "") in measured and not any(
        cell.tokens == 40 for cell in measured
    )
    assert "measurements are left: the same command goes on" in capsys.readouterr().out


def test_what_a_measurement_takes_follows_from_adamws_steps():
    options = argparse.Namespace(micro=32_768)
    rows = [
        {
            "model": "gpt2_small",
            "tokens": "32768",
            "method": "AdamW",
            "what": "step",
            "median_ms": "100",
        }
    ]
    seconds = step_tokens.expected(options, Cell("gpt2_small", 131_072, "KFACAdamW", DEFAULT), rows)
    close(seconds, step_tokens.STARTS + 52 * (0.4 + 0.1 * 0.6), sums=4)
