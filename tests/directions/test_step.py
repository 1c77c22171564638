"""One step of a direction without an engine: kl-clip's sum and factor, copies, parameter groups,
layers that stand still or have no eigenbasis."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
from ds_kfac.model.layers import LayerSpec
from ds_kfac.zero.exchange import Gradients
from tests.choices import planned
from tests.close import close, exact, polar_condition
from tests.curvature.one_factor import random_basis
from tests.deepspeed.toys import Mean, SoftSign
from tests.models import linear_layer
from tests.tape import taped

ROWS, COLUMNS, RATE = 5, 8, 0.3
SUMS = ROWS + COLUMNS
"""Of a product with both bases."""
PLAIN, ORTHOGONAL = {"except_layers": [".*"]}, {"except_layers": []}


def whole(gradients: Mapping[str, Tensor]) -> Gradients:
    """Gradients by layer as an exchange gives them."""
    return Gradients({name: (gradient, None) for name, gradient in gradients.items()})


class Exchange(SimpleNamespace):
    """What a direction reads of a rank's exchange, of one rank.

    Attributes:
        results: layer name -> matrix, of the last step.
    """

    def memory(self, layers: Sequence[LayerSpec]) -> None:
        return None

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        assert not any(layer.name in self.results for layer in layers)
        self.results.update(zip([layer.name for layer in layers], matrices, strict=True))

    def begin(self) -> None:
        self.results = {}


def exchange_of(
    layers: Sequence[LayerSpec],
    parts: Callable[..., Any] = lambda layer, matrix: (matrix.flatten(),),
    groups: tuple[int, ...] = (0,),
) -> Any:
    """An exchange of these layers.

    Args:
        parts: a layer and its matrix -> its parameters.
        groups: their parameter groups.
    """
    return Exchange(
        results={},
        worker_layers=tuple(layers),
        device=torch.device("cpu"),
        group_indices=lambda layer: groups,
        parts=parts,
        layout=SimpleNamespace(rank=0),
        plan=SimpleNamespace(of_layer={}),
        shards={},
        params={},
    )


def make(
    kind=KFACGradient,
    *,
    layers="a",
    groups=None,
    batched=False,
    adam=PLAIN,
    based=None,
    exchange=None,
    values=1.0,
    **preconditioner,
):
    """A direction over layers of one shape, with random eigenbases of those in ``based`` (None:
    all).

    Args:
        groups: the optimizer's parameter groups.
        exchange: options of :func:`exchange_of`.
        values: what eigenvalues are multiplied by.
    """
    specs = tuple(linear_layer(name, COLUMNS, ROWS) for name in layers)
    block = {"preconditioner": {"kl_clip": 0.001, **preconditioner}, "adam": adam}
    plan = planned(block, batched=batched)
    plan.layers = specs
    exchange = exchange_of(specs, **(exchange or {}))
    if kind is KFACGradient:
        moments = KFACGradientRule().moments(plan.config)
        direction = kind(plan, exchange, moments, SimpleNamespace(nu=None))
    elif issubclass(kind, SoftSign):
        direction = kind(plan, exchange, Mean)
    else:
        optimizer = SimpleNamespace(
            slices={},
            used=torch.zeros(0),
            adam_ratio=1.0,
            check_parts=lambda **_: None,
            taken_away=lambda: frozenset(),
        )
        direction = kind(plan, exchange, optimizer)
    for group in direction.layer_groups:
        for index, name in enumerate(group.names):
            place = layers.index(name)
            if based is None or name in based:
                basis = random_basis(ROWS, COLUMNS, seed=place)
                A, G = (replace(side, values=values * side.values) for side in (basis.A, basis.G))
                group.rebase(index, A=A, G=G)
            group.terms[index] = 7.0 + place
    direction.param_groups = groups or [{"lr": RATE}]
    return direction


def gradients_of(layers: str, times=()) -> dict[str, torch.Tensor]:
    """Random ones by layer, multiplied by ``times``."""
    gradients = {}
    for index, name in enumerate(layers):
        generator = torch.Generator().manual_seed(100 + index)
        gradients[name] = torch.randn(ROWS, COLUMNS, generator=generator) * (
            times[index] if times else 1.0
        )
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


BIAS = {"parts": lambda layer, matrix: (matrix[:, :-1].flatten(), matrix[:, -1]), "groups": (0, 1)}
"""The last column is a bias with a parameter group of its own."""


def of_rates(*rates) -> dict:
    return {"exchange": BIAS, "groups": [{"lr": rate} for rate in rates]}


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

    def layer(self, context, layer, gradient, basis, moments):
        return super().layer(context, layer, gradient.nan_to_num(0.0, 1.0, -1.0), basis, moments)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KFACGradient, of_rates(0.3, 0.3)),
        (KFACGradient, of_rates(0.3, 0.2)),
        (KFACGradient, {"eigenvalues": "corrected"}),
        (KFACGradient, {"values": math.nan}),
        (SoftSign, {}),
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
    exchange, moments = exchange_of([layer]), KFACGradientRule().moments(plan.config)
    direction = KFACGradient(plan, exchange, moments, SimpleNamespace(nu=None))
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


def factor_terms(adam: dict) -> dict:
    """How close two steps are: into the eigenbasis and back, and an orthogonal factor if one is
    taken."""
    if adam == PLAIN:
        return {"sums": 2 * SUMS}
    _, results, _ = stepped(AdamDirection, groups=ADAM, adam=PLAIN)
    return {"sums": (2 + 5 * 3) * SUMS, "condition": polar_condition(results["a"])}


@pytest.mark.parametrize("adam", [ORTHOGONAL, PLAIN])
@pytest.mark.parametrize("batched", [False, True])
def test_a_layer_stands_still_whose_gradient_is_zero_or_not_finite_or_too_large_for_moments(
    batched, adam
):
    times = (1.0, 0.0, 1e20, math.inf, math.nan, 1e-20)
    options = {"groups": ADAM, "adam": adam}
    outcome, results, moments = stepped(
        AdamDirection, layers="abcdef", batched=batched, times=times, **options
    )
    _, alone, _ = stepped(AdamDirection, **options)
    close(results["a"], alone["a"], **factor_terms(adam))
    for name in "bcde":
        exact(results[name], torch.zeros(ROWS, COLUMNS))
        assert (
            not moments[name].updates
            and not moments[name].second_OI.any()
            and not moments[name].first_OI.any()
        )
    assert moments["f"].updates == 1 and (results["f"] != 0).all()
    direction = make(AdamDirection, layers="abcdef", batched=batched, **options)
    used = dict(zip(direction.names, outcome.flags.tolist(), strict=True))
    assert used == {"a": 1, "b": 0, "c": 0, "d": 0, "e": 0, "f": 1}, (
        "layers that are not used do not decay"
    )
    assert (int(outcome.unused), int(outcome.replaced)) == (1, 2)
    assert [name for name, flag in zip(direction.names, outcome.left_out, strict=True) if flag] == [
        "c"
    ]
    squares = sum(results[name].double().square().sum() for name in "af")
    close(outcome.numbers[0], squares, sums=2 * ROWS * COLUMNS)


def test_adam_takes_the_betas_of_the_layers_own_group():
    groups = [
        {"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1},
        {"lr": RATE, "betas": (0.1, 0.2), "eps": 10.0},
    ]
    _, results, moments = stepped(AdamDirection, groups=groups)
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


@pytest.mark.parametrize("kind", [KFACGradient, AdamDirection])
def test_a_step_that_was_recorded_without_a_basis_uses_the_first_one(kind):
    results, replays = [], []
    for steady in (1, math.inf):  # recorded at the second step; never
        with taped(steady) as repeated:
            direction = make(kind, batched=True, based="", groups=ADAM)
            for step in range(4):
                if step == 3:
                    basis = random_basis(ROWS, COLUMNS)
                    direction.layer_groups[0].rebase(0, A=basis.A, G=basis.G)
                direction.exchange.begin()
                direction.step(StepContext(step, ADAM), whole(gradients_of("a")))
        results.append(direction.exchange.results["a"].clone())
        replays.append(repeated[0])
    assert replays[0] > 0 == replays[1]
    exact(*results)
