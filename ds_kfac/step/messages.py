"""What ranks exchange beside gradients and batch sums.

Eigenbases, or damped inverses, travel from the ranks that decompose to gradient workers elsewhere,
in messages of bounded size; so do scalars about factors, whose names every rank derives from the
plan. After the first captured batch all ranks agree on which layers share one A, and on how many
rows each layer has.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.assignment.costs import FactorSpec, factors_by_layer
from ds_kfac.comm.message import Arrivals, Channel, MessagePart, Move, RelayoutPlan, gathered
from ds_kfac.curvature.methods import EIGEN, Decomposition, Method
from ds_kfac.log import logger
from ds_kfac.model.shared import SharedInputs, agreed
from ds_kfac.ops.host_copy import HostCopy
from ds_kfac.plan.plan import Observations, Plan


class Delivery:
    """Sends eigenbases or inverses from eigen workers to gradient workers.

    Args:
        factors: in an order that is the same on every rank.
        eigen_workers: factor key -> the rank that decomposes it.
        workers: layer name -> ranks that precondition its gradient.
        wire: dtype of eigenvectors on the wire.
        method: defines what a decomposition consists of.
        nbytes: most bytes that a rank sends, or receives, in one message, unless one decomposition
            has more.
        copied: layers of which other tensor-parallel ranks, with plans of their own, have copies.

    Attributes:
        receivers: factor key -> gradient workers that are not its eigen worker.
        rounded: keys of the factors whose eigen worker itself uses the decomposition as it is after
            travelling: those that travel, so that all workers have the same bits, and copied
            layers', which another plan may send.
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
        nbytes: int,
        method: Method = EIGEN,
        copied: Collection[str] = (),
    ) -> None:
        self.method, self.nbytes = method, nbytes
        self.kinds = tuple(part.kind for part in self.method.parts)
        self.dtypes = tuple(wire if part.halved else torch.float32 for part in self.method.parts)
        self.factors, self.eigen_workers, self.world, self.wire = (
            tuple(factors),
            eigen_workers,
            world,
            wire,
        )
        self.receivers = {
            factor.key: tuple(
                sorted(
                    {rank for name in factor.layers for rank in workers[name]}
                    - {eigen_workers[factor.key]}
                )
            )
            for factor in factors
        }
        copies = {
            factor.key
            for factor in factors
            if world > 1 and any(name in copied for name in factor.layers)
        }
        self.rounded = {key for key, ranks in self.receivers.items() if ranks} | copies
        self.travels = any(self.receivers.values())

    def messages(self, keys: Collection[str]) -> list[list[tuple[int, int]]]:
        """What travels when the factors in ``keys`` have been refreshed: for each message pairs of
        a factor's place and a receiver. Each pair is in the first message that has room for it."""
        messages: list[list[tuple[int, int]]] = []
        # of each message, the bytes from and to each rank
        loads: list[Counter[tuple[str, int]]] = []
        for place, factor in enumerate(self.factors):
            if factor.key not in keys:
                continue
            sizes = zip(self.method.parts, self.dtypes, strict=True)
            nbytes = sum(part.numel(factor.side) * dtype.itemsize for part, dtype in sizes)
            for rank in self.receivers[factor.key]:
                ends = ("from", self.eigen_workers[factor.key]), ("to", rank)
                fits = (
                    all(not load[end] or load[end] + nbytes <= self.nbytes for end in ends)
                    for load in loads
                )
                index = next((index for index, does in enumerate(fits) if does), len(messages))
                if index == len(messages):
                    messages.append([])
                    loads.append(Counter())
                messages[index].append((place, rank))
                loads[index].update(dict.fromkeys(ends, nbytes))
        return messages

    def plans(self, pairs: Sequence[tuple[int, int]]) -> tuple[RelayoutPlan, ...]:
        """For each part, what moves in a message of :meth:`messages`."""
        of_pairs = [(place, self.factors[place], rank) for place, rank in pairs]
        moves = [
            [
                Move(place, 0, part.numel(f.side), self.eigen_workers[f.key], rank)
                for place, f, rank in of_pairs
            ]
            for part in self.method.parts
        ]
        return tuple(
            RelayoutPlan(self.world, tuple(move for move in part if move.numel)) for part in moves
        )

    def parts(
        self, keys: Collection[str], bases: Mapping[str, Decomposition], device: torch.device
    ) -> list[tuple[MessagePart, ...]]:
        """The parts of each message that delivers the factors in ``keys``. A factor without an
        entry in ``bases`` could not be decomposed: zeros travel for it, as receivers have made
        room."""

        def piece(flat: Callable[[Any], Tensor], move: Move) -> Tensor:
            basis = bases.get(self.factors[move.param].key)
            return (
                torch.zeros(move.numel, device=device, dtype=torch.float32)
                if basis is None
                else flat(basis)
            )

        return [
            tuple(
                MessagePart(part.kind, plan, partial(piece, part.flat), dtype)
                for part, plan, dtype in zip(
                    self.method.parts, self.plans(pairs), self.dtypes, strict=True
                )
            )
            for pairs in self.messages(keys)
        ]

    def received(self, arrivals: Sequence[Arrivals]) -> dict[str, Decomposition]:
        """Factor key -> decomposition: copies of those that arrived in one message.

        Args:
            arrivals: what arrived, one for each part.
        """
        flats = [{move.param: piece for move, piece in part} for part in arrivals]
        delivered: dict[str, Decomposition] = {}
        for place in sorted(set().union(*flats)):
            factor = self.factors[place]
            delivered[factor.key] = self.method.joined(
                factor.side, *(part.get(place) for part in flats)
            )
        return delivered


FAILED, UNUSABLE, FRESH = -1.0, 0.0, 1.0
"""What an eigen worker reports about a factor's decomposition."""


def counting(sides: Mapping[str, FactorSpec]) -> str:
    """Key of the factor whose count of rows is the layer's number of loss terms: G, or A if G is
    the identity."""
    return (sides.get("G") or sides["A"]).key


UNUSUAL = ("limited", "empty", "missed")
"""Kinds of a factor's batch that are counted. limited: scaled down, as it was far above the
average. empty: without a row. missed: empty, but not all ranks contributed, so another rank may
have had rows."""
NONE_UNUSUAL: Sequence[Tensor | float] = (0.0,) * len(UNUSUAL)


def unusual(scalars: Mapping[Hashable, Tensor]) -> Tensor | float:
    """Number of batches of each kind of :data:`UNUSUAL` in this step on all ranks, fp32 [3]; 0.0 if
    not exchanged."""
    numbers = [
        [scalars[name] for name in scalars if isinstance(name, tuple) and name[0] == kind]
        for kind in UNUSUAL
    ]
    return torch.stack([torch.stack(counts).sum() for counts in numbers]) if numbers[0] else 0.0


def scalar_names(
    plan: Plan, *, captured: Collection[str], arriving: Collection[str], travels: bool
) -> list[list[Hashable]]:
    """Names of the scalars that each rank sends, by rank.

    Args:
        captured: keys of the factors that are captured in this step.
        arriving: keys of the factors that are decomposed in this step.
        travels: whether eigenbases ever travel.
    """
    names: list[list[Hashable]] = [[] for _ in range(plan.assignment.world)]
    where = plan.assignment.eigen_workers
    # else the same numbers come with the results, as gradient workers are the eigen workers
    if travels:
        for rank in sorted({where[key] for key in captured}):
            names[rank] += [(kind, rank) for kind in UNUSUAL]
    if plan.adaptive:
        for factor in plan.assignment.factors:
            if factor.key in captured:
                names[where[factor.key]].append(("similar", factor.key))
    if travels and plan.counts_terms:
        of_layer = factors_by_layer(plan.assignment.factors)
        for layer in plan.layers:
            if layer.name in of_layer and (key := counting(of_layer[layer.name])) in captured:
                names[where[key]].append(("terms", layer.name))
    if travels:
        for key in arriving:
            names[where[key]].append(("fresh", key))
    return names


def rows_in(measured: Mapping[str, int | Tensor]) -> dict[str, int]:
    """Layer name -> rows. One transfer from the device."""
    on_device = {layer: rows for layer, rows in measured.items() if isinstance(rows, Tensor)}
    on_host = torch.stack([*on_device.values()]).tolist() if on_device else []
    return {**measured, **dict(zip(on_device, on_host, strict=True))}


class Sharing:
    """Agrees with all ranks on what the first captured batch shows: which layers share one A (see
    ``inputs``), and how many rows each layer has on a rank. It is agreed before anything of that
    batch is kept, and holds for the run.

    Attributes:
        updates: what :meth:`settled` looks at, from the last applied step that captured: number of
            "missed" batches on all ranks, see :data:`UNUSUAL`; this rank's ``missed``, see
            :class:`ds_kfac.step.factors.FactorStep`; and layers that had an input on this rank.
            None: nothing to look at.
    """

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs, self.channel = inputs, channel
        self.updates: (
            tuple[HostCopy, tuple[tuple[str, ...], Tensor | None], Collection[str]] | None
        ) = None

    def observed(
        self,
        observations: Observations,
        plan: Plan,
        ready: set[str],
        measured: Mapping[str, int | Tensor],
    ) -> Observations | None:
        """The observations after this captured step; None if nothing is left to observe, else
        collective.

        Args:
            ready: keys of decomposed factors; the other ranks' are added.
            measured: layer name -> rows on this rank in this step, see
                :class:`ds_kfac.model.capture.Capture`.
        """
        if not self.inputs.searching and (observations.rows is not None or not plan.measures):
            return None
        rows = rows_in(measured)
        # once layers share an A eigenbases may begin to travel, and then all ranks have to know
        # which factors are ready
        everyone = gathered((self.inputs.inputs_seen(), rows, ready), self.channel.group)
        ready.update(key for *_, keys in everyone for key in keys)
        groups = observations.groups
        if self.inputs.searching:
            groups = agreed([found for found, *_ in everyone], plan.sharing_candidates)
        if observations.rows is not None:  # from a checkpoint
            return replace(observations, groups=groups)
        total: Counter[str] = Counter()
        for _, counts, _ in everyone:
            total.update(counts)
        return replace(
            observations,
            groups=groups,
            rows={layer: count / len(everyone) for layer, count in total.items()},
        )

    def settled(self, observations: Observations, plan: Plan) -> Observations | None:
        """Look at :attr:`updates`, whose count has reached the host by now. If a factor's
        contributors had no row, but another rank used one of its layers, return observations by
        which twice as many ranks contribute; else None. Collective if there were "missed" batches:
        all ranks have the same count."""
        if self.updates is None:
            return None
        (count, (keys, flags), seen), self.updates = self.updates, None
        if not count.tolist()[0]:
            return None
        missed = (
            ()
            if flags is None
            else [key for key, flag in zip(keys, flags.tolist(), strict=True) if flag]
        )
        everyone = gathered((tuple(missed), frozenset(seen)), self.channel.group)
        used = frozenset().union(*(layers for _, layers in everyone))
        empty = {key for keys, _ in everyone for key in keys}
        sought = [
            f.key
            for f in plan.assignment.factors
            if f.key in empty and not used.isdisjoint(f.layers)
        ]
        if empty and self.channel.rank == 0:
            more = (
                f"; of {', '.join(sought)} other ranks had some, so twice as many contribute now"
                if sought
                else ""
            )
            logger.debug(
                f"ds_kfac: no rows of {', '.join(sorted(empty))} on the ranks that contribute{more}"
            )
        return plan.seeking(observations, sought) if sought else None
