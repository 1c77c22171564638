"""Which models the coverage benchmark is of: every architecture of transformers with one of TASKS,
ten of timm's."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

TASKS: Mapping[str, tuple[str, ...]] = {
    "speech": ("SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "AUDIO_CLASSIFICATION"),
    "detection": ("OBJECT_DETECTION",),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "image": ("IMAGE_CLASSIFICATION",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "causal": ("CAUSAL_LM",),
}
"""Task -> transformers' tables of models with such a head. An architecture with several has the
first one here: what it was made for, where others are of its parts."""

TIMM: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "resnet50": ("test_resnet", {}),
    "vit_base_patch16_224": ("test_vit", {}),
    "deit_base_distilled_patch16_224": (
        "deit_base_distilled_patch16_224",
        {"embed_dim": 64, "depth": 2, "num_heads": 4},
    ),
    "swin_tiny_patch4_window7_224": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4)},
    ),
    "convnext_tiny": ("test_convnext", {}),
    "efficientnet_b0": ("test_efficientnet", {}),
    "mobilenetv3_large_100": ("mobilenetv3_small_050", {}),
    "regnety_016": ("test_byobnet", {}),
    "mixer_s32_224": ("gmixer_12_224", {}),
    "densenet121": ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
}
"""Model of timm at its published size -> one of the same kind that trains in seconds, and its
options."""

WITHOUT = {
    "encoder-decoder": "joins two others",
    "speech-encoder-decoder": "joins two others",
    "timm_wrapper": "one of timm's",
    "shieldgemma2": "gemma3",
}
"""Names that are no architecture of their own."""


@dataclass(frozen=True)
class Architecture:
    """A row.

    Attributes:
        name: transformers' ``model_type``, or "timm/" and timm's name.
        task: a key of TASKS.
        head: the class of transformers; timm's name of the model that is trained.
    """

    name: str
    task: str
    head: str

    @property
    def of_timm(self) -> bool:
        return self.name.startswith("timm/")


@cache
def architectures() -> Mapping[str, Architecture]:
    """Name -> row, timm's last; needs transformers."""
    with_torchvision()
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found: dict[str, Architecture] = {}
    for task, tables in TASKS.items():
        for table in tables:
            for name, heads in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
                head = heads if isinstance(heads, str) else heads[0]
                # of several names for one class, that of its config
                if (
                    name not in found
                    and name not in WITHOUT
                    and CONFIG_MAPPING[name].model_type == name
                ):
                    found[name] = Architecture(name, task, head)
    taken: dict[str, str] = {}
    for name, row in list(found.items()):
        kind = getattr(head_of(row), "config_class", None)
        if kind is not CONFIG_MAPPING[name] and (
            row.head in taken or getattr(kind, "model_type", name) in found
        ):
            del found[name]
        taken.setdefault(row.head, name)
    rows = sorted(found.values(), key=lambda row: (list(TASKS).index(row.task), row.name))
    rows += [Architecture(f"timm/{name}", "image", small) for name, (small, _) in TIMM.items()]
    return {row.name: row for row in rows}


def head_of(row: Architecture) -> Any:
    """Its class of transformers."""
    import transformers

    return getattr(transformers, row.head)


def at_full_size(row: Architecture) -> nn.Module:
    """As its config has it by default, on the meta device."""
    if row.of_timm:
        with_torchvision()
        import timm

        with torch.device("meta"):
            return timm.create_model(row.name.removeprefix("timm/"))
    config = default_config(row)
    with torch.device("meta"):
        return head_of(row)._from_config(config)


def default_config(row: Architecture, **fields: Any) -> Any:
    """Of transformers, with FILLED and ``fields``."""
    with_torchvision()
    from transformers import CONFIG_MAPPING

    kind = getattr(head_of(row), "config_class", None) or CONFIG_MAPPING[row.name]
    return kind(**{**FILLED.get(row.name, {}), **fields})


FILLED: Mapping[str, Mapping[str, Any]] = {
    "blip-2": {"qformer_config": {"use_qformer_text_input": True}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
}
"""Architecture -> fields that its default config leaves open, without which no model can be
built."""


_LIBRARIES: list[Any] = []


def with_torchvision() -> None:
    """timm imports torchvision for its data only. Where that was built for another torch it has no
    operators, and its import asks for two of them: they are declared here, without a body."""
    if _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)  # declarations live as long as it
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # is there
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
