"""Process groups of our own, and sums over all ranks of a model-parallel job."""

from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor


def clone_group(group: Any) -> Any:
    """A new group of the same ranks. Collective over all ranks of the job, whose groups may differ.

    Our traffic must not be ordered against DeepSpeed's reductions and prefetches, hence not in its own group.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    everyone: list[list[int]] = [ranks] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, ranks)
    mine = None
    for other in sorted({tuple(one) for one in everyone}):  # every rank takes part in making every group
        made = torch.distributed.new_group(list(other))
        if list(other) == ranks:
            mine = made
    return mine


class Totals:
    """Sums small vectors over all ranks that train one model.

    Args:
        group: of K-FAC's own traffic, the ranks that share a layer's work.
        everywhere: whether others hold other layers, so that the whole job has to be summed over.
    """

    def __init__(self, group: Any, *, everywhere: bool) -> None:
        self.own = everywhere
        self.group = clone_group(torch.distributed.group.WORLD) if everywhere else group

    def sum(self, vector: Tensor) -> Tensor:
        """In place. Collective."""
        if torch.distributed.get_world_size(self.group) > 1:
            dist.all_reduce(vector, group=self.group)
        return vector

    def remove(self) -> None:
        if self.own:
            torch.distributed.destroy_process_group(self.group)
