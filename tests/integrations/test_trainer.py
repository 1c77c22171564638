"""transformers' Trainer itself: unequally many labels on ranks and micro-batches, evaluation first,
another optimizer, reporters."""

import os
import subprocess
import sys

import pytest
import torch

from tests.deepspeed.test_moving import converted
from tests.ranks import ROOT, free_port, run_ranks

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
OTHER = {"AdamW": "KFACAdamW", "KFACAdamW": "AdamW"}


def run(worker: str, payload, *, world: int = 1):
    """The result of rank 0."""
    target = f"tests.integrations.trainer_runs:{worker}_worker"
    return run_ranks(target, world=world, payload=payload)[0]


APART = 1e-3
"""Of the whole batch's: fp32 sums over eight micro-batches differ by less; traces of factors were
0.6 to 6.4 times those of the whole batch where labels were not weighed."""


def assert_alike(found: dict, whole: dict, count: int) -> None:
    """Traces of factors are those of the whole batch."""
    assert found.keys() == whole.keys() and len(whole) == count
    apart = {key: found[key] / trace for key, trace in whole.items() if trace}
    assert all(abs(ratio - 1) < APART for ratio in apart.values()), apart


def assert_same_weights(found: dict, whole: dict) -> None:
    apart = {name: float((found[name] - w).norm() / w.norm()) for name, w in whole.items()}
    assert all(value < APART for value in apart.values()), apart


def test_unequal_labels_make_the_same_factors_and_weights_as_the_whole_batch(tmp_path):
    whole, found = (
        run("labels", (str(tmp_path), parts, "fp32"), world=world)
        for world, parts in ((1, 1), (2, 4))
    )
    assert_alike(found["traces"], whole["traces"], 15)
    assert_same_weights(found["weights"], whole["weights"])


@pytest.mark.parametrize("kind", ["compute_loss_func", "label_smoothing_factor", "SFTTrainer"])
def test_a_sum_that_is_divided_outside_makes_the_same_factors_as_the_whole_batch(kind, tmp_path):
    pytest.importorskip("trl")
    whole, found = (
        run("outside", (str(tmp_path), kind, parts), world=world)
        for world, parts in ((1, 1), (2, 4))
    )
    assert_alike(found, whole, 15)


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallelism_makes_the_same_factors_as_the_whole_batch(stage, tmp_path):
    """Its labels are shifted before they are cut, and losses of the ranks are gathered, chosen and
    weighed."""
    whole, found = (run("sequence", (str(tmp_path), stage, ranks), world=ranks) for ranks in (1, 2))
    assert_alike(found["traces"], whole["traces"], 24)
    assert_same_weights(found["weights"], whole["weights"])


def test_evaluation_may_come_first(tmp_path):
    before, after, steps = run("evaluation", str(tmp_path), world=2)
    assert steps == 2 and after < before


def test_an_object_that_the_trainer_drops_is_an_error(tmp_path):
    said = run("object", str(tmp_path))
    assert said.startswith("ds_kfac: a KFACAdamW was made for 21 of the parameters"), said
    assert "optimizer_cls_and_kwargs=" in said


SCRIPT = """
import transformers
transformers.logging.set_verbosity_error()
from tests.integrations.trainer_runs import trainer_of
trainer_of({folder!r}, log_level="error").train()
"""


def test_the_summary_is_seen_once_under_run_whatever_frameworks_mute(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    launcher = ["run", "--num_accelerators", "2", "--master_port", str(free_port())]
    command = [sys.executable, "-m", "ds_kfac", *launcher, str(script)]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("of the trained matrix parameters") == 1, done.stderr
    assert "K-FAC" not in done.stdout


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", OTHER)
def test_a_running_job_moves_to_the_other_optimizer(kind, stage, tmp_path):
    """At stage 0 as it is; at the others after the command and the key of the config that the error
    names."""
    saved = run("moving", (str(tmp_path), stage, kind, False, False))
    if stage:
        converted([tmp_path / "checkpoint-2" / "global_step2"])
    moved = run("moving", (str(tmp_path), stage, OTHER[kind], True, stage > 0))
    for name, weight in saved["ended"].items():
        assert torch.equal(moved["begun"][name], weight), "the saved weights"
    assert (moved["at"], moved["step"]) == (2, 4)
    to_kfac = OTHER[kind] == "KFACAdamW"
    assert moved["kfac steps"] == (2 if to_kfac else None)
    assert moved["decay"] == (1.0 if to_kfac else 0.01), "the new config's"
    assert any(not torch.equal(moved["ended"][name], w) for name, w in saved["ended"].items())


@pytest.mark.parametrize("kind", OTHER)
def test_a_job_that_was_not_converted_is_told_how(kind, tmp_path):
    run("moving", (str(tmp_path), 2, kind, False, False))
    folder = tmp_path / "checkpoint-2/global_step2"
    command = f"ds_to_universal --inject_missing_state --input_folder {folder} "
    for universal in (False, True):
        said = run("moving", (str(tmp_path), 2, OTHER[kind], True, universal))["error"]
        assert command in said and ("take that out" in said) == universal, said


@pytest.mark.parametrize("door", ["Trainer", "by hand", "monitor"])
def test_a_logger_has_our_numbers_once_and_constants_at_the_start_alone(door, tmp_path):
    pytest.importorskip("tensorboard")
    prefix = "kfac/" if door == "monitor" else "train/kfac/"
    found = run("logged", (str(tmp_path), door))
    ours = {name: values for name, values in found.items() if "kfac" in name}
    assert all(name.startswith(prefix) for name in ours), ours
    counts = {"stepped": 1, "curved": 1, "nu": 3, "kl": 3, "eigenvalue_spread": 3}
    for name, count in counts.items():
        assert len(ours[prefix + name]) == count, (name, ours)
    assert ("kfac/refreshes" in ours) == (door == "monitor"), "which has all counters"
