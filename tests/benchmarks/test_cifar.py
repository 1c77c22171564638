"""The CIFAR-10 benchmark: which runs it makes, that a run that is cut off goes on as if it had not
been, its table."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.cifar import report
from benchmarks.cifar.__main__ import check_settings, main
from benchmarks.cifar.jobs import (
    COLUMNS,
    METHODS,
    Job,
    Runs,
    deepspeed_config,
    read,
    swept,
    unfinished,
)
from tests.close import close
from tests.ranks import ROOT

PARTS, SEEDS, BATCH = [1.0, 0.5], [0, 1], 1024


def end(runs: Runs, job: Job, *accuracies: float, seconds: float = 10.0) -> None:
    """A finished run of four epochs, or their part, with an evaluation for each accuracy; nan: it
    diverged there."""
    epochs, lines = 4 * job.part, [",".join(COLUMNS)]
    for index, accuracy in enumerate(accuracies, 1):
        part = index / len(accuracies)
        text = "" if math.isnan(accuracy) else accuracy
        lines.append(
            f"{part * 100 * epochs},{part * epochs},{part * seconds * job.part},1,1,{text},1,{text},5"  # noqa: E501
        )
    runs.path(job).parent.mkdir(parents=True, exist_ok=True)
    runs.path(job).write_text("\n".join(lines))


def all_runs(runs: Runs, accuracy, methods=("sgd", "kfac_own")) -> list[Job]:
    """Makes every run that is to be made, as ``accuracy`` of it says."""
    made = []
    while jobs := list(unfinished(runs, methods, BATCH, PARTS, SEEDS)):
        made.append(jobs[0])
        end(runs, jobs[0], accuracy(jobs[0]))
        assert len(made) < 100
    return made


def test_rates_are_swept_on_the_shortest_schedule_and_the_best_run_on_every_part_and_seed(tmp_path):
    runs = Runs(tmp_path / "runs")
    made = all_runs(runs, lambda job: {0.4: 0.5, 0.8: 0.9}.get(job.rate, 0.6))
    expected = []
    for method in ("sgd", "kfac_own"):
        expected += [Job(method, rate, 0.5, 0) for rate in (0.4, 0.8, 1.6)] + [
            Job(method, 0.8, 1.0, 0)
        ]
    for method in ("sgd", "kfac_own"):
        expected += [Job(method, 0.8, part, 1) for part in PARTS]
    assert made == expected, "a method is whole before the next one, the next seed last"


def test_a_sweep_goes_on_where_the_best_is_at_its_edge_and_below_where_all_diverged(tmp_path):
    runs = Runs(tmp_path / "up")
    made = all_runs(runs, lambda job: job.rate / 10, ["sgd"])
    assert [job.rate for job in made[:5]] == [0.4, 0.8, 1.6, 3.2, 6.4] and {
        job.rate for job in made[5:]
    } == {6.4}
    runs = Runs(tmp_path / "down")
    made = all_runs(runs, lambda job: math.nan if job.rate > 0.25 else 0.5, ["sgd"])
    assert [job.rate for job in made[:4]] == [0.4, 0.8, 1.6, 0.2] and swept(
        runs, "sgd", BATCH, PARTS
    )[0][0.8] == math.inf


def test_a_method_that_diverges_at_every_rate_has_no_other_runs(tmp_path):
    made = all_runs(
        Runs(tmp_path / "runs"), lambda job: math.nan if job.method == "kfac_own" else 0.5
    )
    assert [job.rate for job in made if job.method == "kfac_own"] == [0.4, 0.8, 1.6, 0.2, 0.1]
    assert len([job for job in made if job.method == "sgd"]) == 5 + 3, (
        "0.4 is as good and so the edge: two more"
    )


def test_what_is_left_is_known_before_anything_ran(tmp_path):
    jobs = list(unfinished(Runs(tmp_path), ["sgd", "kfac_own"], BATCH, PARTS, SEEDS))
    assert len(jobs) == len(set(jobs)) == 2 * 3 + 2 * (len(PARTS) * len(SEEDS) - 1)


def test_the_table_says_in_which_schedule_sgds_accuracy_is_reached(tmp_path):
    runs = Runs(tmp_path / "runs")
    for method, seed in itertools.product(("sgd", "kfac_own"), SEEDS):
        for part, rate in itertools.product(PARTS, (0.4, 0.8, 1.6) if seed == 0 else (0.8,)):
            best = 0.9 if rate == 0.8 else 0.5
            if method == "sgd":
                end(runs, Job(method, rate, part, seed), 0.3, best - 0.02 * (part < 1))
            else:
                end(
                    runs,
                    Job(method, rate, part, seed),
                    0.3,
                    best,
                    best + 0.01,
                    best + 0.01,
                    seconds=14.0,
                )
    found = report.finished(runs, BATCH, PARTS, SEEDS)
    target = report.final(found["sgd"][1.0][0])
    close(target, 0.9)
    assert (
        report.shortest(found["kfac_own"], target) == 0.5
        and report.shortest(found["sgd"], target) == 1.0
    )
    assert report.reached(found["kfac_own"][1.0][0], target)["epoch"] == 2.0
    text = report.page(runs, {"epochs": 4.0, "batch": BATCH}, BATCH, PARTS, SEEDS)
    row = next(line for line in text.splitlines() if line.startswith("| kfac_own"))
    # half of SGD's four epochs in its schedule of four; 7 seconds of SGD's 10
    assert (
        "| 2 (0.50), 2 of 2 seeds | 0.5 of its epochs | 0.70 |" in row
        and "91.0 % (91.0 to 91.0, 2 seeds)" in row
    )
    assert (runs.folder / "accuracy.png").stat().st_size > 0
    runs.pack()
    shutil.rmtree(runs.folder / "runs")
    assert (
        report.page(Runs(runs.folder), {"epochs": 4.0, "batch": BATCH}, BATCH, PARTS, SEEDS) == text
    )


def test_runs_of_other_settings_are_kept_apart(tmp_path):
    check_settings(tmp_path, {"batch": 8, "epochs": 1.0})
    check_settings(tmp_path, {"batch": 8, "epochs": 1.0})
    with pytest.raises(ValueError, match=r"other settings \(epochs\)"):
        check_settings(tmp_path, {"batch": 8, "epochs": 2.0})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_valid_config(method):
    from ds_kfac.config.keys import parse

    config = deepspeed_config(method, 0.1, batch=8, steps=100)
    kfac = parse(config["kfac"])
    assert config["optimizer"]["params"]["lr"] == 0.1 and kfac.enabled == (method != "sgd")


def test_sc20s_settings_are_those_of_its_code():
    kfac = deepspeed_config("kfac_sc20", 0.1, batch=8, steps=100)["kfac"]
    assert kfac["factor"] == {
        "update_interval": 1,
        "decay": 0.95,
        "fisher": "empirical",
        "rows": "all",
    }
    assert kfac["eigenbasis"]["refresh_interval"] == 10 and kfac["damping"] == {
        "kind": "tikhonov",
        "value": 0.003,
    }


SMALL = (
    "--model resnet8 --batch 512 --epochs 1.5 --parts 1 --methods kfac_kaisa --seeds 0 "
    "--evaluations 2"
).split()
A_STEP_A_CALL = """
import os, sys, time
from benchmarks.cifar import __main__ as main, run
if sys.argv.pop(1) == "cut":
    train, main.LEFT = run.train, -float("inf")
    run.train = lambda task, job, runs, ends: train(task, job, runs, time.monotonic())
main.main(sys.argv[1:])
sys.stdout.flush()
os._exit(0)
"""


def call(out, how: str, *more: str) -> str:
    command = [
        sys.executable,
        "-c",
        A_STEP_A_CALL,
        how,
        "--out",
        str(out),
        "--held-out",
        "100",
        *SMALL,
        *more,
    ]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.distributed
def test_a_run_that_is_cut_off_goes_on_as_if_it_had_not_been(tmp_path):
    """With statistics of all positions: a run that goes on proves its rows again, for which it
    takes all."""
    pytest.importorskip("sklearn")
    assert "all runs are done" in call(tmp_path / "whole", "whole")
    text = call(tmp_path / "cut", "cut")
    ended = text.count(": ended")
    assert ended >= 3 and text.count("saved, goes on in the next call") == 3 * ended, (
        "of four steps"
    )
    whole, cut = (
        sorted((tmp_path / name / "resnet8_b512").glob("runs/*.csv")) for name in ("whole", "cut")
    )
    assert [path.name for path in whole] == [path.name for path in cut] and len(whole) == ended
    timed = {"seconds", "memory_mb"}
    for paths in zip(whole, cut, strict=True):
        rows = [
            [{k: v for k, v in row.items() if k not in timed} for row in read(path)]
            for path in paths
        ]
        assert rows[0] == rows[1] and len(rows[0]) == 2
    assert not list((tmp_path / "cut" / "resnet8_b512").rglob("*.saved"))
    assert json.loads((tmp_path / "cut/resnet8_b512/settings.json").read_text())["held out"] == 100


def test_a_dry_run_says_what_is_left_and_makes_nothing(tmp_path, capsys):
    pytest.importorskip("sklearn")
    main(["--dry-run", "--out", str(tmp_path), *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kfac_kaisa_lr0.2_part1_seed0: 4 steps, ") and lines[0].endswith(
        "assumed)"
    )
    assert lines[-1].startswith("3 runs, ") and not list(tmp_path.iterdir())


def test_a_packed_run_is_found_by_its_rate_also_if_that_has_more_digits_than_are_written(tmp_path):
    """At batch 512 Adam's rates are a root of 2 apart: the table lost their runs once they were
    packed."""
    job = Job("kfacadamw", 0.0025 * 0.5**0.5, 1.0, 0)
    runs = Runs(tmp_path)
    end(runs, job, 0.5)
    runs.pack()
    runs.path(job).unlink()
    assert Runs(tmp_path).rows(job)[-1]["test_accuracy"] == 0.5


def test_where_the_shortest_schedule_has_no_sweep_the_longest_chooses_the_rate(tmp_path):
    runs = Runs(tmp_path)
    for rate, accuracy in zip((0.4, 0.8, 1.6), (0.5, 0.6, 0.4), strict=True):
        end(runs, Job("sgd", rate, 1.0, 0), accuracy)
    found = report.finished(runs, BATCH, PARTS, SEEDS)
    assert [rows[-1]["test_accuracy"] for rows in found["sgd"][1.0]] == [0.6] and 0.5 not in found[
        "sgd"
    ]
