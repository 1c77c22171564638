"""Numbers over steps, and which steps capture and refresh, against a plain simulation."""

import copy
import random

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


def test_a_piece_holds_from_its_step_on():
    value = piecewise([3, 1, 2], [10, 20])
    assert [value.at(step) for step in (0, 9, 10, 19, 20, 10**9)] == [3, 3, 1, 1, 2, 2]
    assert value.settled == 20 and piecewise([5], []).at(7) == 5
    assert constant(0.25).at(10**9) == 0.25 and constant(1).settled == 0


def simulated(schedule: Schedule, steps: int) -> list[Due]:
    """The rules step by step, with neither memory between calls nor a closed form."""
    result, capture, refresh = [], None, None
    for step in range(steps):
        burn_in = schedule.burn_in
        burning = burn_in is not None and step < burn_in.steps
        update_interval = schedule.update.interval_at(step)
        refresh_interval = schedule.refresh.interval_at(step)
        if burning:
            update_interval = min(update_interval, burn_in.update_interval)
            refresh_interval = min(refresh_interval, burn_in.refresh_interval)
        start = burn_in.steps if burn_in is not None else 0
        forced = capture is None or (burn_in is not None and step == start)
        captures = forced or step - capture >= update_interval
        refreshes = forced or (captures and step - refresh >= refresh_interval)
        begin, offset, first_update = start, schedule.offset, schedule.update.interval_at(start)
        if burning:
            captures_before, rest = divmod(offset, first_update)
            first_update = min(schedule.update.interval_at(0), burn_in.update_interval)
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


def random_value(rng: random.Random) -> Value:
    kind = rng.choice(["constant", "linear", "cosine", "exponential", "piecewise"])
    first, last = rng.randint(1, 20), rng.randint(1, 20)
    if kind == "constant":
        return constant(first)
    if kind == "piecewise":
        steps = sorted(rng.sample(range(1, 150), rng.randint(0, 5)))
        return piecewise([rng.randint(1, 20) for _ in range(len(steps) + 1)], steps)
    return ramp(kind, first, last, rng.randint(1, 100), rng.randint(0, 50))


def random_schedule(rng: random.Random) -> Schedule:
    burn_in = BurnIn(rng.randint(1, 60), rng.randint(1, 5), rng.randint(1, 20))
    chosen = rng.choice([burn_in, None])
    return Schedule(random_value(rng), random_value(rng), chosen)


@pytest.mark.parametrize("seed", range(100))
def test_due_and_the_counts_depend_on_the_step_only(seed):
    """Against the simulation, from a random first step, with jumps, repeats, and in a copy."""
    rng = random.Random(seed)
    schedule = random_schedule(rng).displaced(rng.choice([0, 0, rng.randint(1, 150)]))
    expected = simulated(schedule, 600)
    for step in rng.choices(range(600), k=60):
        assert schedule.due(step) == expected[step], (schedule, step)
    copied = copy.deepcopy(schedule)
    assert [copied.due(step) for step in range(600)] == expected, schedule
    for step in [-1, *rng.choices(range(600), k=60)]:
        done = expected[: step + 1]
        assert schedule.captures(step) == sum(due.capture for due in done), (schedule, step)
        assert schedule.refreshes(step) == sum(due.refresh for due in done), (schedule, step)
