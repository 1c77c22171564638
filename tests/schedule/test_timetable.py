"""Which factors are due, against a simulation that walks all steps."""

import json
import random
from functools import partial
from itertools import product

import pytest

from ds_kfac.schedule.timetable import (
    NO_BATCH,
    BurnIn,
    FactorsDue,
    Schedule,
    Timetable,
    Value,
    next_interval,
)

KEYS = ("a/A", "a/G", "b/A", "b/G", "c/A")
OFFSETS = {"a/G": 3, "b/A": 10, "b/G": 47}
PLAIN = Schedule(Value.constant(5), Value.constant(50))
SCHEDULES = {
    "plain": PLAIN,
    "burn_in": Schedule(Value.constant(5), Value.constant(50), BurnIn(30, 1, 5)),
    "ramps": Schedule(
        Value.ramp("linear", 1, 6, 80), Value.ramp("linear", 3, 40, 100), BurnIn(10, 1, 3)
    ),
}
SAME = dict.fromkeys(KEYS, (True, True))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_factor_follows_its_displaced_schedule_in_any_order_of_asking(schedule):
    table = Timetable(schedule, KEYS, offsets=OFFSETS)
    expected = {key: schedule.displaced(OFFSETS.get(key, 0)) for key in KEYS}
    for step in random.Random(0).choices(range(400), k=300):
        due = table.due(step)
        assert due.capture == {key for key in KEYS if expected[key].due(step).capture}
        assert due.refresh == {key for key in KEYS if expected[key].due(step).refresh}
        assert table.captures_possible(step) == bool(due.capture)
        assert all(table.clocks[key].interval == 1 for key in KEYS)


@pytest.mark.parametrize("adaptive", [False, True], ids=["scheduled", "adaptive"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_next_capture_and_refresh_are_those_that_come(schedule, adaptive):
    """With the adaptive rule as far as intervals stay, which they do if a value is near the last
    one only."""
    table = Timetable(schedule, KEYS, offsets=OFFSETS, adaptive=adaptive)
    captures, refreshes = dict[str, int](), dict[str, int]()
    for step in range(300):
        grows = step < schedule.burnt_in + 60
        due = table.due(step)
        for key in KEYS:
            capture, refresh = table.next_due(key, step)
            assert (capture == step, refresh == step) == (key in due.capture, key in due.refresh), (
                key,
                step,
            )
            if not adaptive or not grows:
                assert captures.setdefault(key, capture) == capture, (key, step)
                assert refreshes.setdefault(key, refresh) == refresh, (key, step)
        table.record(step, due, dict.fromkeys(due.capture, (True, grows)))
        captures = {key: at for key, at in captures.items() if at > step}
        refreshes = {key: at for key, at in refreshes.items() if at > step}
    assert not adaptive or max(clock.interval for clock in table.clocks.values()) > 1


def test_the_adaptive_rule_never_sits_out_the_first_refresh_and_a_load_changes_nothing():
    schedule = Schedule(Value.constant(1), Value.constant(2))
    table, refreshed, found = Timetable(schedule, KEYS, adaptive=True), [], []
    for step in range(400):
        due = table.due(step)
        if "a/A" in due.refresh:
            again = Timetable(schedule, KEYS, adaptive=True)
            again.restore(json.loads(json.dumps(table.state())))
            found.append(table.exact("a/A", step, 10))
            assert again.exact("a/A", step, 10) is found[-1]
            refreshed.append(step)
        table.record(step, due, SAME)  # nothing changes: intervals grow
    # of the schedule's refreshes, at even steps, the first of ten and all after which none was
    # skipped
    tens = [-(-(step // 2 + 1) // 10) for step in refreshed]
    assert found == [now > before for before, now in zip([0, *tens], tens, strict=False)]
    assert refreshed[1] - refreshed[0] < 20 and found.count(False) > 1 and found[-1]


def walked(table: Timetable, steps: range, similar) -> list[FactorsDue]:
    """Applied steps one by one; ``similar(step, key)`` are the flags of a captured factor."""
    result = []
    for step in steps:
        due = table.due(step)
        table.record(step, due, {key: similar(step, key) for key in due.capture})
        result.append(due)
    return result


def test_a_factor_without_a_batch_keeps_its_interval():
    table = Timetable(Schedule(Value.constant(1), Value.constant(1)), ["a", "b"], adaptive=True)
    for step in range(30):
        due = table.due(step)
        codes = [3.0 if key == "a" or step < 4 else NO_BATCH for key in sorted(due.capture)]
        table.record(step, due, lambda codes=codes: codes)
    table.settle()
    assert table.clocks["a"].interval > 5 and table.clocks["b"].interval == 3, table.clocks


def simulated(schedule: Schedule, similar, steps: int) -> list[tuple[bool, bool, int]]:
    """One factor, counting down captures and remembering a refresh that it owes: (capture, refresh,
    multiplier)."""
    start = schedule.burn_in.steps if schedule.burn_in else 0
    interval, previous, wait, owes, result = 1, 1, 0, False, []
    for step in range(steps):
        due = schedule.due(step)
        owes |= due.refresh
        captures = due.capture and wait == 0
        result.append((captures, captures and owes, interval))
        if captures:
            owes = False
            if step >= start:
                interval, previous = next_interval(interval, previous, *similar(step))
            wait = interval - 1
        elif due.capture:
            wait -= 1
    return result


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_thins_out_any_schedule_as_a_simulation_does(seed):
    rng = random.Random(seed)
    schedule = rng.choice(list(SCHEDULES.values()))
    flags = {at: (rng.random() < 0.8, rng.random() < 0.7) for at in product(range(500), KEYS)}
    displaced = {key: schedule.displaced(OFFSETS.get(key, 0)) for key in KEYS}
    expected = {
        key: simulated(displaced[key], lambda step, key=key: flags[step, key], 500) for key in KEYS
    }
    table = Timetable(schedule, KEYS, offsets=OFFSETS, adaptive=True)
    skipped = 0
    for step in range(500):
        due = table.due(step)
        assert due is table.due(step)
        for key in KEYS:
            captures, refreshes, multiplier = expected[key][step]
            assert (key in due.capture, key in due.refresh) == (captures, refreshes), (step, key)
            assert table.clocks[key].interval == multiplier or not captures
            skipped += not captures and displaced[key].due(step).capture
        table.record(step, due, {key: flags[step, key] for key in due.capture})
    assert table.captured == sum(captures for key in KEYS for captures, _, _ in expected[key])
    assert table.skipped == skipped > 0


def test_an_extra_capture_loses_no_record_that_was_not_read_yet():
    """A step that the schedule calls quiet may capture, where a layer had rows and no gradient."""
    schedule = Schedule(Value.constant(4), Value.constant(4))
    late, at_once = (Timetable(schedule, KEYS, adaptive=True) for _ in range(2))
    extra = FactorsDue(frozenset(KEYS[:1]), frozenset())
    for step in range(9):
        due = extra if step == 1 else late.due(step)
        assert step == 1 or due == at_once.due(step)
        if due.capture:
            late.record(step, due, partial(list, [3.0] * len(due.capture)))
            at_once.record(step, due, dict.fromkeys(due.capture, (True, True)))
    late.settle()
    assert late.clocks == at_once.clocks and late.captured == at_once.captured


def test_a_restored_table_continues_identically():
    """What it did before does not matter."""
    rng = random.Random(1)
    grid = product(range(300), KEYS)
    flags = {at: (rng.random() < 0.9, rng.random() < 0.8) for at in grid}
    table, restored = (
        Timetable(SCHEDULES["ramps"], KEYS, offsets=OFFSETS, adaptive=True) for _ in range(2)
    )

    def similar(step: int, key: str) -> tuple[bool, bool]:
        return flags[step, key]

    walked(table, range(137), similar)
    walked(restored, range(40), lambda step, key: (True, True))
    restored.restore(json.loads(json.dumps(table.state())))
    assert walked(table, range(137, 300), similar) == walked(restored, range(137, 300), similar)
    assert table.state() == restored.state()


def test_factors_of_another_model_are_ignored_and_new_ones_start_afresh():
    table = Timetable(PLAIN, (*KEYS, "gone/A"), adaptive=True)
    walked(table, range(33), lambda step, key: (True, True))
    other = Timetable(PLAIN, (*KEYS, "new/A"), adaptive=True)
    other.restore(table.state())
    assert all(other.clocks[key].interval == table.clocks[key].interval > 1 for key in KEYS)
    assert other.due(35) == FactorsDue(frozenset(["new/A"]), frozenset(["new/A"]))
    other.restore({})
    assert other.state() == Timetable(PLAIN, (*KEYS, "new/A"), adaptive=True).state(), "a reset"
