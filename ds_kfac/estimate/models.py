"""Build the model of an estimate on the meta device, from a name on the command line."""

import importlib
import os
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = 4096
"""Largest number of tokens in the example of a language model. There is a limit because the model's
own config may allow a million tokens."""


def build(name: str, lora: int | None = None) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Return a model on the meta device, and example arguments of its forward. The arguments are
    None if they are unknown.

    Args:
        name: one of three forms.
            "module:factory" names a function that returns a model, or (model, example arguments).
            "timm:NAME" names a model of timm. The example is an image of the size on which the
            model was trained.
            "hf:PATH" names a config.json of transformers, by its path or by the path of its folder.
        lora: rank of the adapters that peft adds to all linear layers except the head, while
            everything else is frozen; None: no adapters.

    Raises:
        ValueError: there is no such model.
    """
    library, _, attribute = name.partition(":")
    if not library or not attribute:
        raise ValueError(
            f"model {name}: give module:factory, where factory() returns a model, such as "
            "my_models:gpt; or hf:PATH, where PATH is a config.json of transformers"
        )
    try:
        module = importlib.import_module("transformers" if library == "hf" else library)
        peft = None if lora is None else importlib.import_module("peft")
    except ImportError as problem:
        raise ValueError(
            f"model {name}: {problem}; is it installed, or is its folder in PYTHONPATH?"
        ) from problem
    except SystemExit as problem:
        raise ValueError(
            f"model {name}: importing {library} ran a program, which ended. Put the code that "
            'trains below `if __name__ == "__main__":`, or move the model to a file of its own'
        ) from problem
    with torch.device("meta"):
        made: Any
        if library == "hf":
            made = _of_transformers(module, attribute)
        elif library == "timm":
            made = module.create_model(attribute)
            made = made, torch.zeros(1, *made.default_cfg["input_size"])
        elif callable(factory := getattr(module, attribute, None)):
            made = factory()
        else:
            raise ValueError(f"model {name}: {library} has no function {attribute}")
        model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model {name}: returned a {type(model).__name__}, not a torch.nn.Module"
            )
        if peft is not None:
            if hasattr(model, "prepare_inputs_for_generation"):
                options = {"task_type": "CAUSAL_LM"}
            else:
                options = {}
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=lora, target_modules="all-linear", **options)
            )
    if example is None:
        return model, None
    arguments = example if isinstance(example, (tuple, list)) else (example,)
    return model, tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


def _of_transformers(transformers: Any, path: str) -> Any:
    """Return a model, or (model, example arguments). If the config does not name the model's class,
    the model is a causal language model."""
    if not os.path.exists(path):
        raise ValueError(
            f"model hf:{path}: no such file or folder; give the path of a model's config.json, "
            "because nothing is downloaded"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"model hf:{path}: {str(problem).splitlines()[0]}") from problem
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    model_class = next((each for each in classes if each is not None), None)
    if model_class:
        made = model_class._from_config(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    if made._can_set_experts_implementation():
        # the other implementations read values, and tensors on the meta device have none
        made.set_experts_implementation("batched_mm")
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        return made, torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    if config.is_encoder_decoder or not hasattr(config, "vocab_size"):
        return made
    length = min(getattr(config, "max_position_embeddings", CONTEXT) or CONTEXT, CONTEXT)
    return made, torch.zeros(1, length, dtype=torch.long)
