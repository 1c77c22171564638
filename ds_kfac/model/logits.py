"""How large a model's attention logits are, from A and the weights alone: what grows before attention saturates.

Over all pairs of rows, the mean of (q_i . k_j)^2 is tr(S_q S_k), with S_q = W_q A W_q^T and S_k = W_k A W_k^T: exact
for the rows of A, before rotary embeddings and norms of queries and keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_kfac.model.cuts import HEADS
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS

KEYS = {"q_proj": "k_proj", "query": "key", "q_lin": "k_lin", "wq": "wk", "to_q": "to_k", "q": "k"}
"""Name of a layer of queries -> that of its keys, beside it."""
FUSED = ("qkv", "query_key_value", "c_attn", "qkv_proj", "Wqkv")


@dataclass(frozen=True)
class Heads:
    """Of one attention: the layers of its queries and keys, which may be one, and the width of a head."""

    queries: LayerSpec
    keys: LayerSpec
    width: int


def attentions(model: nn.Module, layers: Mapping[str, LayerSpec]) -> Iterator[Heads]:
    """Those whose layers and number of heads are known by their names."""
    for name, layer in layers.items():
        around, _, last = name.rpartition(".")
        keys = layers.get(f"{around}.{KEYS[last]}".lstrip(".")) if last in KEYS else None
        if last in FUSED and len(layer.blocks) == 3:
            keys = layer
        if keys is None or layer.groups > 1 or layer.part[1] > 1:
            continue
        outputs = layer.G.dim if keys is not layer else layer.G.dim // sum(layer.blocks) * layer.blocks[0]
        parent = model.get_submodule(around)
        for owner in (parent, getattr(parent, "config", None)):
            width = getattr(owner, "head_dim", None)
            count = next(
                (n for key in (*HEADS, "heads") if isinstance(n := getattr(owner, key, None), int) and n > 0), None
            )
            width = width if isinstance(width, int) and width > 0 else outputs // count if count else None
            if width and outputs % width == 0:
                yield Heads(layer, keys, width)
                break


def rms(heads: Heads, parameters: Mapping[str, Tensor], A: Tensor) -> Tensor | None:
    """The root of the mean square of q . k / sqrt(width) over pairs of rows, of the head with the largest; None where
    the weights are not whole here, as at ZeRO stage 3.

    Args:
        A: fp32 [I, I], of the queries' layer.
    """
    found = []
    for place, layer in enumerate((heads.queries, heads.keys)):
        weight = parameters[layer.weight]
        if weight.numel() != layer.G.dim * (layer.A.dim - (layer.bias is not None)):
            return None
        W_OI = (weight.mT if LAYERS[layer.kind].turned else weight).float()
        if layer.bias is not None:
            W_OI = torch.cat([W_OI, parameters[layer.bias].float().unsqueeze(-1)], dim=-1)
        if heads.keys is heads.queries:
            start = sum(layer.blocks[:place])
            W_OI = W_OI.view(-1, sum(layer.blocks), W_OI.shape[-1])[:, start : start + layer.blocks[place]].flatten(
                0, 1
            )
        W_HDI = W_OI.reshape(-1, heads.width, W_OI.shape[-1])
        found.append(W_HDI @ A @ W_HDI.mT)
    queries, keys = found
    keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)  # a key may be of several queries
    return ((queries * keys).sum((1, 2)) / heads.width).clamp(min=0).sqrt().max()
