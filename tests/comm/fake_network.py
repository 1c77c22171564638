"""Several ranks in one process: a thread each, real channels, and an all-to-all that copies from
thread to thread."""

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel

PATIENCE = 20.0
"""Seconds after which a collective that some rank never entered is an error."""


class Posted(defaultdict[tuple[int, int], Future]):
    """Number of a collective and rank -> what the rank sends to each rank, once it has entered."""

    def __missing__(self, key: tuple[int, int]) -> Future:
        return self.setdefault(key, Future())


class FakeNetwork:
    """Stands in for ``torch.distributed``.

    Attributes:
        entered: collectives entered by each rank.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.entered = [0] * world
        self.posted = Posted()

    def run(self, work: Callable[[Channel], Any]) -> list[Any]:
        """``work`` on every rank; results by rank. Raises what a rank raised."""

        def rank_of(rank: int) -> Any:
            try:
                return work(self.channel(rank))
            except BaseException as error:
                self.posted[self.entered[rank], rank].set_exception(error)  # nobody waits for it
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
        rank = group
        assert sum(input_split_sizes) == input.numel() and sum(output_split_sizes) == output.numel()
        number, self.entered[rank] = self.entered[rank], self.entered[rank] + 1
        self.posted[number, rank].set_result(input.clone().split(input_split_sizes))
        handle = _Handle(self, number, rank, output, output_split_sizes)
        return handle if async_op else handle.wait()


@dataclass
class _Handle:
    network: FakeNetwork
    number: int
    rank: int
    output: Tensor
    sizes: list[int]

    def _sent(self) -> list[Future]:
        return [self.network.posted[self.number, source] for source in range(self.network.world)]

    def is_completed(self) -> bool:
        return all(sent.done() for sent in self._sent())

    def wait(self) -> None:
        pieces = [sent.result(PATIENCE)[self.rank] for sent in self._sent()]
        assert [len(piece) for piece in pieces] == self.sizes, "another size is expected than sent"
        assert len({piece.dtype for piece in pieces} | {self.output.dtype}) == 1
        if self.sizes:
            self.output.copy_(torch.cat(pieces))
