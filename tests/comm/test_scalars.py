"""Scalars, and vectors to be added up, that ranks exchange along with a message."""

import pytest
import torch

from ds_kfac.assignment.assign import column
from ds_kfac.comm.message import MessagePart, Move, RelayoutPlan, Scalars, SummedVector, deliver
from tests.close import exact
from tests.comm.fake_network import FakeNetwork

CPU = torch.device("cpu")
NAMES = [["a", ("b", 1)], [], ["c"]]
VALUES = {"a": 0.5, ("b", 1): -2.0, "c": 3.25}


def values_of(rank: int) -> dict:
    return {name: torch.tensor(VALUES[name]) for name in NAMES[rank]}


def exchanged(channel, table: Scalars, values: dict):
    (received,) = deliver([table.part(values, CPU)], channel, CPU)
    return received


def test_everyone_knows_every_number_afterwards():
    def work(channel):
        table = Scalars(NAMES, channel.rank)
        received = exchanged(channel, table, values_of(channel.rank))
        return {name: float(number) for name, number in table.read(received).items()}

    assert FakeNetwork(3).run(work) == [VALUES] * 3


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 2)])
def test_vectors_are_added_up_over_a_row_in_rank_order(world, workers):
    """Sums are then the same on all its ranks, bit for bit."""
    width = world // workers
    rows = [range(start, start + width) for start in range(0, world, width)]
    assert column(0, world=world, workers=workers) == tuple(row[0] for row in rows)
    vectors = [torch.tensor([rank / 3, 1e8 * (-1) ** rank, 0.1]) for rank in range(world)]

    def work(channel):
        summed = SummedVector(3, world, channel.rank, rows)
        (received,) = deliver([summed.part(vectors[channel.rank])], channel, CPU)
        return summed.total(received)

    for rank, total in enumerate(FakeNetwork(world).run(work)):
        exact(total, torch.stack([vectors[member] for member in rows[rank // width]]).sum(dim=0))


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_plans_its_own_moves_and_whether_there_are_any_is_the_same_on_all(rank):
    world = 3
    for senders in ([], [0], [2], [0, 2], [0, 1, 2]):
        names = [[source] if source in senders else [] for source in range(world)]
        moves = Scalars(names, rank).plan.moves
        sent = world - 1 if rank in senders else 0
        received = len(set(senders) - {rank})
        assert len(moves) == sent + received
        assert bool(moves) == bool(senders)


def test_nothing_to_tell_is_no_message():
    network = FakeNetwork(3)

    def work(channel):
        table = Scalars([[], [], []], channel.rank)
        return table.read(exchanged(channel, table, {}))

    assert network.run(work) == [{}] * 3 and network.entered == [0] * 3


def test_alone_a_rank_hears_itself():
    def work(channel):
        table = Scalars([["x"]], channel.rank)
        return table.read(exchanged(channel, table, {"x": torch.tensor(4.0)}))

    assert FakeNetwork(1).run(work) == [{"x": torch.tensor(4.0)}]


@pytest.mark.parametrize(
    "number", [2.5, torch.tensor(True), torch.tensor(7), torch.tensor([2.5], dtype=torch.float64)]
)
def test_numbers_of_any_kind_travel_in_fp32(number):
    def work(channel):
        table = Scalars([["x"], []], channel.rank)
        (heard,) = table.read(
            exchanged(channel, table, {"x": number} if channel.rank == 0 else {})
        ).values()
        return heard.dtype == torch.float32 and float(heard) == float(number)

    assert FakeNetwork(2).run(work) == [True, True]


def test_numbers_ride_along_with_other_legs():
    plan = RelayoutPlan(2, (Move(0, 0, 3, 0, 1),))
    network = FakeNetwork(2)

    def work(channel):
        table = Scalars([["a"], ["b"]], channel.rank)
        own = "ab"[channel.rank]
        parts = [
            MessagePart("gradients", plan, lambda move: torch.ones(3), torch.bfloat16),
            table.part({own: torch.tensor(1.0 + channel.rank)}, CPU),
        ]
        _, received = deliver(parts, channel, CPU)
        return {name: float(number) for name, number in table.read(received).items()}, channel.sent[
            "numbers"
        ]

    assert network.run(work) == [({"a": 1.0, "b": 2.0}, 4)] * 2
    assert network.entered == [1, 1]
