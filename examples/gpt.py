"""A small byte-level GPT: pre-norm blocks, scaled_dot_product_attention, SwiGLU or experts of it,
learned positions."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    width: int = 128
    blocks: int = 4
    heads: int = 4
    context: int = 128
    causal: bool = True
    """False: every byte sees both sides, for masked prediction."""
    experts: int = 0
    """Of a mixture in every block, each of twice the width, of which a byte takes two; 0: no
    mixture."""
    stacked: bool = True
    """Whether the experts' weights are stacked in one tensor, as in transformers; False: modules of
    their own."""


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, config.causal
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = 8 * config.width // 3 // 8 * 8
        self.gate = nn.Linear(config.width, hidden, bias=False)
        self.up = nn.Linear(config.width, hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """SwiGLUs, their weights in two tensors [E, O, I]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.count, hidden = config.experts, 2 * config.width
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * hidden, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, hidden))

    def expert(self, index: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[index]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[index])

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Bytes [N, width], with the weights [N, 2] of the experts [N, 2] that each takes."""
        y = torch.zeros_like(x)
        for index in range(self.count):
            byte, place = torch.where(chosen == index)
            y = y.index_add(0, byte, self.expert(index, x[byte]) * weights[byte, place, None])
        return y


class ExpertModules(Experts):
    """The same with a module for each map."""

    def __init__(self, config: GPTConfig) -> None:
        nn.Module.__init__(self)
        self.count, hidden = config.experts, 2 * config.width
        self.gate_up = nn.ModuleList(
            nn.Linear(config.width, 2 * hidden, bias=False) for _ in range(config.experts)
        )
        self.down = nn.ModuleList(
            nn.Linear(hidden, config.width, bias=False) for _ in range(config.experts)
        )

    def expert(self, index: int, x: Tensor) -> Tensor:
        gate, up = self.gate_up[index](x).chunk(2, dim=-1)
        return self.down[index](F.silu(gate) * up)


class Mixture(nn.Module):
    """Every byte takes the two experts of which a router thinks most."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = (Experts if config.stacked else ExpertModules)(config)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(dim=-1).topk(2)
        return self.experts(
            flat, (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), chosen
        ).view_as(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm_mlp, self.mlp = (
            nn.LayerNorm(config.width),
            (Mixture if config.experts else SwiGLU)(config),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Bytes [B, T] -> logits [B, T, 256]; with targets [B, T], their mean cross-entropy in nats per
    byte.

    Targets of -100 do not count. DeepSpeed's Muon leaves to Adam what is called embed or lm_head,
    and nothing else.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_bytes = nn.Embedding(VOCABULARY, config.width)
        self.embed_positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                into_residual = re.search(r"(out|down)(\.\d+)?(\.weight)?$", name)
                nn.init.normal_(
                    parameter, std=0.02 / (2 * config.blocks) ** 0.5 if into_residual else 0.02
                )

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.embed_bytes(x) + self.embed_positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.lm_head(self.norm(h))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))
