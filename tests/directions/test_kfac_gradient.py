"""The sum under kl-clip's root: from the pass that divides where a layer has one learning rate, else part by part."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.directions.base import StepContext
from ds_kfac.directions.kfac_gradient import KFACGradient, KFACGradientRule, peak_rates
from ds_kfac.update.state import LayerState
from tests.choices import planned
from tests.close import close, exact
from tests.directions.outbox import Results
from tests.models import linear_layer


def local(gradient: torch.Tensor, rates: tuple, *, values: float = 1.0, scale: float = 4.0, **preconditioner):
    """A rank's part of a step for one layer, whose last column is its bias with a parameter group of its own; the
    gradient carries a loss scale."""
    rows, columns = gradient.shape
    layer, generator = linear_layer("layer", columns, rows), torch.Generator().manual_seed(0)

    def basis(dim: int) -> Eigenbasis:
        Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        return Eigenbasis((Q[None],), values * torch.rand(dim, generator=generator))

    plan = planned({"preconditioner": {"kl_clip": 0.001, **preconditioner}})
    exchange = SimpleNamespace(
        owned=(layer,), device=torch.device("cpu"), group_indices=lambda layer: (0, 1),
        parts=lambda layer, matrix: (matrix[:, :-1].flatten(), matrix[:, -1]), outbox=Results,
    )  # fmt: skip
    groups = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])
    layout = SimpleNamespace(grad_scale=lambda: scale, optimizer=groups, last_first=False)
    moments = KFACGradientRule().moments(plan.config)
    state = LayerState.empty(layer, torch.device("cpu"), moments=moments)
    state = state.rebased(A=basis(columns), G=basis(rows))
    direction = KFACGradient(plan, layout, exchange, SimpleNamespace(nu=None))
    return direction.local(StepContext(0, None, {}), {"layer": gradient}, {"layer": state})


@pytest.mark.parametrize("options", [{}, {"eigenvalues": "corrected"}])
@pytest.mark.parametrize(
    "rates", [(0.3, 0.3), (0.3, 0.0), (torch.tensor(0.3), torch.tensor(0.3)), (0.3, torch.tensor(0.1))]
)
def test_the_sum_is_that_of_the_parts_with_their_rates(rates, options):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    found = local(gradient, rates, **options)
    products = found.outbox["layer"].double() * gradient.double() / 4.0**2
    expected = products[:, :-1].sum() * float(rates[0]) ** 2 + products[:, -1].sum() * float(rates[1]) ** 2
    close(found.numbers[0], expected, sums=5 * 8, scale=products.abs().sum() * 0.3**2)


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.3, 0.2)])
def test_a_gradient_that_passes_through_counts_as_itself(rates):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    found = local(gradient, rates, values=float("nan"))
    assert torch.equal(found.outbox["layer"], gradient) and found.replaced == 1
    squares = gradient.square() / 4.0**2
    expected = squares[:, :-1].sum() * rates[0] ** 2 + squares[:, -1].sum() * rates[1] ** 2
    close(found.numbers[0], expected, sums=5 * 8)


def test_corrected_eigenvalues_do_not_see_the_loss_scale():
    """They are of squared gradients, so the scale enters squared; the result carries it once."""
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    one, scaled = (local(k * gradient, (0.3, 0.3), scale=k, eigenvalues="corrected") for k in (1.0, 1024.0))
    second, expected = scaled.pending[0].new.second_OI, one.pending[0].new.second_OI
    assert float(expected.max()) > 0
    exact(second, expected)
    close(scaled.outbox["layer"], 1024.0 * one.outbox["layer"], sums=5 * 8)
    close(scaled.numbers[0], one.numbers[0], sums=2 * 5 * 8)


def test_kl_clip_scales_what_is_preconditioned_and_nothing_else():
    """A layer without an eigenbasis has its raw gradient, whose part is not in the clip's sum."""
    metrics = SimpleNamespace(nu=None)
    plan = planned({"preconditioner": {"kl_clip": 0.001}})
    exchange = SimpleNamespace(owned=(), device=torch.device("cpu"))
    direction = KFACGradient(plan, SimpleNamespace(last_first=False), exchange, metrics)
    prepared = {"with": torch.tensor(True), "without": torch.tensor(False)}
    scales = direction.finish(0, None, [torch.tensor(0.1)], prepared)
    close(scales["with"], torch.tensor(0.1))
    assert float(scales["with"]) == float(metrics.nu)
    assert float(scales.get("without", 1.0)) == 1.0


def schedulers():
    """Of DeepSpeed and torch, each with a peak of 0.4 that the first step is far from."""
    from deepspeed.runtime import lr_schedules as ds
    from torch.optim import lr_scheduler as pt

    return {
        "WarmupLR": lambda o: ds.WarmupLR(o, warmup_max_lr=0.4, warmup_num_steps=10),
        "WarmupDecayLR": lambda o: ds.WarmupDecayLR(o, 100, warmup_max_lr=0.4, warmup_num_steps=10),
        "WarmupCosineLR": lambda o: ds.WarmupCosineLR(o, 100, warmup_num_steps=10),
        "OneCycle": lambda o: ds.OneCycle(o, 0.01, 0.4),
        "LambdaLR": lambda o: pt.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)),
        "OneCycleLR": lambda o: pt.OneCycleLR(o, 0.4, total_steps=100),
    }


def noam(step: int) -> float:
    """Vaswani et al. 2017, of width 16 and 30 steps of warmup: the rate is 1, and this is what it is multiplied by."""
    return 16**-0.5 * min(max(1, step) ** -0.5, max(1, step) * 30**-1.5)


def table(step: int) -> float:
    return [0.2, 0.3, 1.0, 0.1][step]


@dataclass
class Unhashable:
    steps: int = 10_000

    def __call__(self, step: int) -> float:
        return (1 - step / self.steps) ** 2  # which rises again after its end


@pytest.mark.parametrize("factor", [Unhashable(), lambda step: 1.01**step, lambda step: step / 100])
def test_what_rises_after_the_end_or_for_ever_says_nothing(factor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    assert peak_rates(optimizer.param_groups, {}, scheduler) == {0: 2.0}


@pytest.mark.parametrize(("factor", "peak"), [(noam, (0.5, 1.0)), (table, (1.0, 1.0))])
def test_factors_of_a_rate_are_no_rates(factor, peak):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    highest = 2.0 * max(factor(step) for step in range(4 if factor is table else 1000))
    (found,) = peak_rates(optimizer.param_groups, {}, scheduler).values()
    assert peak[0] * highest <= found <= peak[1] * highest


@pytest.mark.parametrize("name", schedulers())
def test_the_peak_is_the_schedules_from_the_first_step_on(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
    scheduler = schedulers()[name](optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0.2
    close(peak_rates(optimizer.param_groups, {}, scheduler), {0: 0.4})
    close(peak_rates(optimizer.param_groups, {0: 0.7}, scheduler), {0: 0.4})  # seen before a load, in another schedule
    assert peak_rates(optimizer.param_groups, {0: 0.01})[0] == max(0.01, optimizer.param_groups[0]["lr"])
