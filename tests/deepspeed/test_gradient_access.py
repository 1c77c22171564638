"""DeepSpeed's own doors to gradients and states give and take the same with K-FAC as without; what
DeepSpeed handed out is filled, never replaced."""

from functools import partial

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
)
from torch.utils._pytree import tree_leaves

import ds_kfac
from ds_kfac.step import proving
from tests.choices import chosen
from tests.close import close, exact
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net

pytestmark = pytest.mark.distributed
MODES = ["z0", "z0-bf16", "z0-fp16-fused", "z1-offload", "z1-bf16-accum32", "z2"]
MODES += ["z2-not_contiguous", "z2-fp16", "z2-bf16-offload", "z3", "z3-offload", "z3-fp16"]
OFF = {"kfac": {"enabled": False}}


def attach(engine) -> None:
    with chosen(KFAC) as config:
        ds_kfac.attach(engine, config)


def handed_out(engine) -> dict[tuple, object]:
    """Every tensor, gradient and number in the attributes of an engine and of what it made."""
    made = engine, engine.optimizer, engine.basic_optimizer, engine.engine_timers
    found: dict[tuple, object] = {}
    for number, holder in enumerate([*map(vars, made), dict(engine.module.named_parameters())]):
        for name, value in holder.items():
            for index, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, (int, float, torch.Tensor)):
                    found[number, name, index] = leaf
                if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad is not None:
                    found[number, name, index, "grad"] = leaf.grad
    return found


@pytest.mark.ranks(2)
def test_nothing_that_deepspeed_handed_out_is_replaced_nor_a_counter_or_loss_scale_changed():
    for name in (*MODES, "z1-fp16", "z3-sub_groups", "z2-autocast_float16"):
        engine = build(BY_NAME[name], 1, **OFF)
        for steps in (0,) if "autocast" in name else (0, 2):
            with patched(BY_NAME[name]):
                train(engine, 1, steps=steps)
            before = handed_out(engine)
            attach(engine)
            during = handed_out(engine)
            engine.kfac.detach()
            after = handed_out(engine)
            assert len(before) > 30 and not after.keys() - before.keys(), (name, steps)
            for way, thing in before.items():
                for now in (during.get(way), after.get(way)):
                    same = now == thing if isinstance(thing, (int, float)) else now is thing
                    assert same, (name, steps, way)
        engine.destroy()


def gradients(engine, accumulation: int, step: int) -> dict[str, torch.Tensor | None]:
    """A step's, as DeepSpeed gives them before it steps. The step itself is still to do."""
    dtype, batches = engine.get_data_types()[0], list(micro_batches(step, accumulation))
    for place, (x, y) in enumerate(batches):
        engine.backward(engine(x.to(dtype), y))
        if place + 1 < len(batches):
            engine.step()
    named = dict(engine.module.named_parameters())
    found = {name: safe_get_full_grad(param) for name, param in named.items()}
    if engine.zero_optimization_stage() == 3:
        found |= {f"{name} here": safe_get_local_grad(param) for name, param in named.items()}
    return {name: None if g is None else g.detach().clone() for name, g in found.items()}


def put(engine, value: float) -> dict[str, torch.Tensor]:
    """Other gradients, and what DeepSpeed gives then."""
    named = dict(engine.module.named_parameters())
    for param in named.values():
        # its safe_set_full_grad fails where a parameter is padded
        if engine.zero_optimization_stage() == 3:
            local = safe_get_local_grad(param)
            safe_set_local_grad(param, torch.full_like(local, value))
        else:
            safe_set_full_grad(param, torch.full(param.shape, value))
    return {name: safe_get_full_grad(param).detach().clone() for name, param in named.items()}


@pytest.mark.ranks(2)
def test_gradients_are_got_and_set_as_without_kfac():
    proving.RAISES = False  # a gradient that is set is not that of the rows
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "gradient_clipping": 0.0}
    for name, accumulation in [*((name, 2) for name in MODES), *((name, 1) for name in MODES[::3])]:
        mode = BY_NAME[name]
        with patched(mode):
            plain, ours = engines = [build(mode, accumulation, **sgd, **OFF) for _ in range(2)]
            for step, value in enumerate((None, 0.0, None, 0.25)):
                if step in (0, 3):
                    attach(ours)
                elif step == 2:
                    ours.kfac.detach()
                case = f"{name} accumulation {accumulation} step {step}"
                got = [gradients(engine, accumulation, step) for engine in engines]
                exact(got[1], got[0], what=case)
                if value is not None:
                    exact(put(ours, value), put(plain, value), what=case)
                # of BF16_Optimizer only a staging copy can be set, which does not move anything
                moves = value is not None and name != "z1-bf16-accum32"
                for engine in engines:  # a step tells its gradient
                    for group in engine.optimizer.param_groups:
                        group["lr"] = 0.5 if moves else 0.0
                    engine.step()
                if moves:  # K-FAC steps its layers otherwise
                    trained = [weights(engine) for engine in engines]
                    names = [n for n in trained[0] if value == 0.0 or n.startswith("norm")]
                    exact(*({n: own[n] for n in names} for own in trained), what=case)
        plain.destroy()
        ours.destroy()


@pytest.mark.ranks(2)
def test_attaching_in_the_middle_of_a_step_is_refused_and_loses_nothing():
    """Of two micro-batches."""
    refusal = "middle of a step: there are gradients that no step has used yet"
    for name in (*MODES, "z1-bf16-accum32-late", "z1-fp16-accum32"):
        mode = BY_NAME[name]
        with patched(mode):
            plain, asked = build(mode, 2, **OFF), build(mode, 2, **OFF)
            dtype = plain.get_data_types()[0]

            def refused(engine=asked) -> bool:
                said = error_of(lambda: attach(engine))
                if not said:
                    engine.kfac.detach()
                return refusal in said

            assert not refused(), name
            for step in range(2):
                for place, (x, y) in enumerate(micro_batches(step, 2)):
                    losses = [engine(x.to(dtype), y) for engine in (plain, asked)]
                    assert not place or refused(), name
                    plain.backward(losses[0]), asked.backward(losses[1])
                    assert refused(), name
                    plain.step(), asked.step()
                    assert refused() == (place == 0), (name, step)
            exact(weights(asked), weights(plain), what=name)
        plain.destroy()
        asked.destroy()


@pytest.mark.ranks(2)
def test_an_engine_that_has_trained_under_autocast_can_be_attached_to():
    """The loss scale that DeepSpeed has made changes nothing."""
    for stage in (0, 2, 3):
        engine = build(BY_NAME[f"z{stage}-autocast_float16"], 1, **OFF)
        train(engine, 1, steps=2)
        attach(engine)
        train(engine, 1, steps=2)
        assert engine.kfac.counters()["steps"] == 2


def set_full(param, key: str) -> None:
    shape = getattr(param, "ds_shape", param.shape)
    safe_set_full_optimizer_state(param, torch.ones(shape), key)


@pytest.mark.ranks(1)
def test_a_layer_one_of_whose_gradients_is_taken_away_stands_still():
    for which in ("weight", "bias"):
        engine = build(BY_NAME["adam-z0"], 1, gradient_clipping=0.0)
        train(engine, 1, steps=1)
        gradients(engine, 1, step=1)
        before = weights(engine)
        getattr(engine.module.first, which).grad = None
        engine.step()
        after = weights(engine)
        names = ("first.weight", "first.bias")
        exact({n: after[n] for n in names}, {n: before[n] for n in names}, what=which)
        assert not torch.equal(after["head.weight"], before["head.weight"])


STATES = ["adam-z2-groups", "adam-z2-offload", "adam-z3", "adam-z1-bf16-accum32"]


@pytest.mark.ranks(2, timeout=90)
def test_states_of_kfacs_parameters_are_refused_on_every_rank_and_those_of_others_are_there():
    """Else two of two ranks in ZeRO-1/2: one that raised, one that waited for it."""
    shapes = {name: p.shape for name, p in make_net().named_parameters()}
    for name in STATES:
        mode = BY_NAME[name]
        engine = build(mode, 1, gradient_clipping=0.0)
        # after one step, by beta 0.8
        moments = {n: 0.2 * g.float() for n, g in gradients(engine, 1, 0).items()}
        engine.step()
        named = dict(engine.module.named_parameters())
        layers = {id(param) for param in engine.kfac.preconditioner.layout.params}
        for parameter, param in named.items():
            if id(param) not in layers:
                moment = safe_get_full_optimizer_state(param, "exp_avg")
                # of micro-batches and ranks, in 16 bits each
                dtype = torch.bfloat16 if mode.extra else torch.float32
                close(moment, moments[parameter], sums=8, dtype=dtype, what=f"{name} {parameter}")
                continue
            for door in (safe_get_full_optimizer_state, set_full):
                said = error_of(lambda: door(param, "exp_avg"))  # noqa: B023
                refusal = "KFACAdamW: this parameter has no 'exp_avg' in the optimizer"
                assert refusal in said, (name, parameter, said)
        assert {n: safe_get_full_fp32_param(p).shape for n, p in named.items()} == shapes, name
        assert len(layers) == len(named) - 2, "all but the norm's"
        groups, state = engine.basic_optimizer.param_groups, engine.basic_optimizer.state
        for ours in (p for group in groups if group["kfac"] for p in group["params"]):
            said = error_of(partial(state[ours].__setitem__, "exp_avg", torch.zeros_like(ours)))
            assert "optimizer.state.clear()" in said, "as ReLoRA sets it"
        engine.destroy()
