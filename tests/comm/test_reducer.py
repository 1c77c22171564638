"""Batch sums in messages; ranks are threads here."""

from itertools import accumulate

import pytest
import torch

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import factor_specs
from ds_kfac.comm import reduce as reducer_module
from ds_kfac.comm.reduce import Reducer, ReductionPlan
from ds_kfac.model.rows import ROWS, BatchSum
from tests.comm.fake_network import FakeNetwork
from tests.models import linear_layer

CPU = torch.device("cpu")
LAYERS = [linear_layer(f"l{i}", dim_A, 3 + i) for i, dim_A in enumerate((5, 8, 8, 6, 8, 7))]
FACTORS = factor_specs(LAYERS, [["l1", "l2", "l4"]])
KEYS = frozenset(factor.key for factor in FACTORS)
ORDER = [factor.key for factor in FACTORS]
EIGEN_WORKERS = {factor.key: i % 2 for i, factor in enumerate(FACTORS)}


def make(
    channel, contributors: Contributors | None = None, dtype=torch.float32, nbytes: int = 2**28
) -> Reducer:
    eigen_workers = {key: rank % channel.world for key, rank in EIGEN_WORKERS.items()}
    plan = ReductionPlan(
        FACTORS, eigen_workers, contributors or Contributors(channel.world), dtype, nbytes
    )
    return Reducer(plan, channel, CPU)


def alone(**options) -> Reducer:
    """To look at plans."""
    return make(FakeNetwork(2).channel(0), **options)


def messages(keys: frozenset[str], reducer: Reducer | None = None):
    reducer = reducer or alone()
    return reducer.plan.of(keys, 0)[1]


def value(key: str, rank: int, step: int) -> float:
    return float(1 + ORDER.index(key) + 100 * rank + 1000 * step)


def filled(
    reducer: Reducer, keys: frozenset[str] = KEYS, step: int = 0, number: int = 0, times: int = 1
):
    """This rank's sums, each added to so many times. ``number`` tells the values of different steps
    apart."""
    sides = {factor.key: factor.side for factor in FACTORS}
    sums = {key: BatchSum.empty(sides[key].numel, CPU) for key in reducer.begin(keys, step)}
    for key in sorted(sums, key=hash) * times:
        sums[key].sum_P.add_(value(key, reducer.channel.rank, number))
        sums[key].counts[ROWS].add_(1)
    return sums


def ranks_of(reducer: Reducer, key: str, step: int):
    return next(slot.contributors for slot in reducer.plan.of(KEYS, step)[0] if slot.factor == key)


def check(found, keys, world: int, rank: int, step: int, times: int = 1) -> None:
    """Own sums are those of all ranks; others' are not here."""
    assert found.keys() == {key for key in keys if EIGEN_WORKERS[key] % world == rank}
    for key, part in found.items():
        expected = times * sum(value(key, other, step) for other in range(world))
        assert (part.sum_P == expected).all() and part.counts[ROWS] == times * world, key


# messages


@pytest.mark.parametrize(
    "keys", [KEYS, KEYS - {"l5/A", "l5/G"}, {"l0/A", "l3/G", "l5/G"}, {"l1/A"}], ids=len
)
def test_messages_cover_every_factor_that_is_due_once(keys):
    found = [piece.slot.factor for bucket in messages(frozenset(keys)) for piece in bucket]
    assert sorted(found) == sorted(keys)


def test_there_is_one_message_unless_it_is_too_long_and_none_where_nothing_travels():
    assert len(messages(KEYS)) == 1 < len(messages(KEYS, alone(nbytes=256)))
    assert messages(frozenset()) == () == messages(KEYS, make(FakeNetwork(1).channel(0)))


# sums


@pytest.mark.parametrize("world", [1, 2, 3])
def test_owners_get_the_sums_of_whatever_is_due(world):
    subsets = [KEYS, KEYS, KEYS, frozenset({"l0/A", "l5/G"}), KEYS, frozenset({"l2/G"}), KEYS, KEYS]

    def work(channel):
        reducer = make(channel)
        for step, keys in enumerate(subsets):
            sums = filled(reducer, keys, step, step, times=2)  # calls of each layer
            check(reducer.reduce(sums), keys, world, channel.rank, step, times=2)

    FakeNetwork(world).run(work)


def test_a_rank_without_rows_sends_zeros():
    def work(channel):
        reducer = make(channel)
        for step in range(4):
            sums = filled(reducer, number=step)
            for key, part in reducer.reduce(sums if channel.rank == 0 else {}).items():
                assert (part.sum_P == value(key, 0, step)).all() and part.counts[ROWS] == 1

    FakeNetwork(2).run(work)


# contributors


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_rank_makes_the_sums_it_contributes_to_and_no_others(count):
    world, counts = 4, dict.fromkeys(KEYS, count)
    contributors = Contributors(world, 2, counts)

    def work(channel):
        reducer, entered = make(channel, contributors=contributors), []
        for step in range(6):
            sums, before = filled(reducer, step=step, number=step), channel.calls["factors"]
            assert sums.keys() == {
                key for key in KEYS if channel.rank in ranks_of(reducer, key, step)
            }
            for key, part in reducer.reduce(sums).items():
                ranks = ranks_of(reducer, key, step)
                assert len(ranks) == count == part.counts[ROWS] == part.ranks
                assert (part.sum_P == sum(value(key, rank, step) for rank in ranks)).all()
            entered.append(channel.calls["factors"] - before)
            assert entered[-1] == len(reducer.plan.of(KEYS, step)[1])
        return entered

    for entered in FakeNetwork(world).run(work):
        assert any(entered) == (count > 1), "no network for what stays"


def test_messages_are_bounded_and_two_are_on_their_way_at_a_time(monkeypatch):
    under_way: list[int] = []

    class Watched(reducer_module.Message):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            under_way.append(1)

        def wait(self):
            under_way.append(-1)
            return super().wait()

    monkeypatch.setattr(reducer_module, "Message", Watched)

    def work(channel):
        reducer = make(channel, nbytes=256)
        for step in range(4):
            before = channel.calls["factors"]
            check(reducer.reduce(filled(reducer, number=step)), KEYS, 2, channel.rank, step)
            assert channel.calls["factors"] - before == len(messages(KEYS, reducer)) > 2

    FakeNetwork(2).run(work)
    assert sum(under_way) == 0 and max(accumulate(under_way)) <= 4, "of two ranks"
