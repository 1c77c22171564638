"""One step of a direction without an engine: kl-clip's sum and factor, copies, parameter groups,
layers that stand still or have no eigenbasis."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ds_kfac.curvature.eigen import Eigenbasis
from ds_kfac.curvature.factor import Side
from ds_kfac.directions.direction import Outcome, StepContext
from ds_kfac.directions.kfac_adamw.direction import AdamDirection
from ds_kfac.directions.kfac_adamw.group_step import BASE
from ds_kfac.directions.kfac_gradient import (
    KFACGradient,
    KFACGradientRule,
    kl_clip_scale,
    weighted_by_rates,
)
from ds_kfac.zero.exchange import Gradients
from tests.choices import planned
from tests.close import close, exact, polar_condition
from tests.curvature.one_factor import random_basis
from tests.deepspeed.toys import Mean, SoftSign
from tests.models import linear_layer

ROWS, COLUMNS, RATE = 5, 8, 0.3
SUMS = ROWS + COLUMNS
"""Of a product with both bases."""
PLAIN, ORTHOGONAL = {"except_layers": [".*"]}, {"except_layers": []}


def whole(gradients: dict[str, Tensor]) -> Gradients:
    """Gradients by layer as an exchange gives them."""
    return Gradients({name: (gradient, None) for name, gradient in gradients.items()})


class Exchange:
    """What a direction reads of a rank's exchange, of one rank.

    Args:
        bias: whether the last column is a bias with a parameter group of its own.

    Attributes:
        results: layer name -> matrix, of the last step.
    """

    device, layout = torch.device("cpu"), SimpleNamespace(rank=0)
    plan, shards, params = SimpleNamespace(of_layer={}), {}, {}

    def __init__(self, layers, bias: bool = False) -> None:
        self.worker_layers, self.bias = tuple(layers), bias
        self.begin()

    def begin(self) -> None:
        self.results = {}

    def memory(self, layers) -> None:
        return None

    def put(self, layers, matrices) -> None:
        assert not any(layer.name in self.results for layer in layers)
        self.results.update(zip([layer.name for layer in layers], matrices, strict=True))

    def group_indices(self, layer) -> tuple[int, ...]:
        return (0, 1) if self.bias else (0,)

    def parts(self, layer, matrix: Tensor) -> tuple[Tensor, ...]:
        return (matrix[:, :-1].flatten(), matrix[:, -1]) if self.bias else (matrix.flatten(),)


def gradient_direction(plan, exchange: Exchange) -> KFACGradient:
    moments = KFACGradientRule().moments(plan.config)
    return KFACGradient(plan, exchange, moments, SimpleNamespace(nu=None))


def adam_direction(plan, exchange: Exchange) -> AdamDirection:
    optimizer = SimpleNamespace(
        slices={},
        used=torch.zeros(0),
        adam_ratio=1.0,
        check_parts=lambda **_: None,
        taken_away=lambda: frozenset(),
    )
    return AdamDirection(plan, exchange, optimizer)


def make(
    kind=gradient_direction,
    *,
    layers="a",
    groups=({"lr": RATE},),
    batched=False,
    adam=PLAIN,
    based=None,
    bias=False,
    values=1.0,
    **preconditioner,
):
    """A direction over layers of one shape, with random eigenbases of those in ``based`` (None:
    all).

    Args:
        groups: the optimizer's parameter groups.
        values: what eigenvalues are multiplied by.
    """
    specs = tuple(linear_layer(name, COLUMNS, ROWS) for name in layers)
    block = {"preconditioner": {"kl_clip": 0.001, **preconditioner}, "adam": adam}
    plan = planned(block, batched=batched)
    plan.layers = specs
    direction = kind(plan, Exchange(specs, bias))
    for group in direction.layer_groups:
        for index, name in enumerate(group.names):
            place = layers.index(name)
            if based is None or name in based:
                basis = random_basis(ROWS, COLUMNS, seed=place)
                A, G = (replace(side, values=values * side.values) for side in (basis.A, basis.G))
                group.rebase(index, A=A, G=G)
            group.terms[index] = 7.0 + place
    direction.param_groups = list(groups)
    return direction


def gradients_of(layers: str, times=()) -> dict[str, Tensor]:
    """Random ones by layer, multiplied by ``times``."""
    gradients = {}
    for index, name in enumerate(layers):
        generator = torch.Generator().manual_seed(100 + index)
        gradients[name] = torch.randn(ROWS, COLUMNS, generator=generator)
        gradients[name] *= times[index] if times else 1.0
    return gradients


def stepped(*arguments, layers="a", times=(), gradients=None, **options):
    """A direction's outcome of one step, its results and its moments by layer."""
    direction = make(*arguments, layers=layers, **options)
    context = StepContext(0, direction.param_groups)
    outcome = direction.step(context, whole(gradients or gradients_of(layers, times)))
    moments = {
        name: group.state(i).moments
        for group in direction.layer_groups
        for i, name in enumerate(group.names)
    }
    return outcome, direction.exchange.results, moments


def of_rates(*rates) -> dict:
    return {"bias": True, "groups": [{"lr": rate} for rate in rates]}


@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.3, 0.0), (0.3, torch.tensor(0.1))], ids=str)
def test_kl_clips_sum_is_that_of_the_parts_with_their_rates(rates, eigenvalues):
    outcome, results, _ = stepped(**of_rates(*rates), eigenvalues=eigenvalues)
    products = results["a"].double() * gradients_of("a")["a"].double()
    weight, bias = products[:, :-1].sum(), products[:, -1].sum()
    expected = weight * float(rates[0]) ** 2 + bias * float(rates[1]) ** 2
    scale = products.abs().sum() * 0.3**2
    close(outcome.numbers[0], expected, sums=ROWS * COLUMNS, scale=scale)


@pytest.mark.parametrize(
    ("quadratic", "expected"),
    [(0.0, 1.0), (0.001, 1.0), (0.004, 0.5), (0.4, 0.05), (math.inf, 0.0), (math.nan, 1.0)],
)
def test_kl_clip_bounds_the_step(quadratic, expected):
    close(kl_clip_scale(torch.tensor(quadratic), kl_clip=0.001), torch.tensor(expected))
    # an infinite product at a rate of zero is left out
    exact(weighted_by_rates(torch.tensor([math.inf, 2.0]), [0.0, 0.5]), torch.tensor(0.5))


def test_kl_clip_scales_what_is_preconditioned_and_nothing_else():
    """A layer without an eigenbasis has its raw gradient, whose part is not in the clip's sum."""
    direction, flags = make(layers="ab"), torch.tensor([True, False])
    scales = direction.finish(StepContext(0, []), Outcome(), [torch.tensor(0.1)], flags)
    close(scales["a"], torch.tensor(0.1))
    assert scales["a"] == direction.metrics.nu and scales["b"] == 1.0


class Bounded(SoftSign):
    """Has a finite result and moments of any gradient, as a rule that steps along signs."""

    def __init__(self, plan, exchange) -> None:
        super().__init__(plan, exchange, Mean)

    def layer(self, context, layer, gradient, basis, moments):
        return super().layer(context, layer, gradient.nan_to_num(0.0, 1.0, -1.0), basis, moments)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (gradient_direction, of_rates(0.3, 0.2)),
        (gradient_direction, {"eigenvalues": "corrected"}),
        (gradient_direction, {"values": math.nan}),
        (Bounded, {}),
    ],
)
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_layer_whose_result_is_not_finite_stands_still_and_counts_for_nothing(
    kind, options, wrong
):
    gradients = gradients_of("a")
    if "values" not in options:
        gradients["a"][2, 3] = wrong
    outcome, results, moments = stepped(kind, gradients=gradients, **options)
    exact(results["a"], torch.zeros(ROWS, COLUMNS))
    assert outcome.replaced == 1 and not any(number.any() for number in outcome.numbers)
    assert moments["a"] is None or not any(part.any() for part in vars(moments["a"]).values())


@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_all_groups_of_a_convolution_stand_still_or_none(eigenvalues):
    def side(width: int) -> Side:
        return Side.dense(width).repeated(2)

    layer = replace(linear_layer("layer", 8, 5), groups=2, A=side(8), G=side(5))
    plan = planned({"preconditioner": {"kl_clip": 0.001, "eigenvalues": eigenvalues}})
    exchange = Exchange([layer])
    direction = gradient_direction(plan, exchange)
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


ADAM = [{"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1}]


@pytest.mark.parametrize("adam", [ORTHOGONAL, PLAIN])
@pytest.mark.parametrize("batched", [False, True])
def test_a_layer_stands_still_whose_gradient_is_zero_or_not_finite_or_too_large_for_moments(
    batched, adam
):
    times = (1.0, 0.0, 1e20, math.inf, math.nan, 1e-20)
    options = {"layers": "abcdef", "batched": batched, "groups": ADAM, "adam": adam}
    outcome, results, moments = stepped(adam_direction, times=times, **options)
    _, alone, _ = stepped(adam_direction, groups=ADAM, adam=adam)
    _, plain, _ = stepped(adam_direction, groups=ADAM)
    condition = polar_condition(plain["a"]) if adam == ORTHOGONAL else 1.0
    close(results["a"], alone["a"], sums=(2 + 5 * 3) * SUMS, condition=condition)
    for name in "bcde":
        exact(results[name], torch.zeros(ROWS, COLUMNS))
        assert not any(part.any() for part in vars(moments[name]).values())
    assert moments["f"].updates == 1 and (results["f"] != 0).all()
    names = make(adam_direction, **options).names
    used = dict(zip(names, outcome.flags.tolist(), strict=True))
    assert used == dict(zip("abcdef", (1, 0, 0, 0, 0, 1), strict=True)), "the others do not decay"
    assert (int(outcome.unused), int(outcome.replaced)) == (1, 2)
    assert [name for name, out in zip(names, outcome.left_out, strict=True) if out] == ["c"]
    squares = sum(results[name].double().square().sum() for name in "af")
    close(outcome.numbers[0], squares, sums=2 * ROWS * COLUMNS)


def test_adam_takes_the_betas_of_the_layers_own_group():
    groups = [
        {"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1},
        {"lr": RATE, "betas": (0.1, 0.2), "eps": 10.0},
    ]
    _, results, moments = stepped(adam_direction, groups=groups)
    basis = random_basis(ROWS, COLUMNS, seed=0)
    rotated = basis.rotate(gradients_of("a")["a"])
    close(moments["a"].first_OI, 0.2 * rotated, sums=SUMS)
    close(moments["a"].second_OI, 0.1 * rotated.square(), sums=SUMS)
    ahead, head = 1 + 0.8 / (1 + 0.8), BASE / COLUMNS  # Nesterov's; a head's part of the rate
    close(
        results["a"], head * basis.restore(ahead * rotated / (rotated.abs() + 0.1)), sums=2 * SUMS
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_a_layer_without_a_basis_beside_others_keeps_its_gradient_and_moments(eigenvalues, batched):
    """Layers of one shape are stepped in one batch, whether all of them have a basis or not."""
    options = {"layers": "abc", "batched": batched, "eigenvalues": eigenvalues}
    _, whole, _ = stepped(**options)
    outcome, results, moments = stepped(based="ac", **options)
    gradients = gradients_of("abc")
    exact(results["b"], gradients["b"])
    for name in "ac":
        close(results[name], whole[name], sums=2 * SUMS)
    assert int(outcome.replaced) == 0 and outcome.flags.sum() == 2
    if eigenvalues == "corrected":
        assert not moments["b"].updates and not moments["b"].second_OI.any()
        assert moments["a"].updates == 1
    products = torch.cat([(results[name] * gradients[name]).flatten() for name in "ac"]).double()
    sums = SUMS + ROWS * COLUMNS
    close(
        outcome.numbers[0],
        RATE**2 * products.sum(),
        sums=2 * sums,
        scale=RATE**2 * products.abs().sum(),
    )
