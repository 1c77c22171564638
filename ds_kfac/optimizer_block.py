"""``"optimizer": {"type": "KFACAdamW"}`` in the config: our optimizer goes to DeepSpeed in place of it."""

import difflib
from collections.abc import Mapping
from typing import Any

from ds_kfac.adamw import FLAG, NAME, PARAMS, build
from ds_kfac.config import KFACConfig
from ds_kfac.grouping import kfac_first
from ds_kfac.scan import scan


def params_in(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The optimizer's parameters if the config asks for it, else None.

    Raises:
        ValueError: a misspelt name, which DeepSpeed would refuse without naming ours, or an unknown parameter.
    """
    block = ds_config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(name, str):
        return None
    if name != NAME:
        if "kfac" in name.lower():
            raise ValueError(f'DeepSpeed config: optimizer.type "{name}" does not exist; did you mean "{NAME}"?')
        return None
    params = {key: value for key, value in (block.get("params") or {}).items() if value != "auto"}
    known = [*PARAMS, "torch_adam"]
    for key in params:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"valid: {', '.join(known)}"
            raise ValueError(f"DeepSpeed config: optimizer.params.{key}: {NAME} has no such parameter; {hint}")
    return params


def put_into(
    arguments: dict[str, Any], config: KFACConfig, params: Mapping[str, Any], ds_config: Mapping[str, Any]
) -> None:
    """Replace the arguments of ``deepspeed.initialize`` so that it takes our optimizer.

    Raises:
        ValueError: something else in the arguments or the config contradicts it.
    """
    zero = ds_config.get("zero_optimization") or {}
    offload_block = zero.get("offload_optimizer") or {}
    offload = offload_block.get("device") in ("cpu", "nvme") or bool(zero.get("cpu_offload"))
    offload_ratio = offload_block.get("ratio", 1.0)
    if offload_ratio < 1:
        raise ValueError(
            f"zero_optimization.offload_optimizer.ratio {offload_ratio}: {NAME} cannot be offloaded in part, DeepSpeed "
            "steps the rest with an AdamW of its own; leave ratio out"
        )
    if arguments.get("optimizer") is not None:
        raise ValueError(f'optimizer.type "{NAME}" in the DeepSpeed config, and an optimizer= argument: choose one')
    if not config.enabled:
        raise ValueError(
            f'optimizer.type "{NAME}" needs K-FAC, but "kfac" says "enabled": false; use "AdamW" to train without it'
        )
    config = config.for_optimizer(adam=True)
    model, given = arguments["model"], arguments.get("model_parameters")
    given = None if given is None else list(given)
    found = scan(model, config.choice, optimized=_flat(given))
    groups = kfac_first(model, found, given, flag=FLAG)
    arguments["optimizer"] = build(groups, params, offload=offload)
    arguments["model_parameters"] = None


def _flat(model_parameters: list[Any] | None) -> list[Any] | None:
    if not model_parameters or not isinstance(model_parameters[0], dict):
        return model_parameters
    return [p for group in model_parameters for p in group["params"]]
