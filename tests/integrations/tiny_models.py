"""Models of transformers at the size of their default config, and tiny ones that train in seconds:
their widths, heads and layers shrunk by the names of the config's fields.

A field that must become something else in one architecture is a line of OWN; a default config that
leaves a field open is completed by FILLED.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

WIDTH, HEADS, LAYERS, HEAD_DIM, VOCABULARY, POSITIONS = 64, 4, 2, 16, 128, 128
FIRST_TOKEN, LAST_TOKEN = 10, 100
"""Examples have tokens of this range; special tokens are others."""
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "attention_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2 * WIDTH),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "linear_key_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_value_head_dim", "mamba_d_state", "state_size"), HEAD_DIM),
    **dict.fromkeys(("qk_head_dim", "q_lora_rank", "kv_lora_rank", "mamba_d_head"), 2 * HEAD_DIM),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "rotary_dim"), 8),
    **dict.fromkeys(("n_group", "n_groups", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len", "n_ctx"), POSITIONS),
    **dict.fromkeys(("n_layer", "n_layers"), LAYERS),
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
}
"""Field -> what it becomes, if it is larger."""
FILLED: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 5e5}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "moonshine_streaming": {"num_key_value_heads": 8},
}
OWN: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {"attn_config.clip_qkv": 8.0},
    "mamba2": {"head_dim": 2 * HEAD_DIM},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
    },
}
"""Architecture -> path of a field -> what it becomes."""
STEPS = 8


class Architecture(NamedTuple):
    """transformers' ``model_type``, and the class of its head."""

    name: str
    head: str


def head_of(row: Architecture) -> Any:
    import transformers

    return getattr(transformers, row.head)


def default_config(row: Architecture) -> Any:
    from transformers import CONFIG_MAPPING

    kind = getattr(head_of(row), "config_class", None) or CONFIG_MAPPING[row.name]
    return kind(**FILLED.get(row.name, {}))


def tiny(row: Architecture) -> nn.Module:
    """With random weights; every dropout is off."""
    config = default_config(row)
    shrink(config)
    put(config, "use_cache", False)
    for path, value in OWN.get(row.name, {}).items():
        *parts, last = path.split(".")
        part = config
        for name in parts:
            part = getattr(part, name)
        put(part, last, value)
    return head_of(row)._from_config(config)


def put(config: Any, name: str, value: Any) -> None:
    """Past what checks a field against others that are not yet changed."""
    vars(config)[name] = value


def shrink(config: Any) -> None:
    """And its parts, in place. Of layers the first ones stay, at least one of each kind."""
    from transformers import PreTrainedConfig

    fields = {name: value for name, value in vars(config).items() if value is not None}
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or [None] * LAYERS
    layers = max(LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))
    special = iter(range(VOCABULARY - 1, LAST_TOKEN, -1))
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif isinstance(value, float) and "drop" in name:
            put(config, name, 0.0)
        elif isinstance(value, list | tuple) and len(value) > 12:
            put(config, name, value[:layers])  # one for each layer
        elif isinstance(value, int) and not isinstance(value, bool):
            put(config, name, smaller(name, value, fields, layers, special))


def smaller(
    name: str, value: int, fields: Mapping[str, Any], layers: int, special: Iterator[int]
) -> int:
    if name.endswith("token_id"):
        return value if value < FIRST_TOKEN else next(special)
    if name == "num_hidden_layers":
        return min(value, layers)
    if "heads" in name or name == "n_head":
        groups = 1
        if "kv" in name or "key_value" in name:
            groups = fields.get("num_attention_heads", value) // value
        return max(1, min(value if groups == 1 and "kv" not in name else HEADS, HEADS) // groups)
    return min(value, SIZES.get(name, value))


def batch_of(row: Architecture) -> dict[str, Any]:
    """Tokens, and as labels the same ones; others for a model of masks."""
    ids, others = torch.randint(FIRST_TOKEN, LAST_TOKEN, (2, 2, 16))
    labels = others if "MaskedLM" in row.head else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def ds_config(stage: int) -> dict[str, Any]:
    params = {"lr": 2e-3, "weight_decay": 0.0, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "KFACAdamW", "params": params},
        "kfac": {"enabled": True, "report": "none"},
    }


def shares(row: Architecture) -> dict[str, Any]:
    """Numbers of parameters of the full model on the meta device: all, those in matrices that K-FAC
    updates, and those with curvature."""
    from ds_kfac.config.keys import parse
    from ds_kfac.diagnostics.share import share_of
    from ds_kfac.directions.table import rule_in
    from ds_kfac.model.scan import scan

    config = default_config(row)
    with torch.device("meta"):
        model = head_of(row)._from_config(config)
    resolved, _ = rule_in(ds_config(0)).resolved(parse(ds_config(0)["kfac"]))
    share = share_of(model, scan(model, resolved.choice))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrices": share.matrices,
        "updated": share.updated,
        "curved": share.curved,
        "layers": sum(count for _, count in share.kinds),
        "left": [[kind, reason, numel] for (kind, reason), numel in share.skipped[:4]],
    }


def trained(row: Architecture) -> dict[str, Any]:
    """Loss before and after some steps at ZeRO 2, K-FAC's layers, how many moved, and which of
    these have no curvature after all."""
    import ds_kfac

    torch.manual_seed(0)
    model, batch = tiny(row), batch_of(row)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = ds_kfac.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config(2)
        )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(STEPS):
        loss = engine(**batch).loss
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    kfac, now = engine.kfac.preconditioner, dict(engine.module.named_parameters())
    moved = [
        layer
        for layer in kfac.layers
        for index, count in [layer.part]
        if bool((now[layer.weight] != before[layer.weight]).reshape(count, -1)[index].any())
    ]
    fits = [layer for layer in moved if layer.name not in kfac.proving.unfit]
    curved = {layer.name for layer in fits if kfac.state[layer.name].preconditioner is not None}
    return {
        "losses": losses,
        "layers": len(kfac.layers),
        "moved": len(moved),
        "silent": [layer.name for layer in moved if layer.name not in curved],
    }
