"""The main job as a user runs it: every config, the launcher, a killed run, wrong input. Small
models, few steps."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, free_port, run_ranks

pytestmark = pytest.mark.distributed
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("gpt_*_kfac.json"))
TINY = ["--width", "16", "--blocks", "2", "--heads", "2", "--context", "16", "--eval-batches", "1"]


def make_corpus(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(
        "\n".join(
            f"line {i}: the quick brown fox jumps over {i * i} lazy dogs" for i in range(3000)
        )
    )
    return path


def rows_of(run: Path) -> list[dict]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def configs_worker(payload) -> dict:
    """Run the example's main() for every config in one process; fp16 needs the CPU to pretend."""
    from deepspeed.accelerator import get_accelerator

    from examples import train_gpt

    data, out, names = payload
    get_accelerator().is_fp16_supported = lambda: True
    codes = {}
    for name in names:
        argv = [
            "--deepspeed_config",
            str(ROOT / f"configs/{name}.json"),
            "--data",
            data,
            "--out",
            out,
            "--steps",
            "6",
        ]
        codes[name] = train_gpt.main([*argv, *TINY, "--eval-interval", "3", "--save-interval", "5"])
    return codes


def test_every_config_trains_and_writes_its_run(tmp_path):
    assert {f"gpt_zero{stage}_kfac" for stage in range(4)} <= set(CONFIGS)
    payload = (str(make_corpus(tmp_path)), str(tmp_path), CONFIGS)
    for codes in run_ranks(
        "tests.examples.test_train_gpt:configs_worker", world=2, payload=payload
    ):
        assert codes == dict.fromkeys(CONFIGS, 0)
    for name in CONFIGS:
        run = tmp_path / name
        rows = rows_of(run)
        losses = [float(row["loss"]) for row in rows]
        assert (
            len(rows) == 6 and all(2 < loss < 6.5 for loss in losses) and losses[-1] < losses[0]
        ), (name, losses)
        assert [bool(row["held_out_loss"]) for row in rows] == [False, False, True] * 2
        assert all(float(row["seconds_precondition"]) > 0 for row in rows)
        for file in (
            "loss_by_step.png",
            "loss_by_seconds.png",
            "step_time.png",
            "checkpoints/global_step6/kfac/latest",
        ):
            assert (run / file).stat().st_size > 0, (name, file)
        assert (run / "csv_monitor/kfac_refreshes.csv").exists() and list(
            (run / "tensorboard").iterdir()
        )


def mixture_worker(payload) -> list[int]:
    """``make train-moe``, with Muon as Python runs it."""
    import torch._dynamo

    from examples import train_gpt

    data, out = payload
    torch._dynamo.config.disable = True
    argv = [
        "--data",
        data,
        "--out",
        out,
        "--steps",
        "4",
        "--experts",
        "4",
        "--eval-interval",
        "2",
        "--no-plots",
        *TINY,
    ]
    runs = {"moe": ["kfac"], "moe-adamw": ["kfac", "--without-kfac"], "moe-muon": ["muon"]}
    return [
        train_gpt.main(
            [
                *argv,
                "--deepspeed_config",
                str(ROOT / f"configs/gpt_zero2_{kind}.json"),
                "--name",
                name,
                *more,
            ]
        )
        for name, (kind, *more) in runs.items()
    ]


def test_experts_in_one_tensor_train_by_three_optimizers(tmp_path):
    payload = (str(make_corpus(tmp_path)), str(tmp_path))
    assert (
        run_ranks("tests.examples.test_train_gpt:mixture_worker", world=2, payload=payload)
        == [[0, 0, 0]] * 2
    )
    for name in ("moe", "moe-adamw", "moe-muon"):
        losses = [float(row["loss"]) for row in rows_of(tmp_path / name)]
        assert len(losses) == 4 and all(2 < loss < 6.5 for loss in losses), (name, losses)


def launch(*arguments: str, launcher: bool = False, **environment: str) -> subprocess.Popen:
    """One rank without the launcher, or the real launcher."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        **environment,
    }
    script = ["examples/train_gpt.py", *arguments]
    if launcher:
        binary = Path(sys.executable).parent / "deepspeed"
        command = [
            str(binary),
            "--num_accelerators",
            "2",
            "--master_port",
            str(free_port()),
            *script,
        ]
        env["PATH"] = f"{binary.parent}{os.pathsep}{env['PATH']}"
    else:
        command = [sys.executable, *script]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def one_rank() -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def test_killed_and_resumed_equals_unbroken(tmp_path):
    data, config = str(make_corpus(tmp_path)), "configs/gpt_zero2_kfac.json"
    common = [
        "--deepspeed_config",
        config,
        "--data",
        data,
        "--out",
        str(tmp_path),
        *TINY,
        "--steps",
        "40",
    ]
    common += ["--eval-interval", "20", "--save-interval", "5", "--no-plots"]
    unbroken = launch(*common, "--name", "unbroken", **one_rank())
    broken = launch(*common, "--name", "broken", **one_rank())
    latest, deadline = tmp_path / "broken/checkpoints/latest", time.monotonic() + 120
    while time.monotonic() < deadline and broken.poll() is None and not latest.exists():
        time.sleep(0.005)
    os.kill(broken.pid, signal.SIGKILL)
    broken.communicate()
    at_kill = len(rows_of(tmp_path / "broken"))
    assert broken.returncode == -signal.SIGKILL and 5 <= at_kill < 40, at_kill
    assert unbroken.wait(120) == 0, unbroken.communicate()
    resumed = launch(*common, "--name", "broken", "--resume", **one_rank())
    output = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0, output
    first = int(re.search(r"steps (\d+) to 40", output).group(1))
    assert first >= 5 and first % 5 == 0
    losses = [
        [(row["step"], row["loss"], row["held_out_loss"]) for row in rows_of(tmp_path / n)]
        for n in ("unbroken", "broken")
    ]
    assert losses[0] == losses[1]


def test_the_launcher_starts_it(tmp_path):
    data = str(make_corpus(tmp_path))
    arguments = [
        "--deepspeed_config",
        "configs/gpt_zero3_kfac.json",
        "--data",
        data,
        "--out",
        str(tmp_path),
        "--steps",
        "3",
    ]
    process = launch(*arguments, *TINY, launcher=True)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output
    assert (
        output.count("of the trained matrix parameters") == 1
        and "  ZeRO stage 3, float32 parameters" in output
    )
    assert len(rows_of(tmp_path / "gpt_zero3_kfac")) == 3


def main_worker(arguments: list[str]) -> tuple[int, str]:
    """The exit code of the example's main() and what it printed."""
    from examples import train_gpt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        return train_gpt.main(arguments), printed.getvalue()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no data", "no such file or folder"),
        ("small data", "is too little; windows of 16 bytes need at least"),
        ("no config", "no such file"),
        ("not json", "not JSON"),
        ("wrong key", "kfac.damping.vlaue: unknown key; did you mean kfac.damping.value?"),
        (
            "no launcher",
            "no launcher environment (RANK is not set); start with: deepspeed --num_accelerators 2",
        ),
    ],
)
def test_wrong_input_is_one_clear_line(case, message, tmp_path):
    config, data = ROOT / "configs/gpt_zero2_kfac.json", make_corpus(tmp_path)
    if case == "no data":
        data = tmp_path / "nowhere"
    elif case == "small data":
        data.write_text("too short")
    elif case == "no config":
        config = tmp_path / "nowhere.json"
    elif case in ("not json", "wrong key"):
        content = json.loads(config.read_text()) | {"kfac": {"damping": {"vlaue": 1}}}
        config = tmp_path / "bad.json"
        config.write_text("{" if case == "not json" else json.dumps(content))
    arguments = [
        "--deepspeed_config",
        str(config),
        "--data",
        str(data),
        "--out",
        str(tmp_path),
        *TINY,
    ]
    if case == "no launcher":
        process = launch(*arguments)
        output, code = process.communicate(timeout=120)[0], process.returncode
    else:
        (code, output), *_ = run_ranks(
            "tests.examples.test_train_gpt:main_worker", world=1, payload=arguments
        )
    assert code == 2, output
    assert message in output and "Traceback" not in output, output
    assert len([line for line in output.splitlines() if line.startswith("error: ")]) == 1, output


def test_plots_compare_runs(tmp_path):
    for name, slope in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        lines = ["step,seconds,loss,held_out_loss,step_seconds,seconds_forward"]
        lines += [
            f"{i},{i},{5 - slope * i},{5 - slope * i if i % 5 == 0 else ''},1.0,0.5"
            for i in range(1, 21)
        ]
        (tmp_path / name / "metrics.csv").write_text("\n".join(lines))
    command = [
        sys.executable,
        "examples/plots.py",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--out",
        str(tmp_path / "c"),
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(list((tmp_path / "c").glob("*.png"))) == 3 and re.search(
        r"^b +20 +1\.0000", output, re.M
    )
