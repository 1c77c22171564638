"""Batch sums of one message on their way to the ranks that average them, in 32 or 16 bits.

An all-to-all followed by a local sum in rank order: the same result whatever the order of arrival, and sums in fp32
whatever travels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_kfac.comm.bucket import Bucket
from ds_kfac.comm.message import Channel, Message, Move, Part, RelayoutPlan
from ds_kfac.model.batch_sum import BatchSum

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
KIND = "factors"


def plans(bucket: Bucket, rank: int, world: int) -> tuple[RelayoutPlan, RelayoutPlan]:
    """What this rank sends and receives of a message: elements of its pieces, and counts."""
    elements, counts = [], []
    for index, piece in enumerate(bucket):
        slot = piece.slot
        if slot.owner == rank:
            pairs = [(source, rank) for source in slot.contributors if source != rank]
        else:
            pairs = [(rank, slot.owner)] if rank in slot.contributors else []
        elements += [Move(index, piece.start, piece.numel, *pair) for pair in pairs]
        counts += [Move(index, 0, 1, *pair) for pair in pairs if piece.start == 0]
    return RelayoutPlan(world, tuple(elements)), RelayoutPlan(world, tuple(counts))


class Reduction:
    """One message, to be waited for later. Collective: start on every rank, in the same order.

    Args:
        sums: factor key -> this rank's, of the slots that it contributes to.
    """

    def __init__(
        self,
        bucket: Bucket,
        sums: Mapping[str, BatchSum],
        channel: Channel,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        def of(move: Move) -> BatchSum:
            return sums[bucket[move.param].slot.factor]

        self.bucket, self.rank = bucket, channel.rank
        elements, counts = plans(bucket, channel.rank, channel.world)
        parts = (
            Part(KIND, counts, lambda move: of(move).count.reshape(1), torch.float32),
            Part(KIND, elements, lambda move: of(move).sum_P.narrow(0, move.start, move.numel), dtype),
        )
        self._message = Message(parts, channel, device)

    def add_to(self, sums: Mapping[str, BatchSum]) -> None:
        """Wait, and turn this rank's sums of the slots that it owns into those of all contributors, in rank order."""
        counts, elements = self._message.wait()
        arrived: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for kind, arrivals in enumerate((counts, elements)):
            for move, part in arrivals:
                arrived.setdefault((kind, move.param), []).append((move.source, part))
        for (kind, index), parts in arrived.items():
            piece = self.bucket[index]
            own = sums[piece.slot.factor]
            whole = own.sum_P.narrow(0, piece.start, piece.numel) if kind else own.count.reshape(1)
            if self.rank in piece.slot.contributors:
                parts.append((self.rank, whole))
            ordered: list[Any] = [part.float() for _, part in sorted(parts, key=lambda part: part[0])]
            total = ordered[0]
            for part in ordered[1:]:
                total = total + part
            whole.copy_(total)
