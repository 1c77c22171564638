"""GPT-2, BERT, Llama, GPT-OSS and Qwen3-MoE at their published shapes, in plain torch.

    python -m ds_kfac estimate --model benchmarks.models:gpt2_xl --world 64

For estimates on the meta device, not for training: they have no dropout, rotary positions
or initialisation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Shape of a transformer; ``inner`` is the width inside its MLP."""

    blocks: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    context: int


@dataclass(frozen=True)
class Mixture(Shape):
    """Shape of a transformer with mixtures of experts.

    Attributes:
        inner: width between the layers of an expert.
        head: width of a head; ``heads`` counts those of queries.
        grouped: number of heads of keys and values.
        top: number of the ``experts`` that a token takes.
    """

    head: int
    grouped: int
    experts: int
    top: int


GPT2_SMALL = Shape(12, 768, 12, 3072, 50257, 1024)
"""Radford et al. 2019; 124 M parameters."""
GPT2_XL = Shape(48, 1600, 25, 6400, 50257, 1024)
"""1.56 B parameters."""
BERT_LARGE = Shape(24, 1024, 16, 4096, 30522, 512)
"""Devlin et al. 2018; 336 M parameters with both heads of pre-training."""
LLAMA_7B = Shape(32, 4096, 32, 11008, 32000, 2048)
"""Touvron et al. 2023; 6.74 B parameters."""
GPT_OSS_20B = Mixture(24, 2880, 64, 2880, 201088, 4096, head=64, grouped=8, experts=32, top=4)
"""OpenAI 2025; 20.9 B parameters, 3.6 B of them active. Of its context 4,096 tokens."""
QWEN3_30B_A3B = Mixture(48, 2048, 32, 768, 151936, 4096, head=128, grouped=4, experts=128, top=8)
"""Yang et al. 2025; 30.5 B parameters, 3.3 B of them active. Of its context 4,096 tokens."""


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, *, causal: bool) -> Tensor:
    """[B, T, width] each -> [B, T, width]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention with separate projections."""

    def __init__(self, shape: Shape, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.width, shape.width, bias) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            attend(self.query(x), self.key(x), self.value(x), self.heads, causal=self.causal)
        )


class FusedAttention(nn.Module):
    """Attention with one projection for q, k and v."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = (
            nn.Linear(shape.width, 3 * shape.width),
            nn.Linear(shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(attend(q, k, v, self.heads, causal=True))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(shape.width, shape.inner),
            nn.Linear(shape.inner, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PreNormBlock(nn.Module):
    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm_attention, self.attention, self.norm_mlp, self.mlp = (
            norms[0],
            attention,
            norms[1],
            mlp,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT2(nn.Module):
    """Tokens [B, T] -> logits; the head has the embedding's weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed_tokens = nn.Embedding(shape.vocabulary, width)
        self.embed_positions = nn.Embedding(shape.context, width)
        self.blocks = nn.ModuleList(
            PreNormBlock(
                (nn.LayerNorm(width), nn.LayerNorm(width)), FusedAttention(shape), MLP(shape)
            )
            for _ in range(shape.blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, shape.vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.embed_positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class Llama(nn.Module):
    """Tokens [B, T] -> logits; nothing has a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed_tokens = nn.Embedding(shape.vocabulary, width)
        self.layers = nn.ModuleList(
            PreNormBlock(
                (nn.RMSNorm(width), nn.RMSNorm(width)),
                Attention(shape, bias=False, causal=True),
                SwiGLU(shape),
            )
            for _ in range(shape.blocks)
        )
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class PostNormBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.norm_attention = (
            Attention(shape, bias=True, causal=False),
            nn.LayerNorm(shape.width),
        )
        self.mlp, self.norm_mlp = MLP(shape), nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_attention(x + self.attention(x))
        return self.norm_mlp(x + self.mlp(x))


class BERT(nn.Module):
    """Tokens [B, T] -> logits of masked tokens (a tied head) and of the next sentence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed_tokens = nn.Embedding(shape.vocabulary, width)
        self.embed_positions = nn.Embedding(shape.context, width)
        self.embed_segments = nn.Embedding(2, width)
        self.norm_embedding = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(PostNormBlock(shape) for _ in range(shape.blocks))
        self.pooler, self.next_sentence = nn.Linear(width, width), nn.Linear(width, 2)
        self.transform, self.norm_transform = nn.Linear(width, width), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, shape.vocabulary)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(tokens) + self.embed_positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        x = self.norm_embedding(x + self.embed_segments(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = block(x)
        next_sentence = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        return self.lm_head(self.norm_transform(F.gelu(self.transform(x)))), next_sentence


class GroupedAttention(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, shape: Mixture, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.each = shape.heads, shape.heads // shape.grouped
        wide, narrow = shape.heads * shape.head, shape.grouped * shape.head
        self.query, self.out = (
            nn.Linear(shape.width, wide, bias),
            nn.Linear(wide, shape.width, bias),
        )
        self.key, self.value = (nn.Linear(shape.width, narrow, bias) for _ in range(2))
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if bias else None
        self.norm_query, self.norm_key = (
            nn.Identity() if bias else nn.RMSNorm(shape.head) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        head = self.out.in_features // self.heads
        q, k, v = (part(x).unflatten(-1, (-1, head)) for part in (self.query, self.key, self.value))
        q, k = self.norm_query(q), self.norm_key(k)
        q, k, v = (y.flatten(2) for y in (q, *(y.repeat_interleave(self.each, 2) for y in (k, v))))
        return self.out(attend(q, k, v, self.heads, causal=True))


class Experts(nn.Module):
    """Stacked, [E, O, I] as Qwen's."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, shape.width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner))

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """[N, width] and the expert of each, [N] -> [N, width]."""
        gate, up = torch.bmm(self.gate_up_proj[chosen], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(self.down_proj[chosen], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)


class LyingExperts(nn.Module):
    """Experts stacked as [E, I, O], with biases, as GPT-OSS has them."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, shape.width, 2 * shape.inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.inner, shape.width))
        self.down_proj_bias = nn.Parameter(torch.empty(shape.experts, shape.width))

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        rows = (
            torch.bmm(rows.unsqueeze(1), self.gate_up_proj[chosen]).squeeze(1)
            + self.gate_up_proj_bias[chosen]
        )
        gate, up = rows[:, ::2], rows[:, 1::2]
        rows = torch.bmm((F.silu(gate) * (up + 1)).unsqueeze(1), self.down_proj[chosen]).squeeze(1)
        return rows + self.down_proj_bias[chosen]


class Routed(nn.Module):
    """Every token to some of the experts."""

    def __init__(self, shape: Mixture, *, bias: bool) -> None:
        super().__init__()
        self.top, self.gate = shape.top, nn.Linear(shape.width, shape.experts, bias)
        self.experts = LyingExperts(shape) if bias else Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).topk(self.top)
        found = self.experts(rows.repeat_interleave(self.top, 0), chosen.flatten())
        return (found.unflatten(0, (-1, self.top)) * weights.unsqueeze(-1)).sum(1).view_as(x)


class MixtureOfExperts(nn.Module):
    """Tokens [B, T] -> logits."""

    def __init__(self, shape: Mixture, *, bias: bool) -> None:
        super().__init__()
        width = shape.width
        self.embed_tokens = nn.Embedding(shape.vocabulary, width)
        self.layers = nn.ModuleList(
            PreNormBlock(
                (nn.RMSNorm(width), nn.RMSNorm(width)),
                GroupedAttention(shape, bias=bias),
                Routed(shape, bias=bias),
            )
            for _ in range(shape.blocks)
        )
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


Example = tuple[nn.Module, Tensor]
"""A model, and one example of its inputs."""


def _with_tokens(model: nn.Module, shape: Shape) -> Example:
    return model, torch.zeros(1, shape.context, dtype=torch.long)


def gpt2() -> Example:
    return _with_tokens(GPT2(GPT2_SMALL), GPT2_SMALL)


def gpt2_xl() -> Example:
    return _with_tokens(GPT2(GPT2_XL), GPT2_XL)


def bert_large() -> Example:
    return _with_tokens(BERT(BERT_LARGE), BERT_LARGE)


def llama_7b() -> Example:
    return _with_tokens(Llama(LLAMA_7B), LLAMA_7B)


def gpt_oss_20b() -> Example:
    return _with_tokens(MixtureOfExperts(GPT_OSS_20B, bias=True), GPT_OSS_20B)


def qwen3_30b_a3b() -> Example:
    return _with_tokens(MixtureOfExperts(QWEN3_30B_A3B, bias=False), QWEN3_30B_A3B)
