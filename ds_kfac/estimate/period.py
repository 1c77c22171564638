"""What happens in the steps of one period, once all intervals have settled."""

from dataclasses import dataclass, replace

from ds_kfac.plan.plan import Plan

Keys = frozenset[str]


@dataclass(frozen=True)
class Happening:
    """Factors that are captured in a step, those whose decomposition starts, and those whose eigenbases take effect.

    Attributes:
        exact: or else decompositions are single QR steps.
    """

    captured: Keys
    decomposed: Keys
    arriving: Keys
    exact: bool = True


def settled_period(plan: Plan) -> tuple[Happening, ...]:
    """Every step of a period, without the adaptive rule, which only leaves work out. With QR steps between exact
    refreshes the period is as many refresh intervals long."""
    timetable = replace(plan, adaptive=None).timetable()
    schedule = plan.schedule
    settled = max(
        schedule.displaced(offset).settled for offset in {0, *(plan.offsets.get(unit, 0) for unit in plan.together)}
    )
    update, refresh = schedule.intervals(settled)
    period = update * -(-refresh // update)
    lag, start = min(plan.lag, refresh - 1), settled + 2 * period

    def due(step: int) -> tuple[Keys, Keys]:
        found = timetable.due(step)
        return plan.expanded(found.capture), plan.expanded(found.refresh)

    found = []
    for step in range(start, start + period):
        captured, decomposed = due(step)
        found.append(Happening(captured, decomposed, due(step - lag)[1]))
    between = [replace(happening, exact=False) for happening in found] * (plan.work.exact_every - 1)
    return (*found, *between)
