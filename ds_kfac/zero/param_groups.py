"""Parameter groups laid out as [preconditioned | rest] before the engine exists, for KFACAdamW."""

from collections.abc import Iterable
from typing import Any

from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import nn

from ds_kfac.model.scan import Scan
from ds_kfac.model.share import other_matrices


def split_groups(
    model: nn.Module,
    scan: Scan,
    model_parameters: Iterable[Any] | None,
    *,
    flag: str | None = None,
    apart: str | None = None,
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """Split every group of ``model_parameters``: preconditioned parameters in layer order first, then the others,
    matrices among them apart.

    Args:
        model_parameters: what ``deepspeed.initialize`` takes: parameters or parameter groups; None for all.
        flag: key that is set true in preconditioned groups and false in others.
        apart: key that is set true in groups of matrices that are in no layer and false in others; None: they are with
            the others.
        frozen: keep groups of frozen parameters alone, which may be trained later.

    Returns parameter groups; options such as weight_decay are those of the group a parameter came from.
    """
    given = list(model.parameters() if model_parameters is None else model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    named = dict(model.named_parameters())
    order = {
        id(named[name]): index for index, name in enumerate(name for layer in scan.layers for name in layer.parameters)
    }
    matrices = {id(named[name]) for name in other_matrices(model, scan)} if apart else set()
    split: list[dict[str, Any]] = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        ours = sorted((p for p in params if id(p) in order), key=lambda p: order[id(p)])
        rest = [p for p in params if id(p) not in order and id(p) not in matrices]
        left = [p for p in params if id(p) not in order and id(p) in matrices]
        for is_ours, alone, part in ((True, False, ours), (False, False, rest), (False, True, left)):
            if any(frozen or p.requires_grad for p in part):
                keys = {flag: is_ours, apart: alone}
                split.append({**group, "params": part, **{key: value for key, value in keys.items() if key}})
    return split


def experts_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, as DeepSpeed wants them of a model with experts: those of one expert-parallel group in groups of
    their own, which have its name. Groups that are so already, or have none, stay as they are."""
    if not any(is_moe_param(p) and not group.get("moe") for group in groups for p in group["params"]):
        return groups
    named = [{**group, "name": group.get("name", f"group_{index}")} for index, group in enumerate(groups)]
    return [group for group in split_params_into_different_moe_groups_for_optimizer(named) if group["params"]]
