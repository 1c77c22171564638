"""Eigenbases, or damped inverses, on their way from the ranks that decompose factors to gradient workers elsewhere."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kfac.eigenbasis import basis_from, basis_numel, flat_vectors
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.inverse import Kept, from_packed, packed
from ds_kfac.mail import Arrivals, Leg
from ds_kfac.side import Side
from ds_kfac.zero.relayout import Move, RelayoutPlan


@dataclass(frozen=True)
class Form:
    """How what is kept of a factor travels: in one leg of a message per part, and together again.

    Attributes:
        parts: kind, elements of a side's, the flat tensor itself, and whether it travels in the wire's dtype.
        joined: from a side and its flat parts, None for those without elements; copies.
    """

    parts: tuple[tuple[str, Callable[[Side], int], Callable[[Any], Tensor], bool], ...]
    joined: Callable[..., Kept]


FORMS: Mapping[str, Form] = {
    "eigen": Form(
        (
            ("eigenvectors", basis_numel, flat_vectors, True),
            # in fp32 always, their range is too wide
            ("eigenvalues", lambda side: side.dim, lambda basis: basis.values, False),
        ),
        lambda side, vectors, values: basis_from(side, vectors, values.clone()),
    ),
    "inverse": Form((("inverses", lambda side: side.numel, packed, False),), from_packed),
}
"""By ``preconditioner.method``."""


class Delivery:
    """Who gets whose eigenbases or inverses. Pure, but for those themselves.

    Args:
        factors: in an order that is the same on every rank.
        decomposers: factor key -> rank.
        workers: layer name -> ranks.
        wire: dtype of eigenvectors.
        method: a key of ``FORMS``.

    Attributes:
        receivers: factor key -> gradient workers that are not its decomposer.
        travels: whether anything ever travels.
        kinds: of the parts, in their order.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        decomposers: Mapping[str, int],
        workers: Mapping[str, tuple[int, ...]],
        *,
        world: int,
        wire: torch.dtype,
        method: str = "eigen",
    ) -> None:
        self.form = FORMS[method]
        self.kinds = tuple(kind for kind, *_ in self.form.parts)
        self.factors, self.decomposers, self.world, self.wire = tuple(factors), decomposers, world, wire
        self.receivers = {
            factor.key: tuple(
                sorted({rank for name in factor.layers for rank in workers[name]} - {decomposers[factor.key]})
            )
            for factor in factors
        }
        self.travels = any(self.receivers.values())

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the parts on the wire."""
        return tuple(self.wire if halved else torch.float32 for *_, halved in self.form.parts)

    def plans(self, keys: Collection[str]) -> tuple[RelayoutPlan, ...]:
        """What moves of each part when the factors in ``keys`` have been refreshed."""
        return tuple(self._plan(keys, numel) for _, numel, _, _ in self.form.parts)

    def _plan(self, keys: Collection[str], numel: Callable[[Side], int]) -> RelayoutPlan:
        moves = [
            Move(place, 0, numel(factor.side), self.decomposers[factor.key], rank)
            for place, factor in enumerate(self.factors)
            if factor.key in keys
            for rank in self.receivers[factor.key]
        ]
        return RelayoutPlan(self.world, tuple(move for move in moves if move.numel))

    def legs(self, keys: Collection[str], kept: Mapping[str, Kept], device: torch.device) -> tuple[Leg, ...]:
        """Of the factors in ``keys``. One that is not in ``kept`` could not be decomposed: zeros travel for it."""

        def piece(flat: Callable[[Any], Tensor]) -> Callable[[Move], Tensor]:
            def of(move: Move) -> Tensor:
                own = kept.get(self.factors[move.param].key)
                return torch.zeros(move.numel, device=device) if own is None else flat(own)

            return of

        parts = zip(self.form.parts, self.plans(keys), self.dtypes(), strict=True)
        return tuple(Leg(kind, plan, piece(flat), dtype) for (kind, _, flat, _), plan, dtype in parts)

    def received(self, *arrivals: Arrivals) -> dict[str, Kept]:
        """Factor key -> what arrived for this rank's layers.

        Args:
            arrivals: of each leg.
        """
        flats = [{move.param: piece for move, piece in part} for part in arrivals]
        places = sorted(set().union(*flats))
        return {
            self.factors[place].key: self.form.joined(self.factors[place].side, *(part.get(place) for part in flats))
            for place in places
        }

    def kept(self, key: str, own: Kept) -> Kept:
        """What the decomposer itself preconditions with: what the others receive, or replicas would drift apart."""
        return own.rounded(self.wire) if self.receivers[key] else own
