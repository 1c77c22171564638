"""What broke other K-FAC implementations, in a real engine: overflow, direct backward, unused
modules, norms."""

import contextlib
import io
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.curvature import eigen
from tests.close import close, exact, near
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, expected, micro_batches, patched, train, weights
from tests.models import FEATURES, Net, cross_entropy, make_net
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
INFINITE = float("inf")


def snapshot(kfac) -> dict[str, torch.Tensor]:
    """Everything K-FAC keeps on this rank, as tensors."""
    tensors = {"steps": torch.tensor(kfac.steps)}
    for key, own in kfac.curvature.factors.items():
        tensors |= {key: own.packed_P, f"{key}.k": own.updates}
    for name, state in kfac.state.items():
        if state.basis is not None:
            tensors[f"{name}.QA"] = state.basis.A.vectors[0]
            tensors[f"{name}.QG"] = state.basis.G.vectors[0]
        if state.moments is not None:  # which turn with the basis, in place
            tensors |= {f"{name}.{part}": value for part, value in vars(state.moments).items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


# overflow


@pytest.mark.ranks(2)
def test_a_skipped_step_leaves_everything_as_it_was():
    names = ("z1-fp16", "z2-fp16", "z2-fp16-offload", "z3-fp16", "z0-fp16", "z0-fp16-fused")
    for name in (*names, "z1-bf16-accum32", "adam-z2-fp16"):
        mode = BY_NAME[name]
        scale = {"fp16": {"enabled": True, "initial_scale_power": 8}}
        engine = build(mode, 1, **(scale if mode.dtype == "fp16" else {}))
        kfac = engine.kfac.preconditioner
        with patched(mode):
            train(engine, 1, steps=3)
            for step in (3, 4):  # of which one refreshes, at interval 2
                before, trained = snapshot(kfac), weights(engine)
                train(engine, 1, steps=1, first=step, times=INFINITE)
                exact(snapshot(kfac), before, what=name)
                exact(weights(engine), trained, what=name)
                assert not kfac.capture.sums, "what the hooks of a skipped step have seen"
                train(engine, 1, steps=1, first=step)
        assert kfac.metrics.counts["skipped_steps"] == 2, name
        assert kfac.metrics.counts["factor_updates"] == kfac.steps == 5, name
        assert all(weight.isfinite().all() for weight in weights(engine).values()), name


@pytest.mark.ranks(2)
def test_a_step_that_gradscaler_skips_is_dropped():
    """It starts at a scale that overflows fp16, and skips by itself until it fits."""
    engine = build(BY_NAME["z0-autocast_float16"], 1)
    kfac = engine.kfac.preconditioner
    kfac.layout.grad_scaler._init_scale = 2.0**40
    before, trained = snapshot(kfac), weights(engine)
    train(engine, 1, steps=1)
    exact(snapshot(kfac), before)
    exact(weights(engine), trained)
    assert dict(kfac.metrics.counts) == {"skipped_steps": 1}


# ways to run a model


class Checkpointed(Net):
    """Activation checkpointing of the body."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x, y=None):
        def body(x):
            return torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))

        if self.kind == "deepspeed":
            z = deepspeed.checkpointing.checkpoint(body, x.requires_grad_())
        else:
            z = checkpoint(body, x.requires_grad_(), use_reentrant=self.kind == "reentrant")
        return cross_entropy(self.head(z), y)


def backward_of(engine, style: str, x, y, accumulation: int) -> None:
    if style == "no_grad_between":
        with torch.no_grad():
            engine(x, y)
        engine.eval()
        engine(x, y)
        engine.train()
    if style == "direct":
        engine(x, y).backward()
    elif style == "direct_logits":
        cross_entropy(engine(x), y).backward()
    elif style == "scale":
        engine.scale(engine(x, y)).backward()
    elif style == "caller_divides":
        engine.backward(engine(x, y) / accumulation, scale_wrt_gas=False)
    else:
        engine.backward(engine(x, y))


def run_step(engine, style: str, step: int, accumulation: int) -> None:
    for micro, (x, y) in enumerate(micro_batches(step, accumulation)):
        last = micro == accumulation - 1
        if style == "accelerate":  # tells the boundary itself and steps only there
            engine.set_gradient_accumulation_boundary(last)
        backward_of(engine, style, x, y, accumulation)
        with torch.autocast("cpu", torch.bfloat16, enabled=style == "step_in_autocast"):
            if last or style != "accelerate":
                engine.step()


PLAIN_STYLES = ("no_grad_between", "caller_divides", "accelerate", "step_in_autocast")
DIRECT_STYLES = ("direct", "direct_logits", "scale")
CHECKPOINTS = ("reentrant", "non_reentrant", "deepspeed")


@pytest.mark.ranks(2)
def test_every_way_to_run_a_model_trains_like_the_reference():
    deepspeed.checkpointing.configure(None, partition_activations=False)
    cases = [(mode, style, Net, 2) for mode in ("z0", "z2", "z3") for style in PLAIN_STYLES]
    # DeepSpeed itself refuses a direct backward at stage 0
    cases += [(mode, style, Net, 2) for mode in ("z1", "z2", "z3") for style in DIRECT_STYLES]
    cases += [
        (mode, kind, lambda kind=kind: Checkpointed(kind), 2)
        for mode in ("z0", "z2", "z3")
        for kind in CHECKPOINTS
    ]
    wrong = []
    for name, style, model, accumulation in cases:
        engine = build(BY_NAME[name], accumulation, model=make_net(model))
        initial = weights(engine)
        for step in range(4):
            run_step(engine, style, step, accumulation)
        trained = weights(engine)
        if dist.get_rank() == 0:  # every rank has the same weights in the end
            found = expected(BY_NAME[name], accumulation, 2, initial)
            error = difference(trained, found.weights, initial)
            wrong += within(f"{name} {style}", error, found.bound)
        engine.destroy()
    assert not wrong, "\n".join(wrong)


class PartlyFrozen(Net):
    """A frozen weight, a frozen bias, a tied pair, a layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.partly = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.tied_a, self.tied_b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.tied_b.weight = self.tied_a.weight
        self.frozen.weight.requires_grad_(False)
        self.partly.bias.requires_grad_(False)

    def forward(self, x, y=None):
        x = self.partly(input=torch.tanh(self.frozen(x)))
        return super().forward(self.tied_b(torch.tanh(self.tied_a(x))), y)


@pytest.mark.ranks(2)
def test_frozen_and_tied_parameters_are_left_alone_in_every_stage():
    widths = {"first": FEATURES + 1, "middle": 17, "head": 20, "partly": FEATURES}
    of_stage_0 = {}
    for name in ("z0", "z1", "z2", "z2-offload", "z3"):
        engine = build(BY_NAME[name], 1, model=make_net(PartlyFrozen))
        before = weights(engine)
        train(engine, 1, steps=3)
        after = weights(engine)
        assert {layer.name: layer.A.dim for layer in engine.kfac.preconditioner.layers} == widths
        unmoved = {n for n, weight in after.items() if torch.equal(weight, before[n])}
        assert unmoved == {"frozen.weight", "partly.bias"}, name
        of_stage_0 = of_stage_0 or after
        # three steps, each 1 / damping = 100 times as sensitive as its factors
        close(after, of_stage_0, sums=3 * 100, condition=100, what=name)


# norms, precision of what is written back


NORMS = ["z1", "z2-offload", "z2-round_robin", "z3", "z1-bf16-accum32", "z2-bf16-offload"]
NORMS += ["z3-fp16", "z0-bf16-fused"]


@pytest.mark.ranks(2)
def test_the_reported_norm_is_of_the_raw_gradient():
    """Also where nothing is clipped."""
    for name, clip in [
        *((name, 0.5) for name in NORMS),
        *((f"z{stage}", 0.0) for stage in (2, 3)),
    ]:
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
    for dtype, clip in (("fp16", 0.0), ("fp16", 0.5), ("bf16", 0.0), ("bf16", 0.5)):
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
                before, trained = snapshot(engine.kfac.preconditioner), weights(engine)
                assert engine.skipped_steps == 0, name
                overflows = INFINITE if dist.get_rank() == 1 else 1.0
                train(engine, 1, steps=1, first=3, times=overflows)
            assert engine.skipped_steps == 1, name
            exact(weights(engine), trained, what=name)
            exact(snapshot(engine.kfac.preconditioner), before, what=name)
            near(norms[1], norms[0], 1e-3 * norms[0], "terms in bf16, at most", what=name)
            moved = max(float((after_one_step[-1][n] - w).abs().max()) for n, w in start.items())
            largest = moved / RATE
            assert dtype == "bf16" or clip or largest > 2 * torch.finfo(torch.float16).max, name
        # the wrappers add up the norm that they clip by in different orders
        rounded = 2 * clip * torch.finfo(torch.float32).eps * RATE / DAMPING
        near(*after_one_step, rounded, "rounding of a gradient, over the damping", what=dtype)


@pytest.mark.ranks(2)
def test_our_own_nan_is_never_applied():
    """A preconditioned gradient of NaN, which bf16 ZeRO-2 would apply."""
    engine = build(BY_NAME["z2-bf16"], 1)
    kfac = engine.kfac.preconditioner
    train(engine, 1, steps=1)
    for state in kfac.state.values():
        state.basis.A.vectors[0].fill_(float("nan"))
    train(engine, 1, steps=1, first=1)
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    assert kfac.owned and float(kfac.metrics.summary[0]) == 3, "counted over all ranks"


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
        before = weights(engine)
        moments = {layer: dict(vars(state.moments)) for layer, state in kfac.state.items()}
        moments = {
            layer: {part: x.clone() for part, x in own.items()} for layer, own in moments.items()
        }
        hook = engine.module.norm.bias.register_hook(lambda gradient: gradient * INFINITE)
        train(engine, 1, steps=1, first=3)
        hook.remove()
        for layer, state in kfac.state.items():
            exact(dict(vars(state.moments)), moments[layer], what=f"{name} {layer}")
        assert kfac.steps == 4
        assert engine.kfac.counters()["not_finite_layers"] == len(kfac.layers), name
        if mode.adam:
            after = weights(engine)
            for parameter in (parameter for layer in kfac.layers for parameter in layer.parameters):
                exact(after[parameter], before[parameter], what=parameter)


# a learning rate schedule, and a failing decomposition


@pytest.mark.ranks(1)
def test_kl_clip_respects_a_learning_rate_schedule():
    """It goes by the largest rate so far, whoever sets it: halving lr halves the step."""
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    mode = Mode("sgd", 2, kfac={"preconditioner": {"kl_clip": 1e-6}}, clip=0.0)
    engine = build(mode, 1, optimizer=sgd)
    moved = []
    for lr in (0.1, 0.05):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        before = weights(engine)
        train(engine, 1, steps=1, first=0)
        after = weights(engine)
        squares = [(after[n] - before[n]).square().sum() for n in after if "norm" not in n]
        moved.append(float(sum(squares)) ** 0.5)
    near(moved[1] / moved[0], 0.5, 0.1, "the gradient changes from step to step")
    peaks = [max(engine.kfac.preconditioner.direction.peak_lr.values())]
    engine = build(Mode("decay", 2, clip=0.0), 1, optimizer=sgd)
    decaying = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer.optimizer, gamma=0.1)
    for step in range(2):
        train(engine, 1, steps=1, first=step)
        decaying.step()  # by the program, as Accelerate does
    peaks.append(max(engine.kfac.preconditioner.direction.peak_lr.values()))
    close(peaks, [0.1, 0.1])


@pytest.mark.ranks(2)
def test_a_failed_refresh_keeps_the_old_basis_and_is_counted_and_said():
    """Also that of a factor which is not finite any more."""
    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.preconditioner
    train(engine, 1, steps=2)
    before = snapshot(kfac)
    assert engine.kfac.counters()["refresh_retries"] == 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        with patch.object(eigen, "eigh", side_effect=torch.linalg.LinAlgError("no convergence")):
            train(engine, 1, steps=1, first=2)
        counts = engine.kfac.counters()
        for factor in kfac.curvature.factors.values():
            factor.packed_P.fill_(float("nan"))
        train(engine, 1, steps=2, first=3)
    after, owned = snapshot(kfac), len(kfac.owned)
    bases = [name for name in before if name.endswith((".QA", ".QG"))]
    assert bases
    exact({name: after[name] for name in bases}, {name: before[name] for name in bases})
    assert counts["refresh_failures"] == 2 * 3, "factors of all ranks, two of each layer"
    assert counts["refreshes_failed"] == 2 * owned
    assert counts["refresh_retries"] == 4 * owned
    for step in (2, 4):
        line = f"succeeded ({2 * owned} in step {step}); the last result stays in use"
        assert line in said.getvalue()
