"""What is run: sizes, methods with their rates, parts; and what it would take."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WARMUP_PART, LAST_RATIO = 0.07, 0.01


@dataclass(frozen=True)
class Sizes:
    """``rows``: of a micro-batch; ``most``: bytes of the corpus; ``held_out``: micro-batches of an
    evaluation."""

    width: int
    blocks: int
    heads: int
    context: int
    vocabulary: int
    rows: int
    held_out: int
    most: int | None = None


@dataclass(frozen=True)
class Part:
    steps: int
    micro_batches: int
    every: int
    """Steps between evaluations."""
    held_out: str


SIZES = {
    "full": Sizes(
        width=768, blocks=12, heads=12, context=1024, vocabulary=32768, rows=32, held_out=16
    ),
    "kills": Sizes(
        width=256,
        blocks=4,
        heads=4,
        context=256,
        vocabulary=4096,
        rows=16,
        held_out=4,
        most=1 << 24,
    ),
    "small": Sizes(
        width=32, blocks=2, heads=2, context=32, vocabulary=512, rows=4, held_out=4, most=1 << 20
    ),
}
PARTS = {
    "full": {
        "a": Part(100, 16, 25, "validation"),
        "b": Part(350, 16, 10, "test"),
        "c": Part(1200, 4, 25, "test"),
        "r": Part(100, 4, 50, "validation"),
        "d": Part(400, 4, 20, "test"),
        "d70": Part(280, 4, 20, "test"),
        "d35": Part(140, 4, 20, "test"),
    },
    "kills": {"a": Part(2000, 1, 100, "validation")},
    "small": {
        "a": Part(6, 2, 3, "validation"),
        "b": Part(12, 2, 3, "test"),
        "c": Part(16, 1, 4, "test"),
        "r": Part(4, 1, 4, "validation"),
        "d": Part(10, 1, 5, "test"),
        "d70": Part(7, 1, 7, "test"),
        "d35": Part(4, 1, 4, "test"),
    },
}
"""a: rates. b: large batches. c: batches of a quarter. r and d: rates and a race that fit into half
an hour; d70 and d35 are schedules of 0.70 and 0.35 of d's steps."""
RATES_OF = {"b": "a", "c": "a", "d": "r", "d70": "r", "d35": "r"}
"""Part -> the one that chooses its rates."""
SERIES = {
    "d": (
        ("r", ("adamw", "adamw_table", "muon", "muon_table", "kfacadamw")),
        ("d", ("muon", "muon_table")),
        ("d70", ("kfacadamw",)),
        ("d", ("adamw", "adamw_table")),
        ("d35", ("kfacadamw",)),
        ("d", ("kfacadamw",)),
    ),
}
"""Part -> the parts and methods that a call for it makes, one after the other; others are made
alone."""

ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}


def adamw(rate: float) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.1, **ADAM}}}


def muon(rate: float, adam: float = 0.004) -> dict[str, Any]:
    """DeepSpeed's. Decay and ``adam``, the rate of heads and tables, as tuned in public for this
    size and batch. Not clipped: at ZeRO 1 that would divide orthogonalized updates by their norm
    (docs/howto/switch.md)."""
    params = {"muon_lr": rate, "adam_lr": adam, "momentum": 0.95, "weight_decay": 0.05, **ADAM}
    return {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 0.0}


def kfacadamw(rate: float) -> dict[str, Any]:
    return {
        "optimizer": {"type": "KFACAdamW", "params": {"lr": rate, "weight_decay": 1.0, **ADAM}},
        "kfac": {},
    }


def soap(rate: float) -> dict[str, Any]:
    """Of the package pytorch-optimizer, which needs matrices whole: ZeRO 0, bf16 by autocast on
    fp32 weights."""
    params = {"lr": rate, "betas": [0.95, 0.95], "precondition_frequency": 10, "weight_decay": 0.01}
    return {
        "client": ("SOAP", params),
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 0},
    }


@dataclass(frozen=True)
class Method:
    """``name``: of the family whose best method and rate b and c take.

    Attributes:
        extra: seconds of a step beyond its micro-batches', for the prediction.
        table: rate of the token table; None: that of the other parameters that Adam trains.
    """

    name: str
    block: Callable[[float], dict[str, Any]]
    rates: tuple[float, ...]
    extra: float
    table: float | None = None


METHODS = {
    "adamw": Method("AdamW", adamw, (1e-3, 2e-3, 4e-3), 0.005),
    "muon": Method("Muon", muon, (0.00625, 0.0125, 0.025), 0.048),
    "kfacadamw": Method("KFACAdamW", kfacadamw, (1e-3, 2e-3, 4e-3), 0.044),
    "unrotated": Method(
        "without curvature",
        lambda rate: {**kfacadamw(rate), "kfac": {"adam": {"rotate": False}}},
        (1e-3, 2e-3, 4e-3),
        0.024,
    ),
    "adamw_table": Method("AdamW", adamw, (1e-3, 2e-3), 0.005, table=0.03),
    "muon_table": Method("Muon", muon, (0.0125,), 0.048, table=0.03),
    "muon_half": Method("Muon", lambda rate: muon(rate, rate / 2), (0.025,), 0.048),
    "soap": Method("SOAP", soap, (1.5e-3, 3e-3, 6e-3), 0.2),
}
""".._table: the token table at a rate of its own (0.7 in public, for models that normalize what it gives). muon_half:
heads and tables at half of the matrices' rate, as in benchmarks/convergence."""
DEFAULT = ["adamw", "muon", "kfacadamw", "unrotated", "adamw_table", "muon_table", "muon_half"]
MICRO_BATCH, EVALUATED, START = 0.0895, 0.03, 20.0
"""Seconds on an H100: forward and backward of 32 x 1024 tokens (step_gpu.py's AdamW, vocabulary
50,304); guessed: a forward, a run's start."""


@dataclass(frozen=True)
class Job:
    part: str
    method: str
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.part}_{self.method}_lr{self.rate:g}_seed{self.seed}"


def parsed(name: str) -> Job:
    """The job of a run's name."""
    part, rest = name.split("_", 1)
    method, rest = rest.rsplit("_lr", 1)
    rate, seed = rest.split("_seed")
    return Job(part, method, float(rate), int(seed))


def rate_jobs(methods: Sequence[str], rates: Mapping[str, float], part: str = "a") -> list[Job]:
    """Of part a or r; ``rates``: those of them that are given and need no search."""
    return [
        Job(part, name, rate)
        for name in methods
        if name not in rates
        for rate in METHODS[name].rates
    ]


def best_jobs(
    part: str,
    methods: Sequence[str],
    rates: Mapping[str, float],
    losses: Mapping[Job, float],
    seeds: int,
):
    """Of a part that takes rates: each family's method and rate, the given one or that of the
    lowest loss in the part that chooses them; and families without any."""
    chosen: dict[str, tuple[str, float] | None] = {}
    given = {METHODS[name].name: (name, rates[name]) for name in reversed(methods) if name in rates}
    for name in methods:
        family = METHODS[name].name
        if family in given:
            chosen[family] = given[family]
        elif family not in chosen:
            found = {
                (job.method, job.rate): loss
                for job, loss in losses.items()
                if job.part == RATES_OF[part]
                and METHODS[job.method].name == family
                and loss < float("inf")
            }
            chosen[family] = min(found, key=found.__getitem__) if found else None
    jobs = [Job(part, *best, seed) for seed in range(seeds) for best in chosen.values() if best]
    return jobs, [family for family, best in chosen.items() if best is None]


def config(job: Job, sizes: Sizes, part: Part) -> dict[str, Any]:
    """DeepSpeed's; "client" and "table" are not for it."""
    schedule = {
        "total_num_steps": part.steps,
        "warmup_num_steps": max(2, round(WARMUP_PART * part.steps)),
        "warmup_type": "linear",
        "warmup_min_ratio": LAST_RATIO,
        "cos_min_ratio": LAST_RATIO,
    }
    return {
        "train_micro_batch_size_per_gpu": sizes.rows,
        "gradient_accumulation_steps": part.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "table": METHODS[job.method].table,
        **METHODS[job.method].block(job.rate),
    }


def fingerprint(job: Job, sizes: Sizes, part: Part, corpus: str, compiled: bool) -> str:
    """Of all that decides a run's numbers, but for software and card."""
    facts = [job.name, asdict(sizes), asdict(part), config(job, sizes, part), corpus, compiled]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def predicted(job: Job, part: Part, sizes: Sizes) -> float:
    """Seconds on an H100 at full sizes."""
    steps = part.steps * (part.micro_batches * MICRO_BATCH + METHODS[job.method].extra)
    return START + steps + (part.steps // part.every) * sizes.held_out * EVALUATED
