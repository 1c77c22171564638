"""All network traffic: collectives of K-FAC's own process group, counted by what they carry."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_kfac.comm.agreement import gathered


class Channel:
    """A process group of our own, so that our traffic is never ordered against DeepSpeed's reductions and prefetches.

    Collective: construct it on every rank of the job, each with a group of its own.

    Args:
        group: whose ranks it connects.

    Attributes:
        calls: kind -> collectives entered. One that carries several kinds counts for the first.
        sent, received: kind -> payload bytes to and from other ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group = clone_group(group)
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def close(self) -> None:
        """Give back the group with its threads and descriptors, unless that has happened. Local: other ranks may be
        gone, or the job's default group, with which all groups end."""
        group, self.group = self.group, None
        if group is not None and group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)

    def sum(self, vector: Tensor) -> Tensor:
        """A small vector of numbers, summed over all ranks in place. Collective."""
        dist.all_reduce(vector, group=self.group)
        self.calls["numbers"] += 1
        nbytes = vector.numel() * vector.element_size()
        self.sent["numbers"] += nbytes
        self.received["numbers"] += nbytes
        return vector

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


def clone_group(group: Any) -> Any:
    """A new group of the same ranks, with the job's timeout. Collective over all ranks of the job, whose groups may
    differ."""
    ranks = torch.distributed.get_process_group_ranks(group)
    mine, timeout = None, job_timeout()
    for other in sorted({tuple(one) for one in gathered(ranks)}):  # every rank takes part in making every group
        made = torch.distributed.new_group(list(other), timeout=timeout)
        if list(other) == ranks:
            mine = made
    return mine


def job_timeout() -> timedelta | None:
    """What the job was initialized with, which DeepSpeed's own groups do not take over; None if a backend hides it."""
    world = torch.distributed.distributed_c10d._get_default_group()
    options = [getattr(world._get_backend(device), "options", None) for device in world._device_types]
    return next((option._timeout for option in options if option is not None), None)
