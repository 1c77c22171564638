"""A tiny model of an architecture: its default config, shrunk by the names of its fields.

All widths become WIDTH, whatever they were, so that parts that fit still do; of layers the first
ones stay, at least one of each kind. Where an architecture needs something else, it is a line of
OWN.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tests.integrations.coverage.architectures import (
    TIMM,
    Architecture,
    default_config,
    head_of,
    with_torchvision,
)

WIDTH, HEADS, VOCABULARY, POSITIONS, IMAGE, LAYERS = 64, 4, 128, 128, 64, 2
FIRST_TOKEN, LAST_TOKEN = 10, 100
"""Examples have tokens of this range; special tokens are others."""

WIDTHS = """
    hidden_size d_model n_embd dim embed_dim emb_dim embedding_size projection_dim projection_size project_dim dim_model
    image_text_hidden_size output_hidden_size encoder_hidden_size decoder_hidden_size encoder_hidden_dim
    word_embed_proj_dim d_latents backbone_hidden_size cross_hidden_size projector_hidden_size hidden_size_global
    embedding_dim input_embedding_size output_embedding_size lru_width attention_hidden_size audio_hidden_size
    cross_attention_hidden_size n_embed model_dim attn_hidden_size shared_hidden_size adapter_hidden_size
    encoder_width decoder_width text_hidden_size vision_hidden_size out_hidden_size pooler_hidden_size
""".split()  # noqa: E501
INNER = """
    intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner dim_ff dff mlp_dim hidden_dim
    ffn_hidden_size d_inner feed_forward_size moe_intermediate_size shared_expert_intermediate_size
    shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size intermediate_size_mlp
    dense_intermediate_size prompt_intermediate_size speech_encoder_intermediate_size decoder_intermediate_size
    shared_experts_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim decoder_intermediate_dim
    ffn_intermediate_size block_ff_dim expert_intermediate_size
""".split()  # noqa: E501
EXACT: Mapping[str, int] = {
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(INNER, 2 * WIDTH),
    **dict.fromkeys(
        (
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "head_dim",
            "d_kv",
            "attention_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(
        ("kv_channels", "dim_head", "swa_head_dim", "global_head_dim", "index_head_dim", "d_head"),
        16,
    ),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "attention_head_size"),
        16,
    ),
    **dict.fromkeys(("swa_v_head_dim", "cross_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "o_lora_rank"), 32),
    **dict.fromkeys(
        (
            "mamba_dt_rank",
            "time_step_rank",
            "laurel_rank",
            "adapter_rank",
            "hidden_size_per_layer_input",
        ),
        8,
    ),
    # times heads: twice the width
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    "mamba_d_ssm": 2 * WIDTH,
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(
        ("sliding_window", "attention_window_size", "index_topk", "attention_chunk_size"), 16
    ),
    **dict.fromkeys(
        ("n_positions", "max_position_embeddings", "max_seq_len", "model_max_length", "n_ctx"),
        POSITIONS,
    ),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), POSITIONS),
    **dict.fromkeys(
        ("num_queries", "num_detection_tokens", "num_denoising", "num_query_tokens"), 8
    ),
    "num_kv_shared_layers": 0,
    "num_filters": 4,
    "zero_expert_num": 2,
    "rotary_dim": 8,
    "conf_num_attention_heads": HEADS,
    "num_labels": 8,
}
"""Field -> what it becomes, if it is larger."""
KINDS_OF_LAYERS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "block_types",
    "attn_types",
    "layer_type",
)


def tiny(row: Architecture) -> nn.Module:
    """With random weights; every dropout is off."""
    with_torchvision()
    if row.of_timm:
        import timm

        name, options = TIMM[row.name.removeprefix("timm/")]
        return timm.create_model(name, **options, num_classes=8)
    return head_of(row)._from_config(tiny_config(row))


def tiny_config(row: Architecture) -> Any:
    config = default_config(row, **MADE.get(row.name, {}))
    shrink(config)
    put(config, "use_cache", False)
    for path, value in OWN.get(row.name, {}).items():
        *parts, last = path.split(".")
        part = config
        for name in parts:
            part = getattr(part, name)
        put(part, last, value)
    if row.task in ("seq2seq", "speech"):
        for name, value in (
            ("pad_token_id", 0),
            ("decoder_start_token_id", 0),
            ("eos_token_id", 1),
        ):
            if getattr(config, name, None) is None:
                put(config, name, value)
    return config


def put(config: Any, name: str, value: Any) -> None:
    """Past what checks a field against others that are not yet changed."""
    vars(config)[name] = value


def shrink(config: Any) -> None:
    """And its parts, in place."""
    from transformers import PreTrainedConfig

    for part in list(vars(config).values()):
        if isinstance(part, PreTrainedConfig):
            shrink(part)
    fields = {
        name: value
        for name, value in vars(config).items()
        if value is not None and not isinstance(value, bool)
    }
    layers = layers_of(fields)
    special = iter(range(VOCABULARY - 1, LAST_TOKEN, -1))
    for name, value in fields.items():
        if isinstance(value, int):
            put(config, name, smaller(name, value, fields, layers, special))
        elif isinstance(value, float) and (
            "drop" in name or name in ("mask_time_prob", "mask_feature_prob")
        ):
            put(config, name, 0.0)
        elif isinstance(value, list | tuple) and value:
            put(config, name, shorter(name, list(value), layers, special))
    for name in ("layerdrop", "apply_spec_augment"):
        if name in fields or hasattr(config, name):
            put(config, name, type(getattr(config, name))(0))


def smaller(name: str, value: int, fields: Mapping[str, Any], layers: int, special: Any) -> int:
    if (
        name.endswith(("token_id", "token_index", "_token")) and "experts" not in name
    ) or name == "mask_index":
        return value if value < FIRST_TOKEN else next(special)
    if name in EXACT:
        return min(value, EXACT[name])
    if "vocab" in name and "offset" not in name:
        return min(value, VOCABULARY)
    if "heads" in name or name in ("n_head", "num_key_value_groups"):
        return heads(name, value, fields)
    if is_layers(name):
        return min(value, layers)
    if "experts" in name or name in ("moe_topk", "moe_k"):
        return min(
            value,
            2
            if "per_tok" in name or "top" in name or name == "moe_k"
            else 1
            if "shared" in name
            else 4,
        )
    if name == "image_size":
        patch = fields.get("patch_size", 16)
        return min(value, max(IMAGE, 4 * patch if isinstance(patch, int) else IMAGE))
    return value


def is_layers(name: str) -> bool:
    known = ("n_layer", "n_layers", "num_layers", "depth", "num_blocks", "num_encoder_blocks_")
    return name.endswith(("hidden_layers", "coder_layers")) or name in known


def heads(name: str, value: int, fields: Mapping[str, Any]) -> int:
    if "key_value" not in name and "kv" not in name:
        return min(value, HEADS)
    queries = [
        n
        for key, n in fields.items()
        if isinstance(n, int) and key == name.replace("key_value_", "attention_")
    ]
    queries += [
        n for key, n in fields.items() if key in ("num_attention_heads", "num_heads", "n_heads")
    ]
    groups = queries[0] // value if queries and isinstance(queries[0], int) else 1
    return max(1, HEADS // max(1, groups))


def layers_of(fields: Mapping[str, Any]) -> int:
    """How many have one of each kind."""
    found = LAYERS
    for name in KINDS_OF_LAYERS:
        kinds = fields.get(name)
        if isinstance(kinds, list | tuple) and kinds:
            found = max(found, max(kinds.index(kind) for kind in set(kinds)) + 1)
    return min(found, 8)


def shorter(name: str, values: list[Any], layers: int, special: Any) -> Any:
    if name.endswith("token_id"):
        return [value if value < FIRST_TOKEN else next(special) for value in values[:1]]
    # one for each layer
    if name in EXACT and name not in STAGES and all(isinstance(value, int) for value in values):
        return [min(value, EXACT[name]) for value in values[:layers]]
    if name in KINDS_OF_LAYERS or (
        len(values) > 12 and name.endswith(("layers", "_types", "size"))
    ):
        return values[:layers]
    if name in (
        "depths",
        "depth",
        "layers_per_stage",
        "stage_num_blocks",
        "stage_numb_of_layers",
        "num_block_repeats",
    ):
        return [min(value, 1) for value in values]
    if name in STAGES and all(isinstance(value, int) for value in values):
        while all(value % 2 == 0 for value in values) and min(values) >= 32:
            values = [value // 2 for value in values]
    return values


MADE: Mapping[str, Mapping[str, Any]] = {
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 192},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
}
"""Architecture -> fields that its config is made with, of which it makes others."""

STAGES = (
    "hidden_sizes",
    "embed_dims",
    "embed_dim",
    "dims",
    "neck_hidden_sizes",
    "conv_dim",
    "encoder_hidden_sizes",
)
"""Fields with a width for each stage; all are halved as often as they can be."""

HGNET: Mapping[str, Any] = {
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 32, 32, 64],
    "stage_mid_channels": [16] * 4,
    "stage_out_channels": [32, 32, 64, 64],
    "hidden_sizes": [32, 32, 64, 64],
}
AS_BACKBONE = {f"backbone_config.{name}": value for name, value in HGNET.items()} | {
    "decoder_in_channels": [WIDTH] * 3
}

OWN: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {"head_dim": 32},
    "reformer": {
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (4, 4),
        "attn_layers": ["local", "lsh"],
    },
    "xlstm": {"chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
        "mamba_dt_rank": 8,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
        "hybrid_layer_ids": [1, 3, 5],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 32,
    },
    "ernie4_5_moe": {"moe_k": 2},
    "conditional_detr": {"backbone_config.backbone": "test_resnet"},
    "dab-detr": {"backbone_config.backbone": "test_resnet"},
    "deformable_detr": {"backbone_config.backbone": "test_resnet"},
    "detr": {"backbone_config.backbone": "test_resnet"},
    "table-transformer": {"backbone_config.backbone": "test_resnet"},
    "align": {
        "text_config.hidden_size": WIDTH,
        "vision_config.width_coefficient": 0.1,
        "vision_config.depth_coefficient": 0.1,
        "vision_config.hidden_dim": WIDTH,
        "projection_dim": 32,
        "vision_config.initializer_range": 0.2,
    },
    "dbrx": {"attn_config.clip_qkv": 8.0},
    "bit": {"num_groups": 4},
    "blt": {
        "global_config.hidden_size": 2 * WIDTH,
        "global_config.head_dim": 32,
        "encoder_config.hidden_size_global": 2 * WIDTH,
        "decoder_config.hidden_size_global": 2 * WIDTH,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        }
    },
    "dots3_note_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
            for kind in ("indexed_attention", "sliding_attention")
        }
    },
    "cvt": {"depth": [1, 2, 3]},
    **dict.fromkeys(("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v4"), AS_BACKBONE),
    "rt_detr": {"decoder_in_channels": [WIDTH] * 3},
    "rt_detr_v2": {"decoder_in_channels": [WIDTH] * 3},
    "lw_detr": {"backbone_config.num_hidden_layers": 10},
    "rf_detr": {"backbone_config.num_hidden_layers": 12},
    "pp_doclayout_v3": {**AS_BACKBONE, "x4_feat_dim": 32},
    "swin": {"embed_dim": 48, "image_size": 224},
    "swinv2": {"embed_dim": 48},
    "textnet": {"stem_out_channels": 16, "image_size": (IMAGE, IMAGE)},
    "donut-swin": {"embed_dim": 48, "image_size": 224},
    "efficientnet": {
        "width_coefficient": 0.1,
        "depth_coefficient": 0.1,
        "hidden_dim": 128,
        "initializer_range": 0.2,
    },
    "falcon_h1": {"mamba_d_head": 32},
    "gemma3n": {"vision_config.architecture": "test_resnet"},
    "hgnet_v2": HGNET,
    "kyutai_speech_to_text": {"codec_config.upsample_groups": 64},
    "mobilevit": {"hidden_sizes": [16, 16, 16]},
    "qwen4_exp_text": {
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "whisper": {"max_source_positions": 64},
}
"""Architecture -> path of a field -> what it becomes."""
