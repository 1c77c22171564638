"""Batch sums in messages that leave as soon as they are complete; ranks are threads here."""

import random

import pytest
import torch

from ds_kfac.assignment.contributors import Contributors
from ds_kfac.assignment.factor_spec import factor_specs
from ds_kfac.comm.reducer import Reducer
from tests.close import near
from tests.comm.fake_network import FakeNetwork
from tests.models import linear_layer

CPU = torch.device("cpu")
LAYERS = [linear_layer(f"l{i}", dim_A, 3 + i) for i, dim_A in enumerate((5, 8, 8, 6, 8, 7))]
FACTORS = factor_specs(LAYERS, [["l1", "l2", "l4"]])
KEYS = frozenset(factor.key for factor in FACTORS)
ROWS = [(factor.layers[0], 0, factor.key[-1]) for factor in FACTORS]
DECOMPOSERS = {factor.key: i % 2 for i, factor in enumerate(FACTORS)}


class Boundary:
    """Whether the running backward is the last of the step."""

    def __init__(self, last: bool = True) -> None:
        self.last = last

    def __call__(self) -> bool:
        return self.last


def make(channel, *, last=None, **options) -> Reducer:
    options = {"last_micro_batch": last or Boundary()} | options
    decomposers = {key: rank % channel.world for key, rank in DECOMPOSERS.items()}
    return Reducer(LAYERS, FACTORS, decomposers, channel, CPU, **options)


def alone(**options) -> Reducer:
    """To look at plans."""
    return make(FakeNetwork(2).channel(0), **options)


def messages(keys: frozenset[str], reducer: Reducer | None = None):
    reducer = reducer or alone()
    return reducer.layout.buckets(keys, 0)


def value(row, rank: int, step: int) -> float:
    return float(1 + ROWS.index(row) + 100 * rank + 1000 * step)


def add(reducer: Reducer, sums, rows, step: int = 0) -> None:
    """One addition to each of ``rows``, in that order."""
    for row in rows:
        part = getattr(sums[row[0]][row[1]], row[2])
        part.sum_P.add_(value(row, reducer.channel.rank, step))
        part.count.add_(1)
        reducer.rows_added(*row)


def ranks_of(reducer: Reducer, row, step: int):
    return next(slot.contributors for slot in reducer.layout.slots(KEYS, step) if slot.rows == row)


def due(row, keys) -> bool:
    return f"{row[0]}/{row[2]}" in keys


def check(found, keys, world: int, rank: int, step: int, times: int = 1) -> None:
    """Own sums are those of all ranks; others' are not here."""
    parts = {(name, use, side): part for name, uses in found.items() for use, sums in enumerate(uses)
             for side, part in (("A", sums.A), ("G", sums.G)) if part is not None}  # fmt: skip
    own = {row for row in ROWS if DECOMPOSERS[f"{row[0]}/{row[2]}"] % world == rank}
    assert set(parts) == {row for row in own if due(row, keys)}
    for row, part in parts.items():
        expected = times * sum(value(row, other, step) for other in range(world))
        assert (part.sum_P == expected).all() and part.count == times * world, row


# messages


@pytest.mark.parametrize("keys", [KEYS, KEYS - {"l5/A", "l5/G"}, {"l0/A", "l3/G", "l5/G"}, {"l1/A"}], ids=len)
def test_messages_cover_every_factor_that_is_due_once(keys):
    found = [piece.slot.factor for bucket in messages(frozenset(keys)) for piece in bucket]
    assert sorted(found) == sorted(keys)


def test_there_is_one_message_where_nothing_leaves_early_or_only_one_layer_is_due():
    reducer = Reducer(LAYERS, FACTORS, DECOMPOSERS, FakeNetwork(2).channel(0), CPU)
    assert len(messages(KEYS, reducer)) == 1
    assert len(messages(frozenset(["l3/A", "l3/G"]))) == 1
    assert messages(frozenset()) == () == messages(KEYS, make(FakeNetwork(1).channel(0)))


# sums


@pytest.mark.parametrize("world", [1, 2, 3])
def test_owners_get_the_sums_of_whatever_is_due(world):
    subsets = [KEYS, KEYS, KEYS, frozenset({"l0/A", "l5/G"}), KEYS, frozenset({"l2/G"}), KEYS, KEYS]

    def work(channel):
        reducer = make(channel)
        for step, keys in enumerate(subsets):
            sums = reducer.allocate(keys, step)
            rows = [row for row in ROWS if due(row, keys)]
            random.Random(channel.rank + step).shuffle(rows)
            for _ in range(2):  # calls of each layer
                add(reducer, sums, rows, step)
            check(reducer.finish(keys, step), keys, world, channel.rank, step, times=2)

    FakeNetwork(world).run(work)


def test_a_rank_without_rows_sends_zeros():
    def work(channel):
        reducer = make(channel)
        for step in range(4):
            if channel.rank == 0:
                add(reducer, reducer.allocate(KEYS, 0), ROWS, step)
            found = reducer.finish(KEYS, 0)
            for name, (sums,) in found.items():
                for side, part in (("A", sums.A), ("G", sums.G)):
                    if part is not None:
                        assert (part.sum_P == value((name, 0, side), 0, step)).all() and part.count == 1

    FakeNetwork(2).run(work)


def test_every_step_starts_from_zero():
    reducer = alone()
    add(reducer, reducer.allocate(KEYS, 0), ROWS)
    reducer.forget()
    for uses in reducer.allocate(KEYS, 0).values():
        for part in (uses[0].A, uses[0].G):
            assert part is None or (not part.sum_P.any() and not part.count.any())


# when a bucket leaves


def entered(channel, reducer: Reducer, steps, last: Boundary | None = None) -> list[list[int]]:
    """Per step, the collectives entered after each addition. ``steps``: lists of rows, each a micro-batch."""
    seen = []
    for step, micro_batches in enumerate(steps):
        sums, before, counts = reducer.allocate(KEYS, 0), channel.calls["factors"], []
        for index, rows in enumerate(micro_batches):
            if last is not None:
                last.last = index == len(micro_batches) - 1
            for row in rows:
                add(reducer, sums, [row], step)
                counts.append(channel.calls["factors"] - before)
        reducer.finish(KEYS, 0)
        assert channel.calls["factors"] - before == 2
        seen.append(counts)
    return seen


FORWARD_BACKWARD = [row for row in ROWS if row[2] == "A"] + [row for row in reversed(ROWS) if row[2] == "G"]


def first_bucket() -> int:
    """Additions after which the upper half is complete."""
    upper = {piece.slot.rows for piece in messages(KEYS)[0]}
    return max(place for place, row in enumerate(FORWARD_BACKWARD) if row in upper) + 1


def test_buckets_leave_with_their_last_rows_once_two_steps_had_as_many():
    def work(channel):
        return entered(channel, make(channel), [[FORWARD_BACKWARD]] * 4)

    half, total = first_bucket(), len(ROWS)
    assert half < total
    late = [0] * total
    early = [0] * (half - 1) + [1] * (total - half) + [2]
    assert FakeNetwork(2).run(work) == [[late, late, early, early]] * 2


def test_buckets_leave_in_the_last_micro_batch_only():
    last = [Boundary(), Boundary()]

    def work(channel):
        boundary = last[channel.rank]
        return entered(channel, make(channel, last=boundary), [[FORWARD_BACKWARD] * 3] * 3, boundary)

    half, total = first_bucket(), len(ROWS)
    for _, _, third in FakeNetwork(2).run(work):
        assert third == [0] * (2 * total + half - 1) + [1] * (total - half) + [2]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        # a row that does not come makes its bucket wait for the end, in that step
        (FORWARD_BACKWARD[:-1], [0, 0, 2, 1, 1, 2, 2]),
        # rows that come twice are expected twice after two such steps, and once after two steps of the old kind
        ([FORWARD_BACKWARD[0], *FORWARD_BACKWARD], [0, 0, 2, 1, 1, 1, 1]),
    ],
    ids=["fewer", "more"],
)
def test_a_bucket_with_other_calls_than_expected_leaves_at_the_end(other, expected):
    usual = FORWARD_BACKWARD
    steps = [[rows] for rows in (usual, usual, usual, other, other, usual, usual)]

    def work(channel):
        return [counts[-1] for counts in entered(channel, make(channel), steps)]

    assert FakeNetwork(2).run(work) == [expected] * 2


def test_a_bucket_never_overtakes_the_one_before_it():
    """Lower layers are complete first here, on one rank only: collectives still come in the same order."""
    lower_first = [*reversed(FORWARD_BACKWARD)]

    def work(channel):
        reducer = make(channel)
        seen = entered(channel, reducer, [[lower_first if channel.rank else FORWARD_BACKWARD]] * 4)
        return seen[-1][-1]

    assert FakeNetwork(2).run(work) == [2, 2]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_rows_that_come_too_late_are_dropped_counted_and_awaited_from_then_on(ranks, caplog):
    """Also on some ranks only: all enter the same messages in the same order."""
    times = [1, 1, 2, 2, 2, 2]

    def work(channel):
        reducer, seen = make(channel), []
        for step, often in enumerate(times):
            sums, counts, dropped, before = reducer.allocate(KEYS, 0), [], 0, channel.calls["factors"]
            for _ in range(often if channel.rank in ranks else 1):
                for row in FORWARD_BACKWARD:
                    if reducer.gone(*row):  # as the hooks do: nothing is added
                        dropped += 1
                        reducer.rows_added(*row)
                    else:
                        add(reducer, sums, [row], step)
                    counts.append(channel.calls["factors"] - before)
            found = reducer.finish(KEYS, 0)
            late = reducer.late
            assert channel.calls["factors"] - before == 2 and dropped == late, "what has been sent is not added to"
            for rows, part in parts_of(found).items():
                given = [1 + (rank in ranks and often == 2 and step != 2) for rank in range(2)]
                assert part.count == sum(given), (step, rows)
                assert (part.sum_P == sum(n * value(rows, rank, step) for rank, n in enumerate(given))).all()
            seen.append((late, counts[len(ROWS) - 1], counts[-1]))
        return seen

    for rank, seen in enumerate(FakeNetwork(2).run(work)):
        total = len(ROWS)
        twice = rank in ranks
        assert [late for late, _, _ in seen] == [0, 0, total * twice, 0, 0, 0]
        assert [gone for _, gone, _ in seen] == ([0, 0, 2, 0, 0, 0] if twice else [0, 0, 2, 2, 2, 2])
        assert [gone for _, _, gone in seen] == ([0, 0, 2, 0, 2, 2] if twice else [0, 0, 2, 2, 2, 2])


def parts_of(found):
    return {(name, use, side): part for name, uses in found.items() for use, sums in enumerate(uses)
            for side, part in (("A", sums.A), ("G", sums.G)) if part is not None}  # fmt: skip


def test_a_step_that_is_given_up_leaves_no_rank_with_a_message_of_its_own():
    """Rank 0 has sent half of its sums when both give up; the next step is right on both."""

    def work(channel):
        reducer = make(channel)
        entered(channel, reducer, [[FORWARD_BACKWARD]] * 3)
        sums, before = reducer.allocate(KEYS, 0), channel.calls["factors"]
        if channel.rank == 0:
            add(reducer, sums, FORWARD_BACKWARD[: first_bucket()], 7)
        assert channel.calls["factors"] - before == (channel.rank == 0)
        reducer.drain(KEYS, 0)
        add(reducer, reducer.allocate(KEYS, 0), ROWS, 8)
        check(reducer.finish(KEYS, 0), KEYS, 2, channel.rank, 8)

    FakeNetwork(2).run(work)


# layers that part


@pytest.mark.parametrize("seen_by", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_saw_layers_part_have_no_rows_of_what_they_share(seen_by, dtype):
    group = next(factor.layers for factor in FACTORS if len(factor.layers) > 1)

    def work(channel):
        reducer = make(channel, parted=lambda: {group} if channel.rank in seen_by else (), dtype=dtype)
        for step in range(4):
            add(reducer, reducer.allocate(KEYS, 0), ROWS)
            for (name, _, side), part in parts_of(reducer.finish(KEYS, 0)).items():
                left = [rank for rank in range(2) if rank not in seen_by or (name, side) != ("l1", "A")]
                assert part.count == len(left), (name, side, step)
                expected = sum(value((name, 0, side), rank, 0) for rank in left)
                near(
                    part.sum_P,
                    torch.full_like(part.sum_P, expected),
                    2**-7 * abs(expected),
                    "roundings to bf16 of the parts and on the way",
                )

    FakeNetwork(2).run(work)


# contributors


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_rank_makes_the_sums_it_contributes_to_and_no_others(count, everywhere):
    world, counts = 4, dict.fromkeys(KEYS, count)
    contributors = Contributors(world, 2, everywhere, counts)

    def work(channel):
        reducer, entered = make(channel, contributors=contributors), []
        for step in range(6):
            sums, before = reducer.allocate(KEYS, step), channel.calls["factors"]
            mine = {row for row in ROWS if channel.rank in ranks_of(reducer, row, step)}
            assert set(parts_of(sums)) == mine
            add(reducer, sums, sorted(mine, key=ROWS.index), step)
            for row, part in parts_of(reducer.finish(KEYS, step)).items():
                ranks = ranks_of(reducer, row, step)
                assert len(ranks) == count == part.count
                assert (part.sum_P == sum(value(row, rank, step) for rank in ranks)).all()
            entered.append(channel.calls["factors"] - before)
            assert entered[-1] == len(reducer.layout.buckets(KEYS, step))
        return entered

    for entered in FakeNetwork(world).run(work):
        assert any(entered) == (count > 1 or everywhere), "no network for what stays"


def test_messages_are_bounded_and_two_are_on_their_way_at_a_time():
    def work(channel):
        reducer = make(channel, nbytes=256)
        for step in range(4):
            sums, before = reducer.allocate(KEYS, step), channel.calls["factors"]
            add(reducer, sums, FORWARD_BACKWARD, step)
            early, running = channel.calls["factors"] - before, len(reducer._running)
            assert running <= 2 and (early > 0) == (step >= 2)
            check(reducer.finish(KEYS, step), KEYS, 2, channel.rank, step)
            assert channel.calls["factors"] - before == len(messages(KEYS, reducer)) > 2

    FakeNetwork(2).run(work)
