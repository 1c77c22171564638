"""Training runs of the GPT example against plain ones: few rows a factor, adaptive statistics,
every option on."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.cases import STRATEGIES, workers_of
from benchmarks.held import nbytes_of
from examples import text
from examples.gpt import GPT, GPTConfig

BASE = "plain"
EVALUATION_BATCHES = 32
ADAM = {"betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 2e-3, **ADAM}},
    "KFACAdamW": {"type": "KFACAdamW", "params": {"lr": 2e-3, **ADAM}},
}

EVERY_STATISTIC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 10},
    "burn_in": {"steps": 0},
}
INTERVALS = {"factor": {"update_interval": 5}, "burn_in": {"steps": 20}}
PLAIN = {
    **INTERVALS,
    "eigenbasis": {"refresh_interval": 20},
    "communication": {"dtype": "fp32"},
}
EVERYTHING = {
    **INTERVALS,
    "eigenbasis": {"refresh_interval": 20},
    "communication": {"dtype": "bf16"},
    "adaptive": 0.2,
    "offload": {"device": "cpu"},
}


@dataclass(frozen=True)
class Training:
    """One run.

    Attributes:
        name: of the run, among those with the same strategy and optimizer.
        strategy: of the cases.
        block: "kfac".
    """

    name: str
    strategy: str
    optimizer: str
    block: Mapping[str, Mapping[str, Any]]
    steps: int
    seed: int = 0

    def config(self, rows: int, world: int) -> dict[str, Any]:
        """For DeepSpeed."""
        stage = STRATEGIES[self.strategy][0]
        assignment = (
            {} if stage else {"gradient_worker_fraction": workers_of(self.strategy, world) / world}
        )
        schedule = {
            "total_num_steps": self.steps,
            "warmup_num_steps": max(2, self.steps // 14),
            "warmup_min_ratio": 0.01,
            "cos_min_ratio": 0.01,
        }
        return {
            "train_micro_batch_size_per_gpu": rows,
            "steps_per_print": 1_000_000_000,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "optimizer": dict(OPTIMIZERS[self.optimizer]),
            "scheduler": {"type": "WarmupCosineLR", "params": schedule},
            "kfac": {
                **self.block,
                "assignment": {**self.block.get("assignment", {}), **assignment},
            },
        }


def adaptive_name(tolerance: float) -> str:
    return f"adaptive {tolerance:g}"


def adaptive_runs(
    optimizer: str, steps: int, seeds: Sequence[int], tolerances: Sequence[float]
) -> list[Training]:
    """Every statistic at every step, and the same thinned out by the adaptive rule."""
    blocks = {BASE: EVERY_STATISTIC} | {
        adaptive_name(tolerance): {**EVERY_STATISTIC, "adaptive": tolerance}
        for tolerance in tolerances
    }
    return [
        Training(name, "MEM-OPT", optimizer, blocks[name], steps, seed)
        for seed in seeds
        for name in blocks
    ]


def option_runs(
    optimizer: str, steps: int, seeds: Sequence[int], strategies: Sequence[str]
) -> list[Training]:
    """Without options, and with all of them."""
    runs = []
    for strategy in strategies:
        for seed in seeds:
            for name, block in ((BASE, PLAIN), ("every option", EVERYTHING)):
                runs.append(Training(name, strategy, optimizer, block, steps, seed))
    return runs


def rows_name(rows: int) -> str:
    return f"{rows} rows"


def rows_runs(
    optimizer: str, steps: int, seeds: Sequence[int], numbers: Sequence[int]
) -> list[Training]:
    """Factors of all ranks' rows, and of so many, which come from as few ranks as have them."""
    few = {rows_name(rows): rows for rows in numbers}
    blocks = {name: {"factor": {"rows": rows}} for name, rows in ({BASE: "all"} | few).items()}
    return [
        Training(name, "ZeRO-2", optimizer, blocks[name], steps, seed)
        for seed in seeds
        for name in blocks
    ]


def train(
    runs: list[Training], model: GPTConfig, rows: int, data: str | None
) -> list[dict[str, Any]]:
    """Each run from the same weights on the same batches; losses are of all ranks. Runs on every
    rank."""
    corpus = text.load(data, model.context)
    return [_train(run, model, rows, corpus) for run in runs]


def _train(run: Training, model: GPTConfig, rows: int, corpus: text.Corpus) -> dict[str, Any]:
    import ds_kfac

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(run.seed)
    module = GPT(model)
    with contextlib.redirect_stdout(io.StringIO()):
        engine = ds_kfac.initialize(
            model=module, model_parameters=module.parameters(), config=run.config(rows, world)
        )[0]
    losses = []
    for step in range(run.steps):
        generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step * 1009 + rank)
        x, y = corpus.batch(generator, rows, model.context)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss.detach().float()))
    engine.eval()
    generator = torch.Generator().manual_seed(10_000 + rank)
    with torch.no_grad():
        batches = (
            corpus.batch(generator, rows, model.context, held_out=True)
            for _ in range(EVALUATION_BATCHES)
        )
        held_out = torch.stack([engine(x, y).float() for x, y in batches]).mean()
    kfac = engine.kfac.preconditioner
    timetable = kfac.curvature.timetable
    timetable.settle()
    row = {
        "optimizer": run.optimizer,
        "strategy": run.strategy,
        "run": run.name,
        "seed": run.seed,
        "losses": losses,
        "held_out": _mean(held_out),
        "sent": dict(kfac.channel.sent),
        "calls": dict(kfac.channel.calls),
        "counts": dict(kfac.metrics.counts),
        "captured": timetable.captured,
        "skipped": timetable.skipped,
        "state": nbytes_of(kfac)[0],
    }
    kfac.close()
    engine.destroy()
    if rank == 0:
        print(
            f"{run.optimizer}, {run.strategy}, {run.name}, seed {run.seed}: {row['held_out']:.4f} "
            f"held out",
            flush=True,
        )
    return row


def _mean(value: torch.Tensor) -> float:
    """Over ranks."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()
