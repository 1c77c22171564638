"""A model that a function of the user's makes, or transformers from a config.json, on the meta device."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = 4096
"""Most tokens of an example of a language model; its config may allow a million."""


def build(name: str, lora: int | None = None) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """A model and the arguments of its forward for one example, or None if they are not known.

    Args:
        lora: rank of adapters that peft puts to all linear layers but the head, all else frozen; None: none.
        name: "module:factory", a function without arguments that returns a model, or a model and a tuple of arguments
            (or the only one). It is called inside ``torch.device("meta")``. Or "timm:NAME", one of timm's, with an
            image of the size it was trained on; or "hf:PATH", a config.json of transformers or its folder.

    Raises:
        ValueError: no such model.
    """
    factory = _factory(name)
    with torch.device("meta"):
        made: Any = factory()
        model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {name}: returned a {type(model).__name__}, not a torch.nn.Module")
        if lora is not None:
            model = _with_lora(model, lora)
        if example is None:
            return model, None
        arguments = example if isinstance(example, (tuple, list)) else (example,)
        return model, tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


def _factory(name: str) -> Callable[[], Any]:
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        raise ValueError(
            f"model {name}: give module:factory, a function that returns a model, such as my_models:gpt; or hf:PATH, a "
            "config.json of transformers"
        )
    try:
        if where == "timm":
            return _of_timm(attribute)
        if where == "hf":
            return _of_transformers(attribute)
        found = importlib.import_module(where)
    except ImportError as problem:
        raise ValueError(f"model {name}: {problem}; is its folder in PYTHONPATH?") from problem
    factory = getattr(found, attribute, None)
    if not callable(factory):
        raise ValueError(f"model {name}: {where} has no function {attribute}")
    return factory


def _of_timm(name: str) -> Callable[[], Any]:
    timm = importlib.import_module("timm")

    def factory() -> Any:
        model = timm.create_model(name)
        return model, torch.zeros(1, *model.default_cfg["input_size"])

    return factory


def _of_transformers(path: str) -> Callable[[], Any]:
    """By the class that its config names, else as a causal language model."""
    transformers = importlib.import_module("transformers")
    if not os.path.exists(path):
        raise ValueError(f"model hf:{path}: no such file or folder; give a model's config.json, nothing is downloaded")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"model hf:{path}: {str(problem).splitlines()[0]}") from problem
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((found for found in known if found is not None), None)

    def factory() -> Any:
        made = kind._from_config(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
        if made._can_set_experts_implementation():  # the one of their forms that runs on the meta device
            made.set_experts_implementation("batched_mm")
        if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
            return made, torch.zeros(1, config.num_channels, config.image_size, config.image_size)
        if config.is_encoder_decoder or not hasattr(config, "vocab_size"):
            return made
        length = min(getattr(config, "max_position_embeddings", CONTEXT) or CONTEXT, CONTEXT)
        return made, torch.zeros(1, length, dtype=torch.long)

    return factory


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        peft = importlib.import_module("peft")
    except ImportError as problem:
        raise ValueError(f"--lora: {problem}; pip install peft") from problem
    options = {"task_type": "CAUSAL_LM"} if hasattr(model, "prepare_inputs_for_generation") else {}
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", **options))
