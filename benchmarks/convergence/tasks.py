"""What is trained: a model, its data, and how much of it a step takes.

Every task has the members of :class:`Task`. A batch depends on the seed and its number only, so all
methods see the same batches, and a run that goes on after a pause sees the ones that it has missed.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence import corpus as sources
from benchmarks.convergence.gpt2 import GPT2, GPT2Config
from examples import images, networks
from examples.gpt import GPT, GPTConfig
from examples.text import STRETCHES, Corpus, load

Batch = tuple[Tensor, Tensor]
MASK, MASKED_PART, IGNORED = 0xFF, 0.15, -100  # UTF-8 has no byte 0xFF
HELD_OUT_BATCHES, HELD_OUT_WINDOWS = 8, 512
"""Size of an evaluation on bytes, at most."""
HELD_OUT_IMAGES = 180
"""Images in a forward pass of an evaluation."""
TOKENS = Path(__file__).resolve().parents[2] / "runs/corpus"
"""Folder in which encoded corpora are kept."""
BF16_ZERO1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


@dataclass(frozen=True)
class Task:
    """Bytes, predicted from those before them or, by a model that is not causal, where masked.

    Attributes:
        rows: examples in a micro-batch.
        steps: optimizer steps of a run.
        micro_batches: forward passes in a step.
        engine: more of the DeepSpeed config.
        base: the method that the others are compared with.
        unit: of the held-out loss, for labels.
        judged_by: column of a run's csv by which runs are compared.
        alone: whether methods run one after the other because several do not fit on a device.
    """

    model: Any
    rows: int
    steps: int
    micro_batches: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    base: str = "adamw"
    unit: str = "nats per byte"
    judged_by: str = "held_out_loss"
    alone: bool = False

    def corpus(self, path: str | None) -> Corpus:
        """Read the data. ``path``: a text file or a folder of them."""
        return load(path, self.model.context)

    def build(self, seed: int, corpus: Any) -> nn.Module:
        """Return a model whose forward takes a batch and returns the loss."""
        torch.manual_seed(seed)
        return GPT(self.model)

    def batch(self, corpus: Corpus, seed: int, number: int) -> Batch:
        """Return micro-batch ``number`` of the run: tokens and labels, int64 [rows, context]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number * 1009)
        return self._windows(corpus, generator, held_out=False)

    def held_out(self, corpus: Corpus, part: str) -> list[Batch]:
        """Return the batches of an evaluation, the same for every method, seed and step.

        Args:
            part: "validation", by which learning rates are chosen, or "test", which is reported.
            The
                parts share no byte.
        """
        generator = torch.Generator().manual_seed(10_000)
        halves = corpus.held_out.view(STRETCHES, -1).chunk(2, dim=1)
        half = halves[("validation", "test").index(part)].reshape(-1)
        batches = max(1, min(HELD_OUT_BATCHES, HELD_OUT_WINDOWS // self.rows))
        own = replace(corpus, held_out=half)
        return [self._windows(own, generator, held_out=True) for _ in range(batches)]

    def _windows(self, corpus: Corpus, generator: torch.Generator, *, held_out: bool) -> Batch:
        context = self.model.context
        tokens, following = corpus.batch(generator, self.rows, context, held_out=held_out)
        if self.model.causal:
            return tokens, following
        masked = torch.rand(tokens.shape, generator=generator) < MASKED_PART
        return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, IGNORED)


@dataclass(frozen=True)
class Tokens:
    """An encoded corpus: ``parts``, int32 [N], by name."""

    name: str
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class TokenTask(Task):
    """A GPT-2 on the Python sources of installed packages, of which whole packages are held out.

    Attributes:
        evaluated: micro-batches of an evaluation.
        most: bytes of the corpus, at most.
    """

    engine: dict[str, Any] = field(default_factory=lambda: dict(BF16_ZERO1))
    base: str = "adamw_decay_0.1"
    unit: str = "nats per token"
    alone: bool = True
    evaluated: int = 16
    most: int | None = None

    def corpus(self, path: str | None) -> Tokens:
        """Encode the corpus if it is not there yet. ``path``: a folder of packages."""
        key = f"{self.model.vocabulary}_{self.most or 'all'}"
        folder = Path(path, "tokens") if path else TOKENS
        folders = [Path(path)] if path else []
        vocabulary, most = self.model.vocabulary, self.most
        made = sources.make(folder / key, vocabulary=vocabulary, most=most, folders=folders)
        parts = {
            part: torch.from_numpy(sources.load(folder / key, part).astype("int32"))
            for part in sources.PARTS
        }
        name = f"Python sources, {made.encoding}, {made.tokens}, sha256 {made.sha256[:16]}"
        return Tokens(name, parts)

    def build(self, seed: int, corpus: Any) -> nn.Module:
        torch.manual_seed(seed)
        return GPT2(self.model)

    def batch(self, corpus: Tokens, seed: int, number: int) -> Batch:
        tokens = corpus.parts["train"]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        last = len(tokens) - self.model.context
        return self._at(tokens, torch.randint(last, (self.rows,), generator=generator))

    def held_out(self, corpus: Tokens, part: str) -> list[Batch]:
        tokens = corpus.parts[part]
        last = len(tokens) - self.model.context - 1
        starts = torch.linspace(0, last, self.evaluated * self.rows, dtype=torch.float64).long()
        return [self._at(tokens, rows) for rows in starts.split(self.rows)]

    def _at(self, tokens: Tensor, starts: Tensor) -> Batch:
        windows = tokens[starts[:, None] + torch.arange(self.model.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class RandomTokenTask(TokenTask):
    """Random tokens, other ones on every rank: for the cost of a step. Nothing is held out."""

    def corpus(self, path: str | None) -> Tokens:
        return Tokens("random tokens", {})

    def batch(self, corpus: Tokens, seed: int, number: int) -> Batch:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number * 1009 + rank)
        shape = self.rows, self.model.context
        x = torch.randint(self.model.vocabulary, shape, generator=generator)
        return x, x.roll(-1, 1)

    def held_out(self, corpus: Tokens, part: str) -> list[Batch]:
        return []


class Classifier(nn.Module):
    """A network and its cross-entropy. ``accuracy``: of the last forward pass in eval mode."""

    accuracy: float | None = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(x)
        if not self.training:
            self.accuracy = float((logits.argmax(1) == labels).float().mean())
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Network:
    """The name of a network of examples/networks.py."""

    name: str


@dataclass(frozen=True)
class ImageTask(Task):
    """Images by a convolutional network; scikit-learn's digits if no data is named.

    Attributes:
        first: number of training images that are used; None: all.
        needs_data: whether ``--data`` must name a data set.
    """

    base: str = "sgd"
    unit: str = "nats per image"
    first: int | None = None
    needs_data: bool = False

    def corpus(self, path: str | None) -> images.Images:
        if self.needs_data and path is None:
            raise ValueError("--data: this task needs the folder of a data set, such as CIFAR-10's")
        data = images.load(path, per_pixel=self.model.name == "unet")
        if self.first is not None:
            data = data.first(self.first)
        return data.to(torch.device("cuda")) if torch.cuda.is_available() else data

    def build(self, seed: int, corpus: Any) -> nn.Module:
        torch.manual_seed(seed)
        shape = {"channels": corpus.channels, "size": corpus.train.pixels.shape[-1]}
        return Classifier(networks.build(self.model.name, classes=corpus.classes, **shape))

    def batch(self, corpus: images.Images, seed: int, number: int) -> Batch:
        """Return images and labels: one epoch after the other, each in an order of its own."""
        return corpus.draw(seed, number * self.rows, self.rows)

    def held_out(self, corpus: images.Images, part: str) -> list[Batch]:
        """Return every second held-out image for validation, and the others for the test."""
        first = ("validation", "test").index(part)
        whole = corpus.held_out
        own = images.Part(whole.labels[first::2], whole.pixels[first::2])
        return list(replace(corpus, held_out=own).batches(HELD_OUT_IMAGES, 0, 1))


SMALL = GPTConfig(width=128, blocks=4)
BY_ACCURACY = {"judged_by": "held_out_accuracy", "needs_data": True, "alone": True}
TASKS: dict[str, Task] = {
    "gpt_small": Task(SMALL, rows=16, steps=300),
    "gpt_small_8k": Task(SMALL, rows=64, steps=75),
    "gpt_small_32k": Task(SMALL, rows=256, steps=40),
    "gpt_small_long": Task(SMALL, rows=16, steps=1500),
    "gpt_small_8k_long": Task(SMALL, rows=64, steps=375),
    "gpt_large": Task(GPTConfig(width=256, blocks=4), rows=16, steps=150),
    "gpt_25m": Task(GPTConfig(width=512, blocks=8, heads=16), rows=64, steps=300),
    "gpt_moe": Task(GPTConfig(width=128, blocks=3, experts=8), rows=16, steps=300),
    "mlm": Task(GPTConfig(width=128, blocks=3, causal=False), rows=16, steps=150),
    "gpt2_small": TokenTask(GPT2Config(), rows=32, steps=280, micro_batches=4),
    "digits": ImageTask(Network("resnet8"), rows=64, steps=100),
    "digits_large_batch": ImageTask(Network("resnet8"), rows=512, steps=30),
    "digits_unet": ImageTask(Network("unet"), rows=64, steps=60),
    # 30 epochs of 50,000 images
    "cifar_resnet32": ImageTask(Network("resnet32"), rows=1024, steps=1465, **BY_ACCURACY),
    # 7.68 epochs of 20,000 images
    "cifar_resnet8": ImageTask(
        Network("resnet8"), rows=512, steps=300, first=20_000, **BY_ACCURACY
    ),
    # for rehearsals and tests
    "tiny": Task(GPTConfig(width=16, blocks=1, heads=2, context=16), rows=2, steps=3),
    "gpt2_tiny": TokenTask(
        GPT2Config(width=32, blocks=2, heads=2, context=32, vocabulary=512),
        rows=4,
        steps=12,
        micro_batches=2,
        evaluated=4,
        most=1 << 20,
    ),
}
DEFAULT_TASKS = ["gpt_small", "gpt_large", "mlm"]
BATCHES = {"gpt_small": 2048, "gpt_small_8k": 8192, "gpt_small_32k": 32768}
"""The same model with a growing batch: task to bytes in a step."""
TEXT_METHODS = ["adamw", "muon", "kfacadamw", "kfacadamw_unrotated"]
METHODS_OF = {
    "gpt2_small": ["kfacadamw_decay_1", "muon_gpt2", "adamw_decay_0.1"],
    "gpt2_tiny": ["kfacadamw_decay_1", "muon_gpt2", "adamw_decay_0.1"],
    **{
        name: ["sgd", "adamw", "kfac_nesterov", "kfac_relative", "kfacadamw"]
        for name in ("digits", "digits_large_batch", "digits_unet")
    },
    **{
        name: ["sgd", "kfac_cnn", "kfacadamw", "kfac_kaisa"]
        for name in ("cifar_resnet32", "cifar_resnet8")
    },
}
"""Methods of a task unless others are named, in order of worth; of other tasks TEXT_METHODS."""
RATES_OF = {
    "digits": {
        "sgd": [0.1, 0.2, 0.4, 0.8],
        "adamw": [5e-3, 1e-2, 2e-2, 4e-2],
        "kfac_nesterov": [0.25, 0.5, 1.0, 2.0],
        "kfac_relative": [0.25, 0.5, 1.0, 2.0],
        "kfacadamw": [1.25e-3, 2.5e-3, 5e-3, 1e-2],
    },
    "cifar_resnet32": {"kfacadamw": [1.25e-3, 2.5e-3, 5e-3]},
    "gpt2_small": {"adamw_decay_0.1": [1e-3, 2e-3, 4e-3], "kfacadamw_decay_1": [2e-3, 4e-3, 8e-3]},
}
RATES_OF["digits_large_batch"] = RATES_OF["digits_unet"] = RATES_OF["digits"]
"""Where sweeps of a task start if not where ``methods.RATES`` says."""
