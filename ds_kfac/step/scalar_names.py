"""The scalars that decomposers send about their factors in a step: their names, known to every rank beforehand."""

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor

from ds_kfac.assignment.work import FactorSpec, factors_by_layer
from ds_kfac.plan.plan import Plan
from ds_kfac.step.draft import FactorDraft

FAILED, UNUSABLE, FRESH = -1.0, 0.0, 1.0
"""What a decomposer reports of a factor."""


def counting(own: Mapping[str, FactorSpec]) -> str:
    """The factor of a layer whose count is the layer's number of loss terms."""
    return (own.get("G") or own["A"]).key


UNUSUAL = ("limited", "empty")
"""Batches of factors that are counted: those that were scaled down, those without a row."""


def unusual(scalars: Mapping[Hashable, Tensor]) -> Tensor | float:
    """How many of each of :data:`UNUSUAL` there were in this step, over all ranks, where that is exchanged."""
    numbers = [[scalars[name] for name in scalars if isinstance(name, tuple) and name[0] == kind] for kind in UNUSUAL]
    return torch.stack([torch.stack(of_kind).sum() for of_kind in numbers]) if numbers[0] else 0.0


def scalar_names(
    plan: Plan, *, captured: Collection[str], arriving: Collection[str], travels: bool, terms: bool
) -> list[list[Hashable]]:
    """Per rank, the names of the scalars it sends.

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
            names[rank] += [(kind, rank) for kind in UNUSUAL]
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


def scalars_of(draft: FactorDraft, rank: int, device: torch.device) -> dict[Hashable, Tensor]:
    """A rank's scalars in a step, by name."""
    values: dict[Hashable, Tensor] = {}
    for key, similar in draft.similar.items():
        values["similar", key] = similar[0] + 2.0 * similar[1]
    for name, terms in draft.terms.items():
        values["terms", name] = terms
    if draft.unusual is not None:
        values |= {(kind, rank): number for kind, number in zip(UNUSUAL, draft.unusual.unbind(), strict=True)}
    for key in draft.arriving:
        result = draft.results.get(key)
        state = UNUSABLE if result is None else FAILED if result.basis is None else FRESH
        values["fresh", key] = torch.full((), state, device=device)
    return values
