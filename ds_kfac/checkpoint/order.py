"""Which parameter is where in the optimizer: DeepSpeed takes an optimizer's state by place."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.step.job import Job
from ds_kfac.zero.layout import parameter_groups

MARKS = tuple(dict.fromkeys(mark for rule in DIRECTIONS for mark in rule.marks))
"""Keys of parameter groups by which the optimizers of update rules know theirs."""


def marks(groups: Sequence[Mapping[str, Any]]) -> list[list[bool]]:
    """Return which of :data:`MARKS` each parameter group has."""
    return [[bool(group.get(mark)) for mark in MARKS] for group in groups]


def of_kfac(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether K-FAC steps some of these parameter groups."""
    return any(map(any, marks(groups)))


def order_of(engine: Any) -> list[str]:
    """Return the names of the parameters as the optimizer has them, group by group. Empty with
    several pipeline stages, which have one client_state."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = parameter_groups(engine.optimizer) if getattr(engine, "num_stages", 1) == 1 else ()
    # layers may have been replaced
    return [names[id(p)] for group in groups for p in group if id(p) in names]


def groups_of(engine: Any, job: Job) -> dict[str, int]:
    """Return the number of each parameter's optimizer group by name, if K-FAC's layers decide the
    groups. Empty with several pipeline stages."""
    if job.preconditioners[0].rule.optimizer_type is None or getattr(engine, "num_stages", 1) > 1:
        return {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    trained = [
        (parameter, kfac.layout)
        for kfac in job.preconditioners
        for parameter in (*kfac.layout.params, *kfac.engine_view.other_params)
    ]
    # at stage 0 in fp32 the model's, frozen ones among them
    groups = enumerate(engine.basic_optimizer.param_groups)
    found = {
        names[id(p)]: index for index, group in groups for p in group["params"] if id(p) in names
    }
    return found | {names[id(p)]: layout.group_index(p) for p, layout in trained}


def check_order(own: Sequence[str], saved: Sequence[str], folder: Path) -> None:
    """Raise CheckpointError if a name that both have has another place among those that both
    have."""
    both = set(own) & set(saved)
    pairs = zip(
        (name for name in own if name in both),
        (name for name in saved if name in both),
        strict=True,
    )
    if other := next((pair for pair in pairs if pair[0] != pair[1]), None):
        raise CheckpointError(
            f"ds_kfac: the optimizer state in {folder} has {other[1]} where this model has "
            f"{other[0]}: its modules, or "
            "what the optimizer was given, were in another order when it was saved. DeepSpeed "
            "takes it by place, "
            "which mixes up weights and moments. Build an engine with the order as it was, or "
            "load a universal "
            f"checkpoint, which goes by name. {files.WEIGHTS_ALONE}"
        )
