"""SGD, K-FAC into SGD and KFACAdamW on CIFAR-10, each at its best rate: epochs and seconds to SGD's
final accuracy.

    python -m benchmarks.cifar --data PATH [--batch 1024] [--seconds 500]    # again, until it says that all is done
    python -m benchmarks.cifar --data PATH --dry-run                         # what is to be done, and what it takes
    python -m benchmarks.cifar --data PATH --model resnet8 --images 20000 --batch 512 --epochs 7.68 --parts 1   # a CPU

A sweep of rates by seed 0 and the shortest schedule, then every method at its best rate over each
part of the epochs with each seed. A call makes runs until its seconds are over, saves the one it is
in, and goes on with it next time, as it does after a kill. Rows are in OUT/MODEL_bBATCH/runs as
they come, in one csv of that folder when the call ends, the page beside it.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cifar import report
from benchmarks.cifar.jobs import DEFAULT_METHODS, METHODS, Runs, unfinished

OUT = Path(__file__).resolve().parents[1] / "results/cifar"
ASSUMED = {"cuda": 20_000, "cpu": 300}
"""Images a second of SGD, before any run was timed."""
FACTORS = {
    "kfac_sc20": 3.0,
    "kfac_kaisa": 1.4,
    "kfac_own": 1.3,
    "kfacadamw": 1.6,
    "kfacadamw_decay": 1.6,
}
"""Steps of SGD that one of another method is assumed to take."""
LEFT = 5.0
"""Seconds without which no run is begun."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        help="as of examples/train_images.py: CIFAR's folder, or one or an archive of images",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--epochs", type=float, default=30.0, help="of the longest schedule")
    parser.add_argument(
        "--parts",
        nargs="+",
        type=float,
        default=[1.0, 0.6, 0.5],
        help="of the epochs, for schedules",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT_METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--images", type=int, help="so many of the training part; default: all")
    parser.add_argument(
        "--held-out", type=int, help="so many of the held-out part, evenly spread; default: all"
    )
    parser.add_argument("--evaluations", type=int, default=30, help="in the longest schedule")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which the call saves and ends"
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--report", action="store_true", help="write the page and the plot only")
    return parser.parse_args(argv)


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keep runs of other settings out of the folder. Raises ValueError."""
    path = folder / "settings.json"
    before = json.loads(path.read_text()) if path.exists() else settings
    if before != settings:
        different = [key for key in settings if before.get(key) != settings[key]]
        raise ValueError(
            f"{path}: these runs were made with other settings ({', '.join(different)}); use "
            f"another --out"
        )
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")


def write_page(runs: Runs, about: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    runs.pack()
    text = report.page(runs, about, arguments.batch, arguments.parts, arguments.seeds)
    if runs.packed.exists():
        (arguments.out / f"{runs.folder.name}.md").write_text(text)
    print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    ends = time.monotonic() + arguments.seconds
    folder = arguments.out / f"{arguments.model}_b{arguments.batch}"
    runs = Runs(folder)
    if arguments.report:
        write_page(runs, json.loads((folder / "settings.json").read_text()), arguments)
        return
    from deepspeed.accelerator import get_accelerator

    from benchmarks.cifar import run
    from examples import images

    data = images.load(arguments.data)
    if data.train.pixels is None:
        raise ValueError(
            f"--data {arguments.data}: images above {images.IN_MEMORY} pixels are not kept in "
            f"memory"
        )
    if arguments.images is not None:
        data = data.first(arguments.images)
    if arguments.held_out is not None:
        data = data.tested_on(arguments.held_out)
    gpu = get_accelerator().device_name() != "cpu"
    data = data.to(get_accelerator().current_device_name()) if gpu else data
    task = run.Task(
        arguments.model,
        arguments.batch,
        arguments.epochs,
        arguments.evaluations,
        data,
        2000 if gpu else 250,
    )
    device = get_accelerator().device_name() if not gpu else run.torch.cuda.get_device_name()
    about = {
        "data": data.name,
        "held out": len(data.held_out),
        "batch": task.batch,
        "epochs": task.epochs,
        "device": device,
    }

    def jobs() -> list:
        return list(
            unfinished(runs, arguments.methods, task.batch, arguments.parts, arguments.seeds)
        )

    if arguments.dry_run:
        each = task.batch / ASSUMED["cuda" if gpu else "cpu"]
        assumed = {method: each * FACTORS.get(method, 1.0) for method in METHODS}
        print(
            "\n".join(
                report.progress(runs, jobs(), {job: task.steps(job) for job in jobs()}, assumed)
            )
        )
        return
    check_settings(folder, about)
    run.start()
    warm = set()
    while todo := jobs():
        job = todo[0]
        if time.monotonic() > ends - LEFT:
            break
        if job.method not in warm:
            run.warm_up(task, job)
            warm.add(job.method)
        done = run.train(task, job, runs, ends)
        rows = (
            report.read(runs.path(job) if done else runs.partial(job))
            if done or runs.partial(job).exists()
            else []
        )
        state = "ended" if done else "saved, goes on in the next call"
        figures = " ".join(
            f"{key} {value:.4g}" for key, value in (rows[-1] if rows else {}).items()
        )
        print(f"{job.name}: {state}; {figures}", flush=True)
    write_page(runs, about, arguments)
    print(
        f"{len(todo)} runs are left: the same command goes on" if todo else "all runs are done",
        flush=True,
    )


if __name__ == "__main__":
    import os
    import sys

    try:
        main()
        status = 0
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort at exit
