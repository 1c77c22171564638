"""kfac.rescale_weights: after a step every weight is what it would be without, times the paper's
factor."""

import pytest
import torch

from tests.close import close, near
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, patched, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
MODES = [
    "z0",
    "z1",
    "z2",
    "z2-round_robin",
    "z2-offload",
    "z3",
    "z3-persistence_0",
    "z3-sub_groups",
    "z3-offload",
    "z0-bf16",
    "z0-bf16-fused",
    "z1-bf16-accum32",
    "z2-bf16",
    "z3-bf16",
    "adam-z2",
]
WEIGHTS = ("first.weight", "middle.weight", "head.weight")


def worker(names) -> dict:
    found = {}
    for name in names:
        mode, results = BY_NAME[name], {}
        for rescale in (False, True):
            model = make_net()
            with torch.no_grad():
                for weight in (model.first.weight, model.middle.weight):
                    weight.mul_(5)
            engine = build(
                mode, 1, model=model, kfac={**KFAC, **mode.kfac, "rescale_weights": rescale}
            )
            with patched(mode):
                train(engine, 1, steps=1)
                results[rescale] = weights(engine)
                if rescale:
                    import deepspeed

                    used = {}
                    for key, p in engine.module.named_parameters():
                        with deepspeed.zero.GatheredParameters([p], enabled=mode.stage == 3):
                            used[key] = p.detach().float().cpu().clone()
                    found[name, "used"] = used
                    train(engine, 1, steps=3, first=1)
                    found[name, "later"] = weights(engine)
            engine.destroy()
        found[name] = results
    return found


def test_every_stage_rescales_masters_and_weights():
    for results in run_ranks("tests.deepspeed.test_rescaling:worker", world=2, payload=MODES):
        for name in MODES:
            mode = BY_NAME[name]
            plain, rescaled, used = results[name][False], results[name][True], results[name, "used"]
            shrunk = 0
            for key, weight in plain.items():
                limit = (2 * len(weight)) ** 0.5
                factor = min(1.0, limit / (float(weight.norm()) + 1e-9)) if key in WEIGHTS else 1.0
                shrunk += factor < 0.9
                where = f"{name} {key}"
                if mode.dtype == "fp32":
                    close(rescaled[key], factor * weight, sums=weight.numel(), what=where)
                else:
                    near(
                        rescaled[key],
                        factor * weight,
                        1e-3 * weight.abs(),
                        "the norm of the rounded weight",
                        what=where,
                    )
                ulp = 0 if mode.dtype == "fp32" else 2**-7
                near(
                    used[key],
                    rescaled[key],
                    ulp * rescaled[key].abs() + 1e-7,
                    "rounding to 16 bits",
                    what=where,
                )
                assert (
                    key not in WEIGHTS or float(results[name, "later"][key].norm()) <= limit * 1.001
                )
            assert shrunk >= 1, name


def frozen_worker(names) -> dict:
    found = {}
    for name in names:
        model = make_net()
        with torch.no_grad():
            model.middle.weight.mul_(20)
        block = {**KFAC, "rescale_weights": True}
        # ZeRO applies weight decay to a parameter that was frozen
        optimizer = {"type": "SGD", "params": {"lr": 0.02}}
        engine = build(BY_NAME[name], 1, model=model, kfac=block, optimizer=optimizer)
        before = weights(engine)
        engine.module.middle.weight.requires_grad_(False)
        train(engine, 1, steps=1)
        found[name] = before["middle.weight"], weights(engine)["middle.weight"]
        engine.destroy()
    return found


def test_a_weight_that_was_frozen_after_attach_keeps_its_norm():
    (found,) = run_ranks(
        "tests.deepspeed.test_rescaling:frozen_worker", world=1, payload=["z0", "z2"]
    )
    for name, (before, after) in found.items():
        assert torch.equal(before, after), name


def norms_worker(names) -> dict:
    found = {}
    block = {**KFAC, "rescale_weights": True, "layers": {"types": ["LayerNorm"]}}
    for name in names:
        engine = build(BY_NAME[name], 1, kfac=block)
        train(engine, 1, steps=2)
        found[name] = engine.kfac.job.steps
        engine.destroy()
    return found


def test_layers_without_a_matrix_are_trained_without_rescaling():
    (found,) = run_ranks(
        "tests.deepspeed.test_rescaling:norms_worker", world=1, payload=["z0", "z2"]
    )
    assert found == {"z0": 2, "z2": 2}
