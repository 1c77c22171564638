"""KFACAdamW's parameter groups, made before the engine exists, against the layers found in it."""

from ds_kfac.adamw import FLAG, KFACAdamWStep
from ds_kfac.target import Target


def check_groups(target: Target) -> None:
    """KFACAdamW steps exactly the marked groups along K-FAC's directions: they must hold the layers, and only them.

    Raises:
        ValueError: some parameter is in the wrong kind of group.
    """
    if not isinstance(target.inner, KFACAdamWStep):
        return
    groups = target.layout.optimizer.param_groups
    for layout, ours in ((target.layout, True), (target.rest, False)):
        for parameter in layout.params:
            if bool(groups[layout.group_index(parameter)].get(FLAG)) != ours:
                name = next(n for n, p in target.model.named_parameters() if p is parameter)
                raise ValueError(
                    f"KFACAdamW: {name} is {'' if ours else 'not '}preconditioned, but its parameter group says "
                    "otherwise; the model or kfac.layers changed between ds_kfac.initialize and attach"
                )
