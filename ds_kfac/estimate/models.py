"""Models by name, on the meta device: built-in ones, and any that a function of the user's makes."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.estimate.resnet import ResNet50
from ds_kfac.estimate.transformers import BERT, BERT_LARGE, GPT2, GPT2_SMALL, GPT2_XL, LLAMA_7B, Llama, Shape


@dataclass(frozen=True)
class Known:
    """A built-in model.

    Attributes:
        example: one, on the meta device.
        batch: examples of a rank in a step where nothing else is said.
    """

    make: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    batch: int


def _tokens(shape: Shape) -> Callable[[], Tensor]:
    return partial(torch.zeros, 1, shape.context, dtype=torch.long, device="meta")


MODELS: Mapping[str, Known] = {
    "gpt2": Known(partial(GPT2, GPT2_SMALL), _tokens(GPT2_SMALL), 8),
    "gpt2-xl": Known(partial(GPT2, GPT2_XL), _tokens(GPT2_XL), 8),
    "bert-large": Known(partial(BERT, BERT_LARGE), _tokens(BERT_LARGE), 16),
    "llama-7b": Known(partial(Llama, LLAMA_7B), _tokens(LLAMA_7B), 4),
    "resnet50": Known(ResNet50, partial(torch.zeros, 1, 3, 224, 224, device="meta"), 64),
}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """A model and the arguments of its forward for one example, or None if they are not known.

    Args:
        name: of :data:`MODELS`; or "module:factory", a function without arguments that returns a model, or a model
            and a tuple of arguments. It is called inside ``torch.device("meta")``.

    Raises:
        ValueError: no such model.
    """
    factory = MODELS[name].make if name in MODELS else _factory(name)
    with torch.device("meta"):
        made: Any = factory()
        if name in MODELS:
            made = made, MODELS[name].example()
        model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {name}: returned a {type(model).__name__}, not a torch.nn.Module")
        if example is None:
            return model, None
        arguments = example if isinstance(example, (tuple, list)) else (example,)
        return model, tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


def _factory(name: str) -> Callable[[], Any]:
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        raise ValueError(f"model {name}: not known; give one of {', '.join(MODELS)}, or module:factory")
    try:
        found = importlib.import_module(where)
    except ImportError as problem:
        raise ValueError(f"model {name}: {problem}; is its folder in PYTHONPATH?") from problem
    factory = getattr(found, attribute, None)
    if not callable(factory):
        raise ValueError(f"model {name}: {where} has no function {attribute}")
    return factory
