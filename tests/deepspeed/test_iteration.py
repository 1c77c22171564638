"""KFACAdamW's refreshes as on a GPU, from the last eigenbasis: like the oracle, resumed to the bit,
exact where due."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from ds_kfac.assignment import assign
from ds_kfac.assignment.assign import place_eigen_workers
from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.curvature import eigen
from ds_kfac.plan import common
from tests.choices import STAGGERED
from tests.deepspeed import expert_stacks
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, compare, train, weights
from tests.models import make_net
from tests.oracle import ReferenceKFAC
from tests.ranks import run_ranks
from tests.spread import within

pytestmark = pytest.mark.distributed
CPU = frozenset({"cpu"})
ROWS = 12
"""Of experts, a rank."""


@contextmanager
def as_on_a_gpu():
    """Refreshes on this CPU, and the plan's rates, are those of a GPU; and so is the oracle."""
    rates = replace(BUILTIN["cpu"], ieee_flops=1e11)
    with ExitStack() as stack:
        stack.enter_context(patch.object(eigen, "GROUPED", CPU))
        stack.enter_context(patch.object(ReferenceKFAC, "iterates", CPU))
        stack.enter_context(patch.dict(BUILTIN, {"cpu": rates}))
        yield


def mode(stage: int, fisher: str = "activations_only", **kfac) -> Mode:
    factor = {**KFAC["factor"], "fisher": fisher, **kfac.pop("factor", {})}
    kfac = {"burn_in": {"steps": 0}, **kfac}
    return Mode("iteration", stage, adam=True, orthogonal=True, kfac={**kfac, "factor": factor})


COMPARED = {
    "stage 0": mode(0, assignment={"gradient_worker_fraction": 1.0}),
    "stage 2, with G": mode(2, "empirical"),
    "stage 3, blocks": mode(3, factor={"dense_max": 6}),
    "stage 1, of one worker": mode(1),
    "stage 1, in the burn-in": mode(1, burn_in={}),
}


def compare_worker(_) -> dict:
    with as_on_a_gpu(), patch.dict(BY_NAME, COMPARED):
        return compare([(name, 4) for name in COMPARED])


@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_like_the_oracle(world):
    found = run_ranks("tests.deepspeed.test_iteration:compare_worker", world=world)[0]
    for (name, _), result in found.items():
        iterated = result["counts"].get("refreshes_iteration", 0) > 0
        assert iterated == ("burn-in" not in name) and not result["counts"].get(
            "refresh_retries"
        ), name
        assert not within(name, result["difference"], result["bound"])


RESUMED = {
    "stage 0": mode(0, assignment={"gradient_worker_fraction": 1.0}),
    "stage 2": mode(2),
    "stage 3, staggered": mode(3, eigenbasis={"refresh_interval": 3}, plan=STAGGERED),
    "adaptive": mode(2, adaptive=0.9),
}


def resume_worker(folder: str) -> dict:
    """Four steps, a save, a load into another seed's engine and nineteen more, past the tenth
    refresh."""
    results = {}
    with as_on_a_gpu():
        for name, given in RESUMED.items():
            path = f"{folder}/{name.replace(' ', '_')}"
            first = build(given, 1)
            train(first, 1, steps=5)
            first.save_checkpoint(path)
            train(first, 1, steps=19, first=5)
            second = build(given, 1, model=make_net(seed=99))
            second.load_checkpoint(path)
            train(second, 1, steps=19, first=5)
            after, expected = weights(second), weights(first)
            iterated = second.kfac.counters()["refreshes_iteration"]
            results[name] = (
                max(float((after[n] - expected[n]).abs().max()) for n in expected),
                iterated > 0,
            )
            first.destroy()
            second.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_equals_not_stopping(world, tmp_path):
    for result in run_ranks(
        "tests.deepspeed.test_iteration:resume_worker", world=world, payload=str(tmp_path)
    ):
        assert result == dict.fromkeys(RESUMED, (0.0, True))


def counters_worker(_) -> dict:
    """Of twelve refreshes, the first two of them in the burn-in."""
    found = {}
    blocks = {"burn_in": {"steps": 4}, "eigenbasis": {"refresh_interval": 2}}
    for name, given in (
        ("adam", mode(2, **blocks)),
        ("gradient", replace(mode(2, "empirical", **blocks), adam=False)),
    ):
        with as_on_a_gpu():
            engine = build(given, 4)
            train(engine, 4, steps=24)
            found[name] = engine.kfac.counters()
            found[f"{name} report"] = engine.kfac.report
            engine.destroy()
    return found


def test_the_burn_in_and_every_tenth_refresh_after_it_are_by_eigh_and_the_gradients_all():
    (found,) = run_ranks("tests.deepspeed.test_iteration:counters_worker", world=1)
    adam, gradient = found["adam"], found["gradient"]
    assert adam["refreshes"] == 12 * 3
    assert (adam["refreshes_eigh"], adam["refreshes_iteration"]) == (3 * 3, 9 * 3)
    assert not adam.get("refresh_retries")
    assert gradient["refreshes_iteration"] == 0
    assert (
        "orthogonal iteration" in found["adam report"]
        and "orthogonal iteration" not in found["gradient report"]
    )


def of_another_layer(work, workers, **options):
    """As the plan places eigen workers where that pays: on a rank that has another of the layers
    than the first."""
    placed = dict(place_eigen_workers(work, workers, **options))
    for factor in work.factors:
        others = {rank for name in factor.layers for rank in workers[name]} - set(
            workers[factor.layers[0]]
        )
        placed[factor.key] = min(others, default=placed[factor.key])
    return placed


def shared_worker(_) -> tuple[list[tuple[int, int]], int]:
    """(eigen worker, worker of the first layer) of each A that several layers share; and iterated
    refreshes."""
    with (
        as_on_a_gpu(),
        patch.object(assign, "place_eigen_workers", of_another_layer),
        patch.multiple(common, OWN_PART=0.0, OWN_BYTES=0),
    ):
        model = expert_stacks.make(expert_stacks.Upright)
        engine = build(mode(2), 1, model=model, train_micro_batch_size_per_gpu=ROWS)
        kfac, generator = (
            engine.kfac.preconditioner,
            torch.Generator().manual_seed(7 + torch.distributed.get_rank()),
        )
        for _ in range(4):
            x = torch.randn(ROWS, expert_stacks.WIDTH, generator=generator)
            engine.backward(
                engine(x, torch.randint(expert_stacks.CLASSES, (ROWS,), generator=generator))
            )
            engine.step()
        roles, counts = kfac.plan.assignment, kfac.metrics.counts
        pairs = [
            (roles.eigen_workers[f.key], roles.workers[f.layers[0]][0])
            for f in roles.factors
            if f.layers[1:]
        ]
        return pairs, counts["refreshes_iteration"]


def test_a_shared_factor_is_iterated_from_the_basis_of_a_layer_that_its_eigen_worker_has():
    pairs, iterated = run_ranks("tests.deepspeed.test_iteration:shared_worker", world=4)[0]
    assert any(eigen != first for eigen, first in pairs), pairs
    assert iterated > 0
