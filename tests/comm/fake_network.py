"""Several ranks in one process: a thread each, real channels, and an all-to-all that copies from
thread to thread."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel

PATIENCE = 20.0
"""Seconds after which a collective that some rank never entered is an error."""


class FakeNetwork:
    """Stands in for ``torch.distributed``. Ranks wait for each other where a collective begins."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: list[tuple[Tensor, ...]] = [()] * world
        self.together = Barrier(world, timeout=PATIENCE)

    def run(self, work: Callable[[Channel], Any]) -> list[Any]:
        """``work`` on every rank; results by rank. Raises what a rank raised."""

        def rank_of(rank: int) -> Any:
            try:
                return work(self.channel(rank))
            except BaseException:
                self.together.abort()  # nobody waits for it
                raise

        with (
            mock.patch.object(torch.distributed, "all_to_all_single", self.all_to_all_single),
            ThreadPoolExecutor(self.world) as threads,
        ):
            return list(threads.map(rank_of, range(self.world)))

    def channel(self, rank: int) -> Channel:
        """As the constructor would make it."""
        channel = Channel.__new__(Channel)
        channel.group, channel.rank, channel.world = rank, rank, self.world
        channel.calls, channel.sent, channel.received = Counter(), Counter(), Counter()
        return channel

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        *,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: int,
        async_op: bool,
    ) -> Any:
        assert sum(input_split_sizes) == input.numel() and sum(output_split_sizes) == output.numel()
        self.sent[group] = input.clone().split(input_split_sizes)
        self.together.wait()
        pieces = [parts[group] for parts in self.sent]
        self.together.wait()
        assert [len(piece) for piece in pieces] == output_split_sizes, "another size is expected"
        assert {piece.dtype for piece in pieces} == {output.dtype}
        output.copy_(torch.cat(pieces))
        return SimpleNamespace(wait=lambda: None)
