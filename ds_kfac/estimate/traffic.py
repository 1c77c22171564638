"""Payload and collectives of a step, from the plans that the run itself sends by. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from ds_kfac.comm.delivery import Delivery
from ds_kfac.comm.message import ALIGNMENT, RelayoutPlan, Scalars
from ds_kfac.comm.reduce import Layout, payloads
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.step.scalar_names import scalar_names
from ds_kfac.zero.exchange import ExchangePlan
from ds_kfac.zero.shards import ShardMap

Keys = frozenset[str]
Message = Mapping[str, np.ndarray]
"""Kind -> bytes [W, W] from the row's rank to the column's; kinds in the order in which they lie in the message. Of
batch sums counts and elements, one after the other: [2, W, W]."""

PARTS = tuple(dict.fromkeys(part.kind for form in FACTOR_FORMS.values() for part in form.parts))
KINDS = ("factors", "gradients", *PARTS, "results", "numbers")
"""As :class:`ds_kfac.comm.message.Channel` counts them."""
SCATTERED_NUMBERS = 7
"""What the step counts over ranks in addition to the direction's numbers and a flag per layer: see ``_scatter``."""


@dataclass(frozen=True)
class StepTraffic:
    """Of one step, or of the mean of several.

    Attributes:
        payload: kind -> bytes [W, W] from the row's rank to the column's, W ranks; the diagonal is 0.
        calls: kind -> collectives; one that carries several kinds counts for the first.
    """

    payload: Mapping[str, np.ndarray]
    calls: Mapping[str, float]

    def sent(self, kind: str | None = None) -> np.ndarray:
        """Bytes [W] that each rank sends; of all kinds if None."""
        return self._sum(kind, 1)

    def received(self, kind: str | None = None) -> np.ndarray:
        return self._sum(kind, 0)

    def between(self, pairs: np.ndarray) -> np.ndarray:
        """Bytes [W] that each rank sends to those that ``pairs`` [W, W] marks in its row."""
        return np.sum([(matrix * pairs).sum(axis=1) for matrix in self.payload.values()], axis=0)

    @property
    def collectives(self) -> float:
        return sum(self.calls.values())

    def _sum(self, kind: str | None, axis: int) -> np.ndarray:
        matrices = self.payload.values() if kind is None else [self.payload[kind]]
        return np.sum([matrix.sum(axis=axis) for matrix in matrices], axis=0)


def mean_traffic(steps: Sequence[tuple[StepTraffic, int]]) -> StepTraffic:
    """Of steps that occur so many times each."""
    count = sum(times for _, times in steps)
    payload = {kind: np.sum([step.payload[kind] * times for step, times in steps], axis=0) / count for kind in KINDS}
    calls = {kind: sum(step.calls[kind] * times for step, times in steps) / count for kind in KINDS}
    return StepTraffic(payload, calls)


class PlannedTraffic:
    """What a plan sends.

    Args:
        shards: where the gradients of the plan's layers are.
        numbers: scalars that the direction sums over ranks.
        norm: whether ranks exchange the norm of their gradients.
        terms: whether decomposers send loss terms (corrected eigenvalues).
        in_place: whether results take the places of gradients, see :class:`ds_kfac.zero.layout.ShardLayout`.

    Attributes:
        layout: of batch sums; what is asked of it is of step 0, one update is like another.
        first: the same of the first captured step.
        outgoing, staying: (rank, parameter) -> bytes of a result that wait to be sent, and of what waits to be written,
            sent or not.
    """

    def __init__(
        self, plan: Plan, shards: ShardMap, *, numbers: int, norm: bool = False, terms: bool, in_place: bool
    ) -> None:
        self.plan, self.world = plan, shards.world
        self.norm, self.terms = norm, terms
        assignment = plan.assignment
        self.exchange = ExchangePlan(shards, plan.layers, assignment.workers)
        self.outgoing, self.staying = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        fp32, sent = torch.float32.itemsize, plan.gradient_dtypes[1].itemsize
        outgoing = {(move.source, move.param, move.start, move.numel) for move in self.exchange.scatter.moves}
        for rank, param, _, numel in outgoing:
            self.outgoing[rank, param] += sent * numel
        for shard in () if in_place else shards.shards:
            if shard.rank in self.exchange.of_parameter[shard.param]:
                goes = (shard.rank, shard.param, shard.start, shard.numel) in outgoing  # and stays as it is sent
                self.staying[shard.rank, shard.param] += (sent if goes else fp32) * shard.numel
                self.outgoing[shard.rank, shard.param] -= sent * shard.numel if goes else 0
        self._whole = {(s.rank, s.param) for s in shards.shards if s.numel == shards.numels[s.param]}
        self.delivery = Delivery(
            assignment.factors,
            assignment.decomposers,
            assignment.workers,
            world=self.world,
            wire=plan.wire,
            method=plan.method,
        )
        self.layout = Layout(
            assignment.factors, assignment.decomposers, plan.contributors, plan.wire.itemsize,
            plan.bucket_bytes,
        )  # fmt: skip
        self.first = self.layout if plan.first is None else replace(self.layout, contributors=plan.first, _known={})
        self._scattered = numbers + SCATTERED_NUMBERS + len(plan.layers)
        self._steps: dict[tuple[Keys, Keys], StepTraffic] = {}

    def gathered(self, layer: LayerSpec, rank: int) -> int:
        """Elements of a gradient that a worker does not hold as it is."""
        (first, *more) = self.exchange.of_layer[layer.name]
        return layer.numel if more or (rank, first) not in self._whole else 0

    def results(self, layer: LayerSpec, rank: int) -> int:
        """Bytes of a result at a worker, until it is sent."""
        params = self.exchange.of_layer[layer.name]
        return sum(kind[rank, param] for kind in (self.outgoing, self.staying) for param in params)

    @cached_property
    def every(self) -> Keys:
        """All factors."""
        return frozenset(factor.key for factor in self.plan.assignment.factors)

    def step(self, captured: Keys, arriving: Keys) -> StepTraffic:
        """Of a step that captures some factors, and in which eigenbases of some take effect."""
        if (captured, arriving) not in self._steps:
            payload = {kind: np.zeros((self.world, self.world), dtype=np.int64) for kind in KINDS}
            calls = dict.fromkeys(KINDS, 0)
            messages = [*self.reductions(captured), self.gather(captured, arriving), self.scatter]
            for message in messages:
                if self.world == 1 or not message:
                    continue
                calls[next(iter(message))] += 1
                for kind, matrices in message.items():
                    matrix = _each(matrices).sum(axis=0)
                    payload[kind] += matrix - np.diag(np.diag(matrix))
            self._steps[captured, arriving] = StepTraffic(payload, calls)
        return self._steps[captured, arriving]

    def reductions(self, captured: Keys, layout: Layout | None = None) -> list[Message]:
        """Messages of batch sums. ``layout``: None: the settled one."""
        found: list[Message] = []
        for bucket in (layout or self.layout).buckets(captured, 0):
            matrices = np.zeros((2, self.world, self.world), dtype=np.int64)
            for matrix, of_pairs in zip(matrices, payloads(bucket, self.plan.wire.itemsize), strict=True):
                for (source, target), nbytes in of_pairs.items():
                    matrix[source, target] = nbytes
            found.append({"factors": matrices})
        return found

    def gather(self, captured: Keys, arriving: Keys) -> Message:
        """Gradients to their workers, eigenbases or inverses, and the exchanged scalars."""
        moves = zip(self.delivery.kinds, self.delivery.plans(arriving), self.delivery.dtypes(), strict=True)
        order = [factor.key for factor in self.plan.assignment.factors if factor.key in arriving]
        names = scalar_names(
            self.plan, captured=captured, arriving=order, travels=self.delivery.travels, terms=self.terms
        )
        if self.norm:
            for rank, own in enumerate(names):
                own.append(("norm", rank))
        parts = {
            "gradients": self._gradients,
            **{kind: self._matrix(plan, dtype) for kind, plan, dtype in moves},
            "numbers": self._scalars(Scalars(names, 0)),
        }
        return _moving(parts)

    @cached_property
    def scatter(self) -> Message:
        """Results, and the numbers that are summed over a row."""
        scalars = Scalars([range(self._scattered)] * self.world, 0, self.plan.rows)
        results = self._matrix(self.exchange.scatter, self.plan.gradient_dtypes[1])
        return _moving({"results": results, "numbers": self._scalars(scalars)})

    @cached_property
    def _gradients(self) -> np.ndarray:
        return self._matrix(self.exchange.gather, self.plan.gradient_dtypes[0])

    def _matrix(self, plan: RelayoutPlan, dtype: torch.dtype) -> np.ndarray:
        matrix = np.zeros((self.world, self.world), dtype=np.int64)
        if plan.moves:
            moves = np.array([(move.source, move.target, move.numel) for move in plan.moves], dtype=np.int64)
            np.add.at(matrix, (moves[:, 0], moves[:, 1]), moves[:, 2] * dtype.itemsize)
        return matrix

    def _scalars(self, scalars: Scalars) -> np.ndarray:
        """As its plan, which has a move for every pair of ranks, would give."""
        matrix = np.zeros((self.world, self.world), dtype=np.int64)
        for row in scalars.rows:
            for rank in row:
                matrix[rank, list(row)] = len(scalars.names[rank]) * torch.float32.itemsize
                matrix[rank, rank] = 0
        return matrix


def message_bytes(message: Message, *, received: bool = True) -> np.ndarray | int:
    """Memory [W] of a message's buffers at each rank, alignment included; of those to be sent alone unless
    ``received``."""
    padded = [-(-matrix // ALIGNMENT) * ALIGNMENT for matrices in message.values() for matrix in _each(matrices)]
    return sum(matrix.sum(axis=1) + (matrix.sum(axis=0) if received else 0) for matrix in padded)


def _each(matrices: np.ndarray) -> np.ndarray:
    """[n, W, W], each of which is padded by itself."""
    return matrices.reshape(-1, *matrices.shape[-2:])


def _moving(parts: Message) -> Message:
    """Without those of which nothing moves anywhere."""
    return {kind: matrix for kind, matrix in parts.items() if matrix.any()}
