"""The estimator against a clock: predicted and measured processor seconds of every stage, for three
models on this CPU.

    OMP_NUM_THREADS=1 python benchmarks/predicted.py [--costs costs.json] [--periods 2]

One rank and one thread, so processor seconds are what an idle machine would take. Rates are
measured first (as benchmarks/kernels/costs.py does) unless a file has them.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import ds_kfac
from benchmarks.kernels import costs
from ds_kfac.estimate.command import costs_of
from ds_kfac.estimate.estimates import Estimate
from ds_kfac.estimate.subject import Subject, Trace
from ds_kfac.metrics import STAGES
from examples.gpt import GPT, GPTConfig
from examples.networks import resnet20

UPDATE, REFRESH = 5, 10
KFAC_ADAMW = {"type": "KFACAdamW", "params": {"lr": 1e-3, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 1e-3}}
ROWS, CONTEXT, IMAGES, SIZE = 16, 128, 64, 16


def gpt(width: int) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(width=width, blocks=4))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = resnet20(channels=3, classes=10, size=SIZE)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.network(x), y)


def tokens() -> tuple[Tensor, Tensor]:
    x = torch.randint(256, (ROWS, CONTEXT))
    return x, x


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(IMAGES, 3, SIZE, SIZE), torch.randint(10, (IMAGES,))


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], dict, int]
] = {
    "GPT, width 128, KFACAdamW": (gpt(128), tokens, KFAC_ADAMW, ROWS * CONTEXT),
    "GPT, width 256, KFACAdamW": (gpt(256), tokens, KFAC_ADAMW, ROWS * CONTEXT),
    "ResNet-20, K-FAC into SGD": (Classifier, images, SGD, IMAGES),
}


def measured(engine: Any, batch: tuple[Tensor, Tensor], steps: int) -> dict[str, float]:
    """Seconds a step of every stage, and of the model's forward and backward without capture."""
    seconds = engine.kfac.preconditioner.metrics.seconds
    model = 0.0
    for step in range(2 * REFRESH + steps):
        if step == 2 * REFRESH:  # allocations, the first batch, and what follows from it
            before, model = dict(seconds), 0.0
        start = time.perf_counter()
        loss = engine(*batch)
        engine.backward(loss)
        model += time.perf_counter() - start
        engine.step()
    found = {stage: (seconds[stage] - before[stage]) / steps for stage in STAGES}
    return found | {"model": model / steps - found["capture"]}


def compared(name: str, file: Path, periods: int) -> dict[str, tuple[float, float]]:
    """Stage -> predicted and measured seconds of a mean step."""
    build, draw, optimizer, rows = MODELS[name]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer,
        "steps_per_print": 1_000_000,
        "kfac": {
            "factor": {"update_interval": UPDATE},
            "eigenbasis": {"refresh_interval": REFRESH},
            "burn_in": {"steps": 0},
        },
    }
    torch.manual_seed(0)
    model, batch = build(), draw()
    subject = Subject(model, config, trace=Trace(model, batch))
    found = Estimate(subject, costs_of("cpu", str(file)), 1, rows)
    engine = ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.kfac.metrics.timings = True
    clock = measured(engine, batch, periods * REFRESH)
    engine.destroy()
    assert found.model is not None
    predicted = {**found.stages, "model": found.model}
    return {stage: (predicted[stage], clock[stage]) for stage in (*STAGES, "model")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--periods", type=int, default=2, help="refresh intervals that are timed")
    arguments = parser.parse_args()
    time.perf_counter = time.process_time  # type: ignore[assignment]
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.costs or Path(folder) / "costs.json"
        if arguments.costs is None:
            costs.main(["--device", "cpu", "--out", str(file)])
        print(
            "| ms a step: predicted / measured | " + " | ".join((*STAGES, "K-FAC", "model")) + " |"
        )
        print("|---" * (len(STAGES) + 3) + "|")
        for name in MODELS:
            found = compared(name, file, arguments.periods)
            kfac = tuple(sum(found[stage][which] for stage in STAGES) for which in (0, 1))
            cells = [*(found[stage] for stage in STAGES), kfac, found["model"]]
            print(f"| {name} | " + " | ".join(_cell(*cell) for cell in cells) + " |", flush=True)


def _cell(predicted: float, clock: float) -> str:
    if max(predicted, clock) < 1e-4:
        return "-"
    return f"{1e3 * predicted:.3g} / {1e3 * clock:.3g} ({predicted / clock:.2f})"


if __name__ == "__main__":
    alone = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29671,
    }
    for key, value in alone.items():
        os.environ.setdefault(key, str(value))
    main()
