"""A run that goes on with the other optimizer after half of its steps, both ways, beside those that
stay.

The picture and the table of docs/howto/resume_and_move.md:

    python -m benchmarks.moving --out runs/moving            # 1,800 steps of a small GPT a seed, on one thread
    python -m benchmarks.moving --out runs/moving --draw docs/howto/moving.png

A run that is there already is not made again.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HALF = 300
MODEL = ("--width", "64", "--blocks", "2", "--heads", "2")
"""140 thousand parameters: a run is a minute or two."""
ROOT = Path(__file__).parent.parent
KINDS = ("adamw", "kfacadamw")
OPTIMIZERS = {
    "adamw": {
        "type": "AdamW",
        "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True},
    },
    "kfacadamw": {
        "type": "KFACAdamW",
        "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 1.0, "torch_adam": True},
    },
}
"""As docs/howto/resume_and_move.md has them."""
LABELS = {
    "adamw": "AdamW",
    "kfacadamw": "KFACAdamW",
    "adamw-kfacadamw": "AdamW, then KFACAdamW",
    "kfacadamw-adamw": "KFACAdamW, then AdamW",
}
"""Run -> what it is called."""
STYLE = {
    "adamw": "#E69F00",
    "kfacadamw": "#0072B2",
    "adamw-kfacadamw": "#009E73",
    "kfacadamw-adamw": "#CC79A7",
}
"""Okabe and Ito's colours."""


def config_of(kind: str, *, moves: bool) -> dict[str, Any]:
    steps = {
        "total_num_steps": 2 * HALF,
        "warmup_num_steps": 42,
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.01,
    }
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": OPTIMIZERS[kind],
        "zero_optimization": {"stage": 2},
        "scheduler": {"type": "WarmupCosineLR", "params": {**steps, "warmup_type": "linear"}},
        "kfac": {"enabled": kind == "kfacadamw"},
        **({"checkpoint": {"load_universal": True}} if moves else {}),
    }


def train(out: Path, name: str, kind: str, seed: int, *more: str, moves: bool = False) -> None:
    config = out / f"{name}.json"
    config.write_text(json.dumps(config_of(kind, moves=moves)))
    job = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    command = [
        sys.executable,
        str(ROOT / "examples/train_gpt.py"),
        "--deepspeed_config",
        str(config),
        "--name",
        name,
    ]
    command += [
        *MODEL,
        "--out",
        str(out),
        "--steps",
        str(2 * HALF),
        "--seed",
        str(seed),
        "--no-plots",
        *more,
    ]
    subprocess.run(
        command,
        env={**os.environ, **job, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
    )


def convert(tag: Path) -> None:
    given = [
        "--input_folder",
        str(tag),
        "--output_folder",
        f"{tag}_universal",
        "--inject_missing_state",
    ]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *given, *workers], check=True
    )


def measure(out: Path, seed: int) -> None:
    """All four runs of a seed."""
    out.mkdir(parents=True, exist_ok=True)
    tag = f"global_step{HALF}"
    for kind in KINDS:
        name = f"{kind}-{seed}"
        if not (out / name / "checkpoints" / f"global_step{2 * HALF}").exists():
            train(out, name, kind, seed, "--save-interval", str(HALF))
    for first, then in (KINDS, KINDS[::-1]):
        saved, name = out / f"{first}-{seed}", f"{first}-{then}-{seed}"
        if last_step(out / name) == 2 * HALF:
            continue
        if not (saved / "checkpoints" / f"{tag}_universal").exists():
            convert(saved / "checkpoints" / tag)
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir()
        (out / name / "checkpoints").symlink_to((saved / "checkpoints").absolute())
        shutil.copy(saved / "metrics.csv", out / name)
        train(out, name, then, seed, "--resume", moves=True)


def last_step(run: Path) -> int:
    points = curve(run)
    return max(points) if points else 0


def curve(run: Path) -> dict[int, float]:
    """Step -> held-out loss."""
    if not (run / "metrics.csv").is_file():
        return {}
    with open(run / "metrics.csv", newline="") as file:
        return {
            int(row["step"]): float(row["held_out_loss"])
            for row in csv.DictReader(file)
            if row["held_out_loss"]
        }


def curves(out: Path, seeds: list[int]) -> dict[str, dict[int, list[float]]]:
    """Run -> step -> the losses of all seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    for name in LABELS:
        each = [curve(out / f"{name}-{seed}") for seed in seeds]
        found[name] = {step: [own[step] for own in each] for step in each[0]}
    return found


def table(found: dict[str, dict[int, list[float]]]) -> str:
    steps = [HALF, HALF + 25, HALF + 50, HALF + 100, 2 * HALF]
    rows = [
        "| held-out loss after step | " + " | ".join(map(str, steps)) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for name, label in LABELS.items():
        rows.append(
            f"| {label} | "
            + " | ".join(f"{statistics.fmean(found[name][step]):.3f}" for step in steps)
            + " |"
        )
    return "\n".join(rows)


def draw(found: dict[str, dict[int, list[float]]], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.pictures import save

    figure, axis = plt.subplots(figsize=(7, 4))
    for name, label in LABELS.items():
        points = {step: own for step, own in found[name].items() if "-" not in name or step >= HALF}
        means = [statistics.fmean(own) for own in points.values()]
        dashed = "--" if "-" in name else "-"
        axis.plot(list(points), means, dashed, color=STYLE[name], label=label)
        axis.fill_between(
            list(points),
            [*map(min, points.values())],
            [*map(max, points.values())],
            color=STYLE[name],
            alpha=0.15,
            linewidth=0,
        )
    axis.axvline(HALF, color="0.6", linewidth=1)
    seeds = len(next(iter(found["adamw"].values())))
    axis.set(
        xlabel="step",
        ylabel="held-out loss [nats per byte]",
        ylim=(None, 2.8),
        xlim=(50, 2 * HALF),
        title=f"A move at step {HALF} ends between the runs that stay (mean, range of {seeds} "
        f"seeds)",
    )
    axis.title.set_fontsize(10)
    axis.grid(alpha=0.3)
    axis.legend()
    return save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/moving"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", type=Path, help="write the picture and print the table; no runs")
    arguments = parser.parse_args()
    if arguments.draw is None:
        for seed in arguments.seeds:
            measure(arguments.out, seed)
    found = curves(arguments.out, arguments.seeds)
    print(table(found))
    if arguments.draw is not None:
        print(draw(found, arguments.draw))


if __name__ == "__main__":
    main()
