"""Scalars that ranks exchange along with a message."""

import pytest
import torch

from ds_kfac.assignment.assign import column
from ds_kfac.comm.message import MessagePart, Move, RelayoutPlan, Scalars, deliver
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
        return {name: float(number) for name, number in table.named(received).items()}

    assert FakeNetwork(3).run(work) == [VALUES] * 3


def test_numbers_come_in_rank_order_on_every_rank():
    """Sums over ranks are then the same everywhere, bit for bit."""
    names = [range(2)] * 4

    def work(channel):
        table = Scalars(names, channel.rank)
        received = exchanged(channel, table, {0: torch.tensor(channel.rank / 3), 1: torch.tensor(10.0 * channel.rank)})
        numbers = table.read(received)
        assert list(numbers) == [0, 1, 2, 3]
        return torch.stack(list(numbers.values()))

    first, *others = FakeNetwork(4).run(work)
    assert torch.equal(first, torch.tensor([[rank / 3, 10.0 * rank] for rank in range(4)]))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("world", "workers"), [(4, 1), (4, 2), (4, 4), (6, 2)])
def test_a_row_hears_its_own_members_only(world, workers):
    width = world // workers
    rows = [range(start, start + width) for start in range(0, world, width)]
    assert column(0, world=world, workers=workers) == tuple(row[0] for row in rows)

    def work(channel):
        table = Scalars([["x"]] * world, channel.rank, rows)
        received = exchanged(channel, table, {"x": torch.tensor(float(channel.rank))})
        return {rank: number.tolist() for rank, number in table.read(received).items()}

    for rank, heard in enumerate(FakeNetwork(world).run(work)):
        row = rows[rank // width]
        assert heard == {member: [float(member)] for member in row}


def test_nothing_to_tell_is_no_message():
    network = FakeNetwork(3)

    def work(channel):
        table = Scalars([[], [], []], channel.rank)
        return table.named(exchanged(channel, table, {}))

    assert network.run(work) == [{}] * 3 and network.entered == [0] * 3


def test_alone_a_rank_hears_itself():
    def work(channel):
        table = Scalars([["x"]], channel.rank)
        return table.named(exchanged(channel, table, {"x": torch.tensor(4.0)}))

    assert FakeNetwork(1).run(work) == [{"x": torch.tensor(4.0)}]


@pytest.mark.parametrize("number", [torch.tensor(True), torch.tensor(7), torch.tensor([2.5], dtype=torch.float64)])
def test_numbers_of_any_kind_travel_in_fp32(number):
    def work(channel):
        table = Scalars([["x"], []], channel.rank)
        (heard,) = table.named(exchanged(channel, table, {"x": number} if channel.rank == 0 else {})).values()
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
        return {name: float(number) for name, number in table.named(received).items()}, channel.sent["numbers"]

    assert network.run(work) == [({"a": 1.0, "b": 2.0}, 4)] * 2
    assert network.entered == [1, 1]
