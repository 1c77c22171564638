"""Messages between ranks that contain neither gradients nor batch sums.

Owners (the ranks that decompose factors) send eigenbases or damped inverses to gradient
workers (the ranks that precondition layers), in messages of bounded size. The first of these
messages also contains scalars about factors. The scalars are sent without their names, because
every rank can derive the names from the plan. After the first batch whose statistics were collected
("captured"), all ranks agree on which layers share one A, and on how many rows each layer has.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Sends eigenbases or inverses from owners to gradient workers.

    Args:
        factors: all factors, in an order that is the same on every rank.
        owners: factor key -> rank that decomposes the factor.
        workers: layer name -> ranks that precondition the layer's gradient.
        wire: dtype in which eigenvectors are sent.
        method: defines the parts of a decomposition.
        nbytes: limit on the bytes that a rank sends in one message, and on the bytes that it
            receives. A decomposition that is larger has a message of its own.
        copied: names of the layers that exist as copies on several tensor-parallel ranks. Each of
            these ranks has a plan of its own.

    Attributes:
        receivers: factor key -> gradient workers other than the factor's owner.
        rounded_at_home: keys of factors whose owner also rounds its own decomposition to the
            dtype in which it is sent, so that all workers have the same bits. For a copied layer
            the owner always does so, because a rank with another copy may send its
            decomposition.
        travels: whether any decomposition is ever sent to another rank.
        kinds: for each part of a decomposition, the kind of message that counters report for it.
        dtypes: for each part of a decomposition, the dtype in which it is sent.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        owners: Mapping[str, int],
        workers: Mapping[str, tuple[int, ...]],
        *,
        world: int,
        wire: torch.dtype,
        nbytes: int,
        method: Method = EIGEN,
        copied: Collection[str] = (),
    ) -> None:
        self.method = method
        self.nbytes = nbytes
        self.kinds = tuple(part.kind for part in self.method.parts)
        self.dtypes = tuple(wire if part.halved else torch.float32 for part in self.method.parts)
        self.factors = tuple(factors)
        self.owners = owners
        self.world = world
        self.wire = wire
        self.receivers: dict[str, tuple[int, ...]] = {}
        for factor in factors:
            ranks = {rank for name in factor.layers for rank in workers[name]}
            self.receivers[factor.key] = tuple(sorted(ranks - {owners[factor.key]}))
        copies = {
            factor.key
            for factor in factors
            if world > 1 and any(name in copied for name in factor.layers)
        }
        self.rounded_at_home = {key for key, ranks in self.receivers.items() if ranks} | copies
        self.travels = any(self.receivers.values())

    def messages(self, keys: Collection[str]) -> list[list[tuple[int, int]]]:
        """Return the messages that are sent when the factors in ``keys`` have been refreshed.

        Each message is a list of pairs (index of a factor in :attr:`factors`, receiver). A pair is
        put into the first message that has room for it.
        """
        messages: list[list[tuple[int, int]]] = []
        # for each message: ("from", rank) or ("to", rank) -> bytes
        loads: list[Counter[tuple[str, int]]] = []
        for place, factor in enumerate(self.factors):
            if factor.key not in keys:
                continue
            sizes = zip(self.method.parts, self.dtypes, strict=True)
            nbytes = sum(part.numel(factor.side) * dtype.itemsize for part, dtype in sizes)
            for rank in self.receivers[factor.key]:
                ends = ("from", self.owners[factor.key]), ("to", rank)
                index = self._first_with_room(loads, ends, nbytes)
                if index == len(messages):
                    messages.append([])
                    loads.append(Counter())
                messages[index].append((place, rank))
                loads[index].update(dict.fromkeys(ends, nbytes))
        return messages

    def _first_with_room(
        self,
        loads: Sequence[Counter[tuple[str, int]]],
        ends: Sequence[tuple[str, int]],
        nbytes: int,
    ) -> int:
        """Return the index of the first message in which both ``ends``, the sender and the
        receiver, have room for ``nbytes`` more. If there is none, return the number of messages."""
        for index, load in enumerate(loads):
            if all(not load[end] or load[end] + nbytes <= self.nbytes for end in ends):
                return index
        return len(loads)

    def plans(self, pairs: Sequence[tuple[int, int]]) -> tuple[RelayoutPlan, ...]:
        """Return the plans of one message, one for each part of a decomposition. A plan says which
        elements the message moves, and between which ranks.

        Args:
            pairs: one of the messages that :meth:`messages` returns.
        """
        of_pairs = [(place, self.factors[place], rank) for place, rank in pairs]
        moves = [
            [
                Move(place, 0, part.numel(f.side), self.owners[f.key], rank)
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
        """Return the parts of each message that delivers decompositions of the factors in ``keys``.
        A factor without an entry in ``bases`` could not be decomposed. Zeros are sent in place of
        its decomposition, because the receivers expect the same number of elements."""

        def piece(flat: Callable[[Any], Tensor], move: Move) -> Tensor:
            basis = bases.get(self.factors[move.param].key)
            if basis is None:
                return torch.zeros(move.numel, device=device, dtype=torch.float32)
            return flat(basis)

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
        """Return factor key -> decomposition, for the decompositions in one message. They are
        copies, not views of the message.

        Args:
            arrivals: what has arrived for each part of the message.
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
"""Outcomes of a factor's decomposition, as reported by its owner. FAILED: the decomposition
did not succeed. UNUSABLE: the factor cannot be decomposed, for example because it has no data.
FRESH: there is a new decomposition."""


def counting(sides: Mapping[str, FactorSpec]) -> str:
    """Return the key of the factor whose batches contain a layer's number of loss terms. This is G,
    or A if G is the identity."""
    return (sides.get("G") or sides["A"]).key


UNUSUAL = ("limited", "empty", "missed")
"""Kinds of unusual batches of a factor. Each kind is counted.

- limited: the batch was scaled down, because its trace was far above the trace of the average.
- empty: the factor was not changed, because the batch had no row, or contained a value that is not
  finite.
- missed: the batch had no row, but only some ranks contributed. Another rank may have had rows.
"""
NONE_UNUSUAL: Sequence[Tensor | float] = (0.0,) * len(UNUSUAL)


def unusual(scalars: Mapping[Hashable, Tensor]) -> Tensor | float:
    """Return, for each kind in :data:`UNUSUAL`, how many of this step's batches on all ranks are of
    that kind, fp32 [3]. Return 0.0 if the ranks have not sent these numbers."""
    numbers = [
        [scalars[name] for name in scalars if isinstance(name, tuple) and name[0] == kind]
        for kind in UNUSUAL
    ]
    if not numbers[0]:
        return 0.0
    return torch.stack([torch.stack(counts).sum() for counts in numbers])


def scalar_names(
    plan: Plan, *, captured: Collection[str], arriving: Collection[str], travels: bool
) -> list[list[Hashable]]:
    """Return the names of the scalars that each rank sends, in rank order.

    Args:
        captured: keys of the factors for which this step collects statistics.
        arriving: keys of the factors that are decomposed in this step.
        travels: whether eigenbases are ever sent to other ranks.
    """
    names: list[list[Hashable]] = [[] for _ in range(plan.assignment.world)]
    where = plan.assignment.owners
    # If eigenbases are never sent, the gradient workers are the owners. Totals then sends
    # these numbers with the results.
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
            if layer.name not in of_layer:
                continue
            key = counting(of_layer[layer.name])
            if key in captured:
                names[where[key]].append(("terms", layer.name))
    if travels:
        for key in arriving:
            names[where[key]].append(("fresh", key))
    return names


def rows_in(measured: Mapping[str, int | Tensor]) -> dict[str, int]:
    """Return layer name -> number of rows, with all numbers on the host. Numbers on the device are
    copied in one transfer."""
    on_device = {layer: rows for layer, rows in measured.items() if isinstance(rows, Tensor)}
    on_host = torch.stack([*on_device.values()]).tolist() if on_device else []
    return {**measured, **dict(zip(on_device, on_host, strict=True))}


@dataclass(frozen=True)
class MissedBatches:
    """A rank's factors to which only some of the ranks contributed in a step.

    Attributes:
        keys: factor keys.
        without_rows_n: bool [n] on the device, True for each key whose batch had no row. None if
            there are no keys.
    """

    keys: tuple[str, ...] = ()
    without_rows_n: Tensor | None = None

    def without_rows(self) -> tuple[str, ...]:
        """Return the keys whose batch had no row. Synchronises with the device."""
        if self.without_rows_n is None:
            return ()
        flags = self.without_rows_n.tolist()
        return tuple(key for key, flag in zip(self.keys, flags, strict=True) if flag)


@dataclass(frozen=True)
class CapturedStep:
    """Data of a captured step, which the ranks compare later to find "missed" batches.

    Attributes:
        step: number of the step.
        plan: the plan of the step.
        missed_count: number of "missed" batches on all ranks, see :data:`UNUSUAL`.
        missed: this rank's factors to which only some of the ranks contributed.
        seen: names of the layers that had an input on this rank in the step.
    """

    step: int
    plan: Plan
    missed_count: HostCopy
    missed: MissedBatches
    seen: Collection[str]


class Sharing:
    """Makes all ranks agree on what the captured batches show about layers.

    The first captured batch shows which layers share one A (see ``inputs``), and how many rows each
    layer has on an average rank. Before a factor uses that batch, the ranks agree on both for the
    whole run. Later batches may show that too few ranks contribute to a factor.
    """

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs = inputs
        self.channel = channel

    def observed(
        self,
        observations: Observations,
        plan: Plan,
        ready: set[str],
        measured: Mapping[str, int | Tensor],
    ) -> Observations | None:
        """Return the observations after this captured step. Collective.

        If earlier steps have already shown everything, return None; in that case the call is local.

        Args:
            ready: keys of decomposed factors. The ready keys of other ranks are added in place.
            measured: layer name -> number of rows on this rank in this step, see
                :class:`ds_kfac.model.capture.Capture`.
        """
        if not self.inputs.searching and (observations.rows is not None or not plan.measures):
            return None
        rows = rows_in(measured)
        # Layers that begin to share an A may make it necessary to send eigenbases. All ranks must
        # then know which factors are ready.
        everyone = gathered((self.inputs.inputs_seen(), rows, ready), self.channel.group)
        ready.update(key for *_, keys in everyone for key in keys)
        groups = observations.groups
        if self.inputs.searching:
            groups = agreed([shared for shared, *_ in everyone], plan.sharing_candidates)
        if observations.rows is not None:  # the rows were read from a checkpoint
            return replace(observations, groups=groups)
        total: Counter[str] = Counter()
        for _, counts, _ in everyone:
            total.update(counts)
        return replace(
            observations,
            groups=groups,
            rows={layer: count / len(everyone) for layer, count in total.items()},
        )

    def settled(self, captured: CapturedStep, observations: Observations) -> Observations | None:
        """Check an applied step for "missed" batches. Their count has usually reached the host by
        now.

        If the ranks that contribute to a factor had no row, but another rank used one of the
        factor's layers, return observations with which twice as many ranks contribute. Otherwise
        return None. The call is collective if there were "missed" batches. Every rank knows whether
        there were any, because the count is a sum over all ranks.
        """
        if not captured.missed_count.tolist()[0]:
            return None
        plan = captured.plan
        mine = captured.missed.without_rows(), frozenset(captured.seen)
        everyone = gathered(mine, self.channel.group)
        used = frozenset().union(*(layers for _, layers in everyone))
        empty = {key for keys, _ in everyone for key in keys}
        sought = [
            factor.key
            for factor in plan.assignment.factors
            if factor.key in empty and not used.isdisjoint(factor.layers)
        ]
        if empty and self.channel.rank == 0:
            more = ""
            if sought:
                more = (
                    f"; other ranks had rows of {', '.join(sought)}, so from now on twice as many "
                    "ranks contribute"
                )
            logger.debug(
                f"ds_kfac: no rows of {', '.join(sorted(empty))} on the ranks that contribute{more}"
            )
        return plan.seeking(observations, sought) if sought else None
