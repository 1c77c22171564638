"""What broke other K-FAC implementations, in a real engine: overflow, spikes, norms, learning rate
schedules, failed decompositions."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.precision_config import DeepSpeedBF16Config

from ds_kfac.curvature import eigen, inverse
from tests.close import exact, near
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, CLIP, KFAC, Mode
from tests.deepspeed.runs import build, patched, train, weights
from tests.deepspeed.said import heard
from tests.deepspeed.test_checkpoint import check_same, flat, own_state

INFINITE = float("inf")


# overflow


@pytest.mark.ranks(2)
def test_a_skipped_step_leaves_everything_as_it_was():
    names = ("z1-fp16", "z2-fp16-offload", "z3-fp16", "z0-fp16", "z0-fp16-fused")
    # torch_autocast, in which GradScaler skips, is global to a process
    for name in (*names, "z1-bf16-accum32", "adam-z2-fp16", "z0-autocast_float16"):
        mode = BY_NAME[name]
        scale = {"fp16": {"enabled": True, "initial_scale_power": 8}}
        engine = build(mode, 1, **(scale if mode.dtype == "fp16" else {}))
        kfac = engine.kfac.preconditioner
        with patched(mode):
            train(engine, 1, steps=3)
            for step in (3, 4):  # of which one refreshes, at interval 2
                before, trained = own_state(engine), weights(engine)
                train(engine, 1, steps=1, first=step, times=INFINITE)
                check_same(own_state(engine), before, name)
                exact(weights(engine), trained, what=name)
                assert not kfac.capture.sums, "what the hooks of a skipped step have seen"
                train(engine, 1, steps=1, first=step)
        assert kfac.metrics.counts["skipped_steps"] == 2, name
        assert kfac.metrics.counts["factor_updates"] == kfac.steps == 5, name
        assert all(weight.isfinite().all() for weight in weights(engine).values()), name


# norms, precision of what is written back


@pytest.mark.ranks(2)
def test_the_reported_norm_is_of_the_raw_gradient():
    """Also where nothing is clipped."""
    names = ("z2-offload", "z2-round_robin", "z3", "z1-bf16-accum32", "z2-bf16-offload")
    for name, clip in (*((name, 0.5) for name in names), ("z2", 0.0), ("z3", 0.0)):
        mode, norms = BY_NAME[name], []
        for kfac in ({"enabled": False}, KFAC):
            engine = build(mode, 1, kfac=kfac, gradient_clipping=clip)
            with patched(mode):
                train(engine, 1, steps=1)
            norms.append(float(engine.get_global_grad_norm()))
            engine.destroy()
        raw, reported = norms
        near(reported, raw, 1e-3 * raw, "DeepSpeed adds parts up in its own formats", what=name)


DAMPING, RATE = 1e-11, 1e-6
"""With them results leave fp16, and weights move all the same."""


@pytest.mark.ranks(2)
def test_results_that_leave_fp16_are_no_overflow_and_an_inf_of_one_rank_is():
    """FP16_UnfusedOptimizer takes the norm of gradients in the parameters' dtype: all steps were
    skipped."""
    block = {"damping": {"kind": "tikhonov", "value": DAMPING}, "preconditioner": {"kl_clip": 0}}
    optimizer = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}}
    for dtype, clip in (("fp16", 0.0), ("fp16", 0.5), ("bf16", 0.5)):
        half = {"fp16": {"enabled": True, "loss_scale": 1.0}} if dtype == "fp16" else {}
        options = {"optimizer": optimizer, "gradient_clipping": clip, **half}
        after_one_step = []
        for name in (f"z0-{dtype}", f"z0-{dtype}-fused"):
            mode, norms = BY_NAME[name], []
            with patched(mode):
                plain = build(mode, 1, kfac={"enabled": False}, **options)
                engine = build(mode, 1, kfac={**KFAC, **block}, **options)
                start = weights(engine)
                for one in (plain, engine):
                    train(one, 1, steps=1)
                    norms.append(float(one.get_global_grad_norm() or 0))
                after_one_step.append(weights(engine))
                train(engine, 1, steps=2, first=1)
                before, trained = own_state(engine), weights(engine)
                assert engine.skipped_steps == 0, name
                overflows = INFINITE if dist.get_rank() == 1 else 1.0
                train(engine, 1, steps=1, first=3, times=overflows)
            assert engine.skipped_steps == 1, name
            exact(weights(engine), trained, what=name)
            check_same(own_state(engine), before, name)
            near(norms[1], norms[0], 1e-3 * norms[0], "terms in bf16, at most", what=name)
            moved = max(float((after_one_step[-1][n] - w).abs().max()) for n, w in start.items())
            largest = moved / RATE
            assert dtype == "bf16" or clip or largest > 2 * torch.finfo(torch.float16).max, name
        # the wrappers add up the norm that they clip by in different orders
        rounded = 2 * clip * torch.finfo(torch.float32).eps * RATE / DAMPING
        near(*after_one_step, rounded, "rounding of a gradient, over the damping", what=dtype)


@pytest.mark.ranks(1)
def test_no_layer_moves_or_learns_where_deepspeed_clips_an_infinite_norm_and_all_are_counted():
    """DeepSpeed is told to apply gradients in bf16 that are not finite, and clips them: it
    multiplies all by 0."""
    bf16 = {"enabled": True}
    if "check_grad_overflow" in DeepSpeedBF16Config.model_fields:  # versions without never check
        bf16["check_grad_overflow"] = False
    no_refresh = {"eigenbasis": {"refresh_interval": 50}, "burn_in": {"steps": 0}}
    for name in ("z2-bf16-corrected", "adam-z2-bf16"):
        mode = BY_NAME[name]
        engine = build(mode, 1, kfac={**mode.kfac_block, **no_refresh}, bf16=bf16)
        kfac = engine.kfac.preconditioner
        train(engine, 1, steps=3)
        before, moments = weights(engine), flat([state.moments for state in kfac.state.values()])
        hook = engine.module.norm.bias.register_hook(lambda gradient: gradient * INFINITE)
        train(engine, 1, steps=1, first=3)
        hook.remove()
        check_same(flat([state.moments for state in kfac.state.values()]), moments, name)
        assert kfac.steps == 4
        assert engine.kfac.counters()["not_finite_layers"] == len(kfac.layers), name
        if mode.adam:
            after, ours = weights(engine), {n for layer in kfac.layers for n in layer.parameters}
            exact(*({n: each[n] for n in ours} for each in (after, before)), what=name)


# a learning rate schedule, and a failing decomposition


@pytest.mark.ranks(1)
def test_kl_clip_respects_a_learning_rate_schedule():
    """It goes by the largest rate so far: halving lr halves the step."""
    mode = Mode("sgd", 2, kfac={"preconditioner": {"kl_clip": 1e-6}}, clip=0.0)
    engine, moved = build(mode, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}}), []
    for lr in (0.1, 0.05):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        before = weights(engine)
        train(engine, 1, steps=1, first=0)
        after = weights(engine)
        squares = [(after[n] - before[n]).square().sum() for n in after if "norm" not in n]
        moved.append(float(sum(squares)) ** 0.5)
    near(moved[1] / moved[0], 0.5, 0.1, "the gradient changes from step to step")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_failed_refresh_keeps_the_last_result_and_is_counted_and_said(method):
    """Also that of a factor which is not finite any more."""
    kfac = {**KFAC, "damping": {"kind": "relative", "value": 0.3}}
    kfac["preconditioner"] = {**KFAC["preconditioner"], "method": method}
    engine = build(BY_NAME["z2"], 1, kfac=kfac)
    kfac = engine.kfac.preconditioner
    if method == "eigen":
        failing = patch.object(eigen, "eigh", side_effect=torch.linalg.LinAlgError)
    else:
        failing = patch.object(
            inverse, "cholesky_inverse", lambda matrix, **_: torch.full_like(matrix, INFINITE)
        )
    train(engine, 1, steps=2)
    before = {name: (state.A, state.G) for name, state in kfac.state.items()}
    assert engine.kfac.counters()["refresh_retries"] == 0
    with heard() as said:
        with failing:
            train(engine, 1, steps=1, first=2)
        counts = engine.kfac.counters()
        for factor in kfac.curvature.factors.values():
            factor.packed_P.fill_(float("nan"))
        train(engine, 1, steps=2, first=3)
    owned = len(kfac.worker_layers)
    for name, (A, G) in before.items():
        assert kfac.state[name].A is A and kfac.state[name].G is G
    assert counts["refresh_failures"] == 2 * 3, "factors of all ranks, two of each layer"
    assert counts["refreshes_failed"] == 2 * owned
    assert counts["refresh_retries"] == 4 * owned
    for step in (2, 4):
        line = f"succeeded ({2 * owned} such factors in step {step}); each keeps its last"
        assert any(line in text for text in said)


SPIKES = {3: 1e20, 5: 1e30, 6: 1e20}


def with_spikes(name: str, clip: float, spikes: dict[int, float]):
    """The engine after ten steps, how far each step moves each layer's weights, and what is said.
    The loss of some is multiplied."""
    engine = build(BY_NAME[name], gradient_clipping=clip)
    kfac, seen = engine.kfac.preconditioner, [weights(engine)]
    with patched(BY_NAME[name]), heard() as said:
        for step in range(10):
            train(engine, 1, steps=1, first=step, times=spikes.get(step, 1.0))
            seen.append(weights(engine))
            kept = [x for x in own_state(engine).values() if isinstance(x, torch.Tensor)]
            assert all(bool(torch.isfinite(x).all()) for x in kept), f"kept at step {step}"
    ours = {parameter for layer in kfac.layers for parameter in layer.parameters}
    steps = [{n: float((b[n] - a[n]).norm()) for n in ours} for a, b in itertools.pairwise(seen)]
    return engine, steps, [text for text in said if "left out" in text]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [CLIP, 0.0])
@pytest.mark.parametrize("name", ["adam-z0", "adam-z1-bf16-accum32", "z3"])
def test_training_survives_a_huge_gradient_with_and_without_clipping(name, clip):
    plain, usual, nothing = with_spikes(name, clip, {})
    assert not plain.kfac.counters()["left_out_gradients"] and not nothing
    engine, steps, said = with_spikes(name, clip, SPIKES)
    for parameter, size in usual[-1].items():  # it is neither frozen nor thrown about
        assert 0.2 * size < steps[-1][parameter] < 5 * size, (parameter, size, steps)
    largest = max(size for step in usual for size in step.values())
    for step in SPIKES:
        assert max(steps[step].values()) <= 2 * largest, (step, steps[step])
    if "adam" in name and not clip:
        counters, kfac = engine.kfac.counters(), engine.kfac.preconditioner
        taken = len(SPIKES) - counters.get("skipped_steps", 0)
        assert counters["left_out_gradients"] == taken * len(kfac.layers)
        for layer in kfac.worker_layers if taken else ():
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
    ("name", "eigenvalues", "limited"), [("z0-noclip", "corrected", 6), ("z3", "kronecker", 3)]
)
def test_a_spike_does_not_stall_the_kfac_gradient(name, eigenvalues, limited):
    """Each layer's G is limited, on whichever rank it is averaged, and EKFAC's second moment, which
    is of clipped gradients. Without that the weights move 0.01 to 0.07 as far, with it 0.9 to
    1.7."""
    usual, none = moved(name, eigenvalues, 1.0)
    spiked, counted = moved(name, eigenvalues, 1e3)
    assert none == 0 and counted == limited
    assert 1 / 3 < spiked / usual < 3
