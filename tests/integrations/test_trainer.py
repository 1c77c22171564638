"""transformers' Trainer itself: unequally many labels on ranks and micro-batches, evaluation first,
reporters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.deepspeed.test_moving import converted
from tests.ranks import free_port, run_ranks

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed


def test_unequal_labels_make_the_same_factors_and_weights_as_the_whole_batch(tmp_path):
    def run(world: int, accumulation: int) -> dict:
        payload = (str(tmp_path), accumulation)
        return run_ranks(
            "tests.integrations.trainer_runs:labels_worker", world=world, payload=payload
        )[0]

    whole, found = run(1, 1), run(2, 4)
    assert len(whole["traces"]) == 15
    traces = max(abs(found["traces"][key] / trace - 1) for key, trace in whole["traces"].items())
    weights = max(
        float((found["weights"][n] - w).norm() / w.norm()) for n, w in whole["weights"].items()
    )
    # fp32 sums over eight micro-batches
    assert traces < 1e-3 and weights < 1e-3, (traces, weights)
    assert all(torch.isfinite(w).all() for w in found["weights"].values())


@pytest.mark.parametrize("kind", ["compute_loss_func", "label_smoothing_factor", "SFTTrainer"])
def test_a_sum_that_is_divided_outside_makes_the_same_factors_as_the_whole_batch(kind, tmp_path):
    pytest.importorskip("trl")
    whole, found = (
        run_ranks(
            "tests.integrations.trainer_runs:outside_worker",
            world=w,
            payload=(str(tmp_path), kind, many),
        )[0]
        for w, many in ((1, 1), (2, 4))
    )
    assert len(whole) == 15
    apart = {key: found[key] / trace for key, trace in whole.items() if trace}
    # by a mean over labels they are 3.6 to 4.7
    assert all(abs(ratio - 1) < 1e-3 for ratio in apart.values()), apart


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallelism_makes_the_same_factors_as_the_whole_batch(stage, tmp_path):
    """Its labels are shifted before they are cut, and losses of the ranks are gathered, chosen and
    weighed."""
    whole, found = (
        run_ranks(
            "tests.integrations.trainer_runs:sequence_worker",
            world=n,
            payload=(str(tmp_path), stage, n),
        )[0]
        for n in (1, 2)
    )
    assert len(whole["traces"]) == 24
    apart = {key: found["traces"][key] / trace for key, trace in whole["traces"].items() if trace}
    bound = 1e-3  # of ratios that were 0.6 to 6.4
    assert all(abs(ratio - 1) < bound for ratio in apart.values()), apart
    weights = max(
        float((found["weights"][n] - w).norm() / w.norm()) for n, w in whole["weights"].items()
    )
    assert weights < bound, weights


def test_evaluation_may_come_first(tmp_path):
    results = run_ranks(
        "tests.integrations.trainer_runs:evaluation_worker", world=2, payload=str(tmp_path)
    )
    before, after, steps = results[0]
    assert steps == 2 and after < before


def test_an_object_that_the_trainer_drops_is_an_error(tmp_path):
    said = run_ranks(
        "tests.integrations.trainer_runs:object_worker", world=1, payload=str(tmp_path)
    )[0]
    assert said.startswith("ds_kfac: a KFACAdamW was made for 21 of the parameters"), said
    assert "optimizer_cls_and_kwargs=" in said


@pytest.mark.parametrize("by_hand", [False, True])
def test_metrics_reach_the_trainers_reporters_without_a_line(by_hand, tmp_path):
    pytest.importorskip("tensorboard")
    payload = (str(tmp_path), by_hand)
    names = run_ranks("tests.integrations.trainer_runs:reporter_worker", world=1, payload=payload)[
        0
    ]
    expected = {
        "loss",
        *(f"kfac/{name}" for name in ("nu", "kl", "stepped", "curved", "eigenvalue_spread")),
    }
    assert {f"train/{name}" for name in expected} <= set(names), names


SCRIPT = """
import transformers
transformers.logging.set_verbosity_error()
from tests.integrations.trainer_runs import trainer_of
trainer_of({folder!r}, accumulation=1, micro=4, log_level="error").train()
"""


def test_the_summary_is_seen_once_under_run_whatever_frameworks_mute(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    command = [
        sys.executable,
        "-m",
        "ds_kfac",
        "run",
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        [*command, str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (
        run.stderr.count("of the trained matrix parameters") == 1 and "K-FAC" not in run.stdout
    ), run.stderr


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "KFACAdamW"])
def test_a_running_job_moves_to_the_other_optimizer(kind, stage, tmp_path):
    """At stage 0 as it is; at the others after the command and the key of the config that the error
    names."""
    other = {"AdamW": "KFACAdamW", "KFACAdamW": "AdamW"}[kind]

    def run(kind: str, resumes: bool) -> dict:
        payload = (str(tmp_path), stage, kind, resumes, resumes and stage > 0)
        return run_ranks("tests.integrations.trainer_runs:moving_worker", world=1, payload=payload)[
            0
        ]

    saved = run(kind, False)
    if stage:
        converted([tmp_path / "checkpoint-2" / "global_step2"])
    moved = run(other, True)
    assert all(torch.equal(moved["begun"][name], w) for name, w in saved["ended"].items()), (
        "the saved weights"
    )
    assert (moved["at"], moved["step"]) == (2, 4)
    assert moved["kfac steps"] == (2 if other == "KFACAdamW" else None)
    assert moved["decay"] == (1.0 if other == "KFACAdamW" else 0.01), "the new config's"
    assert any(not torch.equal(moved["ended"][name], w) for name, w in saved["ended"].items())


@pytest.mark.parametrize("kind", ["AdamW", "KFACAdamW"])
def test_a_job_that_was_not_converted_is_told_how(kind, tmp_path):
    other = {"AdamW": "KFACAdamW", "KFACAdamW": "AdamW"}[kind]
    worker = "tests.integrations.trainer_runs:moving_worker"
    run_ranks(worker, world=1, payload=(str(tmp_path), 2, kind, False, False))
    for universal in (False, True):
        said = run_ranks(worker, world=1, payload=(str(tmp_path), 2, other, True, universal))[0][
            "error"
        ]
        assert (
            f"ds_to_universal --inject_missing_state --input_folder "
            f"{tmp_path}/checkpoint-2/global_step2 " in said
        )
        assert ("take that out" in said) == universal, said


@pytest.mark.parametrize(
    ("door", "kind", "prefix"),
    [
        ("Trainer", "tensorboard", "train/kfac/"),
        ("Trainer", "wandb", "train/kfac/"),
        ("Trainer", "mlflow", "kfac/"),
        ("monitor", "tensorboard", "kfac/"),
        ("monitor", "wandb", "kfac/"),
    ],
)
def test_every_logger_has_our_numbers_once_and_constants_at_the_start_alone(
    door, kind, prefix, tmp_path
):
    pytest.importorskip(kind)
    payload = (str(tmp_path), door, kind)
    found = run_ranks("tests.integrations.trainer_runs:logged_worker", world=1, payload=payload)[0]
    ours = {name: values for name, values in found.items() if "kfac" in name}
    assert all(name.startswith(prefix) for name in ours), ours
    for name, count in {
        "stepped": 1,
        "curved": 1,
        "nu": 3,
        "kl": 3,
        "eigenvalue_spread": 3,
    }.items():
        assert len(ours[prefix + name]) == count, (name, ours)
    assert ("kfac/refreshes" in ours) == (door == "monitor"), "which has all counters"
