"""The batch sums of one step on their way to the decomposers: in two buckets, each sent as soon as it is complete."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.bucket import FactorBucket, step_buckets
from ds_kfac.calls import UseSums
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.layers.base import LayerSpec
from ds_kfac.traffic import Channel
from ds_kfac.wire import Reduction

Rows = tuple[str, int, str]
"""(layer, use, side)"""

KEPT_PLANS = 64


class Reducer:
    """Buckets of the factors that are due, the upper layers' first: their gradients come first.

    During backward a bucket leaves once every layer in it has got as many calls' rows as in each of its last two steps,
    in the last micro-batch; what has not left by then leaves at the step. The order of the buckets is the same on every
    rank, whatever the order of its layers, and so is their number in a step: a rank that calls its layers in another
    way, or more often, or not at all, only sends earlier or later. Rows that come after their bucket has left are
    dropped, counted and warned of once; a layer that was called so often is waited for from then on.

    Args:
        layers, factors: what there is.
        decomposers: factor key -> rank.
        dtype: on the wire.
        error_feedback: add what rounding took from a sum to the next one.
        last_micro_batch: whether the running backward is the step's last; None: nothing leaves before the step.
        flag: whether this rank saw that layers no longer share what they share; asked when the last bucket leaves.

    Attributes:
        flagged: of the last step's sums, fp32 scalar on the device: on how many ranks ``flag`` was true, the same on
            every rank; None if no layers share anything.
        late: calls of layers in the last step whose rows were dropped here.
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
        flag: Callable[[], bool] = lambda: False,
    ) -> None:
        self.layers, self.factors, self.decomposers = tuple(layers), tuple(factors), decomposers
        self.channel, self.device, self.dtype = channel, device, dtype
        self._last_micro_batch, self._flag = last_micro_batch if channel.world > 1 else None, flag
        self.flagged: Tensor | None = None
        self.late, self._warned = 0, False
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
        self.late = 0
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

    def gone(self, layer: str, use: int, side: str) -> bool:
        """Whether the bucket with this sum has left."""
        return bool(self._running) and self._bucket_of[layer, use, side] < len(self._running)

    def rows_added(self, layer: str, use: int, sides: str) -> None:
        """Told by the hooks when a call's rows have come; if their bucket was gone by then, they were not added."""
        if self._last_micro_batch is None:
            return
        for side in sides:
            rows = (layer, use, side)
            if rows not in self._bucket_of:  # of a forward before the step that changed what is due
                continue
            self._added[rows] += 1
            bucket = self._bucket_of[rows]
            if bucket < len(self._running):
                self.late += 1
            elif self._added[rows] == self._expected.get(rows, (0, 0))[0]:
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
        self.flagged = None
        for bucket, running in zip(self._buckets, self._running, strict=True):
            received, segment = running.wait(), bucket.segments[self.channel.rank]
            found |= bucket.views(received, rank=self.channel.rank)
            if segment.flag is not None:
                self.flagged = received[segment.flag - segment.start]
        if self.flagged is not None:
            self._leave_out_shared(found, self.flagged)
        if self.late and not self._warned:
            self._warned = True
            logger.warning(
                f"ds_kfac: rank {self.channel.rank}: the rows of {self.late} calls of layers came after the step's "
                "statistics had been sent, which happens where a step runs forward and backward more often than the "
                "last ones did. They were left out of the factors, not of the training; it is said once, and counted "
                'in late_calls. "overlap": false in kfac.communication waits for all rows in every step'
            )
        for rows, count in self._added.items():
            before, times = self._expected.get(rows, (0, 0))
            self._expected[rows] = (count, times + 1 if count == before else 1)
        self._finished, late = self._running, self.late
        self._begin()
        self.late = late
        return found

    def _leave_out_shared(self, found: Mapping[str, Sequence[UseSums]], flagged: Tensor) -> None:
        """Of a batch in which layers were seen to part: it is not all of theirs. No rows, so the factor stays."""
        for factor in self.factors:
            if len(factor.layers) > 1 and factor.layers[0] in found:
                for sums in found[factor.layers[0]]:
                    if sums.A is not None:
                        sums.A.count.mul_(flagged == 0)

    def drain(self, keys: frozenset[str]) -> None:
        """A step is given up, maybe after its sums began to leave here or elsewhere: send what is left and drop all.
        Collective; nothing if nothing ever leaves before the step."""
        if self._last_micro_batch is not None and keys:
            self.finish(keys)
            self.forget()

    def _start(self, index: int) -> None:
        assert self._flats is not None
        places = [segment.flag for segment in self._buckets[index].segments if segment.flag is not None]
        if places and self._flag():
            for place in places:
                self._flats[index].narrow(0, place, 1).fill_(1.0)
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
        self.late = 0
