"""The sum under kl-clip's root: from the pass that divides where a layer has one learning rate,
else part by part."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import Side
from ds_kfac.directions.direction import Outcome, StepContext
from ds_kfac.directions.kfac_gradient import (
    KFACGradient,
    KFACGradientRule,
    kl_clip_scale,
    peak_rates,
    weighted_by_rates,
)
from tests.choices import planned
from tests.close import close, exact
from tests.directions.outbox import exchange_of, whole
from tests.models import linear_layer


def stepped(gradient: torch.Tensor, rates: tuple, *, values: float = 1.0, **preconditioner):
    """Outcome and result of a step for one layer, whose last column is its bias with a parameter
    group of its own."""
    rows, columns = gradient.shape
    layer, generator = linear_layer("layer", columns, rows), torch.Generator().manual_seed(0)

    def basis(dim: int) -> Eigenbasis:
        Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        return Eigenbasis((Q[None],), values * torch.rand(dim, generator=generator))

    plan = planned({"preconditioner": {"kl_clip": 0.001, **preconditioner}})
    exchange = exchange_of(
        [layer],
        parts=lambda layer, matrix: (matrix[:, :-1].flatten(), matrix[:, -1]),
        groups=(0, 1),
    )
    direction = KFACGradient(
        plan, exchange, KFACGradientRule().moments(plan.config), SimpleNamespace(nu=None)
    )
    direction.layer_groups[0].rebase(0, A=basis(columns), G=basis(rows))
    outcome = direction.step(
        StepContext(0, [{"lr": rate} for rate in rates]),
        whole({"layer": gradient}),
    )
    return outcome, exchange.results["layer"]


@pytest.mark.parametrize("options", [{}, {"eigenvalues": "corrected"}])
@pytest.mark.parametrize(
    "rates",
    [(0.3, 0.3), (0.3, 0.0), (torch.tensor(0.3), torch.tensor(0.3)), (0.3, torch.tensor(0.1))],
)
def test_the_sum_is_that_of_the_parts_with_their_rates(rates, options):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    outcome, result = stepped(gradient, rates, **options)
    products = result.double() * gradient.double()
    expected = (
        products[:, :-1].sum() * float(rates[0]) ** 2 + products[:, -1].sum() * float(rates[1]) ** 2
    )
    close(outcome.numbers[0], expected, sums=5 * 8, scale=products.abs().sum() * 0.3**2)


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.3, 0.2)])
@pytest.mark.parametrize("wrong", ["basis", "gradient"])
def test_a_layer_whose_result_is_not_finite_stands_still_and_counts_for_nothing(wrong, rates):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    if wrong == "gradient":
        gradient[2, 3] = torch.inf
    outcome, result = stepped(gradient, rates, values=float("nan") if wrong == "basis" else 1.0)
    exact(result, torch.zeros(5, 8))
    assert outcome.replaced == 1 and outcome.numbers[0] == 0


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.3, 0.2)])
def test_more_than_fp32_holds_is_clipped_to_nothing(rates):
    outcome, _ = stepped(1e19 * torch.ones(5, 8), rates)
    assert kl_clip_scale(outcome.numbers[0], kl_clip=0.001) == 0 and outcome.replaced == 0


def test_an_infinite_product_at_a_rate_of_zero_is_left_out_of_the_sum():
    dots = torch.tensor([torch.inf, 2.0])
    exact(weighted_by_rates(dots, [0.0, 0.5]), torch.tensor(0.5))


@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_all_groups_of_a_convolution_stand_still_or_none(eigenvalues):
    def side(width: int) -> Side:
        return Side.dense(width).repeated(2)

    layer = replace(linear_layer("layer", 8, 5), groups=2, A=side(8), G=side(5))
    plan = planned({"preconditioner": {"kl_clip": 0.001, "eigenvalues": eigenvalues}})
    exchange = exchange_of([layer])
    direction = KFACGradient(
        plan, exchange, KFACGradientRule().moments(plan.config), SimpleNamespace(nu=None)
    )
    (group,) = direction.layer_groups
    bases = (
        Eigenbasis((torch.eye(width).repeat(2, 1, 1),), torch.ones(2 * width)) for width in (8, 5)
    )
    group.rebase(0, *bases)
    gradient = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    gradient[1, 2, 3] = torch.nan
    outcome = direction.step(StepContext(0, [{"lr": 0.3}]), whole({"layer": gradient}))
    exact(exchange.results["layer"], torch.zeros(2, 5, 8))
    assert outcome.replaced == 1 and outcome.numbers[0] == 0
    assert group.moments is None or not group.moments.updates.any()


def test_kl_clip_scales_what_is_preconditioned_and_nothing_else():
    """A layer without an eigenbasis has its raw gradient, whose part is not in the clip's sum."""
    plan, metrics = planned({"preconditioner": {"kl_clip": 0.001}}), SimpleNamespace(nu=None)
    plan.layers = [linear_layer(name, 8, 5) for name in ("with", "without")]
    direction = KFACGradient(plan, exchange_of(plan.layers), None, metrics)
    flags = torch.tensor([True, False])
    scales = direction.finish(StepContext(0, []), Outcome(), [torch.tensor(0.1)], flags)
    close(scales["with"], torch.tensor(0.1))
    assert scales["with"] == metrics.nu and scales["without"] == 1.0


def test_the_peak_is_the_largest_rate_so_far():
    groups = [{"lr": 0.4}, {"lr": torch.tensor(0.1)}]
    peaks = peak_rates(groups, {})
    groups[0]["lr"] = 0.2
    groups[1]["lr"].fill_(0.3)  # as a scheduler changes it
    assert peaks == {0: 0.4, 1: torch.tensor(0.1)}
    peaks = peak_rates(groups, peaks)
    assert peaks == {0: 0.4, 1: torch.tensor(0.3)}
    groups[1]["lr"] = 0.2
    assert peak_rates(groups, peaks) == {0: 0.4, 1: torch.tensor(0.3)}
