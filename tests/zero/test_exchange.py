"""A map of shards covers its parameters; what is kept of results, and scaled where. What engines
show of the exchange is tested by their modes."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.shards import Shard, ShardMap, partition_chunks, worker_that_sends_to
from tests.close import exact
from tests.models import linear_layer


@pytest.mark.parametrize(("world", "workers"), [(1, (0,)), (4, (1, 3)), (12, (2, 5, 8, 11))])
def test_several_workers_serve_consecutive_ranks_each(world, workers):
    """The KAISA grid: every rank gets each layer from the one worker in its row."""
    served = [worker_that_sends_to(workers, rank, world) for rank in range(world)]
    assert served == [worker for worker in workers for _ in range(world // len(workers))]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (4, "gap or overlap at element 3"),
        (2, "gap or overlap at element 2"),
        (None, "first 3 of 5"),
    ],
)
def test_a_map_that_does_not_cover_is_refused(second, message):
    shards = [Shard(0, 0, 3, 0, 0, 0)]
    shards += [] if second is None else [Shard(0, second, 5 - second, 1, 0, 0)]
    with pytest.raises(ValueError, match=message):
        ShardMap(2, (5,), tuple(shards))


O, I = 4, 6  # noqa: E741
LAYER, HALF = linear_layer("a", I, O), O * I // 2


def exchange_of(world: int = 2, *, dtype=torch.float32, raw=False, frozen=False, copies=1):
    """Of the first rank, which steps a layer and has its part of the gradient.

    Args:
        raw: whether DeepSpeed will still multiply the gradient.
    """
    shards = ShardMap(world, (O * I,), tuple(partition_chunks(O * I, 0, 0, 0, world)))
    parameter = torch.nn.Parameter(torch.zeros(O * I), requires_grad=not frozen)
    layout = SimpleNamespace(
        rank=0,
        world=world,
        replicated=False,
        engine=SimpleNamespace(device=torch.device("cpu")),
        shards=shards,
        own=shards.on(0),
        param_of=lambda part: parameter,
        raw=lambda shard: raw,
        gradients=lambda: {part: torch.ones(part.numel, dtype=dtype) for part in shards.on(0)},
    )
    layers, dtypes = [replace(LAYER, copies=copies)], (torch.float32, torch.float32)
    exchange = GradientExchange(layout, layers, {"a": (0,)}, dtypes)
    exchange.begin()
    return exchange, layers


NOT_AS_IT_LIES = [{"world": 2}, {"raw": True}, {"dtype": torch.bfloat16}, {"frozen": True}]


@pytest.mark.parametrize("case", [{}, *NOT_AS_IT_LIES, {"copies": 2}], ids=str)
def test_results_may_be_computed_where_they_belong_only_if_it_is_one_fp32_tensor(case):
    exchange, layers = exchange_of(**{"world": 1, **case})
    memory = exchange.memory(layers)
    assert (memory is None) == bool(case)
    if memory is not None:
        memory.fill_(2.0)
        exact(*exchange.gradients.values(), torch.full((O * I,), 2.0))


def test_no_more_than_what_another_rank_gets_of_a_result_is_kept_for_it():
    exchange, _ = exchange_of()
    exchange.put([LAYER], [torch.ones(O, I)])
    part = exchange.scatter_part()
    (sent,) = [part.piece(move) for move in part.plan.moves]
    assert sent.untyped_storage().nbytes() == torch.float32.itemsize * HALF


def test_results_on_the_host_are_scaled_by_numbers_on_the_host():
    """With offload; a part of it may stay on the device. torch multiplies no tensor by one on
    another device."""
    (exchange, _), devices = exchange_of(), []

    def noting(ours, others):
        devices.extend((x.device.type, y.device.type) for x, y in zip(ours, others, strict=True))

    with FakeTensorMode(), patch.object(torch, "_foreach_mul_", noting):
        for device in ("cpu", "cuda"):
            exchange.gradients = {exchange.layout.own[0]: torch.ones(HALF, device=device)}
            exchange.write([], {"a": torch.ones((), device="cuda")})
    assert devices == [("cpu", "cpu"), ("cuda", "cuda")]
