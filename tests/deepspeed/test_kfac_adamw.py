"""The optimizer KFACAdamW as a user meets it: config, norms and clipping, schedules, memory, loss
scales, detaching."""

import contextlib
import copy
import io
import itertools
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import ds_kfac
from benchmarks.held import nbytes_of
from ds_kfac.directions.kfac_adamw import group_step
from tests.close import close
from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, micro_batches, patched, train, weights
from tests.models import CLASSES, FEATURES, cross_entropy, make_batch, make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
PLAIN = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
OURS = {"type": "KFACAdamW", "params": {"lr": 0.01, "torch_adam": True}}


def config(**changes) -> dict:
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": copy.deepcopy(OURS),
    }
    return {**base, "steps_per_print": None, **changes}


def start(settings: dict, model=None, **keywords):
    engine, optimizer, _, scheduler = ds_kfac.initialize(
        model=model or make_net(),
        model_parameters=keywords.pop("parameters", None),
        config=settings,
        **keywords,
    )
    return engine, optimizer, scheduler


def problem(settings: dict, **keywords) -> str:
    try:
        start(settings, **keywords)[0].destroy()
    except (ValueError, RuntimeError, AssertionError) as error:
        return str(error)
    return ""


def errors_worker(_) -> dict:
    params = OURS["params"]
    model = make_net()
    return {
        "unknown parameter": problem(
            config(optimizer={"type": "KFACAdamW", "params": {**params, "beta": [0.9, 0.9]}})
        ),
        "misspelt": problem(config(optimizer={"type": "KfacAdam", "params": {"lr": 0.01}})),
        "disabled": problem(config(kfac={"enabled": False})),
        "two optimizers": problem(
            config(), model=model, optimizer=torch.optim.AdamW(model.parameters())
        ),
        "partial offload": problem(
            config(
                zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
            )
        ),
        "wrong block": problem(config(kfac={"adam": {"rotat": True}})),
        "no curvature": problem(
            config(kfac={"adam": {"rotate": False}, "factor": {"fisher": "empirical"}})
        ),
    }


def test_contradictions_are_said_before_an_engine_is_built():
    errors = run_ranks("tests.deepspeed.test_kfac_adamw:errors_worker", world=1)[0]
    assert (
        "optimizer.params.beta: KFACAdamW has no such parameter; did you mean betas?"
        in errors["unknown parameter"]
    )
    assert 'did you mean "KFACAdamW"?' in errors["misspelt"]
    assert 'use "AdamW" to train without it' in errors["disabled"]
    assert "choose one" in errors["two optimizers"]
    assert "cannot be offloaded in part" in errors["partial offload"]
    assert "did you mean kfac.adam.rotate?" in errors["wrong block"]
    assert "kfac.adam.rotate false keeps no factors" in errors["no curvature"]


def behaviour_worker(_) -> dict:
    results = {}
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    }
    for stage in (0, 2, 3):
        norms, states, rates = {}, {}, {"plain": [], "ours": []}
        for name, optimizer in (("plain", PLAIN), ("ours", OURS)):
            zero = {"stage": stage}
            settings = config(
                optimizer=copy.deepcopy(optimizer), zero_optimization=zero, gradient_clipping=0.05
            )
            settings |= {"scheduler": schedule, "bf16": {"enabled": False}}
            if name == "plain":
                engine, *_ = deepspeed.initialize(model=make_net(), config=settings)
            else:
                engine, *_ = start(settings)
            norms[name] = []
            for step in range(3):
                for x, y in micro_batches(step, 1):
                    engine.backward(engine(x, y))
                engine.step()
                norms[name].append(float(engine.get_global_grad_norm() or 0))
                rates[name].append({group["lr"] for group in engine.optimizer.param_groups})
                if step == 0:
                    first = weights(engine)
            inner, groups = engine.basic_optimizer, len(engine.optimizer.param_groups)
            elements = sum(
                t.numel() for state in inner.state.values() for t in state.values() if t.numel() > 1
            )
            moments = torch.tensor(float(elements))
            if name == "ours":
                kfac = engine.kfac.preconditioner
                ranks = dist.get_world_size() if stage else 1
                held = torch.tensor(nbytes_of(kfac)[1] / 4 - len(kfac.owned))
                dist.all_reduce(held)
                dist.all_reduce(moments)
                states["ours"] = float(held) + float(moments) / (dist.get_world_size() / ranks)
                states["report"] = engine.kfac.report
            else:
                dist.all_reduce(moments)
                states["plain"] = float(moments) / (1 if stage else dist.get_world_size())
            del first
            engine.destroy()
        results[stage] = {
            "norms": norms,
            "states": states,
            "rates": rates["ours"],
            "plain rates": rates["plain"],
        }
        results[stage]["groups"] = groups
    return results


def test_norm_schedule_and_memory_are_those_of_adamw():
    numel = sum(p.numel() for p in make_net().parameters())
    for stage, result in run_ranks("tests.deepspeed.test_kfac_adamw:behaviour_worker", world=2)[
        0
    ].items():
        norms = result["norms"]
        # the first gradient is the same; that it is the raw one's norm holds for all
        close(norms["ours"][0], norms["plain"][0], sums=numel, dtype=torch.float32, what=str(stage))
        assert result["groups"] == 2 and result["rates"] == result["plain rates"], (
            "every group follows the schedule"
        )
        assert len({rate for rates in result["plain rates"] for rate in rates}) == 3, (
            "which changes them"
        )
        padding = 2 * 4 * 3  # of flat groups
        assert result["states"]["ours"] <= 2 * numel + padding
        assert result["states"]["plain"] >= 2 * numel
        assert " in eigenbases and " in result["states"]["report"]


def implied_worker(_) -> dict:
    engine, *_ = start(config())
    layers = [layer.name for layer in engine.kfac.preconditioner.layers]
    groups = [bool(group.get("kfac")) for group in engine.optimizer.param_groups]
    shown = start(
        config(kfac={"damping": {"value": 2.0}, "adam": {"except_layers": ["head", "fc"]}})
    )[0].kfac.report
    other = start(config(optimizer=copy.deepcopy(PLAIN), kfac={"adam": {"whiten": 0.2}}))[
        0
    ].kfac.report
    frozen = make_net()
    frozen.middle.weight.requires_grad_(False)
    frozen_engine, *_ = start(config(), model=frozen)
    train(frozen_engine, 1, steps=2)
    engine.kfac.detach()
    with patched(BY_NAME["z2"]):
        try:
            train(engine, 1, steps=1)
            detached = ""
        except RuntimeError as error:
            detached = str(error)
    return {
        "layers": layers,
        "groups": groups,
        "shown": shown,
        "other": other,
        "detached": detached,
        "frozen": [layer.name for layer in frozen_engine.kfac.preconditioner.layers],
    }


def test_the_name_alone_attaches_kfac_and_detaching_stops_training():
    result = run_ranks("tests.deepspeed.test_kfac_adamw:implied_worker", world=1)[0]
    assert result["layers"] == ["first", "middle", "head"] and result["groups"] == [True, False]
    assert "without effect with KFACAdamW: kfac.damping.value" in result["shown"]
    assert "kfac.adam.except_layers 'fc', which no layer's name ends with" in result["shown"]
    assert "2 layers orthogonalized at lr, 1 along Adam's direction at " in result["shown"]
    rows = {
        line.split()[0]: line
        for line in result["shown"].splitlines()
        if line.startswith("  ") and line.split()
    }
    assert rows["first"].endswith("orthogonalized")
    assert rows["head"].endswith("Adam's direction: kfac.adam.except_layers 'head'")
    assert "without effect with AdamW: kfac.adam.whiten" in result["other"]
    assert result["frozen"] == ["first", "head"]
    assert "K-FAC was detached" in result["detached"]


def growth_worker(names: list[str]) -> dict[str, dict[int, tuple[list[float], list[float]]]]:
    """Sizes of a layer's steps, and loss scales, which grow every 4 steps or never; with clipping,
    too.

    ZeRO 1 and 2 double the scale before they divide by it, so that the gradients of that step are
    half as large, for every optimizer. Where the scale never grows, that step's loss is half as
    large instead.
    """
    found = {}
    for name in names:
        parts: list[float] = []  # of its gradient a step gets this part
        for clip in (0.0, 1e-3):
            runs = found[f"{name}, clipped at {clip}"] = {}
            for window in (4, 1000):
                fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": window}
                engine = build(BY_NAME[name], 1, fp16=fp16, gradient_clipping=clip)
                sizes, scales = runs[window] = [], []
                seam, direction = (
                    engine.kfac.preconditioner.seam,
                    engine.kfac.preconditioner.direction,
                )
                before = weights(engine)["middle.weight"]
                scale = [float(engine.optimizer.loss_scale)]

                def measured(*given, plain=direction.step, seam=seam, parts=parts, scale=scale):
                    parts.append(1.0 if seam.factor is None else float(seam.factor) * scale[0])
                    return plain(*given)

                measuring = window == 4 and not clip
                with (
                    patched(BY_NAME[name]),
                    patch.object(direction, "step", measured if measuring else direction.step),
                ):
                    for step in range(12):
                        train(
                            engine,
                            1,
                            steps=1,
                            first=step,
                            times=1.0 if window == 4 else parts[step],
                        )
                        now = weights(engine)["middle.weight"]
                        sizes.append(float((now - before).norm()))
                        scale[0] = float(engine.optimizer.loss_scale)
                        scales.append(scale[0])
                        before = now
                engine.destroy()
    return found


def test_a_step_is_as_long_where_the_loss_scale_grows():
    names = ["adam-z0-fp16", "adam-z2-fp16", "adam-z3-fp16"]
    (found,) = run_ranks("tests.deepspeed.test_kfac_adamw:growth_worker", world=1, payload=names)
    for name, runs in found.items():
        (sizes, scales), (wanted, same) = runs[4], runs[1000]
        assert scales[-1] >= 4 * scales[0] and same[-1] == same[0], (name, scales)
        for step, (size, expected) in enumerate(zip(sizes, wanted, strict=True)):
            assert 0.99 < size / expected < 1.01, (name, step, sizes, wanted)


def first_steps_worker(_) -> float:
    """Nothing rotated, no momentum, every layer along Adam's direction at lr: exactly AdamW."""
    finals = []
    for optimizer in (PLAIN, OURS):
        settings = config(optimizer=copy.deepcopy(optimizer), gradient_clipping=0.1)
        settings["optimizer"]["params"]["betas"] = [0.0, 0.9]
        settings["kfac"] = {"adam": {"rotate": False, "except_layers": [".*"]}}
        if optimizer is PLAIN:
            del settings["kfac"]
            engine, *_ = deepspeed.initialize(model=make_net(), config=settings)
        else:
            settings["optimizer"]["params"]["adam_lr"] = settings["optimizer"]["params"]["lr"]
            with patch.object(group_step, "BASE", 1):
                engine, *_ = start(settings)
        train(engine, 1, steps=5)
        finals.append(weights(engine))
        engine.destroy()
    return max(float((finals[0][name] - finals[1][name]).abs().max()) for name in finals[0])


def test_without_rotation_it_is_adamw():
    worst = run_ranks("tests.deepspeed.test_kfac_adamw:first_steps_worker", world=2)
    # five steps of weights of up to 0.3
    close(worst, [0.0] * 2, sums=5 * 10, scale=0.3, dtype=torch.float32)


def still_worker(cases) -> dict:
    """What moves in each of three steps; the rate of the second is zero."""
    found = {}
    for stage, types in cases:
        params = {**OURS["params"], "adam_lr": 0, "betas": [0, 0.9], "weight_decay": 0.1}
        settings = config(
            optimizer={"type": "KFACAdamW", "params": params}, zero_optimization={"stage": stage}
        )
        settings["kfac"] = {
            "layers": {"types": types},
            "factor": {"update_interval": 1, "fisher": "empirical"},
        }

        def scheduler(made):
            return LambdaLR(made, [1.0, 0.0, 1.0, 1.0].__getitem__)

        engine, *_ = start(settings, lr_scheduler=scheduler)
        seen = [weights(engine)]
        for step in range(3):
            train(engine, 1, steps=1, first=step)
            seen.append(weights(engine))
        pairs = itertools.pairwise(seen)
        found[stage, len(types)] = [{n for n in b if not torch.equal(a[n], b[n])} for a, b in pairs]
        found[stage, len(types)].append(engine.kfac.counters()["not_finite_layers"])
        engine.destroy()
    return found


def test_what_has_no_rate_stands_still_and_does_not_decay():
    """Norms at adam_lr 0, stepped by AdamW or as layers of K-FAC's; everything at a rate of
    zero."""
    cases = [(stage, types) for stage in (0, 2) for types in (["Linear"], ["Linear", "LayerNorm"])]
    moved = {name for name, _ in make_net().named_parameters() if not name.startswith("norm")}
    for of_rank in run_ranks(
        "tests.deepspeed.test_kfac_adamw:still_worker", world=2, payload=cases
    ):
        for case, found in of_rank.items():
            assert found == [moved, set(), moved, 0], case


def apart_worker(_) -> dict:
    """How far the first step of AdamW moves entries, where two matrices are left out, in units of
    lr."""
    found = {}
    for stage, as_object in ((0, False), (2, False), (3, False), (2, True)):
        params = {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-12, "torch_adam": True}
        settings = config(
            zero_optimization={"stage": stage}, kfac={"layers": {"exclude": ["^middle", "^first"]}}
        )
        model = make_net()
        keywords = (
            {"optimizer": ds_kfac.KFACAdamW(model.parameters(), **params)} if as_object else {}
        )
        settings |= {} if as_object else {"optimizer": {"type": "KFACAdamW", "params": params}}
        if as_object:
            del settings["optimizer"]
        engine, *_ = start(settings, model=model, **keywords)
        before = weights(engine)
        train(engine, 1, steps=1)
        moved = {
            name: float((W - before[name]).abs().median()) / 0.01
            for name, W in weights(engine).items()
        }
        parts = [
            moved[name] for name in ("middle.weight", "first.weight", "first.bias", "norm.weight")
        ]
        found[stage, as_object] = parts, engine.kfac.report, engine.kfac.log_constants()
        engine.destroy()
    return found


def test_matrices_in_no_layer_and_their_biases_have_lr_and_all_else_adam_lr():
    found = run_ranks("tests.deepspeed.test_kfac_adamw:apart_worker", world=2)[0]
    net = make_net()
    elements = net.middle.weight.numel() + net.first.weight.numel()
    for case, (parts, report, logged) in found.items():
        # g / |g|, in ten operations
        close(parts, [1.0, 1.0, 1.0, 8.0], sums=10, dtype=torch.float32, what=str(case))
        said, step = report.splitlines()[1:3]
        assert said.endswith(
            f": AdamW at 8 lr (adam_lr), {elements:,} of them in matrices, at lr as their biases"
        ), said
        head = 8 * 128 / 20  # of 19 inputs and a bias
        assert step.endswith(f"orthogonalized at lr, 1 along Adam's direction at {head:.3g} lr"), (
            step
        )
        rates = [logged[f"kfac/lr_{kind}"] for kind in ("heads", "others")]
        close(rates, (head, 8.0), sums=1, dtype=torch.float64)


def empty_worker(_) -> dict:
    found = {}
    for stage in (0, 1, 2):
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES))
        model.register_parameter("none", torch.nn.Parameter(torch.zeros(0)))
        engine, *_ = start(config(zero_optimization={"stage": stage}), model=model)
        before, (x, y) = weights(engine)["0.weight"], make_batch(0, 4)
        engine.backward(cross_entropy(engine(x), y))
        engine.step()
        found[stage] = not torch.equal(weights(engine)["0.weight"], before)
        engine.destroy()
    return found


def test_parameters_without_elements_may_be_all_that_is_in_no_layer():
    assert run_ranks("tests.deepspeed.test_kfac_adamw:empty_worker", world=1)[0] == {
        0: True,
        1: True,
        2: True,
    }


def parts_worker(stages: list[int]) -> dict:
    """What is said on standard error after a program has set "lr" of all groups, of none, or of the
    first one alone."""
    found = {}
    for stage in stages:
        for key, change in ("lr", all), ("lr", None), ("lr", any), ("weight_decay", any):
            engine, optimizer, _ = start(
                config(zero_optimization={"stage": stage}, kfac={"report": "none"})
            )
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                train(engine, 1, steps=1)
                groups = {None: [], all: optimizer.param_groups, any: optimizer.param_groups[:1]}[
                    change
                ]
                for group in groups:
                    group[key] = 0.5 * group[key]
                train(engine, 1, steps=3, first=1)
            found[stage, key, change is any] = said.getvalue().count(
                f"Their {key} is not one any more"
            )
            engine.destroy()
    return found


def test_a_rate_that_is_set_for_a_part_of_a_group_alone_is_told_once():
    found = run_ranks("tests.deepspeed.test_kfac_adamw:parts_worker", world=1, payload=[0, 2, 3])[0]
    assert found == {case: int(case[2]) for case in found} and len(found) == 9


def reset_worker(stages: list[int]) -> dict:
    """How many gradients the layers' moments have after four steps, something, and one step
    more."""
    found = {}
    for stage in stages:
        engine, optimizer, _ = start(config(zero_optimization={"stage": stage}))
        middle = engine.module.middle.weight
        for what in ("nothing", "clear", "pop", "load"):
            train(engine, 1, steps=4)
            if what == "clear":
                optimizer.state.clear()
            elif what == "pop" and not stage:
                optimizer.state[middle] = {}
            elif what == "load" and not stage:
                optimizer.load_state_dict(optimizer.state_dict())
            train(engine, 1, steps=1)
            states = engine.kfac.preconditioner.state
            found[stage, what] = {
                name: float(state.moments.updates) for name, state in states.items()
            }
        engine.destroy()
    return found


def test_moments_that_a_program_takes_from_the_optimizers_state_begin_at_zero():
    """Those of the layer, or of all where DeepSpeed's parameters are flat."""
    for found in run_ranks(
        "tests.deepspeed.test_kfac_adamw:reset_worker", world=2, payload=[0, 2, 3]
    ):
        for (stage, what), counts in found.items():
            # steps since the last reset of all
            since = {"nothing": 5, "clear": 1, "pop": 6, "load": 11}[what]
            for name, count in counts.items():
                of_one = (
                    {"pop": 1, "load": 6}.get(what, since)
                    if name == "middle" and not stage
                    else since
                )
                assert count == of_one, (stage, what, name)


def reset_after_load_worker(_) -> dict:
    """As ``reset_worker``: after a load, a step without a gradient of ``first``, and the loss of
    the state of ``middle``."""
    engine, optimizer, _ = start(config(zero_optimization={"stage": 0}))
    train(engine, 1, steps=4)
    optimizer.load_state_dict(optimizer.state_dict())
    hook = engine.module.first.register_forward_hook(lambda module, inputs, output: output.detach())
    train(engine, 1, steps=1)
    hook.remove()
    optimizer.state.pop(engine.module.middle.weight)
    train(engine, 1, steps=1)
    return {
        name: float(state.moments.updates)
        for name, state in engine.kfac.preconditioner.state.items()
    }


def test_loaded_moments_of_a_layer_without_a_step_stay_where_anothers_are_taken_away():
    (counts,) = run_ranks("tests.deepspeed.test_kfac_adamw:reset_after_load_worker", world=1)
    assert counts.pop("first") == 5 and counts.pop("middle") == 1
    assert set(counts.values()) == {6}
