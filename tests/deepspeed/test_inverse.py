"""Method "inverse": every mode and strategy trains like tests/oracle.py; resuming is exact; what
does not go is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ds_kfac.curvature import inverse
from tests.choices import STAGGERED
from tests.deepspeed.modes import KFAC, OPTIMIZERS, Mode
from tests.deepspeed.runs import build, train, weights
from tests.deepspeed.said import error_of
from tests.deepspeed.test_scaling import compared, complaints, options
from tests.models import Net, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
INVERSE = {"preconditioner": {"method": "inverse"}, "burn_in": {"steps": 0}}
DAMPING = {
    "tikhonov": {"damping": {"kind": "tikhonov", "value": 0.03}},
    "relative": {"damping": {"kind": "relative", "value": 0.3}},
}
WIDE = {"factor": {"rows": "all", "dense_max": 6}}
WIRED = "relative, bf16 on the wire"
NO_G = {"factor": {"rows": "all", "fisher": "activations_only"}}
SCHEDULE = {"schedule": "linear", "start": 0.5, "end": 0.1, "steps": 4}


class Inverse(Mode):
    """With SGD: Adam would hide a wrong scale, and makes whole steps of the sign of a gradient that
    is nearly zero."""

    @property
    def optimizer(self) -> dict:
        return copy.deepcopy(OPTIMIZERS["bf16"])


def blocks(*parts: dict) -> dict:
    """Config blocks merged key by key."""
    merged = copy.deepcopy(INVERSE)
    for part in parts:
        for name, keys in part.items():
            merged[name] = {**merged.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return merged


def cases(world: int) -> dict:
    """Name -> (stage, blocks, what the wire may add to rounding in fp32: the reference has no
    wire). Every place on every number of ranks, with the kinds of damping by turns."""
    found = {}
    for turn, (kind, damping) in enumerate(DAMPING.items()):
        places = {
            **{
                f"{workers} workers": (
                    0,
                    {"assignment": {"gradient_worker_fraction": workers / world}},
                )
                for workers in (1, world)
            },
            **{f"stage {stage}": (stage, {}) for stage in (1, 2, 3)},
            "blocks": (0, WIDE),
            "no G": (2, NO_G),
            "scheduled": (3, {"damping": {"kind": kind, "value": SCHEDULE}}),
        }
        for index, (name, (stage, own)) in enumerate(places.items()):
            if (index + turn + (world == 2)) % 2 == 0:
                found[f"{kind}, {name}"] = (stage, blocks(damping, own), 0.0)
    relative = DAMPING["relative"]
    if world > 1:
        found["relative, offload"] = (2, blocks(relative, {"offload": {"device": "cpu"}}), 0.0)
    if world == 2:
        found[WIRED] = (3, blocks(relative, {"communication": {"dtype": "bf16"}}), 12 * 2**-8)
    return found


def of_step(kfac, step: int, *, scheduled: bool) -> None:
    if scheduled:
        kfac.damping = (
            SCHEDULE["start"] + (SCHEDULE["end"] - SCHEDULE["start"]) * step / SCHEDULE["steps"]
        )


def worker(_) -> dict:
    results = {}
    for name, (stage, given, rounding) in cases(dist.get_world_size()).items():
        rule = partial(of_step, scheduled="scheduled" in name)
        results[name] = compared(
            Inverse("inverse", stage, kfac=options(**given)), rounding, before_step=rule
        )
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_inverses_match_reference(world):
    results = run_ranks("tests.deepspeed.test_inverse:worker", world=world)
    wrong = complaints(results, lambda name: not name.startswith("tikhonov"))
    for own in results:
        for name, result in own.items():
            if name.startswith("tikhonov") != ("layers do not share A" in result["report"]):
                wrong.append(f"{name}: the report must tell whether layers share A")
            counters = result["counters"]
            other = {
                key for key, count in counters.items() if key.startswith("refreshes_") and count
            } - {"refreshes_cholesky"}
            if other or any(
                counters.get(f"sent_bytes_{kind}") for kind in ("eigenvectors", "eigenvalues")
            ):
                wrong.append(f"{name}: not only inverses: {result}")
    assert not wrong, "\n".join(wrong)
    assert all(
        sum(own[name]["counters"].get("refreshes_cholesky", 0) for own in results) > 0
        for name in results[0]
    )
    if world == 2:
        wire = results[0][WIRED]["report"]
        assert "inverses every" in wire and "inverses travel in fp32" in wire


RESUMED = {
    "stage 0": (0, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 1": (1, {}),
    "adaptive, staggered": (2, {"adaptive": 0.1, "plan": STAGGERED}),
}


def resume_worker(folder: str) -> dict:
    """Eight steps against four, a save, a load into another seed's engine and four more."""
    results = {}
    for name, (stage, given) in RESUMED.items():
        kfac = options(
            **blocks(DAMPING["relative"], {"eigenbasis": {"refresh_interval": 3}}, given)
        )
        mode, path = Inverse("inverse", stage, kfac=kfac), f"{folder}/{name.replace(' ', '_')}"
        first = build(mode, 1)
        train(first, 1, steps=4)
        first.save_checkpoint(path)
        train(first, 1, steps=4, first=4)
        second = build(mode, 1, model=make_net(seed=99))
        second.load_checkpoint(path)
        train(second, 1, steps=4, first=4)
        after, expected = weights(second), weights(first)
        results[name] = max(float((after[n] - expected[n]).abs().max()) for n in expected)
        first.destroy()
        second.destroy()
    results["other method"] = other_method(folder)
    return results


def other_method(folder: str) -> dict:
    """States of one method continue in the other: decomposed anew."""
    found = {}
    for method, other in (("eigen", "inverse"), ("inverse", "eigen")):
        late = {"eigenbasis": {"refresh_interval": 3}}
        saved, loaded = (
            Inverse(
                "inverse",
                2,
                kfac=options(
                    **blocks(DAMPING["relative"], late, {"preconditioner": {"method": kind}})
                ),
            )
            for kind in (method, other)
        )
        engine = build(saved, 1)
        train(engine, 1, steps=4)
        engine.save_checkpoint(f"{folder}/{method}")
        factors = {
            key: state.packed_P
            for key, state in engine.kfac.preconditioner.curvature.factors.items()
        }
        engine.destroy()
        engine = build(loaded, 1)
        engine.load_checkpoint(f"{folder}/{method}")
        kfac = engine.kfac.preconditioner
        same = all(
            torch.equal(kfac.curvature.factors[key].packed_P, P) for key, P in factors.items()
        )
        prepared = all(state.preconditioner for state in kfac.state.values())
        kinds = {
            type(side).__name__ for state in kfac.state.values() for side in (state.A, state.G)
        }
        losses = train(engine, 1, steps=5, first=4)
        found[other] = same, prepared, kinds, all(loss < 10 for loss in losses)
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_equals_not_stopping(world, tmp_path):
    for result in run_ranks(
        "tests.deepspeed.test_inverse:resume_worker", world=world, payload=str(tmp_path)
    ):
        other = result.pop("other method")
        assert result == dict.fromkeys(RESUMED, 0.0)
        assert (
            other
            == {
                "inverse": (True, True, {"DampedInverse"}, True),
                "eigen": (True, True, {"Eigenbasis"}, True),
            }
            or world > 1
        )  # a rank may have no layer
        assert all(same and prepared and trains for same, prepared, _, trains in other.values())


def failing_worker(_) -> dict:
    engine = build(Inverse("inverse", 2, kfac=options(**blocks(DAMPING["relative"]))), 1)
    train(engine, 1, steps=1)
    kfac = engine.kfac.preconditioner
    before, plain = dict(kfac.state), inverse.cholesky_inverse

    def broken(matrix: torch.Tensor, **_) -> torch.Tensor:
        return torch.full_like(matrix, float("nan"))

    inverse.cholesky_inverse = broken
    losses = train(engine, 1, steps=3, first=1)  # one refresh
    inverse.cholesky_inverse = plain
    kept = all(
        kfac.state[name].A is state.A and kfac.state[name].G is state.G
        for name, state in before.items()
    )
    return {"kept": kept, "losses": losses, **engine.kfac.counters()}


def test_a_failed_inverse_leaves_the_old_one_and_is_counted():
    results = run_ranks("tests.deepspeed.test_inverse:failing_worker", world=2)
    for result in results:
        assert result["kept"] and all(loss < 10 for loss in result["losses"])
        assert result["refresh_failures"] == 6, "over all ranks: A and G of three layers"
    assert sum(result["refresh_retries"] for result in results) == 12


def refused_worker(_) -> str:
    mode = Mode("inverse", 0, adam=True, kfac={**KFAC, "preconditioner": {"method": "inverse"}})
    return error_of(lambda: build(mode, 1, model=make_net(Net)))


def test_kfac_adamw_is_refused():
    (message,) = run_ranks("tests.deepspeed.test_inverse:refused_worker", world=1)
    assert (
        'kfac.preconditioner.method "inverse" keeps no eigenbasis, in which KFACAdamW steps; use '
        '"eigen"' in message
    )
