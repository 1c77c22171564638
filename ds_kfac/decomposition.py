"""Before and after decompositions: which factors have data for one, and what became of them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from deepspeed.utils import logger

from ds_kfac.eigenbasis import Refreshed
from ds_kfac.factor_state import FactorState


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


def count(results: Mapping[str, Refreshed], counts: Counter[str]) -> None:
    """Add up what became of decompositions, and warn of those that failed."""
    for key, result in results.items():
        counts["refreshes"] += result.basis is not None
        counts[f"refreshes_{result.how}"] += 1
        counts["refresh_retries"] += result.retries
        counts["refresh_failures"] += result.basis is None
        if result.basis is None:
            logger.warning(f"ds_kfac: no decomposition of factor {key} succeeded; its old eigenbasis stays")
