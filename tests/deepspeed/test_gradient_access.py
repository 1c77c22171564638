"""DeepSpeed's own doors to gradients and states give and take the same with K-FAC as without; what
DeepSpeed handed out is filled, never replaced."""

import contextlib
import io
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

import ds_kfac
from ds_kfac.step import proving
from tests.choices import chosen
from tests.close import close
from tests.deepspeed.modes import BY_NAME, KFAC
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
MODES = [
    "z0",
    "z0-bf16",
    "z0-fp16-fused",
    "z1",
    "z1-offload",
    "z1-bf16-accum32",
    "z2",
    "z2-not_contiguous",
    "z2-offload",
    "z2-fp16",
    "z2-bf16-accum32",
    "z2-bf16-offload",
    "z3",
    "z3-offload",
    "z3-fp16",
]
OFF = {"kfac": {"enabled": False}}


def attach(engine, block=KFAC):
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        chosen(block) as config,
    ):
        return ds_kfac.attach(engine, config)


def objects(thing, where: str = "", depth: int = 5) -> dict[str, object]:
    """Every container and tensor that is reached through attributes, keys and places, by its way
    there."""
    found: dict[str, object] = {}
    if isinstance(thing, Mapping):
        inside = {f"{where}[{index}]": value for index, value in enumerate(thing.values())}
    elif isinstance(thing, (list, tuple)):
        inside = {f"{where}[{index}]": value for index, value in enumerate(thing)}
    else:
        inside = {f"{where}.{name}": value for name, value in vars(thing).items()}
    for way, value in inside.items():
        if isinstance(value, torch.Tensor):
            found |= {way: value} | (
                {f"{way}.grad": value.grad} if value.is_leaf and value.grad is not None else {}
            )
        elif isinstance(value, (dict, list, tuple, set)):
            found[way] = value
            if depth and not isinstance(value, set) and len(value) < 200:
                found |= objects(value, way, depth - 1)
    return found


def handed_out(engine) -> dict[str, object]:
    found = objects(engine.optimizer, "optimizer") | objects(
        engine.basic_optimizer, "basic_optimizer"
    )
    found |= objects(engine, "engine", 2) | objects(engine.engine_timers, "engine_timers")
    for name, param in engine.module.named_parameters():
        found |= objects(param, name) | (
            {f"{name}.grad": param.grad} if param.grad is not None else {}
        )
        mapping = getattr(param, "_hp_mapping", None)
        if mapping is not None:
            found |= objects(mapping, f"{name}._hp_mapping")
    return found


def containers_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        engine = build(BY_NAME[name], 1, **OFF)
        found = []
        for steps in (0, 2):
            with patched(BY_NAME[name]):
                train(engine, 1, steps=steps)
            before = handed_out(engine)
            attach(engine)
            during = handed_out(engine)
            engine.kfac.detach()
            after = handed_out(engine)
            for at, now in (("attached", during), ("detached", after)):
                found += [
                    (at, steps, way) for way, thing in before.items() if now.get(way) is not thing
                ]
            found += [("left", steps, way) for way in after.keys() - before.keys()]
        results[name] = len(before), found
        engine.destroy()
    return results


def test_nothing_that_deepspeed_handed_out_is_replaced():
    for result in run_ranks(
        "tests.deepspeed.test_gradient_access:containers_worker", world=2, payload=MODES
    ):
        for name, (reached, found) in result.items():
            assert reached > 30 and not found, (name, found)


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
    for param in engine.module.parameters():
        # its safe_set_full_grad fails where a parameter is padded
        if engine.zero_optimization_stage() == 3:
            local = safe_get_local_grad(param)
            safe_set_local_grad(param, torch.full_like(local, value))
        else:
            safe_set_full_grad(param, torch.full(param.shape, value))
    return {
        name: safe_get_full_grad(p).detach().clone() for name, p in engine.module.named_parameters()
    }


def same(given: list[dict]) -> list[str]:
    """Names under which two engines give different things."""
    plain, ours = given
    both = plain.keys() | ours.keys()
    return [n for n in both if plain[n] is not ours[n] and not torch.equal(plain[n], ours[n])]


def access_worker(cases: list[tuple[str, int]]) -> dict:
    proving.RAISES = False  # a gradient that is set is not that of the rows
    # a step tells its gradient
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "gradient_clipping": 0.0}
    results = {}
    for name, accumulation in cases:
        mode, found = BY_NAME[name], {}
        with patched(mode):
            plain, ours = engines = [build(mode, accumulation, **sgd, **OFF) for _ in range(2)]

            def step(
                number: int,
                value: float | None,
                engines=engines,
                case=(name, accumulation),
                found=found,
            ) -> None:
                # of BF16_Optimizer only a staging copy can be set, which does not move anything
                moves = value is not None and case[0] != "z1-bf16-accum32"
                found["get", number] = same(
                    [gradients(engine, case[1], number) for engine in engines]
                )
                if value is not None:
                    found["set", number] = same([put(engine, value) for engine in engines])
                for engine in engines:
                    for group in engine.optimizer.param_groups:
                        group["lr"] = 0.5 if moves else 0.0
                    engine.step()
                if moves:
                    left = [weights(engine) for engine in engines]
                    if value:  # K-FAC steps its layers otherwise
                        left = [
                            {n: w for n, w in whole.items() if n.startswith("norm")}
                            for whole in left
                        ]
                    found["stepped", number] = same(left)

            attach(ours)
            step(0, None)
            step(1, 0.0)
            ours.kfac.detach()
            step(2, None)
            attach(ours)
            step(3, 0.25)
        results[name, accumulation] = found
        plain.destroy(), ours.destroy()
    return results


CASES = [(name, 2) for name in MODES] + [(name, 1) for name in MODES[::3]]


def test_gradients_are_got_and_set_as_without_kfac():
    for result in run_ranks(
        "tests.deepspeed.test_gradient_access:access_worker", world=2, payload=CASES
    ):
        for case, found in result.items():
            assert all(not names for names in found.values()) and len(found) >= 6, (case, found)


def middle_worker(names: list[str]) -> dict:
    """Attaching in the middle of a step of two micro-batches: what it says, at which point."""
    results = {}
    for name in names:
        mode, said = BY_NAME[name], {}
        with patched(mode):
            plain, asked = build(mode, 2, **OFF), build(mode, 2, **OFF)
            dtype = plain.get_data_types()[0]

            def ask(point: str, engine=asked, said=said) -> None:
                try:
                    attach(engine)
                    said[point] = "attached"
                    engine.kfac.detach()
                except ValueError as error:
                    said[point] = str(error)

            ask("new")
            for step in range(2):
                for place, (x, y) in enumerate(micro_batches(step, 2)):
                    losses = [engine(x.to(dtype), y) for engine in (plain, asked)]
                    if place:
                        ask(f"{step}.{place} after the forward")
                    plain.backward(losses[0]), asked.backward(losses[1])
                    ask(f"{step}.{place} before engine.step()")
                    plain.step(), asked.step()
                    ask(f"{step}.{place} after engine.step()")
            expected = weights(plain)
            said["trains on"] = all(torch.equal(w, expected[n]) for n, w in weights(asked).items())
        results[name] = said
        plain.destroy(), asked.destroy()
    return results


def test_attaching_in_the_middle_of_a_step_is_refused_and_loses_nothing():
    modes = [*MODES, "z1-bf16-accum32-late", "z1-fp16-accum32"]
    for result in run_ranks(
        "tests.deepspeed.test_gradient_access:middle_worker", world=2, payload=modes
    ):
        for name, said in result.items():
            assert said.pop("trains on"), name
            for point, text in said.items():
                ends = point == "new" or point.endswith(".1 after engine.step()")
                assert ends == (text == "attached"), (name, point, text)
                assert (
                    ends
                    or "middle of a step: there is a gradient that no step has taken yet" in text
                ), (name, text)


def states_worker(names: list[str]) -> dict:
    results = {}
    for name in names:
        mode, found = BY_NAME[name], {}
        with patched(mode):
            engine = build(mode, 1, gradient_clipping=0.0)
            # after one step, by beta 0.8
            moments = {n: 0.2 * g.float() for n, g in gradients(engine, 1, 0).items()}
            engine.step()
        layers = {id(param) for param in engine.kfac.preconditioner.layout.params}
        for parameter, param in engine.module.named_parameters():
            shape = getattr(param, "ds_shape", param.shape)
            doors = [
                safe_get_full_optimizer_state,
                partial(safe_set_full_optimizer_state, value=torch.ones(shape)),
            ]
            if mode.stage == 3:
                part = torch.ones_like(param.ds_tensor)
                doors += [
                    safe_get_local_optimizer_state,
                    partial(safe_set_local_optimizer_state, value=part),
                ]
            for place, door in enumerate(doors):
                if id(param) in layers:
                    found[parameter, place] = error_of(
                        lambda door=door, p=param: door(p, optim_state_key="exp_avg")
                    )
            if id(param) not in layers:
                state = safe_get_full_optimizer_state(param, "exp_avg")
                found[parameter, "moment"] = state, moments[parameter]
        found["others"] = {
            n: safe_get_full_fp32_param(p).shape for n, p in engine.module.named_parameters()
        }
        results[name] = found
        engine.destroy()
    return results


def test_states_of_kfacs_parameters_are_refused_on_every_rank_and_those_of_others_are_there():
    """Else two of two ranks in ZeRO-1/2: one that raised, one that waited for it."""
    names = [
        "adam-z1",
        "adam-z2",
        "adam-z2-groups",
        "adam-z2-offload",
        "adam-z3",
        "adam-z3-offload",
    ]
    names += ["adam-z1-bf16-accum32"]
    for result in run_ranks(
        "tests.deepspeed.test_gradient_access:states_worker", world=2, payload=names, timeout=90
    ):
        for name, found in result.items():
            shapes = found.pop("others")
            assert shapes == {n: p.shape for n, p in make_net().named_parameters()}, name
            for (parameter, what), value in found.items():
                if what == "moment":
                    # of micro-batches and ranks, in 16 bits each
                    dtype = torch.bfloat16 if "bf16" in name else torch.float32
                    close(value[0], value[1], sums=8, dtype=dtype, what=f"{name} {parameter}")
                else:
                    assert "KFACAdamW: there is no 'exp_avg' of this parameter" in value, (
                        name,
                        parameter,
                        value,
                    )
            assert sum(what == "moment" for _, what in found) == 2 and len(found) > 10, name
