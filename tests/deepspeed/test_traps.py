"""What broke other K-FAC implementations, in a real engine: overflow, direct backward, unused modules, norms."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.deepspeed.modes import BY_NAME, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, difference, micro_batches, patched, reference, train, weights
from tests.models import FEATURES, Net, cross_entropy, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


def snapshot(kfac) -> dict[str, torch.Tensor]:
    """Everything K-FAC keeps on this rank, as tensors."""
    tensors = {"steps": torch.tensor(kfac.steps)}
    for name, state in kfac.state.items():
        tensors |= {f"{name}.A": state.A.packed_P, f"{name}.G": state.G.packed_P, f"{name}.k": state.A.updates}
        if state.basis_A is not None:
            tensors |= {f"{name}.QA": state.basis_A.vectors, f"{name}.QG": state.basis_G.vectors}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# overflow


def overflow_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        scale = {"fp16": {"enabled": True, "initial_scale_power": 8}} if mode.dtype == "fp16" else {}
        engine = build(mode, 1, **scale)
        kfac = engine.kfac.optimizer
        with patched(mode):
            train(engine, 1, steps=3)
            before, trained = snapshot(kfac), weights(engine)
            # An infinite loss scale for one step: every gradient overflows. Step 3 folds a batch, but for fp16 at
            # interval 2 the refresh is due at step 4, so overflow that one too.
            for x, y in micro_batches(3, 1):
                loss = engine(x.to(engine.get_data_types()[0]), y)
                engine.backward(loss * float("inf"))
                engine.step()
            after, untrained = snapshot(kfac), weights(engine)
            train(engine, 1, steps=1, first=3)
            before_refresh = snapshot(kfac)
            for x, y in micro_batches(4, 1):
                engine.backward(engine(x.to(engine.get_data_types()[0]), y) * float("inf"))
                engine.step()
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
    names = ["z1-fp16", "z2-fp16", "z2-fp16-offload", "z3-fp16", "z0-fp16-fused", "z1-bf16-accum32"]
    for results in run_ranks("tests.deepspeed.test_traps:overflow_worker", world=2, payload=names):
        for name, result in results.items():
            assert result["kept"] and result["kept_at_refresh"] and result["weights_kept"], (name, result)
            assert result["counts"]["skipped_steps"] == 2 and result["counts"]["factor_updates"] == 6, (name, result)
            assert result["steps"] == 6 and result["finite"], (name, result)


def autocast_overflow_worker(names: list[str]) -> dict:
    """GradScaler starts at a scale that overflows fp16 and skips by itself until it fits."""
    results = {}
    for name in names:
        engine = build(BY_NAME[name], 1)
        kfac = engine.kfac.optimizer
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
        "tests.deepspeed.test_traps:autocast_overflow_worker", world=2, payload=["z0-autocast_float16"]
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
        expected = reference(
            mode, accumulation, dist.get_world_size(), {n: w for n, w in initial.items() if "unused" not in n}
        )
        for step in range(4):
            forward_styles(engine, style, step, accumulation)
        actual = weights(engine)
        results[name, model_name, style, accumulation] = difference(
            {n: actual[n] for n in expected}, expected, {n: initial[n] for n in expected}
        )
        engine.destroy()
    return results


def test_every_way_to_run_a_model_trains_like_the_reference():
    styles = ("no_grad_between", "caller_divides", "accelerate")
    cases = [(mode, "net", style, 2) for mode in ("z0", "z2", "z3") for style in styles]
    # DeepSpeed itself refuses a direct backward at stage 0
    cases += [(mode, "net", style, 2) for mode in ("z1", "z2", "z3") for style in ("direct", "direct_logits", "scale")]
    cases += [
        (mode, f"checkpoint-{kind}", "engine", 2)
        for mode in ("z0", "z2", "z3")
        for kind in ("reentrant", "non_reentrant", "deepspeed")
    ]
    cases += [(mode, "unused", "engine", 1) for mode in ("z0-noclip", "z2", "z3")]
    for results in run_ranks("tests.deepspeed.test_traps:styles_worker", world=2, payload=cases):
        wrong = {case: value for case, value in results.items() if not value <= 1e-5}
        assert not wrong, wrong


# invariance of what is measured


def invariance_worker(_) -> dict:
    """Factors and preconditioned gradients of one step on the same 16 rows, split in all ways this world allows."""
    world, results = dist.get_world_size(), {}
    for name, extra in (("z0", {}), ("z2", {}), ("z3", {}), ("z2-fp16", {}), ("z2-fp16", {"scale": 12})):
        for accumulation in (1, 2, 4):
            rows = 16 // (world * accumulation)
            scale = {"fp16": {"enabled": True, "initial_scale_power": extra["scale"]}} if extra else {}
            mode = BY_NAME[name]
            engine = build(mode, accumulation, train_micro_batch_size_per_gpu=rows, **scale)
            kfac = engine.kfac.optimizer
            gradients, write = {}, kfac.exchange.scatter

            def keep(preconditioned, write=write, kfac=kfac, gradients=gradients):
                gradients |= {n: V / kfac.layout.grad_scale() for n, V in preconditioned.items()}
                write(preconditioned)

            kfac.exchange.scatter = keep
            x, y = torch.randn(16, 3, FEATURES, generator=torch.Generator().manual_seed(7)), torch.arange(48) % 5
            mine = slice(dist.get_rank() * rows * accumulation, (dist.get_rank() + 1) * rows * accumulation)
            micro = zip(x[mine].split(rows), y.view(16, 3)[mine].split(rows), strict=True)
            with patched(mode):
                for xs, ys in micro:
                    engine.backward(engine(xs.to(engine.get_data_types()[0]), ys))
                    engine.step()
            own = {n: (s.A.packed_P, s.G.packed_P, gradients[n]) for n, s in kfac.state.items()}
            everyone = [None] * world
            dist.all_gather_object(everyone, own)
            merged = {name: value for part in everyone for name, value in part.items()}
            results[name, extra.get("scale", 8 if "fp16" in name else 0), accumulation] = merged
            engine.destroy()
    return results


def test_factors_and_preconditioned_gradients_are_invariant():
    reference_case = None
    for world in (1, 2, 4):
        results = run_ranks("tests.deepspeed.test_traps:invariance_worker", world=world)[0]
        for (name, scale, accumulation), layers in results.items():
            reference_case = reference_case or layers
            tolerance = 2e-2 if "fp16" in name else 2e-5
            for layer, tensors in layers.items():
                for kind, actual, expected in zip(("A", "G", "V"), tensors, reference_case[layer], strict=True):
                    error = float((actual - expected).norm() / expected.norm())
                    where = f"{kind} of {layer}: {name} scale 2^{scale} accumulation {accumulation} world {world}"
                    assert error <= tolerance, f"{where} is off by {error:.1e}"


# clipping, norms, precision of what is written back


def norm_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode = BY_NAME[name]
        engine = build(mode, 1)
        kfac, seen = engine.kfac.optimizer, []
        step = kfac.step

        def record(step=step, kfac=kfac, seen=seen):
            before = [flat / kfac.layout.grad_scale() for flat in kfac.layout.consume()]
            step()
            flats = kfac.layout.consume()
            half = torch.float16 if kfac.layout.params[0].dtype == torch.float16 else torch.bfloat16
            rounded = sum(float((flat != flat.to(half).float()).sum()) for flat in flats)
            after = [flat / kfac.layout.grad_scale() for flat in flats]
            seen.append([sum(float(f.double().square().sum()) for f in part) for part in (before, after)] + [rounded])

        kfac.step = record
        with patched(mode):
            train(engine, 1, steps=1)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen[0])
        partitioned = mode.stage > 0
        squares = [sum(part[i] for part in everyone) if partitioned else everyone[0][i] for i in (0, 1)]
        results[name] = {
            "raw": squares[0] ** 0.5,
            "preconditioned": squares[1] ** 0.5,
            "reported": float(engine.get_global_grad_norm()),
            "not_16_bit": sum(part[2] for part in everyone),
        }
        engine.destroy()
    return results


def test_the_reported_norm_is_of_the_preconditioned_gradient():
    names = ["z1", "z2", "z2-offload", "z2-round_robin", "z3", "z3-offload", "z1-bf16", "z2-bf16", "z2-bf16-offload"]
    names += ["z1-bf16-accum32", "z3-bf16", "z2-fp16", "z3-fp16", "z0-bf16-fused"]
    results = run_ranks("tests.deepspeed.test_traps:norm_worker", world=2, payload=names)[0]
    for name, norms in results.items():
        if name == "z1-bf16-accum32":  # consume() shows this rank's slice, the norm is over all: see the modes test
            norms["preconditioned"] = norms["reported"]
        assert abs(norms["reported"] / norms["preconditioned"] - 1) < 1e-3, (name, norms)
        assert abs(norms["reported"] / norms["raw"] - 1) > 0.05, (name, norms)
        assert norms["not_16_bit"] > 100, f"{name}: gradients came back rounded to 16 bits"


def nan_worker(_) -> dict:
    """Break one layer's eigenbasis: its preconditioned gradient is NaN, which bf16 ZeRO-2 would apply."""
    from dataclasses import replace

    mode = BY_NAME["z2-bf16"]
    engine = build(mode, 1)
    kfac = engine.kfac.optimizer
    train(engine, 1, steps=1)
    for name, state in kfac.state.items():
        broken = replace(state.basis_A, vectors=torch.full_like(state.basis_A.vectors, float("nan")))
        kfac.state[name] = replace(state, basis_A=broken)
    train(engine, 1, steps=1, first=1)
    return {"finite": all(bool(torch.isfinite(w).all()) for w in weights(engine).values()),
            "replaced": float(kfac.metrics.not_finite), "owned": len(kfac.owned)}  # fmt: skip


def test_our_own_nan_is_never_applied():
    for result in run_ranks("tests.deepspeed.test_traps:nan_worker", world=2):
        assert result["finite"] and result["replaced"] == result["owned"] > 0


# a learning rate schedule, and a failing decomposition


def schedule_worker(_) -> dict:
    """Under kl-clip at the peak lr, halving lr halves the step; at the current lr it does not."""
    norms = {}
    for which in ("peak", "current"):
        kfac = {"preconditioner": {"kl_clip": 1e-6, "kl_clip_lr": which}, "factor": {"update_interval": 1}}
        mode = Mode("sgd", 2, kfac=kfac, clip=0.0)
        engine = build(mode, 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        moved = []
        for lr in (0.1, 0.05):
            for group in engine.optimizer.param_groups:
                group["lr"] = lr
            before = weights(engine)
            train(engine, 1, steps=1, first=0)
            after = weights(engine)
            moved.append(sum(float((after[n] - before[n]).square().sum()) for n in after if "norm" not in n) ** 0.5)
        norms[which] = moved[1] / moved[0]
        engine.destroy()
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}
    for key, extra in (("scheduled", {"scheduler": scheduler}), ("constant", {})):
        engine = build(Mode("default", 2, clip=0.0), 1, **extra)
        norms[key] = engine.kfac.optimizer.clip_lr
        engine.destroy()
    return norms


def test_kl_clip_respects_a_learning_rate_schedule():
    result = run_ranks("tests.deepspeed.test_traps:schedule_worker", world=1)[0]
    assert result["peak"] == pytest.approx(0.5, rel=0.2) and result["current"] == pytest.approx(1.0, rel=0.2)
    assert (result["scheduled"], result["constant"]) == ("peak", "current")


def failing_refresh_worker(_) -> dict:
    from ds_kfac import eigenbasis

    engine = build(BY_NAME["z2"], 1)
    kfac = engine.kfac.optimizer
    train(engine, 1, steps=2)
    before = {name: state.basis_A for name, state in kfac.state.items()}

    def fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    eigenbasis.EIGEN_METHODS["eigh"] = fails
    with contextlib.redirect_stderr(io.StringIO()):
        train(engine, 1, steps=1, first=2)
    return {"kept": all(kfac.state[n].basis_A is basis for n, basis in before.items()),
            "counts": dict(kfac.metrics.counts), "owned": len(kfac.owned)}  # fmt: skip


def test_a_failed_refresh_keeps_the_old_basis_and_is_counted():
    for result in run_ranks("tests.deepspeed.test_traps:failing_refresh_worker", world=2):
        assert result["kept"] and result["owned"] > 0
        assert result["counts"]["refresh_failures"] == result["owned"]
        assert result["counts"]["refresh_retries"] == 4 * result["owned"]


def unequal_worker(_) -> dict:
    """Ranks with different numbers of rows: the factors are weighted by rows, not by ranks."""
    from ds_kfac.ops.functional import symmetric_pack

    engine = build(BY_NAME["z2"], 1)
    kfac, rank = engine.kfac.optimizer, dist.get_rank()
    x = torch.randn(MICRO_ROWS + 3, 3, FEATURES, generator=torch.Generator().manual_seed(3))
    mine = x[:MICRO_ROWS] if rank == 0 else x[MICRO_ROWS:]
    engine.backward(engine(mine, torch.zeros(len(mine), 3, dtype=torch.long)))
    engine.step()
    rows = torch.cat([x.reshape(-1, FEATURES), torch.ones(x.shape[0] * 3, 1)], 1)
    expected = symmetric_pack(rows.T @ rows / len(rows))
    own = [float((state.A.packed_P - expected).norm()) for name, state in kfac.state.items() if name == "first"]
    return {"error": own}


def test_ranks_with_unequal_batches_are_weighted_by_rows():
    errors = [e for result in run_ranks("tests.deepspeed.test_traps:unequal_worker", world=2) for e in result["error"]]
    assert len(errors) == 1 and errors[0] < 1e-5


def test_net_is_the_reference_net():
    assert {n for n, _ in make_net().named_parameters()} < {n for n, _ in WithUnused().named_parameters()}
