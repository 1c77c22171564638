"""``"optimizer": {"type": "KFACAdamW"}`` in the config, or the object: what DeepSpeed steps goes there in its place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.kfac_adamw.optimizer import FLAG, MATRIX, NAME, build
from ds_kfac.directions.kfac_adamw.params import checked, checked_group
from ds_kfac.directions.kfac_adamw.size import ADAM_RATIO
from ds_kfac.directions.kfac_adamw.user_optimizer import given_groups, hand_over, numbered
from ds_kfac.model.scan import Choice, scan
from ds_kfac.zero.layout import ShardLayout
from ds_kfac.zero.param_groups import experts_apart, split_groups


def params_in(ds_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The optimizer's parameters if the config asks for it, else None.

    Raises:
        ValueError: a misspelt name, which DeepSpeed would refuse without naming ours, an unknown parameter, or a part
            of the optimizer offloaded.
    """
    block = ds_config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(name, str):
        return None
    if name != NAME:
        if "kfac" in name.lower():
            raise ValueError(f'DeepSpeed config: optimizer.type "{name}" does not exist; did you mean "{NAME}"?')
        return None
    _offloaded(ds_config)
    params = block.get("params")
    return checked({} if params is None else params, "DeepSpeed config: optimizer.params.")


def _offloaded(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer is; raises ValueError if it is in part."""
    zero = ds_config.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    if (ratio := offload.get("ratio", 1.0)) < 1:
        raise ValueError(
            f"zero_optimization.offload_optimizer.ratio {ratio}: {NAME} cannot be offloaded in part, DeepSpeed "
            "steps the rest with an AdamW of its own; leave ratio out"
        )
    return offload.get("device") in ("cpu", "nvme") or bool(zero.get("cpu_offload"))


def put_into(
    arguments: dict[str, Any],
    config: KFACConfig,
    choice: Choice,
    params: Mapping[str, Any] | None,
    ds_config: Mapping[str, Any],
) -> None:
    """Replace the arguments of ``deepspeed.initialize`` so that it takes our optimizer.

    Args:
        choice: of layers.
        params: of the config's optimizer block; None: the optimizer is an argument.

    Raises:
        ValueError: something else in the arguments or the config contradicts it.
    """
    offload = _offloaded(ds_config)
    if params is not None and arguments.get("optimizer") is not None:
        raise ValueError(f'optimizer.type "{NAME}" in the DeepSpeed config, and an optimizer= argument: choose one')
    model, given = arguments["model"], arguments.get("model_parameters")
    theirs = given_groups(arguments.get("optimizer"))
    if theirs is not None:
        given, params = numbered(theirs), theirs[0].options
    given = None if given is None else list(given)

    def make(given: list[Any] | None) -> torch.optim.Optimizer:
        found = scan(model, choice, optimized=_flat(given))
        parts = split_groups(model, found, given, flag=FLAG, apart=MATRIX, frozen=_bare(ds_config))
        groups = experts_apart([checked_group(group) for group in parts])
        return build(groups, params or {}, offload=offload, adam_ratio=ADAM_RATIO)

    if (ds_config.get("expert_parallel") or {}).get("enabled"):  # AutoEP replaces layers, then DeepSpeed calls ``make``
        if theirs is not None:
            raise ValueError(
                f"expert_parallel replaces layers after {NAME} was made: name it in the DeepSpeed config instead, "
                f'"optimizer": {{"type": "{NAME}", ..}}'
            )
        arguments["optimizer"], arguments["model_parameters"] = make, given or list(model.parameters())
        return
    optimizer = make(given)
    if theirs is not None:
        hand_over(theirs, optimizer)
    arguments["optimizer"], arguments["model_parameters"] = optimizer, None


def _bare(ds_config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed steps the optimizer as it is, with what was frozen at first: its wrappers drop that for good,
    and fail at a group that has nothing else."""
    wrapped = [ds_config.get(key) or {} for key in ("fp16", "bf16", "bfloat16")]
    stage = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    return not stage and not any(block.get("enabled") for block in wrapped)


def _flat(model_parameters: list[Any] | None) -> list[Any] | None:
    if not model_parameters or not isinstance(model_parameters[0], dict):
        return model_parameters
    return [p for group in model_parameters for p in group["params"]]


def check_groups(model: nn.Module, layout: ShardLayout, rest: ShardLayout) -> None:
    """KFACAdamW steps exactly the marked groups along K-FAC's directions: they must hold the layers, and only them.

    Raises:
        ValueError: some parameter is in the wrong kind of group.
    """
    groups = layout.optimizer.param_groups
    for held, ours in ((layout, True), (rest, False)):
        for parameter in held.params:
            if bool(groups[held.group_index(parameter)].get(FLAG)) != ours:
                name = next(n for n, p in model.named_parameters() if p is parameter)
                raise ValueError(
                    f"KFACAdamW: {name} is {'' if ours else 'not '}preconditioned, but its parameter group says "
                    "otherwise; the model or kfac.layers changed between ds_kfac.initialize and attach"
                )
