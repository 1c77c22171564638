"""Several ranks in one process: a thread each, real channels, and an all-to-all that copies from
thread to thread."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_kfac.comm.message import Channel

PATIENCE = 20.0
"""Seconds after which a collective that some rank never entered is an error."""


class FakeNetwork:
    """Stands in for ``torch.distributed``.

    Attributes:
        wire: bytes from each rank to others, as they were really sent, padding included.
        entered: collectives entered by each rank.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.wire: Counter[int] = Counter()
        self.entered = [0] * world
        self._posted: dict[int, dict[int, Sequence[Tensor]]] = {}
        self._changed = threading.Condition()
        self._failed = False

    def run(self, work: Callable[[Channel], Any]) -> list[Any]:
        """``work`` on every rank; results by rank. Raises what the first rank raised."""
        results: list[Any] = [None] * self.world
        errors: dict[int, BaseException] = {}

        def rank_of(rank: int) -> None:
            try:
                results[rank] = work(self.channel(rank))
            except BaseException as error:
                errors[rank] = error
                with self._changed:
                    self._failed = True
                    self._changed.notify_all()

        with mock.patch.object(torch.distributed, "all_to_all_single", self.all_to_all_single):
            threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(self.world)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in sorted(errors.values(), key=lambda error: isinstance(error, ConnectionError)):
            raise error
        return results

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
        rank, width = group, input.element_size()
        assert sum(input_split_sizes) == input.numel() and sum(output_split_sizes) == output.numel()
        number, self.entered[rank] = self.entered[rank], self.entered[rank] + 1
        self.wire[rank] += width * (input.numel() - input_split_sizes[rank])
        with self._changed:
            self._posted.setdefault(number, {})[rank] = input.clone().split(input_split_sizes)
            self._changed.notify_all()
        handle = _Handle(self, number, rank, output, output_split_sizes)
        return handle if async_op else handle.wait()


class _Handle:
    def __init__(
        self, network: FakeNetwork, number: int, rank: int, output: Tensor, sizes: list[int]
    ) -> None:
        self._network, self._number, self._rank, self._output, self._sizes = (
            network,
            number,
            rank,
            output,
            sizes,
        )

    def is_completed(self) -> bool:
        with self._network._changed:
            return len(self._network._posted.get(self._number, {})) == self._network.world

    def wait(self) -> None:
        network = self._network
        with network._changed:

            def complete() -> bool:
                posted = network._posted.get(self._number, {})
                return network._failed or len(posted) == network.world

            if not network._changed.wait_for(complete, timeout=PATIENCE) or network._failed:
                raise ConnectionError(
                    f"rank {self._rank}: another rank did not enter collective {self._number}"
                )
            pieces = [
                network._posted[self._number][source][self._rank] for source in range(network.world)
            ]
        assert [len(piece) for piece in pieces] == self._sizes, (
            "a rank expects another size than is sent to it"
        )
        assert len({piece.dtype for piece in pieces} | {self._output.dtype}) == 1
        if self._sizes:
            self._output.copy_(torch.cat(pieces))
