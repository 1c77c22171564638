"""The batch sums of one step on their way to the decomposers: in two buckets, each sent as soon as it is complete."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.bucket import FactorBucket, step_buckets
from ds_kfac.capture import UseSums
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.layers.base import LayerSpec
from ds_kfac.traffic import Channel
from ds_kfac.wire import Reduction

Rows = tuple[str, int, str]
"""(layer, use, side)"""

KEPT_PLANS = 64


class Reducer:
    """Buckets of the factors that are due, the upper layers' first: their gradients come first.

    During backward a bucket leaves once every layer in it has got as many rows as in each of its last two steps, in
    the last micro-batch; what has not left by then leaves at the step. The order of the buckets is the same on every
    rank, whatever the order of its layers.

    Args:
        layers, factors: what there is.
        decomposers: factor key -> rank.
        dtype: on the wire.
        error_feedback: add what rounding took from a sum to the next one.
        last_micro_batch: whether the running backward is the step's last; None: nothing leaves before the step.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        factors: Sequence[FactorSpec],
        decomposers: Mapping[str, int],
        channel: Channel,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        error_feedback: bool = False,
        last_micro_batch: Callable[[], bool] | None = None,
    ) -> None:
        self.layers, self.factors, self.decomposers = tuple(layers), tuple(factors), decomposers
        self.channel, self.device, self.dtype = channel, device, dtype
        self._last_micro_batch = last_micro_batch if channel.world > 1 else None
        self._residuals: dict[Rows, Tensor] | None = {} if error_feedback and dtype is not torch.float32 else None
        self._plans: dict[frozenset[str], tuple[FactorBucket, ...]] = {}
        self._expected: dict[Rows, tuple[int, int]] = {}  # rows' additions in the last step, and how often so in a row
        self._bucket_of: dict[Rows, int] = {}
        self._finished: list[Reduction] = []
        self._added: Counter[Rows] = Counter()
        self._flats: list[Tensor] | None = None
        self._buckets: tuple[FactorBucket, ...] = ()
        self._running: list[Reduction] = []
        self._missing: list[set[Rows]] = []
        self._steady: list[bool] = []

    def buckets(self, keys: frozenset[str]) -> tuple[FactorBucket, ...]:
        """The layouts of the sums of some factors, in the order in which they leave. The same on every rank."""
        if keys not in self._plans:
            if len(self._plans) >= KEPT_PLANS:  # adaptive intervals make many combinations
                self._plans.pop(next(iter(self._plans)))
            self._plans[keys] = step_buckets(
                self.layers,
                self.factors,
                self.decomposers,
                world=self.channel.world,
                keys=keys,
                halved=self._last_micro_batch is not None,
            )
        return self._plans[keys]

    def allocate(self, keys: frozenset[str]) -> dict[str, list[UseSums]]:
        """Zeroed sums of the factors in ``keys``: layer name -> one per use."""
        self._buckets = self.buckets(keys)
        self._flats = [torch.zeros(bucket.numel, device=self.device) for bucket in self._buckets]
        self._added.clear()
        found: dict[str, list[UseSums]] = {}
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            found |= bucket.views(flat)
        if self._last_micro_batch:
            self._bucket_of = {
                (slot.layer, slot.use, slot.side): index
                for index, bucket in enumerate(self._buckets)
                for slot in bucket.slots
            }
            steady = {rows for rows, (_, times) in self._expected.items() if times >= 2}
            self._missing = [
                {(slot.layer, slot.use, slot.side) for slot in bucket.slots if slot.numel} for bucket in self._buckets
            ]
            self._steady = [missing <= steady for missing in self._missing]
        return found

    def rows_added(self, layer: str, use: int, side: str) -> None:
        """Told by the hooks after every addition.

        Raises:
            RuntimeError: the bucket has left already.
        """
        if self._last_micro_batch is None:
            return
        rows = (layer, use, side)
        self._added[rows] += 1
        bucket = self._bucket_of[rows]
        if bucket < len(self._running):
            raise RuntimeError(
                f"ds_kfac: {layer} was called more often in this step than in the last ones, after its statistics had "
                'been sent; set "overlap": false in kfac.communication for a model that changes its calls'
            )
        if self._added[rows] == self._expected.get(rows, (0, 0))[0]:
            self._missing[bucket].discard(rows)
        else:
            self._missing[bucket].add(rows)
        while (index := len(self._running)) < len(self._buckets):
            if self._missing[index] or not self._steady[index] or not self._last_micro_batch():
                return
            self._start(index)

    def finish(self, keys: frozenset[str]) -> dict[str, list[UseSums]]:
        """Sums over all ranks of the factors that this rank averages. Collective; a rank without rows sends zeros."""
        if self._flats is None:
            self.allocate(keys)
        assert self._flats is not None and self._buckets == self.buckets(keys)
        for index in range(len(self._running), len(self._buckets)):
            self._start(index)
        found: dict[str, list[UseSums]] = {}
        for bucket, running in zip(self._buckets, self._running, strict=True):
            found |= bucket.views(running.wait(), rank=self.channel.rank)
        for rows, count in self._added.items():
            before, times = self._expected.get(rows, (0, 0))
            self._expected[rows] = (count, times + 1 if count == before else 1)
        self._finished = self._running
        self._begin()
        return found

    def _start(self, index: int) -> None:
        assert self._flats is not None
        reduction = Reduction(self._buckets[index], self._flats[index], self.channel, self.dtype, self._residuals)
        self._running.append(reduction)

    def commit(self) -> None:
        """The step was applied: what rounding took from its sums comes with the next ones."""
        for reduction in self._finished:
            if self._residuals is not None:
                self._residuals |= reduction.residuals
        self._finished = []

    def forget(self) -> None:
        """Drop sums that were begun."""
        self._finished = []
        self._begin()

    def _begin(self) -> None:
        self._flats, self._buckets, self._running = None, (), []
        self._added, self._missing, self._steady = Counter(), [], []
