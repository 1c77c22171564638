"""Payload and collectives of a step, from the plans that the run itself sends by. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ds_kfac.board import Board
from ds_kfac.bucket import FactorBucket, step_buckets
from ds_kfac.delivery import Delivery
from ds_kfac.mail import ALIGNMENT
from ds_kfac.notices import notices
from ds_kfac.planning import Plan
from ds_kfac.wire import segment_bytes
from ds_kfac.zero.exchange import ExchangePlan
from ds_kfac.zero.relayout import RelayoutPlan
from ds_kfac.zero.shards import ShardMap

Keys = frozenset[str]
Message = Mapping[str, np.ndarray]
"""Kind -> bytes [W, W] from the row's rank to the column's; kinds in the order in which they lie in the message."""

KINDS = ("factors", "gradients", "eigenvectors", "eigenvalues", "inverses", "results", "numbers")
"""As :class:`ds_kfac.traffic.Channel` counts them."""
SCATTERED_NUMBERS = 6
"""What the optimizer counts over ranks beside the direction's numbers and a flag per layer: see ``_scatter``."""


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
        norm: whether ranks tell each other the norm of their gradients.
        terms: whether decomposers tell loss terms (corrected eigenvalues).
        overlap: whether batch sums leave in two messages.
    """

    def __init__(
        self, plan: Plan, shards: ShardMap, *, numbers: int, norm: bool = False, terms: bool, overlap: bool
    ) -> None:
        self.plan, self.world = plan, shards.world
        self.norm, self.terms, self.overlap = norm, terms, overlap
        assignment = plan.assignment
        self.exchange = ExchangePlan(shards, plan.layers, assignment.workers)
        self.delivery = Delivery(
            assignment.factors,
            assignment.decomposers,
            assignment.workers,
            world=self.world,
            wire=plan.wire,
            method=plan.method,
        )
        self._scattered = numbers + SCATTERED_NUMBERS + len(plan.layers)
        self._steps: dict[tuple[Keys, Keys], StepTraffic] = {}

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
                for kind, matrix in message.items():
                    payload[kind] += matrix - np.diag(np.diag(matrix))
            self._steps[captured, arriving] = StepTraffic(payload, calls)
        return self._steps[captured, arriving]

    def buckets(self, captured: Keys) -> tuple[FactorBucket, ...]:
        assignment = self.plan.assignment
        return step_buckets(
            self.plan.layers,
            assignment.factors,
            assignment.decomposers,
            world=self.world,
            keys=captured,
            halved=self.overlap and self.world > 1,
        )

    def reductions(self, captured: Keys) -> list[Message]:
        """Batch sums; a rank's own segment goes through the message too, on the diagonal."""
        found: list[Message] = []
        for bucket in self.buckets(captured):
            sizes = [segment_bytes(segment, self.plan.wire) for segment in bucket.segments]
            found.append({"factors": np.tile(np.array(sizes, dtype=np.int64), (self.world, 1))})
        return found

    def gather(self, captured: Keys, arriving: Keys) -> Message:
        """Gradients to their workers, eigenbases or inverses, and what ranks tell each other."""
        moves = zip(self.delivery.kinds, self.delivery.plans(arriving), self.delivery.dtypes(), strict=True)
        order = [factor.key for factor in self.plan.assignment.factors if factor.key in arriving]
        names = notices(self.plan, captured=captured, arriving=order, travels=self.delivery.travels, terms=self.terms)
        if self.norm:
            for rank, told in enumerate(names):
                told.append(("norm", rank))
        legs = {
            "gradients": self._gradients,
            **{kind: self._matrix(plan, dtype) for kind, plan, dtype in moves},
            "numbers": self._told(Board(names, 0)),
        }
        return _moving(legs)

    @cached_property
    def scatter(self) -> Message:
        """Results, and the numbers that are summed over a row."""
        board = Board([range(self._scattered)] * self.world, 0, self.plan.rows)
        results = self._matrix(self.exchange.scatter, self.plan.gradient_dtypes[1])
        return _moving({"results": results, "numbers": self._told(board)})

    @cached_property
    def _gradients(self) -> np.ndarray:
        return self._matrix(self.exchange.gather, self.plan.gradient_dtypes[0])

    def _matrix(self, plan: RelayoutPlan, dtype: torch.dtype) -> np.ndarray:
        matrix = np.zeros((self.world, self.world), dtype=np.int64)
        if plan.moves:
            moves = np.array([(move.source, move.target, move.numel) for move in plan.moves], dtype=np.int64)
            np.add.at(matrix, (moves[:, 0], moves[:, 1]), moves[:, 2] * dtype.itemsize)
        return matrix

    def _told(self, board: Board) -> np.ndarray:
        """As its plan, which has a move for every pair of ranks, would give."""
        matrix = np.zeros((self.world, self.world), dtype=np.int64)
        for row in board.rows:
            for rank in row:
                matrix[rank, list(row)] = len(board.names[rank]) * torch.float32.itemsize
                matrix[rank, rank] = 0
        return matrix


def message_bytes(messages: Iterable[Message], *, sent: bool = True) -> np.ndarray:
    """Memory [W] of the buffers of messages at each rank, alignment included.

    Args:
        sent: false where what is sent lies in the buckets already.
    """
    total = np.zeros((), dtype=np.int64)
    for message in messages:
        for matrix in message.values():
            padded = -(-matrix // ALIGNMENT) * ALIGNMENT
            total = total + padded.sum(axis=0) + (padded.sum(axis=1) if sent else 0)
    return total


def _moving(legs: Message) -> Message:
    """Without those of which nothing moves anywhere."""
    return {kind: matrix for kind, matrix in legs.items() if matrix.any()}
