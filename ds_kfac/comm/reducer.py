"""The batch sums of one step on their way to the decomposers: in messages, each sent as soon as it is complete."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from deepspeed.utils import logger

from ds_kfac.assignment.contributors import Contributors
from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.comm.bucket import Bucket, Layout, Slot
from ds_kfac.comm.channel import Channel
from ds_kfac.comm.reduction import Reduction
from ds_kfac.model.batch_sum import BatchSum, UseSums
from ds_kfac.model.layers.base import LayerSpec

Rows = tuple[str, int, str]
"""(layer, use, side)"""

IN_FLIGHT = 2
"""Messages at a time: each holds what it sends and what it receives."""


class Reducer:
    """Sums of the factors that are due, of which this rank makes those that it contributes to.

    During backward a message leaves once every layer in it has got as many calls' rows as in each of its last two
    captures here, in the last micro-batch; what has not left by then leaves at the step. The order of the messages is
    the same on every rank, whatever the order of its layers, and so is their number in a step: a rank that calls its
    layers in another way, or more often, or not at all, only sends earlier or later. Rows that come after their message
    has left are dropped, counted and warned of once; a layer that was called so often is waited for from then on.

    Transient memory: this rank's sums and those of the factors it decomposes, and :data:`IN_FLIGHT` messages, each at
    most twice ``nbytes``.

    Args:
        layers, factors: what there is.
        decomposers: factor key -> rank.
        contributors: which ranks make a factor's sums; None: all.
        dtype: on the wire.
        nbytes: most that a rank sends, or receives, in one message.
        last_micro_batch: whether the running backward is the step's last; None: nothing leaves before the step.
        parted: groups of layers that were seen here not to share what they share; their rows are left out.

    Attributes:
        layout: what travels in which message, at any step.
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
        contributors: Contributors | None = None,
        dtype: torch.dtype = torch.float32,
        nbytes: int = 2**28,
        last_micro_batch: Callable[[], bool] | None = None,
        parted: Callable[[], Collection[tuple[str, ...]]] = tuple,
    ) -> None:
        self.contributors = contributors or Contributors(channel.world)
        self.channel, self.device, self.dtype = channel, device, dtype
        self._last_micro_batch, self.parted = last_micro_batch if channel.world > 1 else None, parted
        least = 1 if self._last_micro_batch is None else 2
        self.layout = Layout(
            tuple(layers), tuple(factors), decomposers, self.contributors, dtype.itemsize, nbytes, least
        )
        self._leaders = {spec.layers[0]: spec.layers for spec in factors if len(spec.layers) > 1}
        self._warned = False
        self._expected: dict[Rows, tuple[int, int]] = {}  # rows' additions in the last capture, how often so in a row
        self.forget()

    def forget(self) -> None:
        """Drop sums that were begun."""
        self._begun, self._started, self.late = False, 0, 0
        self._slots: Sequence[Slot] = ()
        self._buckets: Sequence[Bucket] = ()
        self._sums: dict[Rows, BatchSum] = {}
        self._running: list[Reduction] = []
        self._bucket_of: dict[Rows, int] = {}
        self._missing: list[set[Rows]] = []
        self._steady: list[bool] = []
        self._added: Counter[Rows] = Counter()

    def allocate(self, keys: frozenset[str], step: int) -> dict[str, list[UseSums]]:
        """Empty sums of the factors in ``keys`` that this rank contributes to: layer name -> one per use."""
        self.forget()
        rank, found = self.channel.rank, self.layout.slots(keys, step)
        self._slots, self._buckets, self._begun = found, self.layout.buckets(keys, step), True
        self._sums = {
            slot.rows: BatchSum.empty(slot.numel, self.device)
            for slot in found
            if rank in slot.contributors or rank == slot.owner
        }
        steady = {rows for rows, (_, times) in self._expected.items() if times >= 2}
        for index, bucket in enumerate(self._buckets):
            mine = {piece.slot.rows for piece in bucket if rank in piece.slot.contributors}
            for rows in mine:
                self._bucket_of.setdefault(rows, index)
            self._missing.append(mine)
            self._steady.append(mine <= steady)
        return self._by_layer([slot for slot in found if rank in slot.contributors])

    def gone(self, layer: str, use: int, side: str) -> bool:
        """Whether a message with this sum has left."""
        return self._bucket_of.get((layer, use, side), len(self._buckets)) < self._started

    def rows_added(self, layer: str, use: int, sides: str) -> None:
        """The hooks call this when a call's rows have come; if their message was sent by then, they were not added."""
        if self._last_micro_batch is None:
            return
        for side in sides:
            rows = (layer, use, side)
            bucket = self._bucket_of.get(rows)
            if bucket is None:  # it does not travel, or is of a forward before the step that changed what is due
                continue
            self._added[rows] += 1
            if bucket < self._started:
                self.late += 1
            elif self._added[rows] == self._expected.get(rows, (0, 0))[0]:
                self._missing[bucket].discard(rows)
            else:
                self._missing[bucket].add(rows)
        while (index := self._started) < len(self._buckets):
            if len(self._running) == IN_FLIGHT and self._running[0].arrived:
                self._running.pop(0).add_to(self._sums)
            if len(self._running) == IN_FLIGHT:  # who waits in a backward may wait for ever
                return
            if self._missing[index] or not self._steady[index] or not self._last_micro_batch():
                return
            self._start()

    def finish(self, keys: frozenset[str], step: int) -> dict[str, list[UseSums]]:
        """Sums over all contributors of the factors that this rank averages. Collective; a rank without rows sends
        zeros."""
        if not self._begun:
            self.allocate(keys, step)
        self._leave_out_parted({slot.rows for slot in self._slots if not slot.travels})
        while self._running or self._started < len(self._buckets):
            if len(self._running) < IN_FLIGHT and self._started < len(self._buckets):
                self._start()
                continue
            self._running.pop(0).add_to(self._sums)
        own = self._by_layer([slot for slot in self._slots if slot.owner == self.channel.rank])
        if self.late and not self._warned:
            self._warned = True
            logger.warning(
                f"ds_kfac: rank {self.channel.rank}: the rows of {self.late} calls of layers came after the step's "
                "statistics had been sent: this step ran forward and backward more often than the last ones. The rows "
                "are missing from the factors, not from training. Later steps wait for that many calls. This warning "
                "appears once; late_calls counts on"
            )
        for rows, count in self._added.items():
            before, times = self._expected.get(rows, (0, 0))
            self._expected[rows] = (count, times + 1 if count == before else 1)
        late = self.late
        self.forget()
        self.late = late
        return own

    def drain(self, keys: frozenset[str], step: int) -> None:
        """A step is given up, maybe after its sums began to leave here or elsewhere: send what is left and drop all.
        Collective; nothing if nothing ever leaves before the step."""
        if self._last_micro_batch is not None and keys:
            self.finish(keys, step)
            self.forget()

    def _start(self) -> None:
        bucket, rank = self._buckets[self._started], self.channel.rank
        self._leave_out_parted({piece.slot.rows for piece in bucket})
        self._running.append(Reduction(bucket, self._sums, self.channel, self.device, self.dtype))
        self._started += 1
        for piece in bucket:
            slot = piece.slot
            if slot.owner != rank and slot.rows in self._sums and piece.start + piece.numel == slot.numel:
                self._sums.pop(slot.rows).clear()  # all of it is in messages

    def _leave_out_parted(self, found: Collection[Rows]) -> None:
        """Of layers that were seen here to have parted: the sum is not of all of theirs. No rows from this rank."""
        for group in self.parted():
            for layer, use, side in found:
                if side == "A" and self._leaders.get(layer) == group and (layer, use, side) in self._sums:
                    self._sums[layer, use, side].clear()

    def _by_layer(self, found: Collection[Slot]) -> dict[str, list[UseSums]]:
        """Layer name -> the sums of its uses."""
        layers: dict[str, list[UseSums]] = {}
        for slot in found:
            uses = layers.setdefault(slot.layer, [])
            while len(uses) <= slot.use:
                uses.append(UseSums(None, None))
            uses[slot.use] = uses[slot.use].having(slot.side, self._sums[slot.rows])
        return layers
