"""GPT-2 in plain torch, for training. ``benchmarks.models`` has shapes for estimates."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt import Block, GPTConfig


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a model.

    Attributes:
        vocabulary: number of token ids, a multiple of 64 for speed.
        tied: whether the head's weight is the token table.
    """

    width: int = 768
    blocks: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 32768
    tied: bool = False


class GPT2(nn.Module):
    """Token ids and targets, int64 [rows, context], to their mean cross-entropy in nats, fp32."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        block = GPTConfig(config.width, config.blocks, config.heads, config.context)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(block) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        residual_std = 0.02 / (2 * config.blocks) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_into_residual = re.search(r"(out|down)\.weight$", name)
                nn.init.normal_(parameter, std=residual_std if writes_into_residual else 0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.embed_tokens(x) + self.embed_positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.lm_head(self.norm(h)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
