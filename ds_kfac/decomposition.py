"""Decompositions: which factors have data for one, what one is, and what became of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from deepspeed.utils import logger

from ds_kfac.config import KFACConfig
from ds_kfac.eigenbasis import Eigenbasis, Refreshed, refresh
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_spec import FactorSpec, key_of
from ds_kfac.factor_state import FactorState
from ds_kfac.inverse import DampedInverse, refresh_inverse
from ds_kfac.planning import Plan


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
class Decomposition:
    """A refresh of one factor, bound to what holds at its step: it may be done later, beside the training.

    Attributes:
        partner: the layer's other factor, where inverting needs it: for "tikhonov" damping, and an identity always.
        damping: its value at the step.
    """

    state: FactorState
    partner: KroneckerFactor | None
    damping: float
    plan: Plan
    config: KFACConfig
    device: torch.device

    @classmethod
    def of(
        cls, spec: FactorSpec, states: Mapping[str, FactorState], plan: Plan, config: KFACConfig, step: int,
        device: torch.device,
    ) -> "Decomposition":  # fmt: skip
        """Of a factor that is here."""
        layer = next(layer for layer in plan.layers if layer.name == spec.layers[0])
        side, other = (layer.G, key_of(layer.name, "G")) if spec.is_A else (layer.A, key_of(layer.name, "A"))
        partner = None
        if side.block == 0:
            partner = KroneckerFactor.empty(side, device)
        elif plan.paired:
            partner = states[other].factor
        return cls(states[spec.key], partner, config.damping.at(step), plan, config, device)

    def __call__(self) -> Refreshed[Eigenbasis] | Refreshed[DampedInverse]:
        factor = self.state.factor.to(self.device)
        if self.plan.method == "inverse":
            partner = None if self.partner is None else self.partner.to(self.device)
            return refresh_inverse(factor, partner, damping=self.damping, damping_kind=self.config.damping.kind)
        return refresh(
            factor,
            method=self.config.eigenbasis.method,
            previous=self.state.basis,
            tolerances=self.plan.warm_start,
        )


def count(results: Mapping[str, Refreshed], counts: Counter[str]) -> None:
    """Add up what became of decompositions, and warn of those that failed."""
    for key, result in results.items():
        counts["refreshes"] += result.basis is not None
        counts[f"refreshes_{result.how}"] += 1
        counts["refresh_retries"] += result.retries
        counts["refresh_failures"] += result.basis is None
        if result.basis is None:
            logger.warning(f"ds_kfac: no decomposition of factor {key} succeeded; what it was last decomposed to stays")
