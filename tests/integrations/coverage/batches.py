"""One batch for a model, by its task and what its forward takes; and its loss."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integrations.coverage.architectures import Architecture
from tests.integrations.coverage.tiny import FIRST_TOKEN, IMAGE, LAST_TOKEN

EXAMPLES, TOKENS, SAMPLES, FRAMES = 2, 16, 4000, 128


def batch_of(row: Architecture, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of its forward, with labels where it takes them."""
    if row.of_timm:
        return {"x": torch.randn(EXAMPLES, *image_shape(model))}
    batch = MAKERS[row.task](model)
    batch |= EXTRA[row.name](model, batch) if row.name in EXTRA else {}
    known = inspect.signature(model.forward).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return {
        name: value
        for name, value in batch.items()
        if value is not None and (every or name in known)
    }


def loss_of(output: Any) -> Tensor:
    """The model's own; of timm's scores cross entropy; else, where there is none, the mean square
    of its output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.float().mean()
    if isinstance(output, Tensor):
        return F.cross_entropy(output.float(), torch.arange(EXAMPLES))
    outputs = list(output.values() if hasattr(output, "values") else output)
    first = next(x for x in outputs if isinstance(x, Tensor) and x.requires_grad)
    return first.float().square().mean()


def image_shape(model: Any) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    if config is None:
        return model.default_cfg["input_size"]
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 64
    return getattr(vision, "num_channels", 3), *(
        size if isinstance(size, list | tuple) else (size, size)
    )


def tokens(model: Any, count: int = TOKENS) -> Tensor:
    known = getattr(model.config.get_text_config(), "vocab_size", None) or LAST_TOKEN
    return torch.randint(FIRST_TOKEN, min(known, LAST_TOKEN), (EXAMPLES, count))


def text(model: Any) -> dict[str, Any]:
    ids = tokens(model)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def sequences(model: Any) -> dict[str, Any]:
    """What goes in says nothing of what shall come out."""
    return {**text(model), "labels": tokens(model)}


def images(model: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(EXAMPLES, *image_shape(model)),
        "labels": torch.arange(EXAMPLES),
    }


def boxes(model: Any) -> dict[str, Any]:
    box = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.4]])}
    return {
        "pixel_values": images(model)["pixel_values"],
        "labels": [dict(box) for _ in range(EXAMPLES)],
    }


def image_and_text(model: Any) -> dict[str, Any]:
    batch = text(model)
    del batch["labels"]
    return {**batch, "pixel_values": images(model)["pixel_values"], "return_loss": True}


def speech(model: Any) -> dict[str, Any]:
    """A model that takes tokens is trained on text alone, its encoder of sounds is not."""
    name = model.main_input_name
    if name == "input_ids":
        return sequences(model)
    rows = {"input_values": (SAMPLES,), "input_features": (FRAMES, bins(model.config))}
    mask = torch.ones(EXAMPLES, FRAMES, dtype=torch.long) if name == "input_features" else None
    labels = tokens(model, TOKENS // 4)
    return {name: torch.randn(EXAMPLES, *rows[name]), "attention_mask": mask, "labels": labels}


def bins(config: Any) -> int:
    """Of a spectrum, as the config or a part of it says."""
    known = (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None))
    names = ("feature_projection_input_dim", "num_mel_bins", "input_dim", "feature_size")
    return next((n for part in known for name in names if (n := getattr(part, name, None))), 80)


def codes(channels: int) -> Tensor:
    """Of sound."""
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (EXAMPLES, TOKENS, channels))


def of_assistant(model: Any) -> dict[str, Any]:
    """What the model that it assists has made: hidden states of two kinds, keys and values of its
    last layers."""
    shape = (EXAMPLES, 1, TOKENS, 16)
    known = {
        kind: (torch.randn(shape), torch.randn(shape))
        for kind in ("full_attention", "sliding_attention")
    }
    embedded = torch.randn(EXAMPLES, TOKENS, 2 * model.config.backbone_hidden_size)
    return {"inputs_embeds": embedded, "shared_kv_states": known, "input_ids": None, "labels": None}


def of_codebooks(model: Any) -> dict[str, Any]:
    count = (
        model.config.num_codebooks
        if hasattr(model.config, "num_codebooks")
        else model.config.decoder.num_codebooks
    )
    ids = codes(count).transpose(1, 2).reshape(EXAMPLES * count, TOKENS)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(EXAMPLES, TOKENS, dtype=torch.long),
        "labels": codes(count),
    }


MAKERS = {
    "causal": text,
    "masked": sequences,
    "seq2seq": sequences,
    "image": images,
    "detection": boxes,
    "image and text": image_and_text,
    "speech": speech,
}
EXTRA: dict[str, Any] = {
    "audio-spectrogram-transformer": lambda m, b: {
        "input_values": torch.randn(EXAMPLES, m.config.max_length, m.config.num_mel_bins),
        "labels": torch.arange(EXAMPLES),
    },
    "dia": lambda m, b: {
        "decoder_input_ids": codes(m.config.decoder_config.num_channels),
        "labels": codes(m.config.decoder_config.num_channels),
    },
    "gemma4_assistant": lambda m, b: of_assistant(m),
    "gemma4_unified_assistant": lambda m, b: of_assistant(m),
    "imagegpt": lambda m, b: {"input_ids": tokens(m), "pixel_values": None},
    "kyutai_speech_to_text": lambda m, b: {"input_ids": codes(m.config.num_codebooks + 1)},
    **dict.fromkeys(
        # do not support training, they say
        ("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"),
        lambda m, b: {"labels": None},
    ),
    "voxtral_realtime": lambda m, b: {
        "input_features": torch.randn(EXAMPLES, bins(m.config), 8 * TOKENS)
    },
    "musicgen": lambda m, b: of_codebooks(m),
    "musicgen_melody": lambda m, b: of_codebooks(m),
    **dict.fromkeys(
        ("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_rnnt"),  # the loss is torchaudio's
        lambda m, b: {"decoder_input_ids": tokens(m, TOKENS // 4), "labels": None},
    ),
    "granite_speech5_ctc": lambda m, b: {"input_features": torch.randn(EXAMPLES, FRAMES, 320)},
    "omniasr_ctc": lambda m, b: {
        "input_values": torch.randn(EXAMPLES, 1, SAMPLES),
        "padding_mask": torch.ones(EXAMPLES, SAMPLES).long(),
    },
    "whisper": lambda m, b: {
        "input_features": torch.randn(EXAMPLES, 80, 128),
        "attention_mask": None,
    },
    "videoprism": lambda m, b: {
        "pixel_values_videos": torch.randn(EXAMPLES, 16, 3, IMAGE, IMAGE),
        "pixel_values": None,
    },
    "git": lambda m, b: {"pixel_values": images(m)["pixel_values"]},
    "siglip2": lambda m, b: {
        "pixel_values": torch.randn(EXAMPLES, 16, 3 * m.config.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(EXAMPLES, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * EXAMPLES),
    },
}
"""Architecture -> arguments that it needs besides."""
