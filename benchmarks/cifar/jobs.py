"""The methods on CIFAR-10, which runs there are to make, and their csv files."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.convergence.results import best_rate, next_rate

BASE = "sgd"
SWEEP_SEED = 0
EXTENSIONS = 2
"""Rates that a sweep may add at its edges."""
REFERENCE_BATCH = 1024
COLUMNS = [
    "step",
    "epoch",
    "seconds",
    "loss",
    "validation_loss",
    "validation_accuracy",
    "test_loss",
    "test_accuracy",
    "memory_mb",
]
KEYS = ["method", "rate", "part", "seed"]
WARMUP_PART, LAST_RATIO = 0.05, 0.001


def _sgd(rate: float, nesterov: bool = True) -> dict[str, Any]:
    params = {"lr": rate, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 5e-4}
    return {"optimizer": {"type": "SGD", "params": params}, "gradient_clipping": 0.0}


def _published(rate: float, *, update: int, refresh: int, damping: float) -> dict[str, Any]:
    """As kfac-pytorch's examples: all positions, no burn-in, Tikhonov damping, kl-clip 1e-3, plain
    momentum."""
    return {
        **_sgd(rate, nesterov=False),
        "kfac": {
            "factor": {
                "update_interval": update,
                "decay": 0.95,
                "fisher": "empirical",
                "rows": "all",
            },
            "eigenbasis": {"refresh_interval": refresh},
            "burn_in": {"steps": 0},
            "damping": {"kind": "tikhonov", "value": damping},
            "preconditioner": {"kl_clip": 1e-3, "eigenvalues": "kronecker"},
        },
    }


def _own(rate: float, damping: float) -> dict[str, Any]:
    """The row for CNNs of docs/howto/tune.md."""
    kfac = {"damping": {"kind": "tikhonov", "value": damping}, "preconditioner": {"kl_clip": 1e-2}}
    return {**_sgd(rate), "kfac": kfac}


def _kfacadamw(rate: float, decay: float) -> dict[str, Any]:
    params = {"lr": rate, "betas": [0.9, 0.95], "weight_decay": decay, "torch_adam": True}
    return {
        "optimizer": {"type": "KFACAdamW", "params": params},
        "gradient_clipping": 1.0,
        "kfac": {},
    }


METHODS = {
    BASE: lambda rate: {**_sgd(rate), "kfac": {"enabled": False}},
    "kfac_sc20": lambda rate: _published(rate, update=1, refresh=10, damping=3e-3),
    "kfac_kaisa": lambda rate: _published(rate, update=10, refresh=100, damping=1e-3),
    "kfac_own": lambda rate: _own(rate, 3e-2),
    "kfacadamw": lambda rate: _kfacadamw(rate, 0.05),
    "kfacadamw_decay": lambda rate: _kfacadamw(rate, 0.5),
}
"""Name -> rate -> optimizer and K-FAC of a DeepSpeed config. kfac_sc20: SC20's CIFAR-10 (factors
every step, bases every 10); kfac_kaisa: the intervals and the damping of its and KAISA's
ImageNet."""
DEFAULT_METHODS = [BASE, "kfac_own", "kfac_kaisa", "kfacadamw", "kfac_sc20", "kfacadamw_decay"]
ADAM_RATES = 1.25e-3, 2.5e-3, 5e-3
RATES = {
    method: ADAM_RATES if method.startswith("kfacadamw") else (0.4, 0.8, 1.6) for method in METHODS
}
"""At batch 1,024: SGD's grow with the batch, Adam's with its root."""


def first_rates(method: str, batch: int) -> list[float]:
    ratio = batch / REFERENCE_BATCH
    return [
        rate * (ratio**0.5 if method.startswith("kfacadamw") else ratio) for rate in RATES[method]
    ]


def deepspeed_config(method: str, rate: float, *, batch: int, steps: int) -> dict[str, Any]:
    """fp32, one rank, ZeRO 0; linear warmup, then a cosine, for all methods alike."""
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": max(2, round(WARMUP_PART * steps)),
        "warmup_type": "linear",
        "warmup_min_ratio": LAST_RATIO,
        "cos_min_ratio": LAST_RATIO,
    }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": 0},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        **METHODS[method](rate),
    }


@dataclass(frozen=True)
class Job:
    """A run: a method at a rate, over ``part`` of all epochs, with a schedule of that length."""

    method: str
    rate: float
    part: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}_lr{self.rate:g}_part{self.part:g}_seed{self.seed}"


class Runs:
    """Csv files of a folder: runs/NAME.csv of a finished run, runs/NAME.partial of one that goes
    on, which git ignores; rows.csv of all finished ones, with the columns KEYS before a run's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packed = folder, folder / "rows.csv"
        self._read: dict[Job, list[dict[str, float]]] = {}
        for row in read(self.packed, text=KEYS[0]) if self.packed.exists() else ():
            job = Job(
                str(row.pop("method")), row.pop("rate"), row.pop("part"), int(row.pop("seed"))
            )
            self._read.setdefault(job, []).append(row)

    def path(self, job: Job) -> Path:
        return self.folder / "runs" / f"{job.name}.csv"

    def partial(self, job: Job) -> Path:
        return self.folder / "runs" / f"{job.name}.partial"

    def saved(self, job: Job) -> Path:
        return self.folder / "runs" / f"{job.name}.saved"

    def pack(self) -> None:
        """Write all finished runs, those that were packed before and those that are in runs, to one
        csv."""
        for path in sorted((self.folder / "runs").glob("*.csv")):
            method, rate, part, seed = re.fullmatch(
                r"(\w+)_lr([^_]+)_part([^_]+)_seed(\d+)", path.stem
            ).groups()
            self._read[Job(method, float(rate), float(part), int(seed))] = read(path)
        if not self._read:
            return
        with open(self.packed, "w", newline="") as file:
            table = csv.DictWriter(file, [*KEYS, *COLUMNS], lineterminator="\n")
            table.writeheader()
            for job in sorted(
                self._read, key=lambda job: (job.method, job.rate, -job.part, job.seed)
            ):
                keys = {
                    "method": job.method,
                    "rate": f"{job.rate:g}",
                    "part": f"{job.part:g}",
                    "seed": job.seed,
                }
                for row in self._read[job]:
                    cells = {
                        key: "" if math.isnan(value) else f"{value:.7g}"
                        for key, value in row.items()
                    }
                    table.writerow(keys | cells)

    def rows(self, job: Job) -> list[dict[str, float]] | None:
        """Of a finished run."""
        packed = replace(job, rate=float(f"{job.rate:g}"))  # as rates are written
        if packed not in self._read and self.path(job).exists():
            self._read[packed] = read(self.path(job))
        return self._read.get(packed)

    def error(self, job: Job) -> float:
        """At the end, on the validation part; infinite if it diverged."""
        accuracy = (self.rows(job) or [{}])[-1].get("validation_accuracy", math.nan)
        return 1 - accuracy if math.isfinite(accuracy) else math.inf


def read(path: Path, text: str | None = None) -> list[dict[str, Any]]:
    """Rows of numbers but in the column ``text``; an empty cell is nan."""
    with open(path, newline="") as file:
        return [
            {key: cell if key == text else float(cell or "nan") for key, cell in row.items()}
            for row in csv.DictReader(file)
        ]


def swept(
    runs: Runs, method: str, batch: int, parts: Sequence[float]
) -> tuple[dict[float, float], Job | None]:
    """Rate -> validation error of the shortest schedule with seed 0, and the sweep's next run;
    None: it is done."""
    rates, errors = first_rates(method, batch), dict[float, float]()
    while True:
        for rate in rates:
            job = Job(method, rate, min(parts), SWEEP_SEED)
            if runs.rows(job) is None:
                return errors, job
            errors[rate] = runs.error(job)
        rate = next_rate(errors, len(RATES[method]), EXTENSIONS)
        if rate is None:
            return errors, None
        rates = [rate]


def unfinished(
    runs: Runs, methods: Sequence[str], batch: int, parts: Sequence[float], seeds: Sequence[int]
) -> Iterator[Job]:
    """All runs that are known to be missing, a seed after the other, in it a method after the
    other, in order of worth: with the first seed its sweep, then its best rate over each part."""
    best: dict[str, float | None] = {}
    for seed in seeds:
        for method in methods:
            if method not in best:
                errors, job = swept(runs, method, batch, parts)
                best[method] = best_rate(errors) if job is None else None
                rates = first_rates(method, batch)
                if job is not None:
                    more = [rate for rate in rates if rate not in errors and rate != job.rate]
                    yield from (Job(method, rate, job.part, job.seed) for rate in (job.rate, *more))
                    best[method] = rates[1]  # not known yet: as if it were the middle one
                elif best[method] is None:
                    continue  # all diverged
            rate = best[method]
            for part in sorted(parts, reverse=True) if rate is not None else ():
                job = Job(method, rate, part, seed)
                if runs.rows(job) is None and (part, seed) != (min(parts), SWEEP_SEED):
                    yield job
