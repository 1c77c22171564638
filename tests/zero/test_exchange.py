"""Results on their way: what is rounded, what waits in memory, and where they come to lie."""

from types import SimpleNamespace

import pytest
import torch

from ds_kfac.comm.message import Move
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.shards import Shard, ShardMap
from tests.models import linear_layer
from tests.zero.shard_maps import chunk_map

O, I = 4, 6  # noqa: E741
LAYER, WHOLE = linear_layer("a", I, O), 24
HALF = WHOLE // 2
REPLICATED = ShardMap(2, (WHOLE,), tuple(Shard(0, 0, WHOLE, rank, 0, 0) for rank in range(2)))
PARTS = chunk_map([WHOLE], 2)
SCALE = 0.3


class Rank0:
    """Its exchange, a result of its own, and DeepSpeed's gradient, ones."""

    def __init__(
        self, shards: ShardMap, workers: tuple[int, ...], wire: torch.dtype, *, in_place: bool = False, stored=None
    ):
        self.stored = torch.ones(shards.on(0)[0].numel, dtype=stored or wire)
        layout = SimpleNamespace(
            rank=0,
            engine=SimpleNamespace(device=torch.device("cpu")),
            dtype=self.stored.dtype,
            shards=shards,
            replicated=shards is REPLICATED,
            world=2,
            in_place=in_place,
            param_of=lambda piece: torch.nn.Parameter(torch.zeros(WHOLE)),
            read=lambda shard: self.stored,
            write=lambda shard, gradient: setattr(self, "written", gradient),
        )
        self.exchange = GradientExchange(layout, [LAYER], {"a": workers}, (wire, wire))
        self.result = torch.randn(O, I, generator=torch.Generator().manual_seed(0))
        self.outbox = self.exchange.outbox()
        if 0 in workers:
            self.outbox.add([LAYER], [self.result.clone()])
        self.sent = [self.outbox.part.piece(move) for move in self.outbox.part.plan.moves if move.source == 0]
        self.outbox.release()

    def step(self, *received: torch.Tensor) -> None:
        arrivals = [(Move(0, 0, len(values), 1, 0), values) for values in received]
        self.exchange.write(self.outbox, arrivals, {"a": torch.tensor(SCALE)})


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_replicas_keep_what_the_others_receive(wire):
    rank = Rank0(REPLICATED, (0,), wire)
    own, (sent,) = rank.outbox.here[0, 0], rank.sent
    assert torch.equal(own, sent) and torch.equal(sent, rank.result.flatten().to(wire))


def test_what_nobody_receives_is_not_rounded():
    rank = Rank0(REPLICATED, (0, 1), torch.bfloat16)
    assert not rank.sent and torch.equal(rank.outbox.here[0, 0], rank.result.flatten())


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_of_a_partitioned_result_the_own_part_is_not_rounded(wire):
    rank = Rank0(PARTS, (0,), wire)
    own, flat = rank.outbox.here[0, 0], rank.result.flatten()
    assert torch.equal(own, flat[:HALF]) and torch.equal(rank.sent[0], flat[HALF:].to(wire))
    assert rank.sent[0].untyped_storage().nbytes() == wire.itemsize * HALF, "no more than what is sent is kept for it"
    assert own.untyped_storage().nbytes() == 4 * HALF


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_in_place_the_own_part_lies_where_the_gradient_was(wire):
    rank = Rank0(PARTS, (0,), wire, in_place=True)
    flat = rank.result.flatten()[:HALF].to(wire)
    assert torch.equal(rank.stored, flat) and rank.outbox.here[0, 0] is rank.stored
    rank.step()
    assert torch.equal(rank.stored, (flat.float() * SCALE).to(wire))
    assert not hasattr(rank, "written")
    assert not rank.exchange._views, "DeepSpeed's step frees what they are of"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_what_arrives_is_scaled_in_fp32(wire, stored, in_place):
    rank = Rank0(PARTS, (1,), wire, in_place=in_place, stored=stored)
    values = torch.randn(HALF, generator=torch.Generator().manual_seed(1)).to(wire)
    expected = values.float() * SCALE
    rank.step(values)
    found, wanted = (rank.stored, expected.to(stored)) if in_place else (rank.written, expected)
    assert torch.equal(found, wanted)
