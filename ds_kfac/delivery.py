"""Eigenbases on their way from the ranks that decompose factors to gradient workers elsewhere."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.eigenbasis import Eigenbasis, basis_from, basis_numel, flat_vectors
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.mail import Arrivals, Leg
from ds_kfac.side import Side
from ds_kfac.zero.relayout import Move, RelayoutPlan


class Delivery:
    """Who gets whose eigenbases. Pure, but for the bases themselves.

    Args:
        factors: in an order that is the same on every rank.
        decomposers: factor key -> rank.
        workers: layer name -> ranks.
        wire: dtype of the vectors; values travel in fp32, their range is too wide.

    Attributes:
        receivers: factor key -> gradient workers that are not its decomposer.
        travels: whether any eigenbasis ever travels.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        decomposers: Mapping[str, int],
        workers: Mapping[str, tuple[int, ...]],
        *,
        world: int,
        wire: torch.dtype,
    ) -> None:
        self.factors, self.decomposers, self.world, self.wire = tuple(factors), decomposers, world, wire
        self.receivers = {
            factor.key: tuple(
                sorted({rank for name in factor.layers for rank in workers[name]} - {decomposers[factor.key]})
            )
            for factor in factors
        }
        self.travels = any(self.receivers.values())

    def plans(self, keys: Collection[str]) -> tuple[RelayoutPlan, RelayoutPlan]:
        """What moves when the factors in ``keys`` have new eigenbases: vectors and values."""
        return self._plan(keys, basis_numel), self._plan(keys, lambda side: side.dim)

    def _plan(self, keys: Collection[str], numel: Callable[[Side], int]) -> RelayoutPlan:
        moves = [
            Move(place, 0, numel(factor.side), self.decomposers[factor.key], rank)
            for place, factor in enumerate(self.factors)
            if factor.key in keys
            for rank in self.receivers[factor.key]
        ]
        return RelayoutPlan(self.world, tuple(move for move in moves if move.numel))

    def legs(self, keys: Collection[str], bases: Mapping[str, Eigenbasis], device: torch.device) -> tuple[Leg, Leg]:
        """Of the factors in ``keys``. One that is not in ``bases`` could not be decomposed: zeros travel for it."""

        def piece(part: Callable[[Eigenbasis], Tensor]) -> Callable[[Move], Tensor]:
            def of(move: Move) -> Tensor:
                basis = bases.get(self.factors[move.param].key)
                return torch.zeros(move.numel, device=device) if basis is None else part(basis)

            return of

        vectors, values = self.plans(keys)
        return (
            Leg("eigenvectors", vectors, piece(flat_vectors), self.wire),
            Leg("eigenvalues", values, piece(lambda basis: basis.values), torch.float32),
        )

    def received(self, vectors: Arrivals, values: Arrivals) -> dict[str, Eigenbasis]:
        """Factor key -> what arrived for this rank's layers."""
        flat = {move.param: piece for move, piece in vectors}
        return {
            self.factors[move.param].key: basis_from(self.factors[move.param].side, flat.get(move.param), piece.clone())
            for move, piece in values
        }

    def kept(self, key: str, basis: Eigenbasis) -> Eigenbasis:
        """What the decomposer itself preconditions with: what the others receive, or replicas would drift apart."""
        return basis.rounded(self.wire) if self.receivers[key] else basis
