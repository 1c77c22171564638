"""Read the keys of DeepSpeed's own config on which K-FAC depends."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.config import DtypeEnum


def block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object at a key of a DeepSpeed config, or an empty one if there is none."""
    inner = config.get(key)
    return inner if isinstance(inner, Mapping) else {}


def accumulation(ds_config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the config sets for accumulating gradients. None means the model's
    dtype. Raises ValueError for an unknown dtype."""
    return dtype_of(
        block(ds_config, "data_types").get("grad_accum_dtype"), "data_types.grad_accum_dtype"
    )


def dtype_of(name: Any, where: str) -> torch.dtype | None:
    try:
        return None if name is None else DtypeEnum(name).value
    except ValueError:
        raise ValueError(f"{where}: got {name!r}; must be fp32, fp16 or bf16") from None
