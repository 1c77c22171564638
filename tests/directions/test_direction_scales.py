"""kl-clip's factor, batches of layers, copies, parameter groups and layers that stand still in one
direction, without an engine."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ds_kfac.directions.direction import Outcome, StepContext
from ds_kfac.directions.kfac_adamw import direction as kfac_adamw_direction
from ds_kfac.directions.kfac_adamw.direction import AdamDirection
from ds_kfac.directions.kfac_adamw.group_step import BASE, GroupStep
from ds_kfac.directions.kfac_adamw.optimizer import LayerSlice
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.directions.kfac_gradient import KFACGradient, KFACGradientRule
from ds_kfac.ops import functional
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.newton_schulz import orthogonal_factors
from ds_kfac.zero.shards import Shard
from tests.choices import planned
from tests.close import close, exact, polar_condition
from tests.directions.outbox import exchange_of, whole
from tests.models import linear_layer
from tests.tape import taped
from tests.update.test_moments import random_basis

ROWS, COLUMNS, RATE = 5, 8, 0.3
SUMS = ROWS + COLUMNS
"""Of a product with both bases."""
CPU = torch.device("cpu")
PLAIN, ORTHOGONAL = {"except_layers": [".*"]}, {"except_layers": []}


def make(
    kind=KFACGradient,
    *,
    layers="a",
    copies: int = 1,
    blocks: tuple[int, ...] = (),
    groups=None,
    batched=False,
    adam=None,
    based=None,
    optimizer=None,
    damping=None,
    **preconditioner,
):
    """A direction over layers of one shape, with random eigenbases of those in ``based`` (None:
    all).

    Args:
        groups: the optimizer's parameter groups.
    """
    specs = tuple(
        replace(linear_layer(name, COLUMNS, ROWS), copies=copies, blocks=blocks) for name in layers
    )
    block = {
        "preconditioner": {"kl_clip": 0.001, **preconditioner},
        "adam": adam or PLAIN,
        "damping": damping or {},
    }
    plan = planned(block, batched=batched)
    plan.layers = specs
    if kind is KFACGradient:
        moments = KFACGradientRule().moments(plan.config)
        direction = kind(plan, exchange_of(specs), moments, SimpleNamespace(nu=None))
    else:
        optimizer = optimizer or SimpleNamespace(
            slices={},
            used=torch.zeros(0),
            adam_ratio=1.0,
            check_parts=lambda **_: None,
            taken_away=lambda: frozenset(),
        )
        direction = kind(plan, exchange_of(specs), optimizer)
    for group in direction.layer_groups:
        for index, name in enumerate(group.names):
            place = layers.index(name)
            basis = random_basis(ROWS, COLUMNS, seed=place)
            if based is None or name in based:
                group.rebase(index, A=basis.A, G=basis.G)
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


def stepped(*arguments, layers="a", times=(), **options):
    """A direction's outcome of one step, its results and its moments by layer."""
    direction = make(*arguments, layers=layers, **options)
    context = StepContext(0, direction.param_groups)
    outcome = direction.step(context, whole(gradients_of(layers, times)))
    moments = {
        name: group.state(i).moments
        for group in direction.layer_groups
        for i, name in enumerate(group.names)
    }
    return outcome, direction.exchange.results, moments


def test_corrected_eigenvalues_are_in_units_of_the_fisher():
    """Loss terms times the squared gradient."""
    _, _, moments = stepped(eigenvalues="corrected")
    rotated = random_basis(ROWS, COLUMNS, seed=0).rotate(gradients_of("a")["a"])
    close(moments["a"].second_OI, 7 * rotated.square(), sums=SUMS)


def test_nu_is_for_layers_that_are_prepared_only():
    direction = make(layers="ab")
    flags = torch.tensor([True, False])
    scales = direction.finish(StepContext(0, []), Outcome(), [torch.tensor(0.1)], flags)
    close(scales["a"], torch.tensor((0.001 / 0.1) ** 0.5))
    assert scales["b"] == 1 and direction.metrics.nu == scales["a"]


def test_a_flag_of_each_layer_travels_only_where_it_is_asked_for():
    rule = KFACGradientRule()
    assert rule.flags(planned({}).config)
    fades = {"schedule": "linear", "start": 0.001, "end": 0, "steps": 10}
    assert rule.flags(planned({"preconditioner": {"kl_clip": fades}}).config)
    assert not rule.flags(planned({"preconditioner": {"kl_clip": 0}}).config)
    assert KFACAdamWRule().flags(planned({}).config), "layers that were not used do not decay"


@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_layers_of_a_batch_get_their_own_results(eigenvalues):
    names = "abc"
    assert [len(group.layers) for group in make(layers=names, batched=True).layer_groups] == [3]
    batched, together, moments = stepped(layers=names, batched=True, eigenvalues=eigenvalues)
    alone, one_by_one, own = stepped(layers=names, eigenvalues=eigenvalues)
    for name in names:
        close(together[name], one_by_one[name], sums=2 * SUMS)
        if eigenvalues == "corrected":
            close(moments[name].second_OI, own[name].second_OI, sums=SUMS)
    close(batched.numbers[0], alone.numbers[0], sums=3 * (SUMS + ROWS * COLUMNS))


@pytest.mark.parametrize("kind", [KFACGradient, AdamDirection])
def test_copies_of_a_layer_count_once_over_their_ranks(kind):
    once, *_ = stepped(kind, groups=ADAM)
    twice, *_ = stepped(kind, groups=ADAM, copies=2)
    for number, other in zip(once.numbers, twice.numbers, strict=True):
        close(2 * other, number, sums=ROWS * COLUMNS)


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


@pytest.mark.parametrize("damping", [{"kind": "relative"}, {"kind": "tikhonov", "value": 0.1}])
@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_an_unused_layer_does_not_count_as_one_that_is_not_finite(eigenvalues, damping):
    outcome, results, _ = stepped(
        layers="ab", times=(1.0, 0.0), eigenvalues=eigenvalues, damping=damping
    )
    assert outcome.replaced == 0 and not results["b"].any() and results["a"].any()


@pytest.mark.parametrize("blocks", [(), (1,) * ROWS, (2, 3)])
@pytest.mark.parametrize("layers", ["a", "abc"])
def test_kernels_get_memory_without_gaps(layers, blocks, monkeypatch):
    """Triton's would leave anything else to plain torch, silently."""
    called = []

    def checked(op):
        def run(*tensors, **options):
            called.append(op.__name__)
            assert all(x.is_contiguous() for x in tensors if x is not None), [
                x.stride() for x in tensors
            ]
            op(*tensors, **options)

        return run

    for op in (functional.adam_step_, functional.finish_direction_):
        monkeypatch.setattr(kfac_adamw_direction, op.__name__, checked(op))
    stepped(AdamDirection, layers=layers, batched=True, blocks=blocks, groups=ADAM, adam=ORTHOGONAL)
    assert called == ["adam_step_", "finish_direction_"]


def test_layers_of_two_domains_have_places_of_their_own_in_what_the_optimizer_is_told():
    """Also on a rank that holds no slice of the first one's."""
    dense = make(AdamDirection, layers="abc", groups=ADAM)
    optimizer = dense.optimizer
    experts = make(AdamDirection, layers="d", groups=ADAM, optimizer=optimizer)
    for direction, flags in ((dense, [True, False, True]), (experts, [True])):
        direction.finish(StepContext(0, ADAM), Outcome(), [torch.tensor(4.0)], torch.tensor(flags))
    assert optimizer.used.tolist() == [1, 0, 1, 1]


def test_the_optimizer_is_told_which_layers_of_all_ranks_a_step_used():
    direction = make(AdamDirection, layers="abc", groups=ADAM)
    flags = torch.tensor([True, False, True])
    assert direction.finish(StepContext(0, ADAM), Outcome(), [torch.tensor(4.0)], flags) is None
    assert direction.optimizer.used.tolist() == [1, 0, 1]
    assert direction.last == (4.0, RATE)


def test_slices_of_frozen_parameters_do_not_decay():
    """Those of the other parameters, and of another domain's layers, are told again."""
    direction = make(AdamDirection, groups=ADAM)
    master, other_master = torch.zeros(14), torch.zeros(3)
    other = [LayerSlice(0, 3, 7)]
    optimizer = SimpleNamespace(slices={other_master: other}, used=torch.ones(8))
    weight, bias = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    exchange = direction.exchange
    exchange.plan = SimpleNamespace(of_layer={"a": (0, 1)})
    exchange.params = {"a": [weight, bias]}
    exchange.shards = {0: [Shard(0, 0, 9, 0, 0, 2)], 1: [Shard(1, 0, 3, 0, 0, 11)]}
    exchange.layout.master = lambda shard: master
    direction.optimizer = optimizer
    step = partial(
        direction.finish,
        StepContext(0, ADAM),
        Outcome(),
        [torch.tensor(4.0)],
        torch.tensor([True]),
    )
    for trained, expected in (
        (True, [(2, 9, 0), (11, 3, 0)]),
        (False, [(2, 9, 0)]),
        (True, [(2, 9, 0), (11, 3, 0)]),
    ):
        bias.requires_grad_(trained)
        step()
        assert optimizer.slices == {other_master: other, master: expected}


def test_a_later_domain_has_places_of_its_own_where_the_rank_has_no_slice_of_the_first_one():
    """As where ZeRO gives a rank nothing of a few small layers: else flags of both would be written
    to one place."""
    first = make(AdamDirection, layers="abc", groups=ADAM)
    optimizer = first.optimizer
    assert optimizer.slices == {}, "the exchange has no shards"
    plan = planned({"preconditioner": {"kl_clip": 0.001}, "adam": PLAIN}, batched=False)
    plan.layers = (linear_layer("d", COLUMNS, ROWS),)
    second = AdamDirection(plan, exchange_of(plan.layers), optimizer)
    for direction, flags in ((first, [True, False, True]), (second, [True])):
        direction.finish(StepContext(0, ADAM), Outcome(), [torch.tensor(4.0)], torch.tensor(flags))
    assert optimizer.used.tolist() == [1, 0, 1, 1]


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


@pytest.mark.parametrize(("terms", "kept"), [(None, 3.0), (0.0, 3.0), (5.0, 5.0)])
def test_a_batch_without_terms_leaves_those_of_the_last(terms, kept):
    direction = make()
    (group,) = direction.layer_groups
    group.terms.fill_(3.0)
    update = SimpleNamespace(bases={}, terms={} if terms is None else {"a": torch.tensor(terms)})
    kfac = SimpleNamespace(places={"a": (group, 0)}, curvature=SimpleNamespace(of_layer={}))
    KFACPreconditioner._rebase(kfac, update)
    assert group.state(0).terms == kept


@pytest.mark.parametrize("experts", [1, 2])
def test_orthogonalized_rows_are_put_back_where_they_lay(experts):
    """A head's queries and keys follow each other: the rows of a map lie apart."""
    direction = make(AdamDirection, adam=ORTHOGONAL, groups=ADAM)
    layers = [replace(linear_layer(name, 4, 6), blocks=(1, 2)) for name in "ab"[:experts]]
    step = GroupStep(LayerGroup(layers), slice(0, experts), direction.config.adam, 1.0, CPU)
    step.x_nOI = torch.randn((experts, 6, 4), generator=torch.Generator().manual_seed(0))
    before = step.x_nOI.clone()
    direction._orthogonalize([step])
    for rows in ([0, 3], [1, 2, 4, 5]):
        orthogonal_factors([wanted := before[:, rows].contiguous()])
        close(step.x_nOI[:, rows], wanted, sums=100, what=str(rows))


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
