"""A language model of GPT-2 small's size (135 M parameters) by AdamW, Muon, KFACAdamW with and
without curvature, SOAP.

    python -m benchmarks.gpu_lm --dry-run                  # what each run would take
    python -m benchmarks.gpu_lm a                          # rates: 100 steps of 524,288 tokens
    python -m benchmarks.gpu_lm b --seconds 520            # 350 steps of 524,288 at each method's best rate
    python -m benchmarks.gpu_lm b --rates kfacadamw=2e-3 muon=0.025 adamw=2e-3       # at rates of yours, without a
    python -m benchmarks.gpu_lm c                          # 1,200 steps of 131,072
    python -m benchmarks.gpu_lm d                          # rates, then 400 steps of 131,072, and 280 and 140 of ours
    python -m benchmarks.gpu_lm report

The corpus is the Python sources of the installed packages; the first call makes it. A call ends by
itself within ``--seconds``: the run it was at is saved in ``--out`` and the next call goes on
there. A run that was killed goes on from its last save, or from its start. Finished runs are not
made again; to keep them, copy ``<out>/runs`` and ``<out>/corpus/corpus.json``. ``--sizes small``
rehearses all of it on a CPU. No GPU has run it.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

BEGAN = time.monotonic()
if os.environ.get("DS_ACCELERATOR") == "cpu":  # torch reads it when it is imported
    # Muon's kernels: minutes, and no faster on a CPU
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

from benchmarks.gpu_lm import corpus as corpora  # noqa: E402
from benchmarks.gpu_lm import report  # noqa: E402
from benchmarks.gpu_lm.plan import (  # noqa: E402
    DEFAULT,
    METHODS,
    PARTS,
    RATES_OF,
    SERIES,
    SIZES,
    Job,
    best_jobs,
    fingerprint,
    predicted,
    rate_jobs,
)
from benchmarks.gpu_lm.rows import is_done  # noqa: E402

BETWEEN = 30.0
"""Seconds that must be left for a run to be begun at full sizes."""


def jobs_of(
    options: argparse.Namespace, part: str, methods: Sequence[str], losses: dict[Job, float]
) -> tuple[list[Job], list[str]]:
    """And families for which no rate is known."""
    if part not in RATES_OF:
        jobs = rate_jobs(methods, options.rates, part)
        return jobs[1:2] if options.one_rate else jobs, []
    return best_jobs(part, methods, options.rates, losses, options.seeds)


def dry_run(options: argparse.Namespace, losses: dict[Job, float]) -> None:
    """Every run of every part with seconds on an H100 at full sizes."""
    sizes, total = SIZES[options.sizes], 0.0
    for name, part in PARTS[options.sizes].items():
        jobs = rate_jobs(options.methods, options.rates, name)
        if name in RATES_OF:
            middle = {m: METHODS[m].rates[len(METHODS[m].rates) // 2] for m in options.methods}
            jobs, _ = best_jobs(
                name, options.methods, {**middle, **options.rates}, losses, options.seeds
            )
        tokens = part.steps * part.micro_batches * sizes.rows * sizes.context
        print(
            f"part {name}: {part.steps} steps of {part.micro_batches} x {sizes.rows} x "
            f"{sizes.context} tokens, "
            f"{tokens / 1e6:.1f} M tokens a run"
        )
        for job in jobs:
            total += (seconds := predicted(job, part, sizes))
            print(f"  {job.name:<36} {seconds:5.0f} s, all so far {total / 60:5.1f} min")
    print(
        "seconds: predicted for an H100 from 89.5 ms for forward and backward of 32 x 1024 "
        "tokens; a save is 2.5 GB"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["corpus", "a", "b", "c", "r", "d", "report"], default="a"
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT)
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        metavar="METHOD=RATE",
        help="instead of the best of a or r",
    )
    parser.add_argument("--seeds", type=int, default=1, help="of b, c and d")
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="after which the call has ended"
    )
    parser.add_argument(
        "--save-every", type=float, default=150.0, help="seconds between saves of a run"
    )
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--compile", action="store_true", help="engine.compile(), of all methods")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits each time, slower"
    )
    parser.add_argument("--one-rate", action="store_true", help="of part a only the second run")
    parser.add_argument(
        "--folders", type=Path, nargs="+", default=[], help="of packages; default: site-packages"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_lm"))
    options = parser.parse_args(arguments)
    try:
        options.rates = {
            name: float(rate) for name, rate in (pair.split("=") for pair in options.rates)
        }
        if unknown := set(options.rates) - set(METHODS):
            raise ValueError(f"unknown methods {sorted(unknown)}")
    except ValueError as error:
        parser.error(f"--rates: {error}; got e.g. kfacadamw=2e-3")
    parts, sizes = PARTS[options.sizes], SIZES[options.sizes]
    steps = {name: part.steps for name, part in parts.items()}

    def losses() -> dict[Job, float]:
        return {run.job: run.final for run in report.runs_in(options.out, steps)}

    if options.dry_run:
        dry_run(options, losses())
        return 0
    began = time.monotonic()
    corpus = corpora.make(
        options.out / "corpus",
        vocabulary=sizes.vocabulary,
        most=sizes.most,
        folders=options.folders,
    )
    print(
        f"corpus {corpus.sha256[:16]}, {corpus.encoding}, files {corpus.files}, tokens "
        f"{corpus.tokens}, "
        f"{time.monotonic() - began:.1f} s",
        flush=True,
    )
    failed, unknown = 0, []
    for part, methods in SERIES.get(
        options.part, ((options.part, options.methods),) if options.part in parts else ()
    ):
        jobs, more = jobs_of(
            options, part, [name for name in methods if name in options.methods], losses()
        )
        wrong, done = run(options, part, jobs, corpus)
        failed, unknown = failed + wrong, unknown + more
        print(
            f"part {part}: {done} of {len(jobs)} runs finished, {wrong} failed"
            + ("" if done + wrong == len(jobs) else "; call again to go on"),
            flush=True,
        )
        if done + wrong < len(jobs):
            break
    text = report.write(options.out, options.sizes)
    if options.part == "report":
        print(text)
    for family in unknown:
        print(f"{family}: no rate: run part a, or name one with --rates", flush=True)
    return 1 if failed or unknown else 0


def run(
    options: argparse.Namespace, name: str, jobs: list[Job], corpus: corpora.Corpus
) -> tuple[int, int]:
    """Runs of a part that failed, and that are finished."""
    import torch

    from benchmarks.gpu_lm import train
    from benchmarks.gpu_lm.train import Clock, Data, Saving, get_accelerator

    train.join()
    if options.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    sizes, part = SIZES[options.sizes], PARTS[options.sizes][name]
    small = options.sizes == "small"
    clock = Clock(options.seconds, BEGAN)
    saving = Saving(options.save_every, 1.0 if small else Saving.reserve)
    data, failed, done = None, 0, 0
    for job in jobs:
        fp = fingerprint(job, sizes, part, corpus.sha256, options.compile)
        facts = {"fingerprint": fp, **train.machine(), "corpus": asdict(corpus)["sha256"]}
        if is_done(options.out, job, fp, part.steps):
            done += 1
            continue
        if clock.left() < (2.0 if small else BETWEEN):
            print(f"{job.name}: no time left", flush=True)
            break
        if data is None:
            device = get_accelerator().current_device_name()
            tokens = {
                name: torch.from_numpy(
                    corpora.load(options.out / "corpus", name).astype("int32")
                ).to(device)
                for name in corpora.PARTS
            }
            data = Data(tokens, -(-corpus.vocabulary // 64) * 64)
        try:
            say = lambda text: print(text, flush=True)  # noqa: E731
            if not train.train(
                job,
                sizes,
                part,
                data,
                options.out,
                clock,
                facts=facts,
                saving=saving,
                compiled=options.compile,
                say=say,
            ):
                break
            done += 1
        except Exception as problem:
            failed += 1
            print(
                f"{job.name}: FAILED: {type(problem).__name__}: {str(problem).splitlines()[:1]}",
                flush=True,
            )
    return failed, done


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort at exit
