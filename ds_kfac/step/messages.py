"""What ranks tell each other. With the gradients travel eigenbases, or damped inverses, from the ranks that decompose
factors to gradient workers elsewhere, and scalars about factors, whose names every rank knows beforehand. After the
first captured batch all agree on which layers have one A in common, and on how many rows they have.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.comm.message import Arrivals, Channel, MessagePart, Move, RelayoutPlan, gathered
from ds_kfac.curvature.methods import EIGEN, Decomposition, Method
from ds_kfac.model.calls import SharedInputs, agreed
from ds_kfac.model.layers import key_of
from ds_kfac.model.rows import BatchSum
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.plan.plan import Observations, Plan


class Delivery:
    """Who gets whose eigenbases or inverses.

    Args:
        factors: in an order that is the same on every rank.
        eigen_workers: factor key -> rank.
        workers: layer name -> ranks.
        wire: dtype of eigenvectors.
        method: what is decomposed.
        copied: layers of which other domains, with roles of their own, have copies.

    Attributes:
        receivers: factor key -> gradient workers that are not its eigen worker.
        rounded: keys of the factors whose eigen worker takes what it would send: those that it sends, and those that it
            would send if a copy's roles were its own.
        travels: whether anything ever travels.
        kinds, dtypes: of the parts on the wire, in their order.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        eigen_workers: Mapping[str, int],
        workers: Mapping[str, tuple[int, ...]],
        *,
        world: int,
        wire: torch.dtype,
        method: Method = EIGEN,
        copied: Collection[str] = (),
    ) -> None:
        self.method = method
        self.kinds = tuple(part.kind for part in self.method.parts)
        self.dtypes = tuple(wire if part.halved else torch.float32 for part in self.method.parts)
        self.factors, self.eigen_workers, self.world, self.wire = tuple(factors), eigen_workers, world, wire
        self.receivers = {
            factor.key: tuple(
                sorted({rank for name in factor.layers for rank in workers[name]} - {eigen_workers[factor.key]})
            )
            for factor in factors
        }
        copies = {factor.key for factor in factors if world > 1 and any(name in copied for name in factor.layers)}
        self.rounded = {key for key, ranks in self.receivers.items() if ranks} | copies
        self.travels = any(self.receivers.values())

    def plans(self, keys: Collection[str]) -> tuple[RelayoutPlan, ...]:
        """What moves of each part when the factors in ``keys`` have been refreshed."""
        pairs = [
            (place, factor, rank)
            for place, factor in enumerate(self.factors)
            if factor.key in keys
            for rank in self.receivers[factor.key]
        ]
        moves = [
            [Move(place, 0, part.numel(f.side), self.eigen_workers[f.key], rank) for place, f, rank in pairs]
            for part in self.method.parts
        ]
        return tuple(RelayoutPlan(self.world, tuple(move for move in own if move.numel)) for own in moves)

    def parts(
        self, keys: Collection[str], kept: Mapping[str, Decomposition], device: torch.device
    ) -> tuple[MessagePart, ...]:
        """Of the factors in ``keys``. One that is not in ``kept`` could not be decomposed: zeros travel for it."""
        if not self.travels or not keys:
            return ()

        def piece(flat: Callable[[Any], Tensor], move: Move) -> Tensor:
            own = kept.get(self.factors[move.param].key)
            return torch.zeros(move.numel, device=device) if own is None else flat(own)

        parts = zip(self.method.parts, self.plans(keys), self.dtypes, strict=True)
        return tuple(MessagePart(part.kind, plan, partial(piece, part.flat), dtype) for part, plan, dtype in parts)

    def received(self, own: Mapping[str, Decomposition], *arrivals: Arrivals) -> dict[str, Decomposition]:
        """Factor key -> what arrived for this rank's layers, and its own, rounded as it was sent: replicas stay
        bit-identical.

        Args:
            arrivals: of each part.
        """
        flats = [{move.param: piece for move, piece in part} for part in arrivals]
        found: dict[str, Decomposition] = {}
        for place in sorted(set().union(*flats)):
            factor = self.factors[place]
            found[factor.key] = self.method.joined(factor.side, *(part.get(place) for part in flats))
        return found | {key: kept.rounded(self.wire) if key in self.rounded else kept for key, kept in own.items()}


FAILED, UNUSABLE, FRESH = -1.0, 0.0, 1.0
"""What an eigen worker reports of a factor."""


def counting(own: Mapping[str, FactorSpec]) -> str:
    """The factor of a layer whose count is the layer's number of loss terms."""
    return (own.get("G") or own["A"]).key


UNUSUAL = ("limited", "empty", "missed")
"""Batches of factors that are counted: those that were scaled down, those without a row, and of these those to which
not all ranks contributed."""


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
    where = plan.assignment.eigen_workers
    if travels:  # else it comes with the results, whose workers are the eigen workers
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


class Sharing:
    """What the first captured batch shows: which layers have one A in common, see ``inputs``, and how many rows a rank
    has of each. All ranks agree on it before anything of that batch is kept; it stays for the run. In a later step any
    rank may see that layers of a group got different inputs: it contributes no rows to their A then.

    Attributes:
        updates: of the last captured step that was applied, until :meth:`settled` looks: how many there were without a
            row to which not all ranks contributed, over all ranks; this rank's part of them, see
            :class:`ds_kfac.step.factors.FactorDraft`; and layers that had an input here. None: nothing to look at.
    """

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs, self.channel, self._warned = inputs, channel, False
        self.updates: tuple[HostCopy, tuple[tuple[str, ...], Tensor | None], Collection[str]] | None = None

    def observed(
        self, observations: Observations, plan: Plan, ready: set[str], measured: Mapping[str, Sequence[int]]
    ) -> Observations | None:
        """What this captured step shows, None if all is known. Collective where it is not.

        Args:
            ready: factors that have been decomposed; those of all ranks are added.
            measured: layer name -> rows here in this step, see :class:`ds_kfac.model.capture.Capture`.
        """
        if not self.inputs.searching and (observations.rows is not None or not plan.measures):
            return None
        rows = {layer: max(counts) for layer, counts in measured.items()}  # of first runs or of recomputations
        # with common factors eigenbases may begin to travel, and then all ranks have to know which there are
        everyone = gathered((self.inputs.shown, rows, ready), self.channel.group)
        ready.update(key for *_, keys in everyone for key in keys)
        groups = observations.groups
        if self.inputs.searching:
            groups = agreed([found for found, *_ in everyone], plan.sharing_candidates)
        if observations.rows is not None:  # of a checkpoint
            return replace(observations, groups=groups)
        total: Counter[str] = Counter()
        for _, own, _ in everyone:
            total.update(own)
        return replace(
            observations, groups=groups, rows={layer: count / len(everyone) for layer, count in total.items()}
        )

    def settled(self, observations: Observations, plan: Plan) -> Observations | None:
        """Look at :attr:`updates`, now that their count has long arrived: what is to be known if some had no row, not
        all ranks contributed, and a layer of theirs was used on some rank; else None. Collective if there were any
        such updates, which every rank knows."""
        if self.updates is None:
            return None
        (count, (keys, flags), seen), self.updates = self.updates, None
        if not count.tolist()[0]:
            return None
        missed = () if flags is None else [key for key, flag in zip(keys, flags.tolist(), strict=True) if flag]
        everyone = gathered((tuple(missed), frozenset(seen)), self.channel.group)
        used = frozenset().union(*(own for _, own in everyone))
        told = {key for own, _ in everyone for key in own}
        sought = [f.key for f in plan.assignment.factors if f.key in told and not used.isdisjoint(f.layers)]
        if sought and self.channel.rank == 0:
            logger.info(f"ds_kfac: no rows of {', '.join(sought)} on the ranks that contribute: twice as many do now")
        return plan.seeking(observations, sought) if sought else None

    def leave_out(self, sums: dict[str, BatchSum]) -> int:
        """Drop the common A of groups whose layers got different inputs here in this step: it would not be of all of
        theirs; or gradients of other calls. Returns how many there are."""
        for group, apart in self.inputs.end_step().items():
            if (own := sums.get(key_of(group[0], "A"))) is not None:
                own.sum_P.masked_fill_(apart, 0.0)
                own.count.masked_fill_(apart, 0.0)
        parted = [group for group in self.inputs.broken if key_of(group[0], "A") in sums]
        for group in parted:
            del sums[key_of(group[0], "A")]
        if parted and not self._warned:
            self._warned = True
            logger.warning(
                f"ds_kfac: rank {self.channel.rank}: layers that shared their input in the first step got different "
                f"ones ({'; '.join(map(', '.join, parted))}), or gradients of other calls. Their common A has no rows "
                "of this rank in such steps. This warning appears once; parted_inputs counts on"
            )
        return len(parted)
