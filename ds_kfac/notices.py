"""What decomposers tell about their factors in a step: the names of the numbers, known to every rank beforehand."""

from collections.abc import Collection, Hashable, Mapping

from torch import Tensor

from ds_kfac.factor_spec import FactorSpec, factors_by_layer
from ds_kfac.planning import Plan


def counting(own: Mapping[str, FactorSpec]) -> str:
    """The factor of a layer whose count tells the layer's loss terms."""
    return (own.get("G") or own["A"]).key


def limited(told: Mapping[Hashable, Tensor]) -> Tensor | float:
    """How many batches of factors were scaled down in this step, over all ranks, where that is told."""
    return sum((number for name, number in told.items() if isinstance(name, tuple) and name[0] == "limited"), start=0.0)


def notices(
    plan: Plan, *, captured: Collection[str], arriving: Collection[str], travels: bool, terms: bool
) -> list[list[Hashable]]:
    """Per rank, the names of the numbers it tells.

    Args:
        captured, arriving: factors that are captured, and whose eigenbases take effect, in this step.
        travels: whether eigenbases ever travel.
        terms: whether workers elsewhere need to know how many loss terms a layer had.
    """
    names: list[list[Hashable]] = [[] for _ in range(plan.assignment.world)]
    if plan.assignment.world == 1:
        return names
    where = plan.assignment.decomposers
    if travels:  # else it comes with the results, whose workers are the decomposers
        for rank in sorted({where[key] for key in captured}):
            names[rank].append(("limited", rank))
    if plan.adaptive:
        for factor in plan.assignment.factors:
            if factor.key in captured:
                names[where[factor.key]].append(("similar", factor.key))
    if travels and terms:
        of_layer = factors_by_layer(plan.assignment.factors)
        for layer in plan.layers:
            if layer.name in of_layer and (key := counting(of_layer[layer.name])) in captured:
                names[where[key]].append(("terms", layer.name))
    if travels:
        for key in arriving:
            names[where[key]].append(("fresh", key))
    return names
