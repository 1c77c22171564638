"""Where results of K-FAC may be computed and scaled without a copy; what engines show of the
exchange is tested by their modes."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.shards import Shard, ShardMap
from tests.close import exact
from tests.models import linear_layer
from tests.zero.shard_maps import chunk_map

O, I = 4, 6  # noqa: E741
LAYER, WHOLE = linear_layer("a", I, O), 24
HALF = WHOLE // 2
PARTS = chunk_map([WHOLE], 2)
SCALE = 0.3
FACTOR = torch.tensor(1 / 1024)


class FakeLayout:
    """Rank 0 of two, with a gradient of each of its shards.

    Args:
        raw: parameters that DeepSpeed will still multiply by :data:`FACTOR`.
    """

    rank, world, replicated, sends_raw = 0, 2, False, False
    engine = SimpleNamespace(device=torch.device("cpu"))
    seam = SimpleNamespace(factor=FACTOR, inverse=1 / FACTOR)

    def __init__(self, shards: ShardMap, dtype=torch.float32, raw: tuple[int, ...] = ()):
        self.shards, self.dtype, self.raw_params = shards, dtype, raw
        self.own: tuple[Shard, ...] = shards.on(0)
        self.params = [torch.nn.Parameter(torch.zeros(numel)) for numel in shards.numels]
        self.stored = {shard: torch.ones(shard.numel, dtype=dtype) for shard in self.own}

    def param_of(self, part: int) -> torch.nn.Parameter:
        return self.params[part]

    def gradients(self) -> dict[Shard, Tensor]:
        return self.stored

    def raw(self, shard: Shard) -> bool:
        return shard.param in self.raw_params


def exchange_of(layout: FakeLayout, layer=LAYER) -> GradientExchange:
    dtypes = torch.float32, torch.float32
    exchange = GradientExchange(layout, [layer], {"a": (0,)}, dtypes)
    exchange.begin()
    return exchange


def test_no_more_than_what_another_rank_gets_of_a_result_is_kept_for_it():
    exchange = exchange_of(FakeLayout(PARTS))
    exchange.put([LAYER], [torch.ones(O, I)])
    part = exchange.scatter_part()
    (sent,) = [part.piece(move) for move in part.plan.moves]
    assert sent.untyped_storage().nbytes() == torch.float32.itemsize * HALF


def test_results_on_the_host_are_scaled_by_numbers_on_the_host():
    """With offload; a part of it may stay on the device. torch multiplies no tensor by one on
    another device."""
    layout, multiplied = FakeLayout(PARTS), list[tuple[Tensor, Tensor]]()
    exchange = exchange_of(layout)
    noting = patch.object(
        torch,
        "_foreach_mul_",
        lambda ours, others: multiplied.extend(zip(ours, others, strict=True)),
    )
    with FakeTensorMode(), noting:
        for device in ("cpu", "cuda"):
            exchange.gradients = {layout.own[0]: torch.ones(HALF, device=device)}
            exchange.write([], {"a": torch.ones((), device="cuda")})
    assert [(x.device.type, scale.device.type) for x, scale in multiplied] == [
        ("cpu", "cpu"),
        ("cuda", "cuda"),
    ]


ALONE = ShardMap(1, (WHOLE,), (Shard(0, 0, WHOLE, 0, 0, 0),))


@pytest.mark.parametrize("case", ["fits", "raw", "cut", "bf16", "frozen", "copied"])
def test_results_may_be_computed_where_they_belong_only_if_it_is_one_fp32_tensor(case):
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    layout = FakeLayout(PARTS if case == "cut" else ALONE, dtype, (0,) if case == "raw" else ())
    layout.params[0].requires_grad_(case != "frozen")
    layer = replace(LAYER, copies=2) if case == "copied" else LAYER
    exchange = exchange_of(layout, layer)
    memory = exchange.memory([layer])
    assert (memory is not None) == (case == "fits")
    if memory is not None:
        memory.fill_(2.0)
        exact(layout.stored[layout.own[0]], torch.full((WHOLE,), 2.0))
        exchange.write([], {"a": torch.tensor(SCALE)})
        exact(layout.stored[layout.own[0]], torch.full((WHOLE,), 2.0) * SCALE)
