"""What the convergence benchmark trains: small models on bytes, where a batch depends on seed and
step only."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.convergence.autoencoder_tasks import AUTOENCODER_TASKS, AutoencoderTask
from benchmarks.convergence.bases import made_once
from benchmarks.convergence.image_tasks import IMAGE_TASKS, ImageTask
from benchmarks.convergence.reward_tasks import REWARD_TASKS, RewardTask
from examples.gpt import GPT, GPTConfig
from examples.text import STRETCHES, Corpus, load

MASK, MASKED_PART, IGNORED = 0xFF, 0.15, -100  # UTF-8 has no byte 0xFF
BASE_RATE = 2e-3
WIDTHS = (64, 128, 256, 512)
HELD_OUT_BATCHES, HELD_OUT_WINDOWS = 8, 512
"""At most."""


@dataclass(frozen=True)
class Task:
    """A model, windows a step and steps; a model that is not causal predicts masked bytes."""

    model: GPTConfig
    rows: int
    steps: int
    base = "adamw"
    unit = "nats per byte"

    def corpus(self, path: str | None) -> Corpus:
        return load(path, self.model.context)

    def build(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(self.model)

    def batch(self, corpus: Corpus, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [rows, context]."""
        return self._windows(
            corpus, torch.Generator().manual_seed(seed * 1_000_003 + step * 1009), held_out=False
        )

    def held_out(self, corpus: Corpus, part: str) -> list[tuple[Tensor, Tensor]]:
        """The same windows, masked alike, for every method, seed and step.

        Args:
            part: "validation", by which rates are chosen, or "test", which is reported; they share
                no byte.
        """
        generator = torch.Generator().manual_seed(10_000)
        # of each of the corpus' stretches the first half and the second
        halves = dict(
            zip(
                ("validation", "test"),
                corpus.held_out.view(STRETCHES, -1).chunk(2, dim=1),
                strict=True,
            )
        )
        batches = max(1, min(HELD_OUT_BATCHES, HELD_OUT_WINDOWS // self.rows))
        own = replace(corpus, held_out=halves[part].reshape(-1))
        return [self._windows(own, generator, held_out=True) for _ in range(batches)]

    def _windows(
        self, corpus: Corpus, generator: torch.Generator, *, held_out: bool
    ) -> tuple[Tensor, Tensor]:
        tokens, following = corpus.batch(
            generator, self.rows, self.model.context, held_out=held_out
        )
        if self.model.causal:
            return tokens, following
        masked = torch.rand(tokens.shape, generator=generator) < MASKED_PART
        return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, IGNORED)


@dataclass(frozen=True)
class FineTuning(Task):
    """A model that ``base_steps`` steps of AdamW have trained on one text, the Python standard
    library's sources, goes on with another: by default the C++ headers that come with torch. With
    ``rank`` it is frozen, and adapters of that rank are trained beside its matrices (LoRA)."""

    base_steps: int = 0
    rank: int = 0

    def corpus(self, path: str | None) -> Corpus:
        headers = str(Path(torch.__file__).parent / "include")
        found = super().corpus(path or headers)
        name = found.name.replace(headers, "torch's headers")
        return replace(
            found, name=f"{name}, after {self.base_steps} steps on Python's standard library"
        )

    def build(self, seed: int) -> GPT:
        made = {
            "model": asdict(self.model),
            "rows": self.rows,
            "steps": self.base_steps,
            "rate": BASE_RATE,
        }
        model = super().build(seed)
        model.load_state_dict(made_once("python", made, self.base_model))
        if self.rank:
            add_adapters(model.requires_grad_(False).blocks, self.rank)
        return model

    def base_model(self) -> GPT:
        corpus, model = load(None, self.model.context), super().build(0)
        optimizer = torch.optim.AdamW(
            model.parameters(), BASE_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        warmed_up = torch.optim.lr_scheduler.LinearLR(
            optimizer, 0.01, total_iters=self.base_steps // 15
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.base_steps)
        for step in range(self.base_steps):
            model(*self.batch(corpus, 0, step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warmed_up.step()
            cosine.step()
        return model


class Adapted(nn.Module):
    """A frozen matrix, and LoRA's product of two narrow ones beside it: zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def add_adapters(model: nn.Module, rank: int) -> None:
    """In the place of all linear layers inside of a module."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, Adapted(child, rank))
        else:
            add_adapters(child, rank)


TASKS: dict[str, Task | ImageTask | AutoencoderTask | RewardTask] = {
    "gpt_small": Task(GPTConfig(width=128, blocks=4), rows=16, steps=300),
    "gpt_small_8k": Task(GPTConfig(width=128, blocks=4), rows=64, steps=75),
    "gpt_small_32k": Task(GPTConfig(width=128, blocks=4), rows=256, steps=40),
    "gpt_small_long": Task(GPTConfig(width=128, blocks=4), rows=16, steps=1500),
    "gpt_small_8k_long": Task(GPTConfig(width=128, blocks=4), rows=64, steps=375),
    "gpt_25m": Task(GPTConfig(width=512, blocks=8, heads=16), rows=64, steps=300),
    "gpt_large": Task(GPTConfig(width=256, blocks=4), rows=16, steps=150),
    "gpt_moe": Task(GPTConfig(width=128, blocks=3, experts=8), rows=16, steps=300),
    "gpt_moe_modules": Task(
        GPTConfig(width=128, blocks=3, experts=8, stacked=False), rows=16, steps=300
    ),
    "mlm": Task(GPTConfig(width=128, blocks=3, causal=False), rows=16, steps=150),
    **{
        f"width_{width}": Task(GPTConfig(width, blocks=2, heads=width // 32), rows=8, steps=100)
        for width in WIDTHS
    },
    "depth_8": Task(GPTConfig(width=128, blocks=8), rows=8, steps=100),
    "finetuning": FineTuning(GPTConfig(width=128, blocks=3), rows=16, steps=40, base_steps=300),
    "finetuning_long": FineTuning(
        GPTConfig(width=128, blocks=4), rows=16, steps=60, base_steps=3000
    ),
    "finetuning_lora": FineTuning(
        GPTConfig(width=128, blocks=4), rows=16, steps=60, base_steps=3000, rank=8
    ),
    "finetuning_large": FineTuning(
        GPTConfig(width=256, blocks=4), rows=16, steps=60, base_steps=4000
    ),
    "finetuning_large_lora": FineTuning(
        GPTConfig(width=256, blocks=4), rows=16, steps=60, base_steps=4000, rank=8
    ),
    **IMAGE_TASKS,
    **AUTOENCODER_TASKS,
    **REWARD_TASKS,
    "tiny": Task(GPTConfig(width=16, blocks=1, heads=2, context=16), rows=2, steps=3),
}
DEFAULT_TASKS = ["gpt_small", "gpt_large", "mlm"]
"""The others: gpt_small at 4 and 16 times the batch, and for 5 times the bytes; a model of 25
million; models of several widths, for rates; images, autoencoders and rewards, with methods of
their own; tiny, to try the benchmark."""
BATCHES = {"gpt_small": 2048, "gpt_small_8k": 8192, "gpt_small_32k": 32768}
"""The same model at growing batches: bytes a step."""
