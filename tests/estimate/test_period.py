"""What a plan does in the steps of its burn-in."""

from ds_kfac.estimate.period import burn_in
from tests.plan.test_make_plan import ZERO, plan


def test_a_staggered_burn_in_never_renews_everything_at_once():
    for lag in (0, 3):
        made = plan(ZERO, eigenbasis={"refresh_interval": 50, "stagger": True, "lag": lag}, burn_in={"steps": 50})
        steps = burn_in(made)
        assert len(steps) == 20 and sum(len(step.captured) for step in steps) > 3 * len(made.assignment.factors)
        for step in steps:
            assert len(step.captured) <= len(made.assignment.factors) / 2
            assert len(step.arriving) <= len(made.assignment.factors) / 2
        assert sum(len(step.arriving) for step in steps) >= len(made.assignment.factors)


def test_without_burn_in_there_are_no_steps_of_it():
    assert burn_in(plan(burn_in={"steps": 0})) == ()
