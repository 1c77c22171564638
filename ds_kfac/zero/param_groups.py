"""Parameter groups laid out as [preconditioned | rest] before the engine exists, for KFACAdamW."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_kfac.model.scan import Scan


def split_groups(
    model: nn.Module,
    scan: Scan,
    model_parameters: Iterable[Any] | None,
    *,
    flag: str | None = None,
    frozen: bool = False,
) -> list[dict[str, Any]]:
    """Split every group of ``model_parameters`` in two, preconditioned parameters in layer order first.

    Args:
        model_parameters: what ``deepspeed.initialize`` takes: parameters or parameter groups; None for all.
        flag: key that is set true in preconditioned groups and false in others.
        frozen: keep groups of frozen parameters alone, which may be trained later.

    Returns parameter groups; options such as weight_decay are those of the group a parameter came from.
    """
    given = list(model.parameters() if model_parameters is None else model_parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    named = dict(model.named_parameters())
    order = {
        id(named[name]): index for index, name in enumerate(name for layer in scan.layers for name in layer.parameters)
    }
    split: list[dict[str, Any]] = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        ours = sorted((p for p in params if id(p) in order), key=lambda p: order[id(p)])
        rest = [p for p in params if id(p) not in order]
        for is_ours, part in ((True, ours), (False, rest)):
            if any(frozen or p.requires_grad for p in part):
                split.append({**group, "params": part, **({flag: is_ours} if flag else {})})
    return split
