"""One run: trained step by step, saved now and then, taken up where it was saved.

<out>/runs/<name>.csv       a row a step, written as it is made
<out>/runs/<name>.json      fingerprint, corpus, card, versions
<out>/saves/<name>/         the last save of a run that is not finished

Not run on a GPU yet.
"""

import contextlib
import gc
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import ds_kfac
from benchmarks.convergence.results import is_diverged
from benchmarks.gpu_lm.plan import Job, Part, Sizes, config
from benchmarks.gpu_lm.rows import COLD, Table
from examples.gpt import Block, GPTConfig


class GPT2(nn.Module):
    """Token ids [B, T] -> their mean cross-entropy in nats, fp32. The head has weights of its
    own."""

    def __init__(self, sizes: Sizes, vocabulary: int) -> None:
        super().__init__()
        config = GPTConfig(sizes.width, sizes.blocks, sizes.heads, sizes.context)
        self.embed_tokens = nn.Embedding(vocabulary, sizes.width)
        self.embed_positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = re.search(r"(out|down)\.weight$", name)
                nn.init.normal_(
                    parameter, std=0.02 / (2 * sizes.blocks) ** 0.5 if into_residual else 0.02
                )

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.embed_tokens(x) + self.embed_positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.lm_head(self.norm(h)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


@dataclass
class Data:
    """Tokens [N] int32 on the device, by part; ``vocabulary``: a multiple of 64."""

    tokens: dict[str, Tensor]
    vocabulary: int

    def batch(self, part: str, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Windows [rows, context] and what follows each token."""
        tokens = self.tokens[part]
        places = starts.to(tokens.device)[:, None] + torch.arange(context + 1, device=tokens.device)
        windows = tokens[places].long()
        return windows[:, :-1], windows[:, 1:]

    def drawn(self, seed: int, number: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """A micro-batch of training, by its number in the run: the same whenever a run goes on."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        last = len(self.tokens["train"]) - sizes.context
        return self.batch(
            "train", torch.randint(last, (sizes.rows,), generator=generator), sizes.context
        )

    def held_out(self, part: str, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
        """The same windows at every evaluation, spread over the part."""
        count = sizes.held_out * sizes.rows
        starts = torch.linspace(
            0, len(self.tokens[part]) - sizes.context - 1, count, dtype=torch.float64
        ).long()
        return [self.batch(part, rows, sizes.context) for rows in starts.split(sizes.rows)]


class Clock:
    """Seconds that are left of a call."""

    def __init__(self, seconds: float, began: float | None = None) -> None:
        self.ends = (time.monotonic() if began is None else began) + seconds

    def left(self) -> float:
        return self.ends - time.monotonic()


def build(job: Job, sizes: Sizes, part: Part, vocabulary: int, compiled: bool) -> Any:
    """An engine, without DeepSpeed's prints.

    Raises:
        ModuleNotFoundError: SOAP without the package pytorch-optimizer.
    """
    torch.manual_seed(job.seed)
    model = GPT2(sizes, vocabulary)
    settings = config(job, sizes, part)
    table, client = settings.pop("table"), settings.pop("client", None)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if table is not None:
        own = model.embed_tokens.weight
        groups[0]["params"] = [p for p in groups[0]["params"] if p is not own]
        groups.append({"params": [own], "lr": table})
    given: dict[str, Any] = {"model_parameters": groups}
    if client is not None:
        import pytorch_optimizer

        given = {"optimizer": getattr(pytorch_optimizer, client[0])(groups, **client[1])}
        settings["zero_allow_untested_optimizer"] = True
    start = ds_kfac.initialize if "kfac" in settings else deepspeed.initialize
    with contextlib.redirect_stdout(io.StringIO()):
        engine = start(model=model, config=settings, **given)[0]
        if compiled:
            engine.compile()
    return engine


def evaluated(engine: Any, batches: list[tuple[Tensor, Tensor]]) -> float:
    engine.eval()
    with torch.no_grad():
        total = torch.stack([engine(*batch).float() for batch in batches]).mean()
    engine.train()
    return float(total)


def stepped(
    engine: Any, data: Data, job: Job, sizes: Sizes, step: int, micro_batches: int
) -> float:
    """A step, from 0 on; returns its mean loss once its stream is done."""
    total = torch.zeros((), device=engine.device)
    for index in range(micro_batches):
        loss = engine(*data.drawn(job.seed, step * micro_batches + index, sizes))
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return float(total) / micro_batches


def save(engine: Any, folder: Path) -> float:
    """Seconds it took. Older saves go when the new one is whole."""
    begin = time.perf_counter()
    tag = f"step{engine.global_steps}"
    with contextlib.redirect_stdout(io.StringIO()):
        engine.save_checkpoint(str(folder), tag=tag)
    for other in folder.iterdir():
        if other.is_dir() and other.name != tag:
            shutil.rmtree(other)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Saving:
    """``every``: seconds between saves; ``reserve``: seconds kept for the one at the end of a
    call."""

    every: float = 150.0
    reserve: float = 25.0


def train(
    job: Job,
    sizes: Sizes,
    part: Part,
    data: Data,
    out: Path,
    clock: Clock,
    *,
    facts: dict[str, Any],
    saving: Saving = Saving(),
    compiled: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Train it to its end or until the call's time is up; returns whether it is finished."""
    path, saves = out / "runs" / f"{job.name}.csv", out / "saves" / job.name
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.with_suffix(".json")
    if saves.exists() and (
        not known.exists() or json.loads(known.read_text())["fingerprint"] != facts["fingerprint"]
    ):
        shutil.rmtree(saves)
    known.write_text(json.dumps(facts, indent=1) + "\n")
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    engine = build(job, sizes, part, data.vocabulary, compiled)
    try:
        if (saves / "latest").exists():
            with contextlib.redirect_stdout(io.StringIO()):
                engine.load_checkpoint(str(saves))
        table, first = Table(path, engine.global_steps), engine.global_steps
        if len(table.rows) != first:
            raise ValueError(
                f"{path}: {len(table.rows)} rows, the save is of step {first}; remove {saves}"
            )
        seconds = float(table.rows[-1]["seconds"]) if first else 0.0
        held_out = data.held_out(part.held_out, sizes)
        if first:
            say(f"{job.name}: goes on from step {first}")
        saved, longest, took = time.monotonic(), 0.0, 0.0
        for step in range(first, part.steps):
            if clock.left() < max(saving.reserve, 2 * took) + 2 * longest:
                took = save(engine, saves) if step > first else 0.0
                say(f"{job.name}: stopped at step {step} of {part.steps}, saved in {took:.1f} s")
                return False
            whole = time.perf_counter()
            loss = stepped(engine, data, job, sizes, step, part.micro_batches)
            evaluates = (step + 1) % part.every == 0 or step + 1 == part.steps
            # a refresh may go on beside the steps: it is not to go on beside an evaluation
            if evaluates:
                accelerator.synchronize()
            spent = time.perf_counter() - whole
            seconds += spent
            row = {"step": step + 1, "seconds": seconds, "step_seconds": spent, "loss": loss}
            row["cold"] = float(step - first < COLD)
            if evaluates:
                row["held_out_loss"] = evaluated(engine, held_out)
                row["memory_mb"] = accelerator.max_memory_allocated() / 1e6
                say(
                    f"{job.name}: step {step + 1}, {seconds:.1f} s, loss {loss:.4f}, "
                    f"held out {row['held_out_loss']:.4f}, {row['memory_mb']:.0f} MB"
                )
            table.add(**row)
            longest = max(longest, time.perf_counter() - whole) if step > first else 0.0
            if is_diverged(loss, float(table.rows[0]["loss"])):
                say(f"{job.name}: diverged at step {step + 1}")
                break
            if time.monotonic() - saved > saving.every and step + 1 < part.steps:
                took, saved = save(engine, saves), time.monotonic()
        shutil.rmtree(saves, ignore_errors=True)
        return True
    finally:
        engine.destroy()
        del engine
        gc.collect()
        accelerator.empty_cache()


def join() -> None:
    """This process is a job of one rank, once."""
    if torch.distributed.is_initialized():
        return
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in place.items():
        os.environ.setdefault(name, value)
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:  # DeepSpeed would compile it, and a killed build blocks all later runs
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    backend = "gloo" if on_cpu else "nccl"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed(backend)


def machine() -> dict[str, str]:
    gpu = get_accelerator().device_name() == "cuda"
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": sys.version.split()[0],
    }
