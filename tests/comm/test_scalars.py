"""Scalars, and vectors to be added up, that ranks exchange along with a message."""

import pytest
import torch

from ds_kfac.assignment.assign import column
from ds_kfac.comm.message import Scalars, SummedVector, deliver
from tests.close import exact
from tests.comm.fake_network import FakeNetwork

CPU = torch.device("cpu")


def exchanged(channel, table: Scalars, values: dict):
    (received,) = deliver([table.part(values, CPU)], channel, CPU)
    return table.read(received)


@pytest.mark.parametrize(
    "names", [[["a", ("b", 1)], [], ["c"]], [["a"]], [[], [], []]], ids=["some", "alone", "none"]
)
def test_everyone_knows_every_number_afterwards(names):
    values = {name: 0.5 + ord(str(name)[-1]) for of_rank in names for name in of_rank}
    network = FakeNetwork(len(names))

    def work(channel):
        own = {name: torch.tensor(values[name]) for name in names[channel.rank]}
        received = exchanged(channel, Scalars(names, channel.rank), own)
        return {name: float(number) for name, number in received.items()}

    assert network.run(work) == [values] * len(names)
    assert max(network.entered) == (len(names) > 1 and bool(values)), "nothing to tell: no message"


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


@pytest.mark.parametrize(
    "number", [2.5, torch.tensor(True), torch.tensor(7), torch.tensor([2.5], dtype=torch.float64)]
)
def test_numbers_of_any_kind_travel_in_fp32(number):
    def work(channel):
        table = Scalars([["x"], []], channel.rank)
        (heard,) = exchanged(channel, table, {"x": number} if channel.rank == 0 else {}).values()
        return heard.dtype == torch.float32 and float(heard) == float(number)

    assert FakeNetwork(2).run(work) == [True, True]
