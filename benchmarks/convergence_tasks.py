"""What the convergence benchmark trains: small models on bytes, where a batch depends on seed and step only."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from examples.gpt import GPT, GPTConfig
from examples.text import STRETCHES, Corpus

MASK, MASKED_PART, IGNORED = 0xFF, 0.15, -100  # UTF-8 has no byte 0xFF
HELD_OUT_BATCHES = 8


@dataclass(frozen=True)
class Task:
    """A model, windows a step and steps; a model that is not causal predicts masked bytes."""

    model: GPTConfig
    rows: int
    steps: int

    def build(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(self.model)

    def batch(self, corpus: Corpus, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [rows, context]."""
        return self._windows(corpus, torch.Generator().manual_seed(seed * 1_000_003 + step * 1009), held_out=False)

    def held_out(self, corpus: Corpus, part: str) -> list[tuple[Tensor, Tensor]]:
        """The same windows, masked alike, for every method, seed and step.

        Args:
            part: "validation", by which rates are chosen, or "test", which is reported; they share no byte.
        """
        generator = torch.Generator().manual_seed(10_000)
        # of each of the corpus' stretches the first half and the second
        halves = dict(zip(("validation", "test"), corpus.held_out.view(STRETCHES, -1).chunk(2, dim=1), strict=True))
        own = replace(corpus, held_out=halves[part].reshape(-1))
        return [self._windows(own, generator, held_out=True) for _ in range(HELD_OUT_BATCHES)]

    def _windows(self, corpus: Corpus, generator: torch.Generator, *, held_out: bool) -> tuple[Tensor, Tensor]:
        tokens, following = corpus.batch(generator, self.rows, self.model.context, held_out=held_out)
        if self.model.causal:
            return tokens, following
        masked = torch.rand(tokens.shape, generator=generator) < MASKED_PART
        return tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, IGNORED)


TASKS = {
    "gpt_small": Task(GPTConfig(width=128, blocks=4), rows=16, steps=300),
    "gpt_large": Task(GPTConfig(width=256, blocks=4), rows=16, steps=150),
    "mlm": Task(GPTConfig(width=128, blocks=3, causal=False), rows=16, steps=150),
    "tiny": Task(GPTConfig(width=16, blocks=1, heads=2, context=16), rows=2, steps=3),
}
DEFAULT_TASKS = ["gpt_small", "gpt_large", "mlm"]
"""All but "tiny", which is there to try the benchmark itself."""
