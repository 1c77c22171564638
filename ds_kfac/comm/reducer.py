"""The batch sums of one step on their way to the decomposers, in messages."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ds_kfac.assignment.contributors import Contributors
from ds_kfac.assignment.factor_spec import FactorSpec
from ds_kfac.comm.bucket import Layout, Slot
from ds_kfac.comm.message import Channel
from ds_kfac.comm.reduction import Reduction
from ds_kfac.model.batch_sum import BatchSum, UseSums
from ds_kfac.model.layers.base import LayerSpec

Rows = tuple[str, int, str]
"""(layer, use, side)"""

IN_FLIGHT = 2
"""Messages at a time: each holds what it sends and what it receives."""


class Reducer:
    """Sums of the factors that are due, of which this rank makes those that it contributes to.

    All leave at the step. The order of the messages is the same on every rank, and so is their number.

    Transient memory: this rank's sums and those of the factors it decomposes, and :data:`IN_FLIGHT` messages, each at
    most twice ``nbytes``.

    Args:
        layers, factors: what there is.
        decomposers: factor key -> rank.
        contributors: which ranks make a factor's sums; None: all.
        dtype: on the wire.
        nbytes: most that a rank sends, or receives, in one message.
        parted: groups of layers that were seen here not to share what they share; their rows are left out.

    Attributes:
        layout: what travels in which message, at any step.
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
        parted: Callable[[], Collection[tuple[str, ...]]] = tuple,
    ) -> None:
        self.contributors = contributors or Contributors(channel.world)
        self.channel, self.device, self.dtype, self.parted = channel, device, dtype, parted
        self.layout = Layout(tuple(layers), tuple(factors), decomposers, self.contributors, dtype.itemsize, nbytes)
        self._leaders = {spec.layers[0]: spec.layers for spec in factors if len(spec.layers) > 1}
        self.forget()

    def forget(self) -> None:
        """Drop sums that were begun."""
        self._sums: dict[Rows, BatchSum] | None = None

    def allocate(self, keys: frozenset[str], step: int) -> dict[str, list[UseSums]]:
        """Empty sums of the factors in ``keys`` that this rank contributes to: layer name -> one per use."""
        rank, found = self.channel.rank, self.layout.slots(keys, step)
        self._sums = {
            slot.rows: BatchSum.empty(slot.numel, self.device)
            for slot in found
            if rank in slot.contributors or rank == slot.owner
        }
        return self._by_layer([slot for slot in found if rank in slot.contributors])

    def finish(self, keys: frozenset[str], step: int) -> dict[str, list[UseSums]]:
        """Sums over all contributors of the factors that this rank averages. Collective; a rank without rows sends
        zeros."""
        if self._sums is None:
            self.allocate(keys, step)
        assert self._sums is not None
        slots, rank = self.layout.slots(keys, step), self.channel.rank
        for group in self.parted():  # the sum is not of all of theirs: no rows from this rank
            for rows, batch in self._sums.items():
                if rows[2] == "A" and self._leaders.get(rows[0]) == group:
                    batch.clear()
        running: list[Reduction] = []
        for bucket in self.layout.buckets(keys, step):
            if len(running) == IN_FLIGHT:
                running.pop(0).add_to(self._sums)
            running.append(Reduction(bucket, self._sums, self.channel, self.device, self.dtype))
            for piece in bucket:
                slot = piece.slot
                if slot.owner != rank and slot.rows in self._sums and piece.start + piece.numel == slot.numel:
                    self._sums.pop(slot.rows).clear()  # all of it is in messages
        for reduction in running:
            reduction.add_to(self._sums)
        own = self._by_layer([slot for slot in slots if slot.owner == rank])
        self.forget()
        return own

    def _by_layer(self, found: Collection[Slot]) -> dict[str, list[UseSums]]:
        """Layer name -> the sums of its uses."""
        assert self._sums is not None
        layers: dict[str, list[UseSums]] = {}
        for slot in found:
            uses = layers.setdefault(slot.layer, [])
            while len(uses) <= slot.use:
                uses.append(UseSums(None, None))
            uses[slot.use] = uses[slot.use].having(slot.side, self._sums[slot.rows])
        return layers
