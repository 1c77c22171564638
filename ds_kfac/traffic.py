"""The one door to the network: collectives of K-FAC's own process group, counted by what they carry."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor


class Channel:
    """A process group of our own, so that our traffic is never ordered against DeepSpeed's reductions and prefetches.

    Collective: construct and close it on every rank of the group.

    Args:
        group: whose ranks it connects.

    Attributes:
        calls: kind -> collectives entered. One that carries several kinds counts for the first.
        sent, received: kind -> payload bytes to and from other ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group = torch.distributed.new_group(torch.distributed.get_process_group_ranks(group))
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def close(self) -> None:
        torch.distributed.destroy_process_group(self.group)

    def all_to_all(
        self,
        sent: Tensor,
        outgoing: Sequence[int],
        incoming: Sequence[int],
        *,
        carries: Mapping[str, tuple[int, int]],
        wait: bool = True,
    ) -> tuple[Tensor, Any]:
        """Send ``outgoing[r]`` elements to each rank r, receive ``incoming[r]`` from it.

        Args:
            sent: flat, the pieces in rank order.
            carries: kind -> (bytes to, bytes from) other ranks.
            wait: false returns at once; wait on the handle before using the result.

        Returns what was received, and the handle (None after waiting).
        """
        received = sent.new_empty(sum(incoming))
        handle = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(incoming),
            input_split_sizes=list(outgoing),
            group=self.group,
            async_op=not wait,
        )
        self.calls[next(iter(carries))] += 1
        for kind, (to, from_) in carries.items():
            self.sent[kind] += to
            self.received[kind] += from_
        return received, None if wait else handle
