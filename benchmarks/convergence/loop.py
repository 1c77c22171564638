"""The training loop of all benchmarks: builds an engine, trains, evaluates, writes a csv.

:class:`Training` is one run. It works on a CPU and on GPUs, on one rank and on several. A run that
is stopped can be saved, and goes on as if it had not been stopped.
"""

import contextlib
import gc
import io
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.methods import TABLE_RATIO
from benchmarks.convergence.runs import Table, is_diverged
from benchmarks.convergence.tasks import Batch, Task

EVALUATION_INTERVAL, EVALUATIONS = 10, 60
"""Least number of steps between evaluations, and the largest number of evaluations of a run."""
COLD_STEPS = 2
"""First steps of a run, and after each pause, which compile and allocate."""
JOB_OF_ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


def join() -> None:
    """Start DeepSpeed in this process, as a rank of the launcher's job or as the only rank."""
    warnings.simplefilter("ignore", FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Muon compiles its kernels: two minutes in the first step, and no faster on a CPU.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    import deepspeed  # after the environment is set
    from deepspeed.accelerator import get_accelerator

    deepspeed.utils.logger.setLevel("ERROR")
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:  # DeepSpeed would compile this op, and a build that was killed blocks all later runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if on_cpu else get_accelerator().communication_backend_name()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.distributed.is_initialized():
        os.environ.update(JOB_OF_ONE)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(backend)


def build(model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """Return an engine, without DeepSpeed's prints. Matrices and filters decay, vectors do not."""
    import deepspeed

    import ds_kfac

    config = dict(config)
    table_ratio = config.pop(TABLE_RATIO, None)
    trained = [p for p in model.parameters() if p.requires_grad]
    table: list[torch.nn.Parameter] = []
    if table_ratio is not None:
        table = [p for name, p in model.named_parameters() if name.startswith("embed_bytes")]
    matrices = [p for p in trained if p.ndim >= 2 and not any(p is own for own in table)]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if table:
        groups.append({"params": table, "lr": config["optimizer"]["params"]["lr"] * table_ratio})
    groups = [group for group in groups if group["params"]]
    initialize = ds_kfac.initialize if "kfac" in config else deepspeed.initialize
    with contextlib.redirect_stdout(io.StringIO()):
        return initialize(model=model, model_parameters=groups, config=config)[0]


def kind_of_next_step(engine: Any) -> str:
    """Say which work of K-FAC is due in the step that comes."""
    kfac = getattr(getattr(engine, "kfac", None), "preconditioner", None)
    if kfac is None:
        return "step"
    if kfac.due.refresh:
        return "refresh"
    return "factor update" if kfac.due.capture else "preconditioning only"


class Training:
    """One run: call :meth:`step` until :attr:`finished`, then :meth:`close`.

    Args:
        corpus: the task's data.
        steps: optimizer steps of the whole run.
        part: held-out part, "validation" or "test".
        table: path of the run's csv while it is trained.
        saves: folder of the run's checkpoints; a run that has one there goes on from it.
    """

    def __init__(
        self,
        task: Task,
        corpus: Any,
        config: dict[str, Any],
        *,
        seed: int,
        steps: int,
        part: str,
        table: Path,
        saves: Path | None = None,
    ) -> None:
        from deepspeed.accelerator import get_accelerator

        self.task, self.corpus, self.seed, self.steps = task, corpus, seed, steps
        self.accelerator, self.saves = get_accelerator(), saves
        self.accelerator.reset_peak_memory_stats()
        self.engine = build(task.build(seed, corpus), config)
        if saves is not None and (saves / "latest").exists():
            with contextlib.redirect_stdout(io.StringIO()):
                self.engine.load_checkpoint(str(saves))
        self.first_step = self.engine.global_steps
        self.table = Table(table, self.first_step)
        self.held_out = task.held_out(corpus, part)
        self.interval = max(EVALUATION_INTERVAL, steps // EVALUATIONS)
        self.saved_at = time.monotonic()
        self.save_seconds = 0.0

    @property
    def step_number(self) -> int:
        """Steps that were made, those before a pause included."""
        return len(self.table.rows)

    @property
    def diverged(self) -> bool:
        rows = self.table.rows
        return bool(rows) and is_diverged(rows[-1]["loss"], rows[0]["loss"])

    @property
    def finished(self) -> bool:
        return self.diverged or self.step_number >= self.steps

    def step(self) -> dict[str, Any]:
        """Make an optimizer step and write its row, which is returned."""
        step = self.step_number
        kind = kind_of_next_step(self.engine)
        batches = self._batches(step)
        self._synchronize()
        begin = time.perf_counter()
        losses = []
        for x, y in batches:
            loss = self.engine(x, y)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach().float())
        mean_loss = float(torch.stack(losses).mean())
        # Refreshes on other streams may go on beside the next steps, as they do in a user's run.
        self._synchronize()
        spent = time.perf_counter() - begin
        before = self.table.rows[-1]["seconds"] if self.table.rows else 0.0
        row = {
            "step": step + 1,
            "seconds": before + spent,
            "loss": mean_loss,
            "step_seconds": spent,
            "cold": int(step - self.first_step < COLD_STEPS),
            "kind": kind,
        }
        first_loss = self.table.rows[0]["loss"] if self.table.rows else mean_loss
        evaluates = (step + 1) % self.interval == 0 or step + 1 == self.steps
        if self.held_out and evaluates and not is_diverged(mean_loss, first_loss):
            self.accelerator.synchronize()
            row |= self.evaluate()
            row["memory_mb"] = self.accelerator.max_memory_allocated() / 1e6
        self.table.add(row)
        return row

    def evaluate(self) -> dict[str, float]:
        """Return the mean held-out loss and, if the model has one, the accuracy."""
        self.engine.eval()
        losses, accuracies = [], []
        with torch.no_grad():
            for batch in self.held_out:
                losses.append(self.engine(*self._on_device(batch)).float())
                accuracies.append(getattr(self.engine.module, "accuracy", None))
        self.engine.train()
        row = {"held_out_loss": float(torch.stack(losses).mean())}
        if None not in accuracies:
            row["held_out_accuracy"] = sum(accuracies) / len(accuracies)
        return row

    def save(self) -> None:
        """Write a checkpoint, then remove the one before."""
        assert self.saves is not None
        begin = time.monotonic()
        tag = f"step{self.engine.global_steps}"
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine.save_checkpoint(str(self.saves), tag=tag)
        for other in self.saves.iterdir():
            if other.is_dir() and other.name != tag:
                shutil.rmtree(other)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - begin

    def close(self) -> None:
        """Free the engine's memory. The csv of a finished run gets its name, its checkpoints go."""
        self.table.close()
        if self.finished:
            self.table.rename()
            if self.saves is not None:
                shutil.rmtree(self.saves, ignore_errors=True)
        self.engine.destroy()
        del self.engine
        gc.collect()
        self.accelerator.empty_cache()

    def _batches(self, step: int) -> list[Batch]:
        count = self.task.micro_batches
        numbers = range(step * count, (step + 1) * count)
        drawn = (self.task.batch(self.corpus, self.seed, number) for number in numbers)
        return [self._on_device(batch) for batch in drawn]

    def _on_device(self, batch: Batch) -> Batch:
        x, y = batch
        return x.to(self.engine.device), y.to(self.engine.device)

    def _synchronize(self) -> None:
        stream = self.accelerator.current_stream()
        if stream is not None:
            stream.synchronize()
