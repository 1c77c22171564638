"""Loss scales, kl-clip's factor, batches of layers, copies and parameter groups in one direction, without an engine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_kfac.directions.base import StepContext
from ds_kfac.directions.kfac_adamw.direction import AdamDirection
from ds_kfac.directions.kfac_adamw.group_step import BASE, GroupStep
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.directions.kfac_gradient import KFACGradient, KFACGradientRule
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.newton_schulz import orthogonal_factors
from ds_kfac.update.state import AdamMoments, LayerState
from ds_kfac.zero.layout import ReplicatedHalf, ShardLayout
from ds_kfac.zero.stages import Stage12
from tests.choices import planned
from tests.close import close, exact, near, polar_condition
from tests.directions.outbox import Results
from tests.models import linear_layer
from tests.update.test_moments import random_basis

ROWS, COLUMNS, RATE = 5, 8, 0.3
SUMS = ROWS + COLUMNS
"""Of a product with both bases."""
CPU = torch.device("cpu")
PLAIN, ORTHOGONAL = {"except_layers": [".*"]}, {"except_layers": []}


def apply(local) -> None:
    for pending in local.pending:
        pending.commit()


def make(
    kind=KFACGradient,
    *,
    scale: float = 1.0,
    layers=("a",),
    copies: int = 1,
    groups=None,
    batched=False,
    adam=None,
    times=(),
    norm=None,
    **preconditioner,
):
    """A direction over layers of one shape, with states that have eigenbases, and gradients that carry ``scale``, and
    are multiplied by ``times``."""
    specs = tuple(replace(linear_layer(name, COLUMNS, ROWS), copies=copies) for name in layers)
    plan = planned({"preconditioner": {"kl_clip": 0.001, **preconditioner}, "adam": adam or PLAIN}, batched=batched)
    exchange = SimpleNamespace(
        owned=specs,
        device=CPU,
        group_indices=lambda layer: (0,),
        parts=lambda layer, matrix: (matrix.flatten(),),
        outbox=Results,
    )
    optimizer = SimpleNamespace(param_groups=groups or [{"lr": RATE}], adam_ratio=1.0)
    engine = SimpleNamespace(gradient_clipping=lambda: 0.0)
    layout = SimpleNamespace(
        grad_scale=lambda: scale, optimizer=optimizer, engine=engine, clip_factor=lambda norm: 0.5 / norm,
        last_first=False, rank=0,
    )  # fmt: skip
    if kind is KFACGradient:
        moments = KFACGradientRule().moments(plan.config)
        direction = kind(plan, layout, exchange, SimpleNamespace(nu=None))
    else:
        moments = AdamMoments
        optimizer = SimpleNamespace(
            direction_scale=None, adam_ratio=1.0, check_parts=lambda here: None, state={}, marked=0
        )
        direction = kind(plan, layout, exchange, optimizer)
    states, gradients = {}, {}
    for index, spec in enumerate(specs):
        basis = random_basis(ROWS, COLUMNS, seed=index)
        state = LayerState.empty(spec, CPU, moments=moments).rebased(A=basis.A, G=basis.G)
        states[spec.name] = replace(state, terms=torch.tensor(7.0 + index))
        generator = torch.Generator().manual_seed(100 + index)
        gradients[spec.name] = scale * torch.randn(ROWS, COLUMNS, generator=generator)
        if times:
            gradients[spec.name] *= times[index]
    local = direction.local(StepContext(0, norm, {}), dict(gradients), dict(states))
    apply(local)
    return direction, local, gradients


@pytest.mark.parametrize("kind", ["tikhonov", "relative"])
@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_a_loss_scale_passes_through(eigenvalues, kind):
    options = {"eigenvalues": eigenvalues}
    _, plain, _ = make(**options)
    for scale in (4.0, 1024.0):  # powers of 2: exact
        _, scaled, _ = make(scale=scale, **options)
        exact(scaled.outbox["a"] / scale, plain.outbox["a"])
        close(scaled.numbers[0], plain.numbers[0], sums=ROWS * COLUMNS)
        if eigenvalues == "corrected":
            exact(scaled.states["a"].moments.second_OI, plain.states["a"].moments.second_OI)
    if eigenvalues == "corrected":  # in units of the Fisher: loss terms times the squared gradient
        _, one, gradients = make(**options)
        rotated = random_basis(ROWS, COLUMNS, seed=0).rotate(gradients["a"])
        close(one.states["a"].moments.second_OI, 7 * rotated.square(), sums=SUMS)


def test_nu_is_for_layers_that_are_prepared_only():
    direction, local, _ = make()
    ready = {"a": torch.tensor(True), "b": torch.tensor(False)}
    scales = direction.finish(0, local, [torch.tensor(0.1)], ready)
    close(scales["a"], torch.tensor((0.001 / 0.1) ** 0.5))
    assert scales["b"] == 1 and direction.metrics.nu == scales["a"]


def test_a_flag_of_each_layer_travels_only_where_nu_is_asked_for():
    rule = KFACGradientRule()
    assert rule.asks_prepared(planned({}).config)
    fades = {"schedule": "linear", "start": 0.001, "end": 0, "steps": 10}
    assert rule.asks_prepared(planned({"preconditioner": {"kl_clip": fades}}).config)
    assert not rule.asks_prepared(planned({"preconditioner": {"kl_clip": 0}}).config)
    assert not KFACAdamWRule().asks_prepared(planned({}).config)


@pytest.mark.parametrize("eigenvalues", ["kronecker", "corrected"])
def test_layers_of_a_batch_get_their_own_results(eigenvalues):
    names = ("a", "b", "c")
    direction, batched, _ = make(layers=names, batched=True, eigenvalues=eigenvalues)
    assert [len(group.layers) for group in direction.layer_groups] == [3]
    _, alone, _ = make(layers=names, eigenvalues=eigenvalues)
    for name in names:
        close(batched.outbox[name], alone.outbox[name], sums=2 * SUMS)
        if eigenvalues == "corrected":
            mine, own = (local.states[name].moments for local in (batched, alone))
            close(mine.second_OI, own.second_OI, sums=SUMS)
    close(batched.numbers[0], alone.numbers[0], sums=3 * (SUMS + ROWS * COLUMNS))


@pytest.mark.parametrize("kind", [KFACGradient, AdamDirection])
def test_copies_of_a_layer_count_once_over_their_ranks(kind):
    groups = [{"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1}]
    _, once, _ = make(kind, groups=groups)
    _, twice, _ = make(kind, groups=groups, copies=2)
    for number, other in zip(once.numbers, twice.numbers, strict=True):
        close(2 * other, number, sums=ROWS * COLUMNS)


ADAM = [{"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1}]


def factor_terms(adam: dict) -> dict:
    """How close two steps are: into the eigenbasis and back, and an orthogonal factor if one is taken."""
    _, direction, _ = make(AdamDirection, groups=ADAM, adam=PLAIN)
    if adam == PLAIN:
        return {"sums": 2 * SUMS}
    return {"sums": (2 + 5 * 3) * SUMS, "condition": polar_condition(direction.outbox["a"])}


@pytest.mark.parametrize("adam", [ORTHOGONAL, PLAIN])
@pytest.mark.parametrize("batched", [False, True])
def test_only_gradients_that_moments_can_hold_are_stepped_along(batched, adam):
    times = (1.0, 0.0, 1e20, math.inf, math.nan, 1e-20)
    _, local, _ = make(AdamDirection, layers="abcdef", groups=ADAM, batched=batched, adam=adam, times=times)
    _, alone, _ = make(AdamDirection, groups=ADAM, adam=adam)
    close(local.outbox["a"], alone.outbox["a"], **factor_terms(adam))
    for name in "bc":  # +0: not even decay
        assert not local.outbox[name].view(torch.int32).any()
        assert not local.states[name].moments.updates and not local.states[name].moments.second_OI.any()
    for name in "de":  # DeepSpeed finds it
        assert not torch.isfinite(local.outbox[name]).all() and not local.states[name].moments.updates
    assert local.states["f"].moments.updates == 1 and (local.outbox["f"] != 0).all()
    assert (int(local.unused), int(local.replaced)) == (1, 2)
    assert [name for name, flag in zip("abcdef", local.left_out, strict=True) if flag] == ["c"]
    assert not math.isfinite(local.numbers[0])


def test_a_norm_that_is_none_leaves_every_gradient_at_its_own():
    _, local, gradients = make(AdamDirection, layers="ab", groups=ADAM, times=(3e19, 0.0), norm=torch.tensor(math.inf))
    close(local.outbox["a"].norm(), gradients["a"].norm(), sums=ROWS * COLUMNS)
    assert not local.outbox["b"].view(torch.int32).any() and not local.states["a"].moments.updates
    assert int(local.replaced) == 2


@pytest.mark.parametrize("adam", [ORTHOGONAL, PLAIN])
def test_a_zero_of_a_layer_in_use_is_seen_to_be_in_use(adam):
    adam = {**adam, "rotate": False}
    direction, _, gradients = make(AdamDirection, groups=ADAM, adam=adam)
    gradients["a"][:, 3] = 0.0
    state = LayerState.empty(linear_layer("a", COLUMNS, ROWS), CPU, moments=AdamMoments)
    result = direction.local(StepContext(0, None, {}), gradients, {"a": state}).outbox["a"]
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        assert result.to(dtype).view(bits).all(), dtype
    assert result[:, 3].abs().max() <= 1e-29 < result[:, :3].abs().min()  # what stands for a zero, and what is none


def test_adam_takes_the_betas_of_the_layers_own_group():
    groups = [{"lr": RATE, "betas": (0.8, 0.9), "eps": 0.1}, {"lr": RATE, "betas": (0.1, 0.2), "eps": 10.0}]
    _, local, gradients = make(AdamDirection, groups=groups)
    basis = random_basis(ROWS, COLUMNS, seed=0)
    rotated = basis.rotate(gradients["a"])
    close(local.states["a"].moments.first_OI, 0.2 * rotated, sums=SUMS)
    close(local.states["a"].moments.second_OI, 0.1 * rotated.square(), sums=SUMS)
    ahead, head = 1 + 0.8 / (1 + 0.8), BASE / COLUMNS  # Nesterov's; a head's part of the rate
    close(local.outbox["a"], head * basis.restore(ahead * rotated / (rotated.abs() + 0.1)), sums=2 * SUMS)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_clip_factor_is_of_the_unscaled_norm(scale):
    engine = SimpleNamespace(optimizer=SimpleNamespace(clip_grad=0.5))
    layout = SimpleNamespace(grad_scale=lambda: scale, clips_scaled=False, engine=engine, bound=ShardLayout.bound)
    factor = ShardLayout.clip_factor(layout, torch.tensor(2.0 * scale))
    near(torch.as_tensor(factor), torch.tensor(0.25), 1e-6, "DeepSpeed adds 1e-6 to the norm")


@pytest.mark.parametrize(("recorded", "kept"), [(None, 3.0), (0.0, 3.0), (5.0, 5.0)])
def test_a_batch_without_terms_leaves_those_of_the_last(recorded, kept):
    layer = linear_layer("a", COLUMNS, ROWS)
    state = replace(LayerState.empty(layer, CPU), terms=torch.tensor(3.0))
    draft = SimpleNamespace(bases={}, terms={} if recorded is None else {"a": torch.tensor(recorded)})
    proving, states = SimpleNamespace(unfit={}), {"a": state}
    kfac = SimpleNamespace(owned=(layer,), curvature=SimpleNamespace(of_layer={}), proving=proving)
    assert not KFACPreconditioner._take_arrivals(kfac, draft, states) and states["a"].terms == kept


@pytest.mark.parametrize("kind", [ReplicatedHalf, Stage12])
def test_a_loss_scale_may_be_a_whole_number_of_any_size(kind):
    """DeepSpeed's is, until it was halved once; kl-clip squares it."""
    layout = kind.__new__(kind)
    layout.optimizer = SimpleNamespace(
        loss_scale=2**32, loss_scale_config=SimpleNamespace(cur_scale=2**32), torch_autocast_gradscaler=None
    )
    assert torch.ones(()) / layout.grad_scale() ** 2 == 2.0**-64


@pytest.mark.parametrize("experts", [1, 2])
def test_orthogonalized_rows_are_put_back_where_they_lay(experts):
    """A head's queries and keys follow each other: the rows of a map lie apart."""
    direction, *_ = make(AdamDirection, adam=ORTHOGONAL, groups=ADAM)
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
    direction, whole, gradients = make(layers="abc", batched=batched, eigenvalues=eigenvalues)
    moments, states = KFACGradientRule().moments(direction.config), {}
    for index, name in enumerate("abc"):
        basis, terms = random_basis(ROWS, COLUMNS, seed=index), torch.tensor(7.0 + index)
        state = replace(LayerState.empty(direction.exchange.owned[index], CPU, moments=moments), terms=terms)
        states[name] = state if name == "b" else state.rebased(A=basis.A, G=basis.G)
    local = direction.local(StepContext(0, None, {}), dict(gradients), states)
    exact(local.outbox["b"], gradients["b"])
    for name in "ac":
        close(local.outbox[name], whole.outbox[name], sums=2 * SUMS)
    apply(local)
    assert int(local.replaced) == 0 and states["b"].preconditioner is None
    if eigenvalues == "corrected":
        assert not states["b"].moments.updates and not states["b"].moments.second_OI.any()
        assert states["a"].moments.updates == 1
    products = torch.cat([(local.outbox[name] * gradients[name]).flatten() for name in "ac"]).double()
    sums = SUMS + ROWS * COLUMNS
    close(local.numbers[0], RATE**2 * products.sum(), sums=2 * sums, scale=RATE**2 * products.abs().sum())
