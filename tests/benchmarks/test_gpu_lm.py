"""benchmarks/gpu_lm: the corpus holds whole packages out, a run that is stopped or killed equals
one in a piece, and the report counts steps and seconds right."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convergence.methods import deepspeed_config
from benchmarks.gpu_lm import corpus, report
from benchmarks.gpu_lm.plan import (
    METHODS,
    PARTS,
    SIZES,
    Job,
    best_jobs,
    config,
    fingerprint,
    parsed,
    rate_jobs,
)
from benchmarks.gpu_lm.report import Run, ratio
from tests.close import close

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu_lm"]


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> Path:
    """60 packages of two files; every third has a file that another one has, too."""
    folder = tmp_path_factory.mktemp("packages")
    for number in range(60):
        package = folder / f"package{number}"
        package.mkdir()
        for name in ("one", "two"):
            lines = (
                f"def {name}_{number}_{line}(x):\n    return x + {line * number}\n"
                for line in range(60)
            )
            (package / f"{name}.py").write_text("".join(lines))
        if number % 3 == 0:
            (package / "vendored.py").write_text("# the same everywhere\n" * 20)
    (folder / "alone.py").write_text("x = 1\n" * 100)
    return folder


def test_a_text_counts_once_and_no_package_is_in_two_parts(packages, tmp_path):
    found = corpus.texts([packages], None)
    assert sorted(found) == sorted(f"package{number}" for number in range(60))
    everything = [text for files in found.values() for text in files]
    assert len(everything) == len(set(everything)) == 121
    parts = corpus.parted(found)
    assert sorted(name for names in parts.values() for name in names) == sorted(found)
    total = sum(map(len, everything))
    for part in ("validation", "test"):
        share = sum(len(text) for name in parts[part] for text in found[name]) / total
        assert 0.02 <= share < 0.04
    assert parts == corpus.parted(corpus.texts([packages], None))


def test_tokens_are_the_texts_and_the_hash_is_theirs(packages, tmp_path):
    made = corpus.make(tmp_path / "one", vocabulary=300, folders=[packages])
    assert corpus.make(tmp_path / "two", vocabulary=300, folders=[packages]) == made
    names = corpus.parted(found := corpus.texts([packages], None))["test"]
    texts = [text for name in names for text in found[name]]
    tokens = corpus.load(tmp_path / "one", "test")
    assert (
        tokens.dtype == np.uint16
        and made.tokens["test"] == len(tokens)
        and (tokens == corpus.END).sum() == len(texts)
    )
    pieces = np.split(tokens, np.flatnonzero(tokens == corpus.END))[1:]
    if made.encoding == "bytes":
        back = [(piece[1:] - 1).astype(np.uint8).tobytes() for piece in pieces]
    else:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
        back = [encoder.decode(piece[1:].tolist()).encode() for piece in pieces]
        assert made.vocabulary == 300
    assert back == texts and made.bytes["test"] == sum(map(len, texts))
    other = shutil.copytree(packages, tmp_path / "packages")
    (other / "package7" / "one.py").write_text("# another text\n" * 20)
    assert corpus.make(tmp_path / "three", vocabulary=300, folders=[other]).sha256 != made.sha256


def test_too_few_packages_are_refused():
    with pytest.raises(ValueError, match="2 packages of 5 bytes; too few to hold some out"):
        corpus.parted({"one": [b"abc"], "two": [b"de"]})


def call(out: Path, packages: Path, *arguments: str, **how) -> subprocess.CompletedProcess:
    command = [
        *COMMAND,
        *arguments,
        "--sizes",
        "small",
        "--out",
        str(out),
        "--folders",
        str(packages),
    ]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=200, **how
    )


def losses(out: Path) -> dict[str, list[tuple[str, str]]]:
    found = {}
    for path in sorted((out / "runs").glob("*.csv")):
        with path.open(newline="") as file:
            found[path.stem] = [(row["loss"], row["held_out_loss"]) for row in csv.DictReader(file)]
    return found


@pytest.fixture(scope="session")
def whole(packages, tmp_path_factory) -> Path:
    """Parts a and b in one piece."""
    out = tmp_path_factory.mktemp("whole")
    for part in ("a", "b"):
        done = call(out, packages, part, "--methods", "muon", "kfacadamw")
        assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_chain_ends_in_a_report(whole):
    found, parts = losses(whole), PARTS["small"]
    assert len(found) == 2 * 3 + 2 and all(
        len(rows) == parts[name[0]].steps for name, rows in found.items()
    )
    assert all(float(rows[-1][1]) < float(rows[0][0]) for rows in found.values())
    text = (whole / "report.md").read_text()
    assert (
        "| Muon |" in text and "| KFACAdamW |" in text and "- KFACAdamW's steps of Muon's: " in text
    )
    assert (whole / "curves.csv").read_text().count("\n") == 1 + 6 * 2 + 2 * 4
    assert not list((whole / "saves").glob("*"))


def test_a_run_that_is_stopped_in_time_goes_on_in_the_next_call(whole, packages, tmp_path):
    """With no time at all a call makes no step; a save each step and a call a step would take too
    long here."""
    arguments = ["b", "--methods", "kfacadamw", "--rates", "kfacadamw=4e-3"]
    done = call(tmp_path, packages, *arguments, "--seconds", "0")
    assert (
        done.returncode == 0
        and "0 of 1 runs finished, 0 failed; call again to go on" in done.stdout
    ), done.stdout
    script = (
        "import sys\nfrom benchmarks.gpu_lm import train, __main__ as call\n"
        "class Five(train.Clock):\n"
        "    steps = 0\n"
        "    def left(self):\n"
        "        self.steps += 1\n"
        "        return 1e9 if self.steps < 7 else 0.0\n"
        "train.Clock = Five\ncall.os._exit(call.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *arguments, "--sizes", "small", "--out", str(tmp_path)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=100
    )
    assert "stopped at step 5 of 12, saved in" in done.stdout, done.stdout + done.stderr
    done = call(tmp_path, packages, *arguments)
    assert "goes on from step 5" in done.stdout and "1 of 1 runs finished" in done.stdout, (
        done.stdout + done.stderr
    )
    again = call(tmp_path, packages, *arguments)
    assert "step 12" not in again.stdout and "1 of 1 runs finished" in again.stdout
    alone = call(tmp_path / "alone", packages, *arguments)
    assert alone.returncode == 0
    assert losses(tmp_path) == losses(tmp_path / "alone")


def test_a_run_that_is_killed_goes_on_from_its_last_save(packages, tmp_path):
    arguments = [
        *COMMAND,
        "c",
        "--methods",
        "kfacadamw",
        "--rates",
        "kfacadamw=4e-3",
        "--sizes",
        "small",
        "--folders",
        str(packages),
        "--save-every",
        "0",
    ]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    name = "c_kfacadamw_lr0.004_seed0"
    latest, deadline = tmp_path / "saves" / name / "latest", time.monotonic() + 100
    with subprocess.Popen(
        [*arguments, "--out", str(tmp_path)], cwd=ROOT, env=environment, stdout=-3
    ) as process:
        while not latest.exists() or int(latest.read_text().removeprefix("step") or 0) < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert len(losses(tmp_path)[name]) < PARTS["small"]["c"].steps
    with (tmp_path / "runs" / f"{name}.csv").open("a") as file:
        file.write("9,0.1")  # a row that was cut off
    for out in (tmp_path, tmp_path / "whole"):
        done = subprocess.run(
            [*arguments, "--out", str(out)],
            cwd=ROOT,
            env=environment,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("goes on from step" in done.stdout) == (out == tmp_path)
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_what_other_settings_made_is_made_again(tmp_path):
    job, sizes, part = Job("b", "adamw", 1e-3), SIZES["small"], PARTS["small"]["b"]
    own = fingerprint(job, sizes, part, "corpus", False)
    others = [fingerprint(job, sizes, PARTS["small"]["c"], "corpus", False)]
    others += [
        fingerprint(job, sizes, part, "other", False),
        fingerprint(job, sizes, part, "corpus", True),
    ]
    others += [fingerprint(job, SIZES["full"], part, "corpus", False)]
    assert own not in others and len(set(others)) == 4


def test_b_takes_each_familys_best_of_a_or_the_given_rate():
    runs = {
        Job("a", "muon", 0.025): 3.0,
        Job("a", "muon_table", 0.025): 2.5,
        Job("a", "adamw", 1e-3): 4.0,
        Job("a", "adamw", 2e-3): float("inf"),
        Job("c", "adamw", 4e-3): 1.0,
    }
    jobs, unknown = best_jobs("b", ["adamw", "muon", "kfacadamw", "muon_table"], {}, runs, 2)
    chosen = [("adamw", 1e-3), ("muon_table", 0.025)]
    assert jobs == [Job("b", *best, seed) for seed in (0, 1) for best in chosen] and unknown == [
        "KFACAdamW"
    ]
    jobs, unknown = best_jobs(
        "b", ["muon", "kfacadamw", "muon_table"], {"muon": 0.1, "kfacadamw": 1e-3}, runs, 1
    )
    assert jobs == [Job("b", "muon", 0.1), Job("b", "kfacadamw", 1e-3)] and not unknown
    assert [job.method for job in rate_jobs(["adamw", "muon"], {"muon": 0.1})] == ["adamw"] * 3
    assert all(
        parsed(Job("b", method, 0.0125, 3).name) == Job("b", method, 0.0125, 3)
        for method in METHODS
    )


def test_no_muon_is_clipped_where_deepspeed_clips_its_updates():
    """At ZeRO 1 to 3 (docs/howto/switch.md); it took 0.003 of Muon's rate once."""
    for name in METHODS:
        settings = config(Job("b", name, 1e-3), SIZES["small"], PARTS["small"]["b"])
        is_muon = settings.get("optimizer", {}).get("type") == "Muon"
        assert settings["gradient_clipping"] == (
            0.0 if is_muon and settings["zero_optimization"]["stage"] else 1.0
        )
    ours = [json.loads(path.read_text()) for path in (ROOT / "configs").glob("*muon*.json")]
    assert ours and all(
        own["zero_optimization"]["stage"] and not own["gradient_clipping"] for own in ours
    )
    for stage in (0, 1):
        assert (
            deepspeed_config("muon", 0.02, rows=1, steps=9, stage=stage)["gradient_clipping"]
            == 1.0 - stage
        )


def made(method: str, points: list[tuple[int, float, float]], seed: int = 0) -> Run:
    rows = [
        {"step": s, "seconds": t, "loss": loss, "held_out_loss": loss, "memory_mb": 1.0}
        for s, t, loss in points
    ]
    return Run(
        Job("b", method, 1e-3, seed), rows, {"device": "card", "torch": "2", "deepspeed": "0"}
    )


def test_steps_that_compile_count_as_the_mean_of_the_others():
    spent = [(1, 30.0), (1, 9.0), (0, 1.0), (0, 3.0), (1, 20.0), (0, 2.0)]
    found = report.warmed(
        [{"cold": float(cold), "step_seconds": seconds, "seconds": 0.0} for cold, seconds in spent]
    )
    assert [row["seconds"] for row in found] == [2.0, 4.0, 5.0, 8.0, 10.0, 12.0]
    alone = [{"cold": 1.0, "step_seconds": 5.0, "seconds": 5.0}]
    assert report.warmed(alone) == alone


def test_steps_and_seconds_to_a_loss_lie_on_a_line_between_evaluations():
    muon = made("muon", [(10, 10.0, 5.0), (20, 20.0, 4.0), (40, 40.0, 3.0)])
    ours = made("kfacadamw", [(10, 15.0, 4.5), (20, 30.0, 3.5), (40, 60.0, 2.5)])
    close(ratio([ours], [muon], "step"), 30 / 40, sums=4)  # 3.0 is half of the way from 20 to 40
    close(ratio([ours], [muon], "seconds"), 45 / 40, sums=4)
    assert ratio([muon], [ours], "step") == float("inf") and ratio([muon], [muon], "step") == 1.0
    lines = "\n".join(report.races([muon, ours], 2.0))
    assert "| KFACAdamW | 0.001 | 1 | 2.5000 | 1.2500 | 60 |" in lines
    assert "- KFACAdamW's steps of Muon's: 0.75, goal 0.70: missed" in lines
    assert "- KFACAdamW's seconds of Muon's: 1.12, goal 0.75: missed" in lines
    assert "- KFACAdamW's steps of AdamW's: not there, goal 0.35: not measured" in lines
    diverged = made("muon", [(1, 1.0, 5.0), (2, 2.0, 9.0)])
    assert np.isnan(ratio([ours], [diverged], "step")) and diverged.final == float("inf")
