"""The convergence benchmark: the whole command on a tiny model, and its numbers on curves made by
hand."""

import csv
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import report as convergence_report
from benchmarks.convergence import run as convergence_run
from benchmarks.convergence.bases import FOLDER
from benchmarks.convergence.methods import CLIENT, METHODS, RATES, deepspeed_config
from benchmarks.convergence.results import (
    COLUMNS,
    Job,
    check_settings,
    next_rate,
    pack,
    read,
    read_all,
    write,
)
from benchmarks.convergence.tasks import IGNORED, MASK, TASKS, FineTuning
from examples.gpt import GPTConfig
from examples.text import STRETCHES, Corpus, load
from tests.close import close, exact, near
from tests.ranks import ROOT

INFINITE = math.inf


@pytest.fixture(scope="module")
def pool():
    with convergence.make_pool(1) as pool:
        yield pool


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "\n".join(
            f"line {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(3000)
        )
    )
    return path


@pytest.mark.distributed
def test_the_command_sweeps_finishes_reports_and_keeps_what_is_there(
    tmp_path, corpus, pool, capsys
):
    out = tmp_path / "results"
    argv = [
        "--tasks",
        "tiny",
        "--methods",
        "adamw",
        "muon",
        "kfac_adamw",
        "--rates",
        "0.004",
        "1e30",
        "--seeds",
        "0",
        "1",
        "--data",
        str(corpus),
        "--out",
        str(out),
    ]
    (out / "runs/tiny").mkdir(parents=True)
    # of a killed run
    (out / "runs/tiny/adamw_lr0.004_seed0.partial").write_text("step,seconds\n1,")
    assert convergence.main(argv, pool) == 0
    runs = {run.job: run for run in read_all(out)}
    for method in ("adamw", "muon", "kfac_adamw"):
        first = runs[Job("tiny", method, 0.004, 0)]
        assert first.rows[0]["loss"] == runs[Job("tiny", "adamw", 0.004, 0)].rows[0]["loss"], (
            "another initialisation"
        )
        assert [row["step"] for row in first.rows] == [1, 2, 3] and 4 < first.final < 6
        seconds = sum(first.step_seconds)
        near(first.rows[-1]["seconds"], seconds, 1e-4 * seconds, "five digits are written")
        assert (
            runs[Job("tiny", method, 1e30, 0)].diverged
            and len(runs[Job("tiny", method, 1e30, 0)].rows) == 3
        )
        assert Job("tiny", method, 0.002, 0) in runs, (
            "the best rate was the lowest and nothing below was tried"
        )
        assert {job.seed for job in runs if job.method == method and job.final} == {0, 1}
        assert {job.seed for job in runs if job.method == method and not job.final} == {0}
    for file in (
        "summary.csv",
        "tiny.csv",
        "settings.json",
        "tiny_loss.png",
        "../results.md",
        "runs/tiny/muon.json",
    ):
        assert (out / file).stat().st_size > 0
    assert not list(out.rglob("*.partial"))
    page = capsys.readouterr().out.split("# Convergence")[1]
    shutil.rmtree(out / "runs")  # as in a clone
    assert convergence.main(argv, pool) == 0, "runs that are packed were made again"
    said, again = capsys.readouterr().out.split("# Convergence")
    assert again == page and "sweep: 0 runs to make" in said and "final: 0 runs to make" in said
    assert (
        convergence.main(["draw", "--out", str(out)]) == 0
        and (out / "runs/tiny_rates.png").stat().st_size > 0
    )
    assert convergence.main([*argv, "--steps", "5"], pool) == 2
    assert "other settings (config at rate 1)" in capsys.readouterr().err


@pytest.mark.distributed
def test_a_ramp_takes_the_same_bytes_in_fewer_steps(tmp_path, corpus, pool):
    """Of 30 batches 6 by themselves, 3 pairs, and 4 and a half fours."""
    argv = [
        "sweep",
        "--tasks",
        "tiny",
        "--methods",
        "adamw",
        "adamw_ramp",
        "--rates",
        "0.004",
        "--extensions",
        "0",
    ]
    assert (
        convergence.main(
            [*argv, "--steps", "30", "--data", str(corpus), "--out", str(tmp_path)], pool
        )
        == 0
    )
    constant, ramp = (
        read(Job("tiny", method, 0.004, 0), tmp_path) for method in ("adamw", "adamw_ramp")
    )
    steps = [row["step"] for row in ramp.rows]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) == 14 and len(constant.rows) == 30
    assert [row["loss"] for row in ramp.rows[:6]] == [row["loss"] for row in constant.rows[:6]]
    held_out = ramp.held_out()
    assert held_out[-1]["step"] == len(steps) and len(held_out) == 3 and ramp.final < 6


@pytest.mark.distributed
def test_optimizers_of_another_package_take_the_rates_of_the_schedule(tmp_path, corpus, pool):
    pytest.importorskip("pytorch_optimizer")
    argv = [
        "sweep",
        "--tasks",
        "tiny",
        "--methods",
        "soap",
        "shampoo",
        "--rates",
        "0.004",
        "1e-9",
        "--extensions",
        "0",
    ]
    assert (
        convergence.main(
            [*argv, "--steps", "12", "--data", str(corpus), "--out", str(tmp_path)], pool
        )
        == 0
    )
    for method in ("soap", "shampoo"):
        high, low = (read(Job("tiny", method, rate, 0), tmp_path) for rate in (0.004, 1e-9))
        assert high.rows[0]["loss"] == low.rows[0]["loss"] and high.final < low.final - 0.01


def test_fine_tuning_begins_with_one_base_whatever_the_seed(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    task = FineTuning(
        GPTConfig(width=16, blocks=1, heads=2, context=16), rows=2, steps=1, base_steps=3
    )
    first, second = (task.build(seed).state_dict() for seed in (0, 1))
    exact(first, second)
    begun = super(FineTuning, task).build(0).state_dict()
    assert all(
        not torch.equal(first[name], begun[name]) for name in first if name.endswith("weight")
    )
    assert task.corpus(str(corpus)).name.endswith("after 3 steps on Python's standard library")
    assert len(list((tmp_path / FOLDER).glob("python_*.pt"))) == 1


def test_only_a_finished_run_is_taken_as_one(tmp_path):
    job = Job("tiny", "adamw", 0.001, 0)

    def killed():
        yield {"step": 1, "seconds": 0.1, "loss": 5.0, "step_seconds": 0.1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(job.path(tmp_path), killed())
    assert read_all(tmp_path) == [] and not job.path(tmp_path).exists()
    assert job.path(tmp_path).with_suffix(".partial").exists()


def muon_step() -> dict[str, list[float]]:
    """Singular values of every matrix's first update over the learning rate."""
    rate, task = 0.02, TASKS["tiny"]
    config = deepspeed_config("muon", rate, rows=2, steps=3, stage=0)
    # its first step has rate 0
    del config["scheduler"], config["optimizer"]["params"]["weight_decay"]
    engine = convergence_run.build(task.build(0), config)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(x, x))
    engine.step()
    updates = {
        name: (before[name] - p.detach()) / rate for name, p in engine.module.named_parameters()
    }
    return {
        name: torch.linalg.svdvals(update).tolist()
        for name, update in updates.items()
        if update.ndim == 2
    }


@pytest.mark.distributed
def test_muon_orthogonalises_hidden_matrices_and_no_others(pool):
    values = pool.submit(muon_step).result()
    hidden = [name for name in values if name.startswith("blocks.")]
    assert len(hidden) == 5 and set(values) - set(hidden) == {
        "embed_bytes.weight",
        "embed_positions.weight",
        "lm_head.weight",
    }
    for name, found in values.items():
        # the smallest values take more than five iterations
        low, high = found[len(found) // 2], found[0]
        # tall matrices are scaled by the root of their sides' ratio
        orthogonal = 0.5 < low and high < 1.3 * 3**0.5
        assert orthogonal == (name in hidden), (name, found)


def test_every_method_has_rates_and_a_config_at_the_rate():
    assert set(RATES) == set(METHODS)
    for method, rates in RATES.items():
        assert len(rates) >= 4 and all(b == 2 * a for a, b in itertools.pairwise(rates))
        config = deepspeed_config(method, 0.5, rows=2, steps=300, stage=2)
        params = config[CLIENT][1] if CLIENT in config else config["optimizer"]["params"]
        assert 0.5 in (params.get(key) for key in ("lr", "muon_lr"))
        schedule = config["scheduler"]["params"]
        assert schedule["warmup_num_steps"] == 21
        assert schedule.get("total_num_steps") == 300
        assert schedule["warmup_type"] == "linear"
        assert ("kfac" in config) == method.startswith("kfac")


def test_muon_takes_hidden_filters_and_every_parameter_is_in_one_group():
    model = TASKS["digits"].build(0)
    hidden, others = convergence_run.muon_groups(model, {"adamw_lr": 0.1})
    assert hidden["use_muon"] and not others["use_muon"] and others["lr"] == 0.1
    assert sorted(map(id, [*hidden["params"], *others["params"]])) == sorted(
        map(id, model.parameters())
    )
    outer = {"network.stem.weight", "network.head.weight"}
    names = {
        name
        for name, p in model.named_parameters()
        if any(p is other for other in hidden["params"])
    }
    assert names == {name for name, p in model.named_parameters() if p.ndim >= 2} - outer


def test_masked_bytes_are_the_labels_and_batches_depend_on_seed_and_step(corpus):
    text = load(str(corpus), 16)
    task = type(TASKS["mlm"])(GPTConfig(context=16, causal=False), rows=400, steps=1)
    tokens, labels = task.batch(text, 0, 0)
    masked = labels != IGNORED
    assert ((tokens == MASK) == masked).all() and 0.13 < masked.float().mean() < 0.17
    assert (labels[masked] < 128).all()
    again, other, later = (
        task.batch(text, 0, 0)[0],
        task.batch(text, 1, 0)[0],
        task.batch(text, 0, 1)[0],
    )
    assert (tokens == again).all() and (tokens != other).any() and (tokens != later).any()


def test_rates_are_chosen_on_other_bytes_than_are_reported():
    places = torch.arange(STRETCHES * 41)  # every byte says where it is
    task = type(TASKS["gpt_small"])(GPTConfig(context=4), rows=400, steps=1)
    validation, test = (
        {
            int(place)
            for x, _ in task.held_out(Corpus("", places, places), part)
            for place in x.flatten()
        }
        for part in ("validation", "test")
    )
    assert len(validation) > STRETCHES * 18 and len(test) > STRETCHES * 18 and not validation & test


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 3, 2.0: 2, 4.0: 3, 8.0: 4}, None),
        ({1.0: 2, 2.0: 3, 4.0: 4, 8.0: 4}, 0.5),
        ({1.0: 5, 2.0: 4, 4.0: 3, 8.0: 2}, 16.0),
        ({1.0: 5, 2.0: 4, 4.0: 3, 8.0: 2, 16.0: INFINITE}, None),
        (dict.fromkeys([1.0, 2.0, 4.0, 8.0], INFINITE), 0.5),
        # three more are enough
        ({1.0: 9, 2.0: 8, 4.0: 7, 8.0: 6, 16.0: 5, 32.0: 4, 64.0: 3}, None),
    ],
)
def test_a_sweep_goes_on_while_the_best_is_at_an_edge(losses, expected):
    assert next_rate(losses, started_with=4) == expected
    assert next_rate(losses, started_with=4, extensions=0) is None


def make_run(
    out: Path,
    method: str,
    seed: int,
    held_out: dict[int, float],
    seconds: float,
    *,
    rate=0.001,
    last=5.0,
    task="gpt_small",
):
    """A run of 40 steps with held-out losses at some of them."""
    steps = range(1, 41)
    rows = [
        {"step": n, "seconds": n * seconds, "loss": 5.0, "step_seconds": seconds} for n in steps
    ]
    for step, loss in held_out.items():
        rows[step - 1]["held_out_loss"] = loss
    rows[-1]["loss"] = last
    for final in (False, True):  # as if the race had gone as the sweep did
        write(Job(task, method, rate, seed, final).path(out), rows)


def test_the_report_on_curves_made_by_hand(tmp_path):
    make_run(tmp_path, "adamw", 0, {10: 4.0, 20: 3.0, 30: 2.5, 40: 2.0}, 0.1)
    make_run(tmp_path, "adamw", 0, {40: 2.1}, 0.1, rate=0.002)  # within 5 %
    make_run(tmp_path, "adamw", 0, {40: 2.2}, 0.1, rate=0.004)
    make_run(tmp_path, "adamw", 0, {40: 2.0}, 0.1, rate=0.008, last=8.0)  # diverged
    make_run(tmp_path, "adamw", 1, {10: 4.0, 20: 3.0, 30: 2.5, 40: 2.4}, 0.1)
    make_run(tmp_path, "muon", 0, {10: 3.0, 20: 2.5, 30: 2.2, 40: 2.1}, 0.15)
    make_run(tmp_path, "muon", 1, {10: 3.0, 20: 2.6, 30: 2.2, 40: 2.1}, 0.15)
    make_run(tmp_path, "kfac_sgd", 0, {40: 2.0}, 0.2, last=math.nan)
    make_run(tmp_path, "kfac_adamw", 0, {10: 1.9, 20: 1.8, 30: 1.8, 40: 1.7}, 0.2)
    make_run(tmp_path, "kfac_adamw", 1, {10: 2.5, 20: 2.3, 30: 1.8, 40: 1.7}, 0.2)
    text = convergence_report.report(tmp_path)
    with open(tmp_path / "summary.csv", newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}

    def numbers(method: str, *names: str) -> list[float]:
        return [float(rows[method][name]) for name in names]

    assert numbers("adamw", "rate", "seeds", "final_mean", "final_min", "final_max") == [
        0.001,
        2,
        2.2,
        2.0,
        2.4,
    ]
    assert numbers("adamw", "good_rate_low", "good_rate_high", "good_rates_at_edge") == [
        0.001,
        0.002,
        1,
    ]
    assert rows["adamw"]["diverged_rates"] == "0.008" and numbers("adamw", "rates", "overhead") == [
        4,
        1,
    ]
    # muon: seed 0 ends above AdamW's 2.0; seed 1 reaches 2.4 half way between 2.6 at 20 and 2.2 at
    # 30
    assert numbers("muon", "compared", "reached") == [2, 1]
    close(numbers("muon", "steps_to_base", "steps_fraction"), [25, 25 / 40])
    close(numbers("muon", "seconds_fraction", "overhead"), [25 * 0.15 / 4, 1.5])
    close(numbers("muon", "step_seconds_median", "step_seconds_mean"), [0.15, 0.15])
    assert rows["kfac_sgd"]["seeds"] == "0" and rows["kfac_sgd"]["rate"] == ""
    # kfac_adamw: at the first evaluation; half way between 10 and 20
    close(numbers("kfac_adamw", "steps_to_base", "steps_fraction_min"), [12.5, 10 / 40])
    close(
        numbers("kfac_adamw", "steps_fraction_max", "seconds_fraction"), [15 / 40, 12.5 * 0.2 / 4]
    )
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert (
        "25, 1 of 2 seeds | 0.63 (0.63 to 0.63) | 0.94" in lines["muon"]
        and "all diverged" in lines["kfac_sgd"]
    )
    assert list(lines)[2:] == ["adamw", "muon", "kfac_sgd", "kfac_adamw"]
    # -0.1 and +0.3: a mean of 0.1, a standard deviation of 0.2828
    assert (
        "- gpt_small, adamw minus muon: +0.100, s.e. 0.200, 2 seeds" in text
        and "minus kfac_sgd" not in text
    )
    assert "muon reaches adamw's loss with 1 of 2 seeds" in text
    # Muon's 2.1 of both seeds is a third of the way from 1.9, never before 10, and at 20 + 10 x 0.2
    # / 0.5
    assert "kfac_adamw is at muon's in 0.42 (0.25 to 0.60) of its steps" in text


def test_steps_to_one_loss_against_the_batch(tmp_path):
    for task, scale in (("gpt_small", 1.0), ("gpt_small_8k", 2.0)):
        make_run(
            tmp_path, "adamw", 0, {20: 3.0, 40: 1.0 + scale}, 0.1, task=task
        )  # at the larger batch it ends too high
        make_run(tmp_path, "kfacadamw_unrotated", 0, {20: 3.0, 40: 2.0}, 0.1, task=task)
        make_run(tmp_path, "kfacadamw", 0, {10: 3.0, 20: 3.0 - scale, 40: 1.0}, 0.1, task=task)
    make_run(tmp_path, "muon", 0, {40: 9.0}, 0.1)  # at one size only: not in the figure
    found = convergence_report.steps_by_batch(convergence_report.best_runs(read_all(tmp_path)))
    assert found == {
        "adamw": {2048: [40.0]},
        "kfacadamw": {2048: [20.0], 8192: [15.0]},
        "kfacadamw_unrotated": {2048: [40.0], 8192: [40.0]},
    }
    assert "steps to one loss against the batch" in convergence_report.report(tmp_path)
    assert (tmp_path / "batches.png").stat().st_size > 0


def test_rates_by_width_are_those_of_the_sweep(tmp_path):
    make_run(tmp_path, "kfacadamw", 0, {40: 2.0}, 0.1, task="width_64", rate=0.001)
    make_run(tmp_path, "kfacadamw", 0, {40: 1.9}, 0.1, task="width_64", rate=0.002)
    # diverged
    make_run(tmp_path, "kfacadamw", 0, {40: 1.5}, 0.1, task="width_256", rate=0.002, last=9.0)
    make_run(tmp_path, "adamw", 0, {40: 2.0}, 0.1, task="width_64")  # of one width only
    found = convergence_report.losses_by_width(read_all(tmp_path))
    assert found == {
        "kfacadamw": {"width_64": {0.001: 2.0, 0.002: 1.9}, "width_256": {0.002: INFINITE}}
    }
    convergence_report.report(tmp_path)
    assert (tmp_path / "widths.png").stat().st_size > 0


def test_a_loss_that_is_never_reached(tmp_path):
    make_run(tmp_path, "adamw", 0, {20: 3.0, 40: 2.0}, 0.1)
    make_run(tmp_path, "muon", 0, {20: 3.0, 40: 2.01}, 0.1)
    run = read(Job("gpt_small", "muon", 0.001, 0), tmp_path)
    assert convergence_report.crossing(run, 2.0, "step") is None
    close(convergence_report.crossing(run, 2.505, "seconds"), 3.0)
    assert "not reached" in convergence_report.report(tmp_path)


def test_runs_of_other_settings_are_refused(tmp_path):
    check_settings(tmp_path, "tiny", "adamw", {"model": 1})
    check_settings(tmp_path, "tiny", "adamw", {"model": 2})  # nothing was made with the first
    write(tmp_path / "runs/tiny/adamw_lr0.001_seed0.csv", [dict.fromkeys(COLUMNS, 1.0)])
    for packed in (False, True):
        check_settings(tmp_path, "tiny", "adamw", {"model": 2})
        with pytest.raises(ValueError, match="other settings \\(model\\)"):
            check_settings(tmp_path, "tiny", "adamw", {"model": 3})
        if not packed:
            pack(tmp_path)
            shutil.rmtree(tmp_path / "runs")
    check_settings(tmp_path, "tiny", "muon", {"model": 3})


def test_a_packed_folder_says_the_same(tmp_path):
    make_run(tmp_path, "adamw", 0, {10: 4.0, 20: 1.5, 40: 2.0}, 0.1)
    make_run(tmp_path, "adamw", 1, {10: 4.0, 40: 2.5}, 0.1)
    make_run(tmp_path, "adamw", 0, {20: 2.0}, 0.1, rate=0.002, last=math.inf)
    make_run(tmp_path, "muon", 0, {10: 2.0, 40: 1.0}, 0.3, rate=0.02)
    make_run(tmp_path, "no_longer_there", 0, {40: 3.0}, 0.3, task="mlm")
    before, text = {run.job: run for run in read_all(tmp_path)}, convergence_report.report(tmp_path)
    pack(tmp_path)
    first = {path.name: path.read_text() for path in tmp_path.glob("*.csv")}
    shutil.rmtree(tmp_path / "runs")
    pack(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == first
    after = {run.job: run for run in read_all(tmp_path)}
    assert list(after) == list(before) and convergence_report.report(tmp_path) == text
    assert [row["step"] for row in after[Job("gpt_small", "adamw", 0.001, 0)].rows] == [
        1,
        10,
        20,
        40,
    ]
    for job, run in after.items():
        assert (run.final, run.diverged, run.rows[-1]["seconds"]) == (
            before[job].final,
            before[job].diverged,
            before[job].rows[-1]["seconds"],
        )
        assert not job.final or run.held_out()[0]["step"] == before[job].held_out()[0]["step"]
        assert not job.final or run.step_seconds == before[job].step_seconds


def test_a_key_that_is_newer_than_the_runs(tmp_path):
    def check(kfac, **config):
        settings = {"config at rate 1": {"kfac": config}, "kfac with defaults": kfac}
        check_settings(tmp_path, "tiny", "kfacadamw", settings)

    check({"factor": {"decay": 0.95}, "report": "full"})
    write(tmp_path / "runs/tiny/kfacadamw_lr0.001_seed0.csv", [dict.fromkeys(COLUMNS, 1.0)])
    check({"factor": {"decay": 0.95, "rows": None}, "report": "full", "adaptive": None})
    with pytest.raises(ValueError, match="config at rate 1"):
        check(
            {"factor": {"decay": 0.95, "rows": 9}, "report": "full", "adaptive": None},
            factor={"rows": 9},
        )
    for kfac in ({"factor": {"decay": 0.9}, "report": "full"}, {"factor": {"decay": 0.95}}):
        with pytest.raises(ValueError, match="kfac with defaults"):
            check(kfac)


@pytest.mark.parametrize("folder", ["carried", "knobs", "table", "widths"])
def test_pages_are_what_the_packed_runs_say(tmp_path, folder):
    shutil.copytree(
        ROOT / "benchmarks/results" / folder,
        tmp_path / folder,
        ignore=shutil.ignore_patterns("runs"),
    )
    page = convergence.page(tmp_path / folder)
    assert page == (ROOT / f"benchmarks/results/{folder}.md").read_text()
    for path in (tmp_path / folder).glob("*.csv"):
        assert path.read_text() == (ROOT / "benchmarks/results" / folder / path.name).read_text()


def test_results_stay_small():
    names = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, text=True, capture_output=True
    )
    if names.returncode or not names.stdout:
        pytest.skip("no clone")
    paths = [ROOT / name for name in names.stdout.splitlines()]
    assert len(paths) <= 130 and sum(path.stat().st_size for path in paths) <= 6e6
