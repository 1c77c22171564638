"""Gradients on their way to a layer's worker and results on their way back: what is multiplied or
divided by DeepSpeed's factor, what is rounded, what waits in memory, and where results come to
lie."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_kfac.comm.message import Move
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.shards import Shard, ShardMap
from tests.close import exact
from tests.models import linear_layer
from tests.zero.shard_maps import chunk_map

O, I = 4, 6  # noqa: E741
LAYER, WHOLE = linear_layer("a", I, O), 24
HALF = WHOLE // 2
REPLICATED = ShardMap(2, (WHOLE,), tuple(Shard(0, 0, WHOLE, rank, 0, 0) for rank in range(2)))
PARTS = chunk_map([WHOLE], 2)
SCALE = 0.3
FACTOR = torch.tensor(1 / 1024)
WIRES = pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])


class FakeLayout:
    """Rank 0 of two. ``stored`` has a gradient of each of its shards.

    Args:
        raw: parameters that DeepSpeed will still multiply by :data:`FACTOR`.
    """

    def __init__(
        self,
        shards: ShardMap,
        dtype: torch.dtype,
        raw: tuple[int, ...] = (),
        sends_raw: bool = False,
    ):
        self.rank, self.world, self.shards, self.dtype = 0, 2, shards, dtype
        self.engine = SimpleNamespace(device=torch.device("cpu"))
        self.replicated = shards is REPLICATED
        self.raw_params, self.sends_raw = raw, sends_raw
        self.seam = SimpleNamespace(factor=FACTOR, inverse=1 / FACTOR)
        self.params = [torch.nn.Parameter(torch.zeros(numel)) for numel in shards.numels]
        generator = torch.Generator().manual_seed(3)
        self.stored = {
            (shard.param, shard.start): torch.randn(shard.numel, generator=generator).to(dtype)
            for shard in shards.on(0)
        }

    def param_of(self, part: int) -> torch.nn.Parameter:
        return self.params[part]

    @property
    def own(self) -> tuple[Shard, ...]:
        return self.shards.on(0)

    def gradients(self) -> dict[Shard, Tensor]:
        """Views of ``stored``, which has fp32 in place of fp16 from here on."""
        if self.dtype is torch.float16:
            self.stored = {place: gradient.float() for place, gradient in self.stored.items()}
        return {shard: self.stored[shard.param, shard.start] for shard in self.own}

    def raw(self, shard: Shard) -> bool:
        return shard.param in self.raw_params

    def lacks(self, param: torch.nn.Parameter) -> bool:
        return False


def exchange_of(
    layout: FakeLayout, workers: tuple[int, ...], wire: torch.dtype, layer=LAYER
) -> GradientExchange:
    exchange = GradientExchange(layout, [layer], {"a": workers}, (wire, wire))
    exchange.begin()
    return exchange


class Rank0:
    """Its exchange, and a result of its own if it is a worker, which has been put."""

    def __init__(
        self,
        shards: ShardMap,
        workers: tuple[int, ...],
        wire: torch.dtype,
        stored=torch.float32,
        raw=(),
    ):
        self.layout = FakeLayout(shards, stored, raw)
        self.exchange = exchange_of(self.layout, workers, wire)
        self.result = torch.randn(O, I, generator=torch.Generator().manual_seed(0))
        if 0 in workers:
            self.exchange.put([LAYER], [self.result.clone()])
        part = self.exchange.scatter_part()
        self.sent = [part.piece(move) for move in part.plan.moves if move.source == 0]
        self.exchange.sent_off()

    @property
    def stored(self) -> Tensor:
        return self.layout.stored[0, 0]

    def receive(self, *received: Tensor) -> None:
        arrivals = [(Move(0, 0, len(values), 1, 0), values) for values in received]
        self.exchange.write(arrivals, {"a": torch.tensor(SCALE)})


@WIRES
@pytest.mark.parametrize(
    ("shards", "workers", "kept", "rounded"),
    [
        (REPLICATED, (0,), WHOLE, True),  # replicas keep what the others receive
        (REPLICATED, (0, 1), WHOLE, False),
        (PARTS, (0,), HALF, False),
    ],
)
def test_a_worker_keeps_its_own_part_unrounded_unless_others_have_it_too(
    shards, workers, kept, rounded, wire
):
    rank = Rank0(shards, workers, wire)
    flat = rank.result.flatten()
    exact(rank.stored, flat[:kept].to(wire).float() if rounded else flat[:kept])
    if len(workers) > 1:
        assert not rank.sent, "nobody receives it"
        return
    (sent,) = rank.sent
    exact(sent, flat[WHOLE - kept :].to(wire))
    if shards is PARTS:
        assert sent.untyped_storage().nbytes() == wire.itemsize * HALF, "no more is kept for it"


@pytest.mark.parametrize("raw", [(), (0,)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@WIRES
def test_results_lie_where_the_gradient_was_divided_by_the_factor_still_to_come(wire, stored, raw):
    rank = Rank0(PARTS, (0,), wire, stored, raw)
    written = rank.result.flatten()[:HALF] * (1024.0 if raw else 1.0)
    holds = torch.float32 if stored is torch.float16 else stored
    exact(rank.stored, written.to(holds))
    rank.receive()
    exact(rank.stored, (written.to(holds).float() * SCALE).to(holds))


@pytest.mark.parametrize("raw", [(), (0,)])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@WIRES
def test_what_arrives_is_divided_and_scaled_in_fp32(wire, stored, raw):
    rank = Rank0(PARTS, (1,), wire, stored, raw)
    values = torch.randn(HALF, generator=torch.Generator().manual_seed(1)).to(wire)
    rank.receive(values)
    exact(rank.stored, values.float() * (1024.0 if raw else 1.0) * SCALE)


def test_results_on_the_host_are_scaled_by_numbers_on_the_host():
    """With offload; a part of it may stay on the device. torch multiplies no tensor by one on
    another device."""
    layout, multiplied = FakeLayout(PARTS, torch.float32), list[tuple[Tensor, Tensor]]()
    exchange = exchange_of(layout, (0,), torch.float32)
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


def test_a_parameter_that_was_frozen_since_attach_gets_zeros():
    layout = FakeLayout(PARTS, torch.float32)
    layout.params[0].requires_grad_(False)
    exchange_of(layout, (0,), torch.float32).put([LAYER], [torch.ones(O, I)])
    exact(layout.stored[0, 0], torch.zeros(HALF))


def test_a_weight_and_a_bias_in_groups_that_deepspeed_treats_one_after_the_other_are_one_gradient():
    layer = replace(linear_layer("a", I + 1, O), bias="a.bias")
    shards = ShardMap(
        2, (WHOLE, O), tuple(Shard(param, 0, n, 0, param, 0) for param, n in enumerate((WHOLE, O)))
    )
    layout = FakeLayout(shards, torch.float16, raw=(1,))
    exchange = exchange_of(layout, (0,), torch.float32, layer)
    weight, bias = layout.stored[0, 0].float(), layout.stored[1, 0].float()
    gradient = exchange.gathered([]).pop("a")
    exact(gradient, torch.cat([weight.view(O, I), (bias * FACTOR)[:, None]], dim=1))


@pytest.mark.parametrize("sends_raw", [False, True])
def test_a_gradient_comes_to_its_worker_as_it_will_be_applied(sends_raw):
    """In 16 bits it travels raw, and is multiplied where it arrives; each is taken once."""
    layout = FakeLayout(PARTS, torch.float16 if sends_raw else torch.float32, (0,), sends_raw)
    arriving = torch.randn(HALF).to(layout.dtype)
    gradients = exchange_of(layout, (0,), layout.dtype).gathered(
        [(Move(0, HALF, HALF, 1, 0), arriving)]
    )
    assert "a" in gradients
    found = gradients.pop("a")
    assert found.dtype is torch.float32 and "a" not in gradients
    arrived = arriving.float() * (FACTOR if sends_raw else 1.0)
    exact(found.flatten(), torch.cat([layout.stored[0, 0].float() * FACTOR, arrived]))


ALONE = ShardMap(1, (WHOLE,), (Shard(0, 0, WHOLE, 0, 0, 0),))


@pytest.mark.parametrize("case", ["fits", "raw", "cut", "bf16", "frozen", "copied"])
def test_results_may_be_computed_where_they_belong_only_if_it_is_one_fp32_tensor(case):
    shards = PARTS if case == "cut" else ALONE
    layout = FakeLayout(
        shards, torch.bfloat16 if case == "bf16" else torch.float32, (0,) if case == "raw" else ()
    )
    layout.params[0].requires_grad_(case != "frozen")
    layer = replace(LAYER, copies=2) if case == "copied" else LAYER
    exchange = exchange_of(layout, (0,), torch.float32, layer)
    memory = exchange.memory([layer])
    assert (memory is not None) == (case == "fits")
    if memory is not None:
        memory.fill_(2.0)
        exact(layout.stored[0, 0], torch.full((WHOLE,), 2.0))
        exchange.write([], {"a": torch.tensor(SCALE)})
        exact(layout.stored[0, 0], torch.full((WHOLE,), 2.0) * SCALE)
