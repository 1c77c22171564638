"""What broke other K-FAC implementations, in a real engine: overflow, direct backward, unused
modules, norms."""

import contextlib
import io
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.registry import shard_layout
from tests.close import close, near
from tests.covering import covering
from tests.deepspeed.modes import BY_NAME, KFAC, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, expected, micro_batches, patched, train, weights
from tests.models import FEATURES, Net, cross_entropy
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed


def snapshot(kfac) -> dict[str, torch.Tensor]:
    """Everything K-FAC keeps on this rank, as tensors."""
    tensors = {"steps": torch.tensor(kfac.steps)}
    for key, own in kfac.curvature.factors.items():
        tensors |= {key: own.packed_P, f"{key}.k": own.updates}
    for name, state in kfac.state.items():
        if state.basis is not None:
            tensors |= {
                f"{name}.QA": state.basis.A.vectors[0],
                f"{name}.QG": state.basis.G.vectors[0],
            }
        if state.moments is not None:  # which turn with the basis, in place
            tensors |= {f"{name}.{part}": value for part, value in vars(state.moments).items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# overflow


def overflow_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        scale = (
            {"fp16": {"enabled": True, "initial_scale_power": 8}} if mode.dtype == "fp16" else {}
        )
        engine = build(mode, 1, **scale)
        kfac = engine.kfac.preconditioner
        with patched(mode):
            train(engine, 1, steps=3)
            before, trained = snapshot(kfac), weights(engine)
            # An infinite loss scale for one step: every gradient overflows. Step 3 folds a batch,
            # but for fp16 at interval 2 the refresh is due at step 4, so overflow that one too.
            train(engine, 1, steps=1, first=3, times=float("inf"))
            after, untrained = snapshot(kfac), weights(engine)
            train(engine, 1, steps=1, first=3)
            before_refresh = snapshot(kfac)
            train(engine, 1, steps=1, first=4, times=float("inf"))
            after_refresh = snapshot(kfac)
            train(engine, 1, steps=2, first=4)
        results[name] = {
            "kept": same(before, after),
            "kept_at_refresh": same(before_refresh, after_refresh),
            "weights_kept": all(torch.equal(trained[n], untrained[n]) for n in trained),
            "counts": dict(kfac.metrics.counts),
            "steps": kfac.steps,
            "finite": all(torch.isfinite(t).all().item() for t in weights(engine).values()),
        }
        engine.destroy()
    return results


def test_a_skipped_step_leaves_everything_as_it_was():
    names = [
        "z1-fp16",
        "z2-fp16",
        "z2-fp16-offload",
        "z3-fp16",
        "z0-fp16-fused",
        "z1-bf16-accum32",
        "adam-z2-fp16",
    ]
    for results in run_ranks("tests.deepspeed.test_traps:overflow_worker", world=2, payload=names):
        for name, result in results.items():
            assert result["kept"] and result["kept_at_refresh"] and result["weights_kept"], (
                name,
                result,
            )
            assert (
                result["counts"]["skipped_steps"] == 2 and result["counts"]["factor_updates"] == 6
            ), (name, result)
            assert result["steps"] == 6 and result["finite"], (name, result)


def autocast_overflow_worker(names: list[str]) -> dict:
    """GradScaler starts at a scale that overflows fp16 and skips by itself until it fits."""
    results = {}
    for name in names:
        engine = build(BY_NAME[name], 1)
        kfac = engine.kfac.preconditioner
        kfac.layout.grad_scaler._init_scale = 2.0**40
        before, states = weights(engine), [snapshot(kfac)]
        train(engine, 1, steps=1)
        states.append(snapshot(kfac))
        results[name] = {
            "kept": same(*states),
            "weights_kept": all(torch.equal(before[n], w) for n, w in weights(engine).items()),
            "counts": dict(kfac.metrics.counts),
        }
    return results


def test_a_step_that_gradscaler_skips_is_dropped():
    for results in run_ranks(
        "tests.deepspeed.test_traps:autocast_overflow_worker",
        world=2,
        payload=["z0-autocast_float16"],
    ):
        for name, result in results.items():
            assert result["weights_kept"] and result["kept"], (name, result)
            assert result["counts"] == {"skipped_steps": 1}, (name, result)


# ways to run a model


class Checkpointed(Net):
    """Activation checkpointing of the body: ``kind`` is set on the class before use."""

    kind = "reentrant"

    def forward(self, x, y=None):
        def body(x):
            return torch.tanh(self.middle(self.norm(self.silu(self.first(x)))))

        if self.kind == "deepspeed":
            import deepspeed

            z = deepspeed.checkpointing.checkpoint(body, x.requires_grad_())
        else:
            z = checkpoint(body, x.requires_grad_(), use_reentrant=self.kind == "reentrant")
        return cross_entropy(self.head(z), y)


class WithUnused(Net):
    """A layer that is never called; its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 7)


class SometimesUsed(Net):
    """A layer that only the first step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, FEATURES)
        self.calls = 0

    def forward(self, x, y=None):
        self.calls += 1
        return super().forward(self.extra(x) if self.calls == 1 else x, y)


def unused_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        torch.manual_seed(0)
        engine = build(
            BY_NAME[name],
            1,
            model=SometimesUsed(),
            optimizer={"type": "SGD", "params": {"lr": 1e-4}},
            gradient_clipping=0.0,
        )
        moved, before = [], weights(engine)["extra.weight"]
        for step in range(4):
            train(engine, 1, steps=1, first=step)
            after = weights(engine)["extra.weight"]
            moved.append(float((after - before).norm()))
            before = after
        results[name] = moved
        engine.destroy()
    return results


def test_an_offloaded_gradient_that_was_not_renewed_is_not_preconditioned_again():
    names = ["z0-noclip", "z1-offload", "z2", "z2-offload", "z3-offload"]
    results = run_ranks("tests.deepspeed.test_traps:unused_worker", world=2, payload=names)[0]
    for name, moved in results.items():
        assert moved[0] > 0 and moved[1:] == [0, 0, 0], (name, moved)


class ZeroInit(Net):
    """A zero-initialised output projection: every layer below it has G = 0 in the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


def zero_init_worker(_) -> dict:
    torch.manual_seed(0)
    engine = build(
        BY_NAME["z2-relative_damping"],
        1,
        model=ZeroInit(),
        kfac={"factor": {"update_interval": 1}, "eigenbasis": {"refresh_interval": 50}},
    )
    passed_through = []
    for step in range(4):
        train(engine, 1, steps=1, first=step)
        passed_through.append(engine.kfac.metrics.summary.tolist())
    return {"summary": passed_through}


def test_layers_without_data_at_a_refresh_get_their_basis_as_soon_as_they_have():
    for result in run_ranks("tests.deepspeed.test_traps:zero_init_worker", world=2):
        assert [summary[1] for summary in result["summary"]] == [2, 0, 0, 0], (
            "passed through, over all ranks"
        )
        assert result["summary"][-1][0] == 0, "nothing that is not finite"


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


def partly_frozen_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        torch.manual_seed(0)
        engine = build(BY_NAME[name], 1, model=PartlyFrozen())
        before = weights(engine)
        train(engine, 1, steps=3)
        after = weights(engine)
        results[name] = {
            "layers": {layer.name: layer.A.dim for layer in engine.kfac.preconditioner.layers},
            "frozen": {n for n, w in after.items() if torch.equal(w, before[n])},
            "weights": after,
        }
        engine.destroy()
    return results


def test_frozen_and_tied_parameters_are_left_alone_in_every_stage():
    names = ["z0", "z1", "z2", "z2-offload", "z3"]
    results = run_ranks("tests.deepspeed.test_traps:partly_frozen_worker", world=2, payload=names)[
        0
    ]
    for name, result in results.items():
        assert result["layers"] == {
            "first": FEATURES + 1,
            "middle": 17,
            "head": 20,
            "partly": FEATURES,
        }, name
        assert result["frozen"] == {"frozen.weight", "partly.bias"}, name
        for parameter, weight in result["weights"].items():  # all stages agree with stage 0
            # three steps, each 1 / damping = 100 times as sensitive as its factors
            close(
                weight,
                results["z0"]["weights"][parameter],
                sums=3 * 100,
                condition=100,
                what=f"{name} {parameter}",
            )


def forward_styles(engine, style: str, step: int, accumulation: int) -> None:
    for micro, (x, y) in enumerate(micro_batches(step, accumulation)):
        if style == "accelerate":  # tells the boundary itself and steps only there
            engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
            engine.backward(engine(x, y))
            if micro == accumulation - 1:
                engine.step()
            continue
        if style == "no_grad_between":
            with torch.no_grad():
                engine(x, y)
            engine.eval()
            engine(x, y)
            engine.train()
        if style == "direct":
            engine(x, y).backward()
        elif style == "step_in_autocast":
            engine.backward(engine(x, y))
            with torch.autocast("cpu", torch.bfloat16):
                engine.step()
            continue
        elif style == "direct_logits":
            cross_entropy(engine(x), y).backward()
        elif style == "scale":
            engine.scale(engine(x, y)).backward()
        elif style == "caller_divides":
            engine.backward(engine(x, y) / accumulation, scale_wrt_gas=False)
        else:
            engine.backward(engine(x, y))
        engine.step()


def styles_worker(cases) -> dict:
    results = {}
    for name, model_name, style, accumulation in cases:
        mode = BY_NAME[name]
        if model_name.startswith("checkpoint-"):
            Checkpointed.kind = model_name.removeprefix("checkpoint-")
            if Checkpointed.kind == "deepspeed":
                import deepspeed

                deepspeed.checkpointing.configure(None, partition_activations=False)
        model = {"net": Net, "unused": WithUnused}.get(model_name, Checkpointed)
        torch.manual_seed(0)
        engine = build(mode, accumulation, model=model())
        initial = weights(engine)
        initial = {n: w for n, w in initial.items() if "unused" not in n}
        for step in range(4):
            forward_styles(engine, style, step, accumulation)
        actual = weights(engine)
        if dist.get_rank() == 0:  # every rank has the same weights in the end
            found = expected(mode, accumulation, dist.get_world_size(), initial)
            error = difference({n: actual[n] for n in initial}, found.weights, initial)
            results[name, model_name, style, accumulation] = error, found.bound
        engine.destroy()
    return results


def test_every_way_to_run_a_model_trains_like_the_reference():
    styles = ("no_grad_between", "caller_divides", "accelerate", "step_in_autocast")
    cases = [(mode, "net", style, 2) for mode in ("z0", "z2", "z3") for style in styles]
    # DeepSpeed itself refuses a direct backward at stage 0
    cases += [
        (mode, "net", style, 2)
        for mode in ("z1", "z2", "z3")
        for style in ("direct", "direct_logits", "scale")
    ]
    cases += [
        (mode, f"checkpoint-{kind}", "engine", 2)
        for mode in ("z0", "z2", "z3")
        for kind in ("reentrant", "non_reentrant", "deepspeed")
    ]
    cases += [(mode, "unused", "engine", 1) for mode in ("z0-noclip", "z2", "z3")]
    results = run_ranks("tests.deepspeed.test_traps:styles_worker", world=2, payload=cases)[0]
    wrong = [line for case, result in results.items() for line in within(str(case), *result)]
    assert len(results) == len(cases) and not wrong, "\n".join(wrong)


# invariance of what is measured


def keeping(put, gradients: dict[str, torch.Tensor]):
    """GradientExchange.put that copies results."""

    def kept(self, layers, matrices) -> None:
        for layer, matrix_OI in zip(layers, matrices, strict=True):
            gradients[layer.name] = matrix_OI.clone()
        put(self, layers, matrices)

    return kept


def invariance_worker(cases) -> dict:
    """Factors and preconditioned gradients of one step on the same 16 rows."""
    world, results = dist.get_world_size(), {}
    for name, scale, accumulation, _ in cases:
        rows, mode = 16 // (world * accumulation), BY_NAME[name]
        half = {"fp16": {"enabled": True, "initial_scale_power": scale}} if scale else {}
        engine = build(mode, accumulation, train_micro_batch_size_per_gpu=rows, **half)
        kfac = engine.kfac.preconditioner
        gradients, finish = {}, kfac.direction.finish

        def scaled(*arguments, finish=finish, gradients=gradients):
            scales = finish(*arguments)
            gradients |= {name: V * scales.get(name, 1.0) for name, V in gradients.items()}
            return scales

        kfac.direction.finish = scaled
        x, y = (
            torch.randn(16, 3, FEATURES, generator=torch.Generator().manual_seed(7)),
            torch.arange(48) % 5,
        )
        mine = slice(
            dist.get_rank() * rows * accumulation, (dist.get_rank() + 1) * rows * accumulation
        )
        micro = zip(x[mine].split(rows), y.view(16, 3)[mine].split(rows), strict=True)
        with (
            patched(mode),
            patch.object(GradientExchange, "put", keeping(GradientExchange.put, gradients)),
        ):
            for xs, ys in micro:
                engine.backward(engine(xs.to(engine.get_data_types()[0]), ys))
                engine.step()
        own = {key: s.packed_P for key, s in kfac.curvature.factors.items()}
        everyone = [None] * world
        dist.all_gather_object(everyone, own | gradients)
        parts = {name: value for part in everyone for name, value in part.items()}
        merged = {
            layer.name: [parts[f"{layer.name}/{side}"] for side in "AG"] for layer in kfac.layers
        }
        results[name, scale, accumulation] = {
            name: (*factors, parts[name]) for name, factors in merged.items()
        }
        engine.destroy()
    return results


def test_factors_and_preconditioned_gradients_are_invariant():
    """Of the ways to split them, with the modes and loss scales, every pair of two."""
    modes = [("z0", 0), ("z2", 0), ("z3", 0), ("z2-fp16", 8), ("z2-fp16", 12)]
    ways = [
        (*mode, accumulation, world)
        for world in (1, 2, 4)
        for mode in (modes if world < 4 else modes[1:3])
        for accumulation in (1, 4)
    ]
    chosen = covering(ways, lambda way: {"mode": way[:2], "accumulation": way[2], "world": way[3]})
    reference_case = None
    for world in (1, 2, 4):
        cases = [way for way in chosen if way[3] == world]
        results = run_ranks(
            "tests.deepspeed.test_traps:invariance_worker", world=world, payload=cases
        )[0]
        for (name, scale, accumulation), layers in results.items():
            reference_case = reference_case or layers
            tolerance = 2e-2 if "fp16" in name else 2e-5
            for layer, tensors in layers.items():
                for kind, actual, first in zip(
                    ("A", "G", "V"), tensors, reference_case[layer], strict=True
                ):
                    error = float((actual - first).norm() / first.norm())
                    where = (
                        f"{kind} of {layer}: {name} scale 2^{scale} accumulation "
                        f"{accumulation} world {world}"
                    )
                    assert error <= tolerance, f"{where} is off by {error:.1e}"


# clipping, norms, precision of what is written back


def norms_of(kfac) -> tuple[float, float]:
    """Of this rank's part of the gradients: their norm as the inner optimizer will step with them,
    and before DeepSpeed multiplied them."""
    factor = 1.0 if kfac.seam.factor is None else float(kfac.seam.factor)
    square = 0.0
    view = kfac.engine_view
    others = shard_layout(kfac.layout.engine, view.other_params, view.domain.group, seam=kfac.seam)
    for layout in (kfac.layout, others):
        for shard, gradient in layout.gradients().items():
            applied = gradient.double() * (factor if layout.raw(shard) else 1.0)
            square += float(applied.square().sum())
    return square**0.5, square**0.5 / factor


def norm_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        engine = build(mode, 1)
        kfac, seen = engine.kfac.preconditioner, []
        step = engine.kfac.job.step

        def record(step=step, kfac=kfac, seen=seen):
            _, raw = norms_of(kfac)
            step()
            _, preconditioned = norms_of(kfac)
            layout = kfac.layout
            half = torch.float16 if layout.params[0].dtype == torch.float16 else torch.bfloat16
            written = layout.gradients().values()
            rounded = sum(float((flat != flat.to(half).to(flat.dtype)).sum()) for flat in written)
            seen.append((raw, preconditioned, rounded))

        engine.kfac.job.step = record
        with patched(mode):
            train(engine, 1, steps=1)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen[0])
        whole = everyone[:1] if kfac.layout.replicated else everyone
        raw, preconditioned = (sum(part[i] ** 2 for part in whole) ** 0.5 for i in (0, 1))
        results[name] = {
            "raw": raw / kfac.layout.loss_scale(),
            "preconditioned": preconditioned / kfac.layout.loss_scale(),
            "reported": float(engine.get_global_grad_norm()),
            "not_16_bit": sum(part[2] for part in everyone),
        }
        engine.destroy()
    return results


def test_the_reported_norm_is_of_the_raw_gradient():
    names = [
        "z1",
        "z2",
        "z2-offload",
        "z2-round_robin",
        "z3",
        "z3-offload",
        "z1-bf16",
        "z2-bf16",
        "z2-bf16-offload",
    ]
    names += ["z1-bf16-accum32", "z3-bf16", "z2-fp16", "z3-fp16", "z0-bf16-fused"]
    results = run_ranks("tests.deepspeed.test_traps:norm_worker", world=2, payload=names)[0]
    for name, norms in results.items():
        # DeepSpeed adds its parts up in its own formats; the preconditioned norm is far away
        assert abs(norms["reported"] / norms["raw"] - 1) < 1e-3, (name, norms)
        assert abs(norms["reported"] / norms["preconditioned"] - 1) > 0.05, (name, norms)
        # the first group's are fp32 when its optimizer steps, whatever they were before
        assert norms["not_16_bit"] > 100, f"{name}: results are rounded to 16 bits"


DAMPING, RATE = 1e-11, 1e-6
"""With them results leave fp16, and weights move all the same."""


def large_worker(cases) -> dict:
    """Results that leave fp16, and a step in which one rank alone overflows."""
    results, scale = {}, {"loss_scale": 1.0}
    block = {
        **KFAC,
        "damping": {"kind": "tikhonov", "value": DAMPING},
        "preconditioner": {"kl_clip": 0},
    }
    for name, clip in cases:
        mode = BY_NAME[name]
        half = {"fp16": {"enabled": True, **scale}} if mode.dtype == "fp16" else {}
        optimizer = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}}
        engine = build(mode, 1, kfac=block, optimizer=optimizer, gradient_clipping=clip, **half)
        kfac, seen, reported, first = engine.kfac.preconditioner, [], [], {}
        step = engine.kfac.job.step

        def record(step=step, kfac=kfac, seen=seen):
            _, raw = norms_of(kfac)
            step()
            written = kfac.layout.gradients().values()
            seen.append((raw, max(float(gradient.abs().max()) for gradient in written)))

        engine.kfac.job.step = record
        with patched(mode):
            for index in range(3):
                train(engine, 1, steps=1, first=index)
                reported.append(float(engine.get_global_grad_norm() or 0))
                first = weights(engine) if index == 0 else first
            trained, before, skipped = weights(engine), snapshot(kfac), engine.skipped_steps
            train(engine, 1, steps=1, first=3, times=float("inf") if dist.get_rank() == 1 else 1.0)
        kept = same(trained, weights(engine)) and same(before, snapshot(kfac))
        results[name, clip] = (
            first,
            trained,
            skipped,
            engine.skipped_steps - skipped,
            kept,
            seen,
            reported,
        )
        engine.destroy()
    return results


def test_results_that_leave_fp16_are_no_overflow_and_an_inf_of_one_rank_is():
    """FP16_UnfusedOptimizer takes the norm of gradients in the parameters' dtype: all steps were
    skipped."""
    cases = [
        (name, clip)
        for name in ("z0-fp16", "z0-fp16-fused", "z0-bf16", "z0-bf16-fused")
        for clip in (0.0, 0.5)
    ]
    for results in run_ranks("tests.deepspeed.test_traps:large_worker", world=2, payload=cases):
        for (name, clip), (first, trained, skipped, then, kept, seen, reported) in results.items():
            case = name, clip, seen, reported
            assert skipped == 0 and then == 1 and kept, (*case, skipped, then, kept)
            for norm, (raw, largest) in zip(reported, seen[:3], strict=True):
                assert "bf16" in name or clip or largest > 2 * torch.finfo(torch.float16).max, case
                assert abs(norm / raw - 1) < 1e-3, case  # of terms in bf16, at most
            fused_first, fused, *_ = results[f"{name.removesuffix('-fused')}-fused", clip]
            if clip:  # the wrappers add up the norm that they clip by in different orders
                rounded = clip * torch.finfo(torch.float32).eps  # of a gradient
                near(
                    first,
                    fused_first,
                    2 * rounded * RATE / DAMPING,
                    "rounding, over the damping",
                    what=str(case),
                )
            else:
                assert same(trained, fused), case


def nan_worker(_) -> dict:
    """Break one layer's eigenbasis: its preconditioned gradient is NaN, which bf16 ZeRO-2 would
    apply."""
    mode = BY_NAME["z2-bf16"]
    engine = build(mode, 1)
    kfac = engine.kfac.preconditioner
    train(engine, 1, steps=1)
    for state in kfac.state.values():
        state.basis.A.vectors[0].fill_(float("nan"))
    train(engine, 1, steps=1, first=1)
    return {
        "finite": all(bool(torch.isfinite(w).all()) for w in weights(engine).values()),
        "replaced": float(kfac.metrics.summary[0]),
        "owned": len(kfac.owned),
    }


def test_our_own_nan_is_never_applied():
    for result in run_ranks("tests.deepspeed.test_traps:nan_worker", world=2):
        assert result["finite"] and result["owned"] > 0 and result["replaced"] == 3, (
            "counted over all ranks"
        )


def infinite_norm_worker(names: list[str]) -> dict:
    """DeepSpeed is told to apply gradients in bf16 that are not finite, and clips them: it
    multiplies all by 0."""
    found = {}
    for name in names:
        mode = BY_NAME[name]
        bf16 = {"enabled": True}
        # versions without the key never check
        if "check_grad_overflow" in DeepSpeedBF16Config.model_fields:
            bf16["check_grad_overflow"] = False
        no_refresh = {"eigenbasis": {"refresh_interval": 50}, "burn_in": {"steps": 0}}
        engine = build(mode, 1, kfac={**mode.kfac_block, **no_refresh}, bf16=bf16)
        with patched(mode):
            train(engine, 1, steps=3)
            kfac, before = engine.kfac.preconditioner, weights(engine)
            moments = {
                (layer, part): value.clone()
                for layer, state in kfac.state.items()
                for part, value in vars(state.moments).items()
            }
            hook = engine.module.norm.bias.register_hook(lambda gradient: gradient * torch.inf)
            train(engine, 1, steps=1, first=3)
            hook.remove()
        kept = {
            (layer, part): bool(value.equal(moments[layer, part]))
            for layer, state in kfac.state.items()
            for part, value in vars(state.moments).items()
        }
        after = weights(engine)
        moved = {
            parameter: float((after[parameter] - before[parameter]).norm())
            for layer in kfac.layers
            for parameter in layer.parameters
        }
        counted = engine.kfac.counters()["not_finite_layers"]
        found[name] = kept, moved, (counted, len(kfac.layers)), kfac.steps
        engine.destroy()
    return found


def test_no_layer_moves_or_learns_where_deepspeed_clips_an_infinite_norm_and_all_are_counted():
    names = ["z2-bf16-corrected", "adam-z2-bf16"]
    (found,) = run_ranks("tests.deepspeed.test_traps:infinite_norm_worker", world=1, payload=names)
    for name, (kept, moved, counted, steps) in found.items():
        assert all(kept.values()) and steps == 4, (name, kept)
        assert counted[0] == counted[1], (name, counted)
        assert name == "z2-bf16-corrected" or not any(moved.values()), (name, moved)


# a learning rate schedule, and a failing decomposition


def schedule_worker(_) -> dict:
    """kl-clip goes by the largest rate so far, whoever sets it: halving lr halves the step."""
    engine = build(
        Mode("sgd", 2, kfac={"preconditioner": {"kl_clip": 1e-6}}, clip=0.0),
        1,
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
    )
    moved = []
    for lr in (0.1, 0.05):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        before = weights(engine)
        train(engine, 1, steps=1, first=0)
        after = weights(engine)
        moved.append(
            sum(float((after[n] - before[n]).square().sum()) for n in after if "norm" not in n)
            ** 0.5
        )
    peaks = engine.kfac.preconditioner.direction.peak_lr.values()
    found = {"halved": moved[1] / moved[0], "by hand": max(peaks)}
    engine.destroy()
    engine = build(Mode("decay", 2, clip=0.0), 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    decaying = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer.optimizer, gamma=0.1)
    for step in range(2):
        train(engine, 1, steps=1, first=step)
        decaying.step()  # by the program, as Accelerate does
    found["by a scheduler"] = max(engine.kfac.preconditioner.direction.peak_lr.values())
    engine.destroy()
    return found


def test_kl_clip_respects_a_learning_rate_schedule():
    result = run_ranks("tests.deepspeed.test_traps:schedule_worker", world=1)[0]
    near([result["halved"]], [0.5], 0.1, "the gradient changes from step to step")
    close([result["by hand"], result["by a scheduler"]], [0.1, 0.1])


def failing_refresh_worker(_) -> dict:
    from ds_kfac.curvature import eigen as eigenbasis

    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.preconditioner
    train(engine, 1, steps=2)
    before = snapshot(kfac)

    def fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        with patch.object(eigenbasis, "eigh", fails):
            train(engine, 1, steps=1, first=2)
        counts = engine.kfac.counters()
        for factor in kfac.curvature.factors.values():
            factor.packed_P.fill_(float("nan"))
        train(engine, 1, steps=2, first=3)
    after = snapshot(kfac)
    bases = [name for name in before if name.endswith((".QA", ".QG"))]
    return {
        "kept": bases and all(torch.equal(before[name], after[name]) for name in bases),
        "counts": counts,
        "owned": len(kfac.owned),
        "said": said.getvalue(),
    }


def test_a_failed_refresh_keeps_the_old_basis_and_is_counted_and_said():
    """Also that of a factor which is not finite any more."""
    for result in run_ranks("tests.deepspeed.test_traps:failing_refresh_worker", world=2):
        assert result["kept"] and result["owned"] > 0
        assert result["counts"]["refresh_failures"] == 2 * 3, (
            "factors of all ranks, two of each layer"
        )
        assert result["counts"]["refreshes_failed"] == 2 * result["owned"]
        assert result["counts"]["refresh_retries"] == 4 * result["owned"]
        for step in (2, 4):
            assert (
                f"succeeded ({2 * result['owned']} in step {step}); the last result "
                "stays in use, where there is one" in result["said"]
            )


def unequal_worker(_) -> dict:
    """Ranks with different numbers of rows: the factors are weighted by rows, not by ranks."""
    from tests.ops.specification import symmetric_pack

    engine = build(BY_NAME["z2"], 1)
    kfac, rank = engine.kfac.preconditioner, dist.get_rank()
    x = torch.randn(MICRO_ROWS + 3, 3, FEATURES, generator=torch.Generator().manual_seed(3))
    mine = x[:MICRO_ROWS] if rank == 0 else x[MICRO_ROWS:]
    engine.backward(engine(mine, torch.zeros(len(mine), 3, dtype=torch.long)))
    engine.step()
    rows = torch.cat([x.reshape(-1, FEATURES), torch.ones(x.shape[0] * 3, 1)], 1)
    expected = symmetric_pack(rows.T @ rows / len(rows))
    factors = kfac.curvature.factors.items()
    own = [float((state.packed_P - expected).norm()) for key, state in factors if key == "first/A"]
    return {"error": own}


def test_ranks_with_unequal_batches_are_weighted_by_rows():
    errors = [
        e
        for result in run_ranks("tests.deepspeed.test_traps:unequal_worker", world=2)
        for e in result["error"]
    ]
    close(errors, [0.0], scale=10.0, sums=60, dtype=torch.float32)  # a norm of elements near one
