"""The training benchmarks: the command on tiny models, its numbers on curves made by hand."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import corpus as sources
from benchmarks.convergence import report
from benchmarks.convergence.methods import METHODS, RATES, deepspeed_config
from benchmarks.convergence.runs import Job, Run, read_all, warmed
from benchmarks.convergence.tasks import METHODS_OF, RATES_OF, TASKS
from ds_kfac.config.keys import parse
from tests.close import close, near


@pytest.fixture(scope="module")
def pool():
    with convergence.make_pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = (f"line {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(3000))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """60 packages of two files; every third has a file that others have, too."""
    folder = tmp_path_factory.mktemp("packages")
    for number in range(60):
        package = folder / f"package{number}"
        package.mkdir()
        for name in ("one", "two"):
            lines = (
                f"def {name}_{number}_{i}(x):\n    return x + {i * number}\n" for i in range(60)
            )
            (package / f"{name}.py").write_text("".join(lines))
        if number % 3 == 0:
            (package / "vendored.py").write_text("# the same everywhere\n" * 20)
    return folder


@pytest.mark.distributed
def test_the_command_sweeps_finishes_reports_and_keeps_what_is_there(tmp_path, text, pool, capsys):
    out = tmp_path / "results"
    argv = ["--tasks", "tiny", "--methods", "adamw", "muon", "kfac_adamw", "--seeds", "0", "1"]
    argv += ["--rates", "0.004", "1e30", "--data", str(text), "--out", str(out)]
    (out / "runs/tiny").mkdir(parents=True)
    (out / "runs/tiny/adamw_lr0.004_seed0.partial").write_text("step,seconds\n1,")
    assert convergence.main(argv, pool) == 0
    runs = {run.job: run for run in read_all(out)}
    adamw = runs[Job("tiny", "adamw", 0.004, 0)]
    for method in ("adamw", "muon", "kfac_adamw"):
        first = runs[Job("tiny", method, 0.004, 0)]
        assert first.rows[0]["loss"] == adamw.rows[0]["loss"], "another initialisation"
        assert [row["step"] for row in first.rows] == [1, 2, 3] and 4 < first.final < 6
        assert runs[Job("tiny", method, 1e30, 0)].diverged
        assert Job("tiny", method, 0.002, 0) in runs, "the best rate was the lowest one tried"
        assert {job.seed for job in runs if job.method == method and job.final} == {0, 1}
    for file in ("summary.csv", "tiny.csv", "settings.json", "tiny_loss.png", "../results.md"):
        assert (out / file).stat().st_size > 0
    assert not list(out.rglob("*.partial"))
    page = capsys.readouterr().out.split("# Convergence")[1]
    shutil.rmtree(out / "runs")  # as in a clone
    assert convergence.main(argv, pool) == 0
    said, again = capsys.readouterr().out.split("# Convergence")
    assert again == page and "sweep: 0 runs to make" in said and "final: 0 runs to make" in said
    assert convergence.main([*argv, "--steps", "5"], pool) == 2
    assert "other settings (config at rate 1)" in capsys.readouterr().err
    shutil.rmtree(out)
    assert convergence.main([*argv, "--seconds", "0"], pool) == 0
    assert "the same command goes on: tiny/adamw_lr0.004_seed0" in capsys.readouterr().out


def test_a_text_counts_once_in_one_part_and_its_tokens_are_the_text(packages, tmp_path):
    found = sources.texts([packages], None)
    everything = [text for files in found.values() for text in files]
    assert len(found) == 60 and len(everything) == len(set(everything)) == 121
    parts = sources.parted(found)
    assert sorted(name for names in parts.values() for name in names) == sorted(found)
    for part in ("validation", "test"):
        size = sum(len(text) for name in parts[part] for text in found[name])
        assert 0.02 <= size / sum(map(len, everything)) < 0.04
    made = sources.make(tmp_path / "one", vocabulary=300, folders=[packages])
    assert sources.make(tmp_path / "two", vocabulary=300, folders=[packages]) == made
    texts = [text for name in parts["test"] for text in found[name]]
    tokens = sources.load(tmp_path / "one", "test")
    assert len(tokens) == made.tokens["test"] and (tokens == sources.END).sum() == len(texts)
    if made.encoding == "bytes":
        pieces = np.split(tokens, np.flatnonzero(tokens == sources.END))[1:]
        assert [(piece[1:] - 1).astype(np.uint8).tobytes() for piece in pieces] == texts


def test_every_method_has_rates_and_a_valid_config():
    for method in METHODS:
        config = deepspeed_config(method, 0.1, TASKS["gpt2_small"], 100)
        parse(config.get("kfac", {}))
        assert RATES[method] and config["gradient_accumulation_steps"] == 4
        is_muon = config["optimizer"]["type"] == "Muon"
        assert not is_muon or config["gradient_clipping"] == 0.0, "DeepSpeed would clip its updates"
    assert METHODS_OF.keys() <= TASKS.keys() and RATES_OF.keys() <= TASKS.keys()
    named = {method for methods in METHODS_OF.values() for method in methods}
    assert named | {task.base for task in TASKS.values()} <= METHODS.keys()


def test_cold_steps_count_as_the_mean_of_the_others():
    rows = [{"cold": 1.0, "step_seconds": 9.0, "seconds": 9.0}]
    rows += [{"cold": 0.0, "step_seconds": 2.0, "seconds": 11.0}] * 2
    assert [row["seconds"] for row in warmed(rows)] == [2.0, 4.0, 6.0]


def run_of(method: str, losses: list[float], *, rate=0.1, seed=0, final=True) -> Run:
    """A run that is evaluated at every step, each of which takes a second."""
    rows = [
        {"step": i, "seconds": float(i), "loss": x, "held_out_loss": x, "step_seconds": 1.0}
        | {"held_out_accuracy": math.nan}
        for i, x in enumerate(losses, 1)
    ]
    return Run(Job("tiny", method, rate, seed, final), rows)


def test_steps_and_seconds_to_the_base_methods_loss():
    runs = [run_of("adamw", [5.0, 4.0, 3.0, 2.0]), run_of("kfacadamw", [5.0, 3.0, 1.0, 0.5])]
    runs += [run_of("adamw", [5.0, 2.0], rate=rate, final=False) for rate in (0.1, 0.2)]
    rows = {row["method"]: row for row in report.summarise(runs)}
    close(rows["kfacadamw"]["steps_to_base"], 2.5, sums=4)  # between 3.0 and 1.0
    close(rows["kfacadamw"]["steps_fraction"], 2.5 / 4, sums=4)
    assert rows["adamw"]["good_rate_low"] == 0.1 and rows["adamw"]["good_rates_at_edge"] == 1
    for run in runs[:2]:
        runs.append(run_of(run.job.method, [row["loss"] + 0.1 for row in run.rows], seed=1))
    lines = report.differences(report.best_runs(runs))
    assert "adamw minus kfacadamw: +1.500" in lines[2] and "in 0.62 (0.62 to 0.62)" in lines[2]


def test_the_readmes_figures_are_those_of_the_runs(tmp_path):
    """The summary that is kept is made again from the rows that are kept."""
    kept = convergence.RESULTS
    for task in ("gpt_small", "gpt_moe"):
        shutil.copy(kept / f"{task}.csv", tmp_path)
    with (kept / "summary.csv").open() as file:
        known = {(row["task"], row["method"]): row for row in csv.DictReader(file)}
    rows = report.summarise(read_all(tmp_path))
    assert len(rows) == 10
    for row in rows:
        for column in ("final_mean", "steps_fraction", "rate"):
            value = known[row["task"], row["method"]][column]
            if value:
                near(float(row[column]), float(value), 1e-6, "written with all digits")
