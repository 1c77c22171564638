"""Decompositions of factors in engines: inverses, and eigenbases made of the last ones. That they
train like the oracle is in tests/deepspeed/features.py."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_kfac.assignment import assign
from ds_kfac.assignment.assign import place_owners
from ds_kfac.plan import common
from tests.choices import STAGGERED
from tests.close import exact
from tests.deepspeed import expert_stacks
from tests.deepspeed.features import DAMPINGS, INVERSE, NO_G, as_on_a_gpu, merged
from tests.deepspeed.modes import KFAC, OPTIMIZERS, Mode
from tests.deepspeed.parallel import shared_folder
from tests.deepspeed.runs import build, train, weights
from tests.ranks import of_ranks


def inverses(stage: int, *blocks: dict) -> Mode:
    kfac = merged(KFAC, INVERSE, DAMPINGS["relative"], {"factor": {"rows": "all"}}, *blocks)
    return Mode("inverse", stage, kfac=kfac, inner=OPTIMIZERS["bf16"])


def iterated(stage: int, *blocks: dict) -> Mode:
    """KFACAdamW as on a GPU."""
    kfac = merged(KFAC, NO_G, {"burn_in": {"steps": 0}}, *blocks)
    return Mode("iterated", stage, adam=True, orthogonal=True, kfac=kfac)


LATE = {"eigenbasis": {"refresh_interval": 3}}
SPREAD = {**LATE, "plan": STAGGERED}
ALL_WORKERS = {"assignment": {"gradient_worker_fraction": 1.0}}
RESUMED = [
    inverses(3, LATE),
    inverses(2, SPREAD, {"adaptive": 0.1}),
    iterated(0, ALL_WORKERS, {"adaptive": 0.9}),
    iterated(3, SPREAD),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", RESUMED, ids=[f"{mode.name} z{mode.stage}" for mode in RESUMED])
def test_resuming_equals_not_stopping(mode):
    """Iterated ones past their tenth refresh, which is by eigh."""
    folder = shared_folder()
    before, after = (5, 19) if mode.adam else (4, 4)
    with as_on_a_gpu():
        first, second = build(mode), build(mode, seed=99)
        train(first, 1, steps=before)
        first.save_checkpoint(folder)
        second.load_checkpoint(folder)
        for engine in (first, second):
            train(engine, 1, steps=after, first=before)
    exact(weights(second), weights(first))
    assert (second.kfac.counters()["refreshes_iteration"] > 0) == mode.adam


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("methods", "kind"),
    [(("eigen", "inverse"), "DampedInverse"), (("inverse", "eigen"), "Eigenbasis")],
)
def test_a_state_of_one_method_is_decomposed_anew_by_the_other(methods, kind):
    folder = shared_folder()
    saved, loaded = (
        build(inverses(2, LATE, {"preconditioner": {"method": method}})) for method in methods
    )
    train(saved, 1, steps=4)
    saved.save_checkpoint(folder)
    loaded.load_checkpoint(folder)
    factors, states = loaded.kfac.preconditioner.curvature.factors, loaded.kfac.preconditioner.state
    for key, factor in saved.kfac.preconditioner.curvature.factors.items():
        exact(factors[key].packed_P, factor.packed_P, what=key)
    for state in states.values():
        assert type(state.A).__name__ == type(state.G).__name__ == kind
    assert all(loss < 10 for loss in train(loaded, 1, steps=5, first=4))


@pytest.mark.ranks(1)
def test_the_burn_in_and_every_tenth_refresh_after_it_are_by_eigh_and_the_gradients_all():
    """Of twelve refreshes, the first two of them in the burn-in."""
    blocks = {"burn_in": {"steps": 4}, "eigenbasis": {"refresh_interval": 2}}
    adam = iterated(2, blocks)
    kfac = merged(adam.kfac, {"factor": {"fisher": "empirical"}})
    gradient = replace(adam, adam=False, kfac=kfac)
    for mode, iterations in ((adam, 9 * 3), (gradient, 0)):
        with as_on_a_gpu():
            engine = build(mode, 4)
            train(engine, 4, steps=24)
        counters = engine.kfac.counters()
        assert counters["refreshes_iteration"] == iterations and not counters["refresh_retries"]
        assert ("orthogonal iteration" in engine.kfac.report) == mode.adam
        if mode.adam:
            assert counters["refreshes"] == 12 * 3 and counters["refreshes_eigh"] == 3 * 3


def of_another_layer(work, workers, **options):
    """As the plan places owners where that pays: on a rank that has another of the layers
    than the first."""
    placed = place_owners(work, workers, **options)
    return placed | {factor.key: workers[factor.layers[-1]][0] for factor in work.factors}


@pytest.mark.ranks(4)
def test_a_shared_factor_is_iterated_from_the_basis_of_a_layer_that_its_owner_has():
    rows = 12
    with (
        as_on_a_gpu(),
        patch.object(assign, "place_owners", of_another_layer),
        patch.multiple(common, OWN_PART=0.0, OWN_BYTES=0),
    ):
        model = expert_stacks.make(expert_stacks.Upright)
        engine = build(iterated(2), model=model, train_micro_batch_size_per_gpu=rows)
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        for _ in range(4):
            engine.backward(engine(*expert_stacks.batch(rows, generator)))
            engine.step()
    kfac = engine.kfac.preconditioner
    roles = kfac.plan.assignment
    shared = [factor for factor in roles.factors if factor.layers[1:]]
    assert any(roles.owners[f.key] != roles.workers[f.layers[0]][0] for f in shared)
    assert sum(of_ranks(kfac.metrics.counts["refreshes_iteration"])) > 0
