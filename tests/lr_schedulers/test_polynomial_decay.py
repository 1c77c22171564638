"""SP-NGD's schedule against its formulas, and its velocity against torch's."""

from types import SimpleNamespace

import pytest
import torch

from ds_kfac.lr_schedulers.polynomial_decay import PolynomialDecay
from tests.close import close


def sgd(rate=0.03, momentum=0.97) -> torch.optim.SGD:
    return torch.optim.SGD(
        [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=rate, momentum=momentum
    )


def test_the_rate_follows_its_formula_and_momentum_the_rate():
    optimizer = sgd()
    schedule = PolynomialDecay(optimizer, start=3, end=13, power=3.5, ties_momentum=True)
    for step in range(20):
        part = (1 - min(max(step - 3, 0), 10) / 10) ** 3.5
        group = optimizer.param_groups[0]
        close([group["lr"], group["momentum"]], [0.03 * part, 0.97 * part], condition=3.5)
        assert schedule.get_last_lr() == [group["lr"]]
        schedule.step()


def test_training_is_that_of_the_papers_velocity():
    optimizer = sgd(0.1, 0.9)
    (w,) = optimizer.param_groups[0]["params"]
    schedule = PolynomialDecay(optimizer, end=30, power=2.0, ties_momentum=True)
    theirs, v, last = w.detach().clone(), torch.zeros(3, dtype=torch.float64), None
    for step in range(25):
        g = torch.sin(torch.arange(3.0, dtype=torch.float64) + step)
        rate = 0.1 * (1 - step / 30) ** 2
        v = (0.9 * rate / 0.1) * (1.0 if last is None else rate / last) * v - rate * g
        theirs, last = theirs + v, rate
        w.grad = g
        optimizer.step()
        schedule.step()
    close(w, theirs, sums=25 * 4)


@pytest.mark.parametrize("wrong", [{"end": 0}, {"start": 5, "end": 5}, {"end": 3, "power": -1.0}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="0 <= start < end"):
        PolynomialDecay(sgd(), **wrong)


@pytest.mark.parametrize("others", [[], [0.5]])
def test_it_resumes_also_where_another_optimizer_splits_the_groups(others):
    before, optimizer = sgd(), sgd()
    for rate in others:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate})
    saved, schedule = (
        PolynomialDecay(each, end=10, ties_momentum=True) for each in (before, optimizer)
    )
    for _ in range(4):
        saved.step()
    schedule.load_state_dict(saved.state_dict())
    assert schedule.last_batch_iteration == 4
    for _ in range(2):
        rates = [group["lr"] for group in optimizer.param_groups]
        part = 1 - schedule.last_batch_iteration / 10
        close(rates, [rate * part for rate in (0.03, *others)])
        assert before.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]
        saved.step()
        schedule.step()


def test_a_step_may_be_told_and_a_wrapped_optimizer_is_changed():
    """DeepSpeed's wrappers keep the optimizer as an attribute. Momentum stays if it is not tied."""
    optimizer = sgd()
    schedule = PolynomialDecay(SimpleNamespace(optimizer=optimizer), end=10, power=0.5)
    schedule.step(4)
    schedule.step()
    assert schedule.last_batch_iteration == 5
    close(optimizer.param_groups[0]["lr"], 0.03 * 0.5**0.5)
    assert optimizer.param_groups[0]["momentum"] == 0.97
