"""Results on their way: what is rounded, and what waits in memory."""

from types import SimpleNamespace

import pytest
import torch

from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.shards import Shard, ShardMap
from tests.models import linear_layer
from tests.zero.shard_maps import chunk_map

O, I = 4, 6  # noqa: E741
LAYER, WHOLE = linear_layer("a", I, O), 24
REPLICATED = ShardMap(2, (WHOLE,), tuple(Shard(0, 0, WHOLE, rank, 0, 0) for rank in range(2)))
PARTS = chunk_map([WHOLE], 2)


def own_result(shards: ShardMap, workers: tuple[int, ...], wire: torch.dtype) -> tuple[torch.Tensor, list, dict]:
    """Of rank 0: a result; what it sends of it; what it keeps."""
    replicated = shards is REPLICATED
    engine = SimpleNamespace(device=torch.device("cpu"))
    layout = SimpleNamespace(rank=0, engine=engine, dtype=wire, shards=shards, replicated=replicated, world=2)
    exchange = GradientExchange(layout, [LAYER], {"a": workers}, (wire, wire))
    result = torch.randn(O, I, generator=torch.Generator().manual_seed(0))
    results = {"a": result.clone()}
    leg, own, packed = exchange.scatter_leg(results)
    assert not results, "given up"
    sent = [leg.piece(move) for move in leg.plan.moves if move.source == 0]
    packed()
    return result.flatten(), sent, own


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_replicas_keep_what_the_others_receive(wire):
    result, sent, own = own_result(REPLICATED, (0,), wire)
    assert torch.equal(own[0, 0], result.to(wire).float()) and torch.equal(sent[0].to(wire), result.to(wire))


def test_what_nobody_receives_is_not_rounded():
    result, sent, own = own_result(REPLICATED, (0, 1), torch.bfloat16)
    assert not sent and torch.equal(own[0, 0], result)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_of_a_partitioned_result_the_own_part_is_not_rounded(wire):
    result, sent, own = own_result(PARTS, (0,), wire)
    half = WHOLE // 2
    assert torch.equal(own[0, 0], result[:half]) and torch.equal(sent[0].to(wire), result[half:].to(wire))
    assert sent[0].dtype is wire and own[0, 0].untyped_storage().nbytes() == 4 * half
