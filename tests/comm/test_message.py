"""Pieces of several kinds and dtypes in one message; ranks are threads here."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from ds_kfac.comm.message import ALIGNMENT, MessagePart, Move, RelayoutPlan, deliver
from tests.comm.fake_network import FakeNetwork

CPU = torch.device("cpu")
DTYPES = {
    "gradients": torch.bfloat16,
    "vectors": torch.float32,
    "half": torch.float16,
    "long": torch.int64,
}


def content(kind: str, move: Move, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a move carries: different for every kind, place and pair of ranks, exact in 16 bits."""
    first = (
        7 * move.param
        + move.start
        + 3 * move.source
        + 5 * move.target
        + 11 * sorted(DTYPES).index(kind)
    )
    return (torch.arange(move.numel) + first).remainder(251).to(dtype)


def random_plan(rng: random.Random, world: int) -> RelayoutPlan:
    """Odd sizes, many or no pieces between two ranks, some that stay where they are."""
    moves = {
        (rng.randrange(9), 100 * rng.randrange(9), rng.randrange(world), rng.randrange(world))
        for _ in range(rng.choice([0, 1, 4 * world * world]))
    }
    return RelayoutPlan(
        world, tuple(Move(p, start, rng.randrange(1, 40), s, t) for p, start, s, t in moves)
    )


def parts_of(plans: dict[str, RelayoutPlan], rank: int) -> list[MessagePart]:
    def piece(kind: str):
        def of(move: Move) -> Tensor:
            assert move.source == rank, "asked for a piece of another rank"
            return content(kind, move)  # in fp32: the part converts

        return of

    return [MessagePart(kind, plan, piece(kind), DTYPES[kind]) for kind, plan in plans.items()]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_piece_arrives_where_it_should_in_one_message(seed, world, poisoned):
    rng = random.Random(seed)
    plans = {kind: random_plan(rng, world) for kind in DTYPES}
    network = FakeNetwork(world)

    def work(channel):
        arrivals = deliver(parts_of(plans, channel.rank), channel, CPU)
        assert len(arrivals) == len(plans)
        for (kind, plan), pieces in zip(plans.items(), arrivals, strict=True):
            assert Counter(move for move, _ in pieces) == Counter(
                m for m in plan.moves if m.target == channel.rank
            )
            for move, piece in pieces:
                assert piece.dtype == DTYPES[kind] and torch.equal(
                    piece, content(kind, move, DTYPES[kind])
                )

    network.run(work)
    assert network.entered == [int(any(plan.moves for plan in plans.values()))] * world


def test_every_part_starts_aligned_and_odd_sizes_are_padded():
    plans = {kind: RelayoutPlan(2, (Move(0, 0, 5, 0, 1),)) for kind in ("gradients", "half")}
    network = FakeNetwork(2)
    network.run(lambda channel: deliver(parts_of(plans, channel.rank), channel, CPU))
    assert network.wire == {0: 2 * ALIGNMENT, 1: 0}, "10 bytes each"


def test_parts_without_moves_cost_neither_a_message_nor_padding():
    plans = {
        "gradients": RelayoutPlan(2, ()),
        "vectors": RelayoutPlan(2, ()),
        "half": RelayoutPlan(2, ()),
    }
    network = FakeNetwork(2)
    assert (
        network.run(lambda channel: deliver(parts_of(plans, channel.rank), channel, CPU))
        == [[[], [], []]] * 2
    )
    assert network.entered == [0, 0] and not network.wire
    plans["vectors"] = RelayoutPlan(2, (Move(0, 0, 4, 0, 1),))
    for rank, arrivals in enumerate(
        network.run(lambda channel: deliver(parts_of(plans, channel.rank), channel, CPU))
    ):
        assert [len(pieces) for pieces in arrivals] == [0, rank, 0]
    assert network.entered == [1, 1] and network.wire == {0: 16, 1: 0}


def test_a_rank_without_a_part_takes_part():
    plans = {"vectors": RelayoutPlan(3, (Move(0, 0, 3, 0, 1),))}
    network = FakeNetwork(3)
    network.run(lambda channel: deliver(parts_of(plans, channel.rank), channel, CPU))
    assert network.entered == [1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_payload_is_counted_by_kind_without_what_stays_here(seed):
    rng = random.Random(100 + seed)
    plans = {kind: random_plan(rng, 3) for kind in DTYPES} | {"half": RelayoutPlan(3, ())}
    plans["vectors"] = RelayoutPlan(
        3, (*random_plan(rng, 3).moves, Move(99, 0, 9, 1, 1), Move(99, 0, 9, 1, 2))
    )
    network = FakeNetwork(3)

    def work(channel):
        deliver(parts_of(plans, channel.rank), channel, CPU)
        return channel

    for rank, channel in enumerate(network.run(work)):
        for kind, plan in plans.items():
            width = DTYPES[kind].itemsize
            sent = sum(m.numel for m in plan.moves if m.source == rank != m.target)
            received = sum(m.numel for m in plan.moves if m.target == rank != m.source)
            assert (channel.sent[kind], channel.received[kind]) == (
                width * sent,
                width * received,
            ), kind
        assert "half" not in channel.sent and sum(channel.calls.values()) == 1
        padding = network.wire[rank] - sum(channel.sent.values())
        assert 0 <= padding < ALIGNMENT * 2 * len(plans)


def test_two_parts_of_one_kind_are_counted_together():
    plan = RelayoutPlan(2, (Move(0, 0, 3, 0, 1), Move(1, 0, 5, 1, 0)))
    kinds = [parts_of({kind: plan}, 0)[0] for kind in ("gradients", "vectors")]

    def work(channel):
        parts = [
            MessagePart("both", plan, lambda move: torch.zeros(move.numel), part.dtype)
            for part in kinds
        ]
        deliver(parts, channel, CPU)
        return channel.sent["both"], channel.received["both"]

    assert FakeNetwork(2).run(work) == [(3 * 6, 5 * 6), (5 * 6, 3 * 6)]
