"""For one factor, what the product does for several at once."""

from torch import Tensor

from ds_kfac.curvature import factor as factors
from ds_kfac.curvature.eigen import Eigenbasis, Refreshed, Request, refresh_all
from ds_kfac.curvature.factor import KroneckerFactor


def fold(factor: KroneckerFactor, sum_P: Tensor, count: Tensor, *, decay: float) -> KroneckerFactor:
    """With one batch averaged in, in place."""
    factors.average_([factor], [sum_P], count[None], [decay])
    return factor


def refresh(factor: KroneckerFactor, *, previous: Eigenbasis | None = None, **options) -> Refreshed:
    """Decomposed; options are those of ``refresh_all``."""
    return refresh_all([Request(factor, previous)], **options)[0]
