"""Numbers over steps, and which steps capture and refresh, against a plain simulation."""

import copy
import random
from itertools import pairwise

import pytest

from ds_kfac.schedule.timetable import BurnIn, Due, Schedule, Value
from tests.close import close

constant, ramp, piecewise = Value.constant, Value.ramp, Value.piecewise


@pytest.mark.parametrize(
    ("kind", "quarter", "middle"),
    [
        ("linear", 3.25, 5.5),
        ("cosine", 10 - 9 * (2 + 2**0.5) / 4, 5.5),
        ("exponential", 10**0.25, 10**0.5),
    ],
)
def test_a_ramp_holds_its_ends_exactly_and_passes_its_middle(kind, quarter, middle):
    value = ramp(kind, 1, 10, steps=200, delay=50)
    assert [value.at(step) for step in (0, 49, 50)] == [1, 1, 1]
    close([value.at(100), value.at(150)], [quarter, middle])
    assert 1 < value.at(51) < value.at(249) < 10
    assert [value.at(step) for step in (250, 251, 10**9)] == [10, 10, 10]
    assert value.settled == 250


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(0.1, 1), (1, 0.1), (0.3, 0.3), (1e-12, 1e12)])
def test_a_ramp_is_monotone_between_its_ends(kind, start, end):
    value = ramp(kind, start, end, steps=37)
    seen = [value.at(step) for step in range(40)]
    assert (seen[0], seen[-1]) == (start, end)
    rising = seen if end >= start else seen[::-1]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(rising))


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_a_ramp_of_one_step_is_a_jump(kind):
    assert [ramp(kind, 2, 3, steps=1, delay=4).at(step) for step in (3, 4, 5, 6)] == [2, 2, 3, 3]


def test_a_piece_holds_from_its_step_on():
    value = piecewise([3, 1, 2], [10, 20])
    assert [value.at(step) for step in (0, 9, 10, 19, 20, 10**9)] == [3, 3, 1, 1, 2, 2]
    assert value.settled == 20 and piecewise([5], []).at(7) == 5


def test_a_constant_never_changes():
    assert [constant(0.25).at(step) for step in (0, 1, 10**9)] == [0.25] * 3 and constant(
        1
    ).settled == 0


def test_an_interval_is_the_nearest_integer_and_at_least_one():
    value = ramp("linear", 1, 3, steps=8)
    assert [value.interval_at(step) for step in range(10)] == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert constant(0.2).interval_at(0) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (constant(10), "10"),
        (constant(0.001), "0.001"),
        (constant(0.9999999), "0.9999999"),
        (ramp("linear", 0.1, 1, 200), "linear 0.1 -> 1 over 200 steps"),
        (ramp("cosine", 1, 10, 100, delay=50), "cosine 1 -> 10 over 100 steps after 50"),
        (piecewise([3, 1, 2], [10, 20]), "3, 1 from step 10, 2 from step 20"),
    ],
)
def test_a_value_reads_as_what_it_is(value, text):
    assert str(value) == text


# what is due


def dues(schedule: Schedule, steps: int) -> tuple[list[int], list[int]]:
    due = [schedule.due(step) for step in range(steps)]
    return [s for s in range(steps) if due[s].capture], [s for s in range(steps) if due[s].refresh]


def simulated(schedule: Schedule, steps: int) -> list[Due]:
    """The rules step by step, with neither memory between calls nor a closed form."""
    result, capture, refresh = [], None, None
    for step in range(steps):
        burn_in = schedule.burn_in
        burning = burn_in is not None and step < burn_in.steps
        update_interval, refresh_interval = (
            schedule.update.interval_at(step),
            schedule.refresh.interval_at(step),
        )
        if burning:
            update_interval = min(update_interval, burn_in.update_interval)
            refresh_interval = min(refresh_interval, burn_in.refresh_interval)
        start = burn_in.steps if burn_in is not None else 0
        forced = capture is None or (burn_in is not None and step == start)
        captures = forced or step - capture >= update_interval
        refreshes = forced or (captures and step - refresh >= refresh_interval)
        begin, offset, first_update = start, schedule.offset, schedule.update.interval_at(start)
        if burning:
            later, first_update = (
                first_update,
                min(schedule.update.interval_at(0), burn_in.update_interval),
            )
            captures_before, rest = divmod(offset, later)
            begin, offset = 0, captures_before * first_update + rest
            offset %= min(schedule.refresh.interval_at(0), burn_in.refresh_interval)
        if offset and step >= max(begin, 1):  # step 0 does everything
            first_capture = begin + offset % first_update
            first_refresh = begin + offset
            if step < first_capture:
                captures = False
            elif step in (first_capture, first_refresh):
                captures = True
            else:
                captures = step - capture >= update_interval
            if step <= first_refresh:
                refreshes = step == first_refresh
            else:
                refreshes = captures and step - refresh >= refresh_interval
        capture, refresh = step if captures else capture, step if refreshes else refresh
        result.append(Due(captures, refreshes))
    return result


@pytest.mark.parametrize(("update", "refresh"), [(1, 1), (1, 10), (7, 70), (10, 100), (3, 3)])
def test_constant_intervals_are_the_remainder_of_the_step(update, refresh):
    schedule = Schedule(constant(update), constant(refresh))
    for step in [*range(300), 10**12, 10**12 + 1, 10**12 + 70]:
        assert schedule.due(step) == Due(step % update == 0, step % refresh == 0)


def test_a_refresh_waits_for_the_next_capture():
    captures, refreshes = dues(Schedule(constant(4), constant(10)), 40)
    assert captures == list(range(0, 40, 4)) and refreshes == [0, 12, 24, 36]


def test_a_growing_interval_spaces_out():
    captures, refreshes = dues(Schedule(piecewise([1, 2, 5], [4, 8]), constant(3)), 24)
    assert captures == [0, 1, 2, 3, 5, 7, 12, 17, 22] and refreshes == [0, 3, 7, 12, 17, 22]


def test_a_shorter_interval_takes_effect_at_once():
    captures, refreshes = dues(Schedule(piecewise([100, 3], [8]), piecewise([100, 6], [8])), 21)
    assert captures == [0, 8, 11, 14, 17, 20] and refreshes == [0, 8, 14, 20]


def test_the_burn_in_ends_with_a_refresh_and_the_long_interval_starts_there():
    schedule = Schedule(
        constant(10), constant(20), BurnIn(7, update_interval=1, refresh_interval=3)
    )
    captures, refreshes = dues(schedule, 60)
    assert captures == [*range(8), 17, 27, 37, 47, 57] and refreshes == [0, 3, 6, 7, 27, 47]


def random_value(rng: random.Random) -> Value:
    kind = rng.choice(["constant", "linear", "cosine", "exponential", "piecewise"])
    if kind == "constant":
        return constant(rng.randint(1, 20))
    if kind == "piecewise":
        steps = sorted(rng.sample(range(1, 150), rng.randint(0, 5)))
        return piecewise([rng.randint(1, 20) for _ in range(len(steps) + 1)], steps)
    return ramp(
        kind, rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 100), rng.randint(0, 50)
    )


def random_schedule(rng: random.Random) -> Schedule:
    burn_in = (
        BurnIn(rng.randint(1, 60), rng.randint(1, 5), rng.randint(1, 20))
        if rng.random() < 0.5
        else None
    )
    return Schedule(random_value(rng), random_value(rng), burn_in)


@pytest.mark.parametrize("seed", range(100))
def test_due_depends_on_the_step_only(seed):
    """Against the simulation, from a random first step, with jumps, repeats, and in a copy."""
    rng = random.Random(seed)
    schedule = random_schedule(rng).displaced(rng.choice([0, 0, rng.randint(1, 150)]))
    expected = simulated(schedule, 400)
    for step in rng.choices(range(400), k=60):
        assert schedule.due(step) == expected[step], (schedule, step)
    copied = copy.deepcopy(schedule)
    assert [copied.due(step) for step in range(400)] == expected, schedule


@pytest.mark.parametrize("seed", range(50))
def test_captures_and_refreshes_are_counted_in_any_order(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng).displaced(rng.choice([0, rng.randint(1, 150)]))
    expected = simulated(schedule, 600)
    for step in [-1, *rng.choices(range(600), k=60)]:
        assert schedule.captures(step) == sum(due.capture for due in expected[: step + 1]), (
            schedule,
            step,
        )
        assert schedule.refreshes(step) == sum(due.refresh for due in expected[: step + 1]), (
            schedule,
            step,
        )


# displaced


def test_a_displaced_schedule_keeps_its_own_clock_in_the_burn_in_and_after_it():
    schedule = Schedule(
        constant(10), constant(20), BurnIn(7, update_interval=1, refresh_interval=3)
    ).displaced(13)
    captures, refreshes = dues(schedule, 70)
    assert captures == [*range(7), 10, 20, 30, 40, 50, 60] and refreshes == [0, 1, 4, 20, 40, 60]
    assert schedule.settled == 20
    later = Schedule(
        constant(10), constant(100), BurnIn(50, update_interval=5, refresh_interval=10)
    ).displaced(77)
    captures, refreshes = dues(later, 130)
    assert captures == [0, *range(2, 50, 5), *range(57, 130, 10)] and refreshes == [
        0,
        *range(2, 50, 10),
        127,
    ]


def test_offsets_spread_the_burn_in_evenly_over_its_interval():
    plain = Schedule(
        constant(10), constant(100), BurnIn(50, update_interval=5, refresh_interval=10)
    )
    all_of_them = [plain.displaced(offset) for offset in range(100)]
    for step in range(1, 50):
        assert sum(schedule.due(step).refresh for schedule in all_of_them) <= 10
        assert sum(schedule.due(step).capture for schedule in all_of_them) <= 20
    for refresh, most in ((50, 5), (10, 1)):  # and where that is an odd number of captures
        own = Schedule(
            constant(10), constant(refresh), BurnIn(50, update_interval=5, refresh_interval=10)
        )
        odd = [own.displaced(offset) for offset in range(refresh)]
        assert (
            max(sum(schedule.due(step).refresh for schedule in odd) for step in range(1, 50))
            == most
        )
    # captures in the same steps
    together = [plain.displaced(offset) for offset in range(0, 100, 10)]
    for step in range(1, 50):
        assert sum(schedule.due(step).refresh for schedule in together) == (0 if step % 5 else 5)
        assert {schedule.due(step).capture for schedule in together} == {step % 5 == 0}


def test_without_burn_in_the_clock_is_displaced_from_step_0_on():
    plain = Schedule(constant(4), constant(8))
    assert dues(plain.displaced(6), 30) == ([0, 2, 6, 10, 14, 18, 22, 26], [0, 6, 14, 22])
    assert dues(plain.displaced(4), 30) == ([0, 4, 8, 12, 16, 20, 24, 28], [0, 4, 12, 20, 28])


@pytest.mark.parametrize(("update", "refresh"), [(1, 1), (1, 7), (3, 12), (5, 50)])
def test_an_offset_is_the_remainder_of_the_step(update, refresh):
    """Step 0 does everything; from then on the residues of all offsets are those of one clock."""
    for offset in range(refresh):
        schedule = Schedule(constant(update), constant(refresh)).displaced(offset)
        for step in [*range(1, 5 * refresh), 10**12, 10**12 + 1]:
            expected = Due(
                (step - offset) % update == 0, step >= offset and (step - offset) % refresh == 0
            )
            assert schedule.due(step) == expected, (offset, step)
        assert schedule.due(0) == Due(True, True)


def test_no_offset_changes_nothing():
    schedule = Schedule(constant(4), constant(8), BurnIn(3, 1, 1))
    assert schedule.displaced(5).displaced(0) == schedule != schedule.displaced(5)


@pytest.mark.parametrize("seed", range(30))
def test_an_offset_costs_nothing_in_the_long_run(seed):
    """Once settled, every whole number of intervals holds as many captures and refreshes with an
    offset as without."""
    rng = random.Random(seed)
    plain = random_schedule(rng)
    displaced = plain.displaced(rng.randint(1, 300))
    start = max(plain.settled, displaced.settled) + 1
    update, refresh = plain.intervals(start)
    period = update * -(-refresh // update)
    steps = range(start + 1000, start + 1000 + 3 * period)
    for kind in ("capture", "refresh"):
        counts = [
            sum(getattr(schedule.due(step), kind) for step in steps)
            for schedule in (plain, displaced)
        ]
        assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("seed", range(30))
def test_a_displaced_refresh_always_captures(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng).displaced(rng.randint(1, 300))
    captures, refreshes = dues(schedule, 600)
    assert set(refreshes) <= set(captures)


def test_what_was_asked_does_not_make_schedules_differ():
    asked, fresh = (Schedule(ramp("linear", 1, 9, 50), constant(10)) for _ in range(2))
    asked.due(40)
    assert asked == fresh and hash(asked) == hash(fresh)
