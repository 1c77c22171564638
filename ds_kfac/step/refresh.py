"""Decompositions: which factors have data for one, what one is, and what became of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from deepspeed.utils import logger

from ds_kfac.assignment.work import FactorSpec, key_of
from ds_kfac.curvature.eigen import Refreshed, Request
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.curvature.forms import Options
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.step.factor_state import FactorState


def usable(partners: Mapping[str, Sequence[str]], states: Mapping[str, FactorState], device: torch.device) -> list[str]:
    """Keys of ``partners`` whose factor and whose partners', as far as they are here, can be decomposed.

    One transfer to the host for all of them.

    Args:
        partners: factor key -> keys of its layer's factors.
        states: of the factors that are here.
    """
    asked = [key for key in states if any(key in others for others in partners.values())]
    if not asked:
        return []
    # on the device: an offloaded factor may still be on its way to the host
    flags = torch.stack([states[key].factor.to(device).usable() for key in asked]).tolist()
    known = dict(zip(asked, flags, strict=True))
    return [key for key, others in partners.items() if all(known.get(other, True) for other in others)]


@dataclass(frozen=True)
class Decompositions:
    """Decompositions of factors, bound to what holds at their step: they may be done later, on a side thread or stream.

    Attributes:
        partners: the layer's other factor of each, where the form needs it: always if it is an identity whose damping
            is part of what is kept, and if ``plan.paired``.
        groups: of the layer of each.
        damping: its value at the step.
    """

    states: Sequence[FactorState]
    partners: Sequence[KroneckerFactor | None]
    groups: Sequence[int]
    damping: float
    plan: Plan
    device: torch.device

    @classmethod
    def of(
        cls, specs: Sequence[FactorSpec], states: Mapping[str, FactorState], plan: Plan, step: int,
        device: torch.device,
    ) -> "Decompositions":  # fmt: skip
        """Of factors that are here."""
        layers = {layer.name: layer for layer in plan.layers}
        mine = [layers[spec.layers[0]] for spec in specs]
        partners = [_partner(spec, layer, states, plan, device) for spec, layer in zip(specs, mine, strict=True)]
        kept, groups = [states[spec.key] for spec in specs], [layer.groups for layer in mine]
        return cls(kept, partners, groups, plan.config.damping.at(step), plan, device)

    def __call__(self) -> list[Refreshed]:
        """In the order given."""
        requests = [
            Request(state.factor.to(self.device), partner and partner.to(self.device), groups)
            for state, partner, groups in zip(self.states, self.partners, self.groups, strict=True)
        ]
        plan = self.plan
        options = Options(
            self.damping, plan.config.damping.chosen,
            power=plan.config.adam.whiten, products=plan.precision.products,
        )  # fmt: skip
        return self.plan.form.decompose(requests, options)


def _partner(
    spec: FactorSpec, layer: LayerSpec, states: Mapping[str, FactorState], plan: Plan, device: torch.device
) -> KroneckerFactor | None:
    if not (plan.form.damps_identity or plan.paired):
        return None
    side, key = (layer.G, key_of(layer.name, "G")) if spec.is_A else (layer.A, key_of(layer.name, "A"))
    if side.block == 0:
        return KroneckerFactor.empty(side, device)
    return states[key].factor if plan.paired else None


def count(results: Mapping[str, Refreshed], counts: Counter[str]) -> None:
    """Add up what became of decompositions, and warn of those that failed."""
    for key, result in results.items():
        counts["refreshes"] += result.basis is not None
        counts[f"refreshes_{result.how}"] += 1
        counts["refresh_retries"] += result.retries
        counts["refresh_failures"] += result.basis is None
        if result.basis is None:
            logger.warning(f"ds_kfac: no decomposition of factor {key} succeeded; what it was last decomposed to stays")
