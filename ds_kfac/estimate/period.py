"""What happens in the steps of one period, once all intervals have settled, and in the burn-in."""

from dataclasses import dataclass, replace

from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Timetable

Keys = frozenset[str]


@dataclass(frozen=True)
class Happening:
    """Factors that are captured in a step, those whose decomposition starts, and those whose eigenbases take effect."""

    captured: Keys
    decomposed: Keys
    arriving: Keys


def settled_period(plan: Plan) -> tuple[Happening, ...]:
    """Every step of a period, without the adaptive rule, which only leaves work out."""
    timetable = replace(plan, adaptive=None).timetable()
    schedule = plan.schedule
    offsets = {plan.offsets.get(factor.key, 0) for factor in plan.assignment.factors}
    settled = max(schedule.displaced(offset).settled for offset in {0, *offsets})
    update, refresh = schedule.intervals(settled)
    period = update * -(-refresh // update)
    lag, start = min(plan.lag, refresh - 1), settled + 2 * period
    return tuple(_happening(plan, timetable, step, lag) for step in range(start, start + period))


def burn_in(plan: Plan) -> tuple[Happening, ...]:
    """The burn-in's steps after the first, up to the second refresh of everything."""
    if plan.schedule.burn_in is None:
        return ()
    timetable, refresh = replace(plan, adaptive=None).timetable(), plan.schedule.intervals(0)[1]
    steps = range(1, min(plan.schedule.burn_in.steps, 2 * refresh + 1))
    return tuple(_happening(plan, timetable, step, min(plan.lag, refresh - 1)) for step in steps)


def _happening(plan: Plan, timetable: Timetable, step: int, lag: int) -> Happening:
    due = timetable.due(step)
    # what the first step decomposes takes effect in it
    arriving = timetable.due(step - lag).refresh if step > lag or not lag else frozenset()
    return Happening(due.capture, due.refresh, arriving)
