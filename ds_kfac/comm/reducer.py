"""The batch sums of one step on their way to the decomposers, in messages."""

from collections.abc import Mapping, Sequence

import torch

from ds_kfac.assignment.spread import Contributors
from ds_kfac.assignment.work import FactorSpec
from ds_kfac.comm.bucket import Layout
from ds_kfac.comm.message import Channel
from ds_kfac.comm.reduction import Reduction
from ds_kfac.model.batch_sum import BatchSum

IN_FLIGHT = 2
"""Messages at a time: each holds what it sends and what it receives."""


class Reducer:
    """Sums of the factors that are due, of which this rank makes those that it contributes to.

    The order of the messages is the same on every rank, and so is their number. Transient memory: this rank's sums and
    those of the factors it decomposes, and :data:`IN_FLIGHT` messages, each at most twice ``nbytes``.

    Args:
        factors: what there is.
        decomposers: factor key -> rank.
        contributors: which ranks make a factor's sums; None: all.
        dtype: on the wire.
        nbytes: most that a rank sends, or receives, in one message.

    Attributes:
        layout: what travels in which message, at any step.
    """

    def __init__(
        self,
        factors: Sequence[FactorSpec],
        decomposers: Mapping[str, int],
        channel: Channel,
        device: torch.device,
        *,
        contributors: Contributors | None = None,
        dtype: torch.dtype = torch.float32,
        nbytes: int = 2**28,
    ) -> None:
        self.contributors = contributors or Contributors(channel.world)
        self.channel, self.device, self.dtype = channel, device, dtype
        self.layout = Layout(tuple(factors), decomposers, self.contributors, dtype.itemsize, nbytes)

    def empty(self, keys: frozenset[str], step: int) -> dict[str, BatchSum]:
        """Factor key -> sum without rows, of those in ``keys`` that this rank contributes to."""
        rank, found = self.channel.rank, self.layout.slots(keys, step)
        return {slot.factor: BatchSum.empty(slot.numel, self.device) for slot in found if rank in slot.contributors}

    def reduce(self, sums: Mapping[str, BatchSum], keys: frozenset[str], step: int) -> dict[str, BatchSum]:
        """Sums over all contributors of the factors in ``keys`` that this rank averages. Collective; a rank without
        rows sends zeros.

        Args:
            sums: what :meth:`empty` gave, with this rank's rows; not to be used any more.
        """
        found, rank = self.layout.slots(keys, step), self.channel.rank
        own = {slot.factor: BatchSum.empty(slot.numel, self.device) for slot in found if slot.owner == rank} | {**sums}
        running: list[Reduction] = []
        for bucket in self.layout.buckets(keys, step):
            if len(running) == IN_FLIGHT:
                running.pop(0).add_to(own)
            running.append(Reduction(bucket, own, self.channel, self.device, self.dtype))
            for piece in bucket:
                slot = piece.slot
                if slot.owner != rank and slot.factor in own and piece.start + piece.numel == slot.numel:
                    own.pop(slot.factor).clear()  # all of it is in messages
        for reduction in running:
            reduction.add_to(own)
        return own
