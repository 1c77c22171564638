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

        for kind, plan in plans.items():
            sent = sum(m.numel for m in plan.moves if m.source == channel.rank != m.target)
            received = sum(m.numel for m in plan.moves if m.target == channel.rank != m.source)
            width = DTYPES[kind].itemsize
            assert channel.sent[kind] == width * sent
            assert channel.received[kind] == width * received
        padding = network.wire[channel.rank] - sum(channel.sent.values())
        assert 0 <= padding < ALIGNMENT * world * len(plans)

    network.run(work)
    assert network.entered == [int(any(plan.moves for plan in plans.values()))] * world
