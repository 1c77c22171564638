"""kfac.rescale_weights: after a step every weight is what it would be without, times the paper's
factor."""

import deepspeed
import pytest
import torch

from tests.close import close, exact, near
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, patched, train, weights
from tests.models import make_net

MODES = "z0 z1 z2 z2-round_robin z2-offload z3 z3-persistence_0 z3-sub_groups z3-offload z0-bf16"
MODES += " z0-bf16-fused z1-bf16-accum32 z2-bf16 z3-bf16 adam-z2"
WEIGHTS = ("first.weight", "middle.weight", "head.weight")


def scaled_net(**times: float):
    """Its layers' weights multiplied."""
    model = make_net()
    with torch.no_grad():
        for name, factor in times.items():
            model.get_submodule(name).weight.mul_(factor)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODES.split())
def test_every_stage_rescales_masters_and_weights(name):
    mode = BY_NAME[name]
    block = {**KFAC, **mode.kfac}
    plain, rescaling = (
        build(
            mode,
            model=scaled_net(first=5, middle=5),
            kfac={**block, "rescale_weights": rescale},
        )
        for rescale in (False, True)
    )
    with patched(mode):
        for engine in (plain, rescaling):
            train(engine, 1, steps=1)
        rescaled, used, factors = weights(rescaling), {}, []
        for key, p in rescaling.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=mode.stage == 3):
                used[key] = p.detach().float().clone()
        train(rescaling, 1, steps=3, first=1)
        later = weights(rescaling)
    wide = mode.dtype == "fp32"
    for key, weight in weights(plain).items():
        limit = (2 * len(weight)) ** 0.5
        factor = min(1.0, limit / (float(weight.norm()) + 1e-9)) if key in WEIGHTS else 1.0
        factors.append(factor)
        if wide:
            close(rescaled[key], factor * weight, sums=weight.numel(), what=key)
        else:
            why = "the norm of the rounded weight"
            near(rescaled[key], factor * weight, 1e-3 * weight.abs(), why, what=key)
        ulp = (0 if wide else 2**-7) * rescaled[key].abs() + 1e-7
        near(used[key], rescaled[key], ulp, "rounding to 16 bits", what=key)
        assert key not in WEIGHTS or float(later[key].norm()) <= limit * 1.001
    assert min(factors) < 0.9, "nothing shrinks, so nothing is tested"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["z0", "z2"])
def test_a_weight_that_was_frozen_after_attach_keeps_its_norm(name):
    # ZeRO applies weight decay to a parameter that was frozen
    sgd = {"type": "SGD", "params": {"lr": 0.02}}
    kfac = {**KFAC, "rescale_weights": True}
    engine = build(BY_NAME[name], model=scaled_net(middle=20), kfac=kfac, optimizer=sgd)
    before = weights(engine)["middle.weight"]
    engine.module.middle.weight.requires_grad_(False)
    train(engine, 1, steps=1)
    exact(weights(engine)["middle.weight"], before)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["z0", "z2"])
def test_layers_without_a_matrix_are_trained_without_rescaling(name):
    kfac = {**KFAC, "rescale_weights": True, "layers": {"types": ["LayerNorm"]}}
    engine = build(BY_NAME[name], kfac=kfac)
    train(engine, 1, steps=2)
    assert engine.kfac.job.steps == 2
