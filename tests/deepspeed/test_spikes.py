"""Steps with huge but finite gradients, with and without clipping: training goes on as if they had
not been."""

import itertools

import pytest
import torch

from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, CLIP, KFAC
from tests.deepspeed.runs import build, patched, train, weights
from tests.deepspeed.said import heard

SPIKES = {3: 1e20, 5: 1e30, 6: 1e20}


def trained(name: str, clip: float, spikes: dict[int, float]):
    """The engine after ten steps, how far each step moves each layer's weights, and what is said.
    The loss of some is multiplied."""
    engine = build(BY_NAME[name], gradient_clipping=clip)
    kfac, seen = engine.kfac.preconditioner, [weights(engine)]
    with patched(BY_NAME[name]), heard() as said:
        for step in range(10):
            train(engine, 1, steps=1, first=step, times=spikes.get(step, 1.0))
            seen.append(weights(engine))
            kept = [state.packed_P for state in kfac.curvature.factors.values()]
            if "adam" in name:
                for state in kfac.state.values():
                    kept += [state.moments.first_OI, state.moments.second_OI]
            assert all(bool(torch.isfinite(t).all()) for t in kept), f"kept at step {step}"
    ours = {parameter for layer in kfac.layers for parameter in layer.parameters}
    steps = [{n: float((b[n] - a[n]).norm()) for n in ours} for a, b in itertools.pairwise(seen)]
    return engine, steps, [text for text in said if "left out" in text]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [CLIP, 0.0])
@pytest.mark.parametrize(
    "name", ["adam-z0", "adam-z3", "adam-z1-bf16-accum32", "adam-z2-bf16", "z0", "z3"]
)
def test_training_survives_a_huge_gradient_with_and_without_clipping(name, clip):
    plain, usual, nothing = trained(name, clip, {})
    assert not plain.kfac.counters()["left_out_gradients"] and not nothing
    engine, steps, said = trained(name, clip, SPIKES)
    for parameter, size in usual[-1].items():  # it is neither frozen nor thrown about
        assert 0.2 * size < steps[-1][parameter] < 5 * size, (parameter, size, steps)
    largest = max(size for step in usual for size in step.values())
    for step in SPIKES:
        assert max(steps[step].values()) <= 2 * largest, (step, steps[step])
    if "adam" in name and not clip:
        counters, kfac = engine.kfac.counters(), engine.kfac.preconditioner
        taken = len(SPIKES) - counters.get("skipped_steps", 0)
        assert counters["left_out_gradients"] == taken * len(kfac.layers)
        for layer in kfac.owned if taken else ():
            assert sum(f"gradients of {layer.name} were" in text for text in said) == 1, "once"


def moved(name: str, eigenvalues: str, spike: float) -> tuple[float, float]:
    """How far weights move in the ten steps from the 20th on, along the K-FAC gradient by SGD, the
    loss of the 14th multiplied; and how many factors were limited."""
    sgd = {"type": "SGD", "params": {"lr": 1e-3}}
    preconditioner = {"kl_clip": 0.0, "eigenvalues": eigenvalues}
    factor = {"rows": "all", "update_interval": 1, "decay": 0.95}
    block = merged(KFAC, {"factor": factor, "preconditioner": preconditioner})
    engine, seen = build(BY_NAME[name], 2, kfac=block, optimizer=sgd), []
    for step in range(30):
        train(engine, 2, steps=1, first=step % 4, times=spike if step == 14 else 1.0)
        if step >= 19:
            seen.append(weights(engine))
    far = sum(float((b[n] - a[n]).norm()) for a, b in itertools.pairwise(seen) for n in a)
    return far, engine.kfac.counters()["limited_factors"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "eigenvalues", "limited"),
    [("z0-noclip", "corrected", 6), ("z0", "corrected", 3), ("z3", "kronecker", 3)],
)
def test_a_spike_does_not_stall_the_kfac_gradient(name, eigenvalues, limited):
    """Each layer's G is limited, on whichever rank it is averaged, and EKFAC's second moment, which
    is of clipped gradients. Without that the weights move 0.01 to 0.07 as far, with it 0.9 to
    1.7."""
    usual, none = moved(name, eigenvalues, 1.0)
    spiked, counted = moved(name, eigenvalues, 1e3)
    assert none == 0 and counted == limited
    assert 1 / 3 < spiked / usual < 3
