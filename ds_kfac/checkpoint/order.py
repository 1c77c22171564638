"""Compare the positions of parameters in two optimizers, because DeepSpeed loads an optimizer's
state by position."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_kfac.checkpoint import files
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.step.job import Job
from ds_kfac.zero.layout import parameter_groups

MARKS = tuple(dict.fromkeys(mark for rule in DIRECTIONS for mark in rule.marks))
"""Keys in parameter groups by which update rules recognize the groups that they update."""


def marks(groups: Sequence[Mapping[str, Any]]) -> list[list[bool]]:
    """Return a list for each parameter group. For each of :data:`MARKS`, the list says whether the
    group has this mark."""
    return [[bool(group.get(mark)) for mark in MARKS] for group in groups]


def of_kfac(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether K-FAC updates any of these parameter groups."""
    return any(map(any, marks(groups)))


def order_of(engine: Any) -> list[str]:
    """Return the names of the parameters in the optimizer's order, group by group. The list is
    empty with several pipeline stages, because all stages share one client_state."""
    if getattr(engine, "num_stages", 1) != 1:
        return []
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    parameters = [parameter for group in parameter_groups(engine.optimizer) for parameter in group]
    # a parameter has no name if its layer has been replaced
    return [names[parameter] for parameter in parameters if parameter in names]


def groups_of(engine: Any, job: Job) -> dict[str, int]:
    """Return a dict from parameter name to the index of its parameter group. The dict is empty if
    the groups do not depend on which layers K-FAC has, or if there are several pipeline stages."""
    if job.preconditioners[0].rule.optimizer_type is None or getattr(engine, "num_stages", 1) > 1:
        return {}
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    numbers = {}
    # at stage 0 in fp32 these groups have the model's parameters, including frozen ones. In other
    # modes they have DeepSpeed's copies, which have no names.
    for number, group in enumerate(engine.basic_optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in names:
                numbers[names[parameter]] = number
    for kfac in job.preconditioners:
        layout = kfac.layout
        for parameter in (*layout.params, *kfac.engine_view.other_params):
            numbers[names[parameter]] = layout.group_index(parameter)
    return numbers


def check_order(names: Sequence[str], saved_names: Sequence[str], folder: Path) -> None:
    """Check that the parameters which this model and a checkpoint both have are in the same order.

    Args:
        names: parameters of this model, in the optimizer's order.
        saved_names: parameters of the checkpoint, in the saved optimizer's order.
        folder: the checkpoint's folder, for the error.

    Raises:
        CheckpointError: the order is different.
    """
    common = set(names) & set(saved_names)
    now = [name for name in names if name in common]
    then = [name for name in saved_names if name in common]
    for name, saved_name in zip(now, then, strict=True):
        if name != saved_name:
            raise CheckpointError(
                f"ds_kfac: the optimizer state in {folder} has {saved_name} where this model has "
                f"{name}: the model's modules, or the optimizer's parameters, were in another "
                "order when the state was saved. DeepSpeed loads the state by position, which "
                "mixes up weights and moments. Build an engine with the old order, or load a "
                f"universal checkpoint, which is loaded by name. {files.WEIGHTS_ALONE}"
            )
