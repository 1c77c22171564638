"""One batch for a model, by its task and what its forward takes; and its loss."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.architectures import Architecture
from benchmarks.coverage.tiny import FIRST_TOKEN, LAST_TOKEN

EXAMPLES, TOKENS, SAMPLES, FRAMES = 2, 16, 4000, 128


def batch_of(row: Architecture, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of its forward, with labels where it takes them."""
    if row.of_timm:
        return {"x": torch.randn(EXAMPLES, *image_shape(model))}
    batch = MAKERS[row.task](model)
    batch |= EXTRA[row.name](model, batch) if row.name in EXTRA else {}
    known = inspect.signature(model.forward).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    return {name: value for name, value in batch.items() if value is not None and (every or name in known)}


def loss_of(output: Any) -> Tensor:
    """The model's own; else, where there is none, the mean square of its output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.float().mean()
    outputs = [output] if isinstance(output, Tensor) else list(output.values() if hasattr(output, "values") else output)
    first = next(x for x in outputs if isinstance(x, Tensor) and x.requires_grad)
    return first.float().square().mean()


def image_shape(model: Any) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    if config is None:
        return model.default_cfg["input_size"]
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 64
    return getattr(vision, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (EXAMPLES, count))


def text(model: Any) -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def sequences(model: Any) -> dict[str, Any]:
    return {**text(model), "labels": tokens(TOKENS // 2)}


def images(model: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(EXAMPLES, *image_shape(model)), "labels": torch.tensor([1, 2])}


def boxes(model: Any) -> dict[str, Any]:
    box = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.4]])}
    return {"pixel_values": images(model)["pixel_values"], "labels": [dict(box) for _ in range(EXAMPLES)]}


def image_and_text(model: Any) -> dict[str, Any]:
    batch = text(model)
    del batch["labels"]
    return {**batch, "pixel_values": images(model)["pixel_values"], "return_loss": True}


def speech(model: Any) -> dict[str, Any]:
    name = model.main_input_name
    bins = getattr(model.config, "num_mel_bins", None) or getattr(model.config, "feature_size", None) or 80
    rows = {"input_values": (SAMPLES,), "input_features": (FRAMES, bins)}
    return {name: torch.randn(EXAMPLES, *rows[name]), "labels": tokens(TOKENS // 4)}


MAKERS = {
    "causal": text,
    "masked": text,
    "seq2seq": sequences,
    "image": images,
    "detection": boxes,
    "image and text": image_and_text,
    "speech": speech,
}
EXTRA: dict[str, Any] = {}
"""Architecture -> arguments that it needs besides."""
