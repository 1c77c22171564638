"""The main job as a user runs it: every config, three optimizers, wrong input. Small models, few
steps. Resuming is in test_train_images.py: both have it of examples/job.py."""

import json
import re
from pathlib import Path

import pytest

from tests.examples.runs import arguments_of, assert_trains, losses_of, rows_of, run
from tests.programs import python
from tests.ranks import ROOT

pytestmark = pytest.mark.distributed
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("gpt_*_kfac.json"))
TINY = {"width": 16, "blocks": 2, "heads": 2, "context": 16, "eval_batches": 1}


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    lines = (f"line {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(3000))
    path.write_text("\n".join(lines))
    return path


def test_every_config_trains_and_writes_its_run(tmp_path, data):
    assert {f"gpt_zero{stage}_kfac" for stage in range(4)} <= set(CONFIGS)
    options = {"data": data, "steps": 6, "eval_interval": 3, "save_interval": 5, **TINY}
    assert_trains("train_gpt", *(arguments_of(tmp_path, name, **options) for name in CONFIGS))
    for name in CONFIGS:
        rows, losses = rows_of(tmp_path / name), losses_of(tmp_path / name)
        assert len(losses) == 6 and losses[-1] < losses[0], (name, losses)
        assert all(2 < loss < 6.5 for loss in losses), (name, losses)
        assert [bool(row["held_out_loss"]) for row in rows] == [False, False, True] * 2
        assert all(float(row["seconds_precondition"]) > 0 for row in rows)
        for file in (
            "loss_by_step.png",
            "loss_by_seconds.png",
            "step_time.png",
            "checkpoints/global_step6/kfac/latest",
            "csv_monitor/kfac_refreshes.csv",
        ):
            assert (tmp_path / name / file).stat().st_size > 0, (name, file)
        assert list((tmp_path / name / "tensorboard").iterdir())


def test_experts_in_one_tensor_train_by_three_optimizers(tmp_path, data):
    """``make train-moe``."""
    options = {"data": data, "steps": 4, "experts": 4, "eval_interval": 2, **TINY}
    runs = {
        "moe": arguments_of(tmp_path, "gpt_zero2_kfac", "--no-plots", **options),
        "adamw": arguments_of(
            tmp_path, "gpt_zero2_kfac", "--no-plots", "--without-kfac", **options
        ),
        "muon": arguments_of(tmp_path, "gpt_zero2_muon", "--no-plots", **options),
    }
    assert_trains("train_gpt", *([*run, "--name", name] for name, run in runs.items()))
    for name in runs:
        losses = losses_of(tmp_path / name)
        assert len(losses) == 4 and all(2 < loss < 6.5 for loss in losses), (name, losses)
    folders = [str(tmp_path / name) for name in runs]
    command = ["examples/plots.py", *folders, "--out", str(tmp_path / "compare")]
    said = python(*command, folder=ROOT, path=str(ROOT)).stdout
    assert len(list((tmp_path / "compare").glob("*.png"))) == 3
    assert re.search(r"^muon +4 +", said, re.M), said


def assert_one_clear_line(code: int, output: str, message: str) -> None:
    assert code == 2 and message in output and "Traceback" not in output, output
    assert len([line for line in output.splitlines() if line.startswith("error: ")]) == 1, output


def test_wrong_input_is_one_clear_line(tmp_path, data):
    small, nowhere, broken, misspelt = (tmp_path / name for name in "abcd")
    small.write_text("too short")
    broken.write_text("{")
    config = json.loads((ROOT / "configs/gpt_zero2_kfac.json").read_text())
    misspelt.write_text(json.dumps(config | {"kfac": {"damping": {"vlaue": 1}}}))
    cases = {
        "no such file or folder": ("gpt_zero2_kfac", nowhere),
        "is too little; windows of 16 bytes need at least": ("gpt_zero2_kfac", small),
        "no such file": (nowhere, data),
        "not JSON": (broken, data),
        "kfac.damping.vlaue: unknown key; did you mean kfac.damping.value?": (misspelt, data),
    }
    runs = [arguments_of(tmp_path, given, data=text, **TINY) for given, text in cases.values()]
    results = run("train_gpt", *runs, world=1)
    for message, (code, output) in zip(cases, results, strict=True):
        assert_one_clear_line(code, output, message)


def test_without_a_launcher_one_line_says_how_to_start_it(tmp_path, data):
    arguments = arguments_of(tmp_path, "gpt_zero2_kfac", data=data, **TINY)
    done = python("examples/train_gpt.py", *arguments, folder=ROOT, path=str(ROOT), status=2)
    told = "no launcher environment (RANK is not set); start with: deepspeed --num_accelerators 2"
    assert_one_clear_line(done.returncode, done.stderr, told)
