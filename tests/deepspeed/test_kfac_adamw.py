"""KFACAdamW as a user meets it: named in the config, as an object that trains as the config's does,
its groups, schedules, loss scales and moments."""

import contextlib
import copy
import io
import pickle

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import ds_kfac
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.directions.table import rule_in
from tests.close import close, exact, near
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import build, parameter_groups, patched, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import make_net

pytestmark = pytest.mark.distributed
OPTIONS = {"lr": LR, "adam_lr": LR / 4, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.1}
OPTIONS["torch_adam"] = True
DEFAULTS = {"lr": 0.01, "torch_adam": True}


def engine_of(
    stage: int,
    way: str = "named",
    schedules=None,
    *,
    initialize=ds_kfac.initialize,
    options=OPTIONS,
    groups=lambda model: parameter_groups(model, "decay"),
    **more,
):
    """An engine, which also has the user's optimizer if there is one.

    Args:
        way: the optimizer is "named" in the config, an "object", or a function, "made late".
        schedules: makes a scheduler of an optimizer.
        groups: makes the optimizer's parameter groups of the model.
        more: of the config.
    """
    model, given = make_net(), {}
    config = {**BY_NAME[f"adam-z{stage}"].config(1, dist.get_world_size()), **more}
    del config["optimizer"]
    if way == "object":
        given["optimizer"] = ds_kfac.KFACAdamW(groups(model), **options)
        if schedules:
            given["lr_scheduler"] = schedules(given["optimizer"])
    else:
        given["model_parameters"] = groups(model)
        if way == "made late":
            given["optimizer"] = lambda groups: ds_kfac.KFACAdamW(groups, **options)
        else:
            params = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
            config["optimizer"] = {"type": "KFACAdamW", "params": params}
        if schedules:
            given["lr_scheduler"] = schedules
    engine, *_ = initialize(model=model, config=config, **given)
    engine.given = given.get("optimizer")
    return engine


def all_parameters(model) -> list:
    return list(model.parameters())


def by_default(stage: int, way: str = "named", schedules=None, *, params=None, **more):
    """An engine with the defaults of KFACAdamW and of K-FAC."""
    options, kfac = DEFAULTS | (params or {}), more.pop("kfac", {})
    return engine_of(
        stage, way, schedules, options=options, groups=all_parameters, kfac=kfac, **more
    )


def rates(optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def schedule(step: int) -> float:
    return (step + 1) / 4  # the first step's rate is not lr


def scheduled(optimizer) -> LambdaLR:
    return LambdaLR(optimizer, schedule)


def listed(optimizer) -> LambdaLR:
    """A scheduler with something of its own for each of the user's two groups."""
    assert len(optimizer.param_groups) == 2, f"{len(optimizer.param_groups)} groups"
    return LambdaLR(optimizer, [schedule, lambda step: 1 / (step + 2)])


@pytest.mark.ranks(2)
def test_the_object_trains_as_the_config_does(tmp_path):
    """Also where it is saved and loaded."""
    for stage in (0, 2, 3):
        named = engine_of(stage, "named", scheduled)
        train(named, 1, steps=4)
        expected = weights(named)
        assert set(named.get_lr()) == {schedule(4) * LR}
        engine = engine_of(stage, "object", scheduled, initialize=deepspeed.initialize)
        train(engine, 1, steps=2)
        engine.save_checkpoint(f"{tmp_path}/{stage}", tag="tag")
        train(engine, 1, steps=2, first=2)
        exact(weights(engine), expected, what=f"stage {stage}")
        assert rates(engine.given) == [schedule(4) * LR] * 2
        resumed = engine_of(stage, "object", scheduled)
        resumed.load_checkpoint(f"{tmp_path}/{stage}", tag="tag")
        assert rates(resumed.given) == [schedule(2) * LR] * 2
        train(resumed, 1, steps=2, first=2)
        exact(weights(resumed), expected, what=f"stage {stage}")


@pytest.mark.ranks(2)
def test_callables_and_lists_see_the_groups_of_the_user():
    """Not the four that DeepSpeed steps: their errors said that two of something are too few."""
    warmup = {"warmup_min_lr": [0.0, 0.01], "warmup_max_lr": [0.05, 0.02], "warmup_num_steps": 8}
    warmup = {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}}
    for stage in (2, 3):
        made_before = engine_of(stage, "object", listed)
        train(made_before, 1, steps=3)
        for way, initialize in (
            ("named", ds_kfac.initialize),
            ("made late", ds_kfac.initialize),
            ("made late", deepspeed.initialize),
        ):
            engine = engine_of(stage, way, listed, initialize=initialize)
            train(engine, 1, steps=3)
            exact(weights(engine), weights(made_before), what=f"{way} {stage}")
            assert rates(engine.basic_optimizer) == rates(made_before.basic_optimizer)
        engine = engine_of(stage, "made late", scheduler=warmup)
        train(engine, 1, steps=3)
        first, other = 0.05 * 2 / 8, 0.01 + 0.01 * 2 / 8
        close(rates(engine.basic_optimizer), [first, other, other], sums=4)
        model, config = make_net(), BY_NAME[f"z{stage}"].config(1, 2)
        del config["optimizer"]
        engine, *_ = ds_kfac.initialize(
            model=model,
            model_parameters=parameter_groups(model, "decay"),
            optimizer=lambda groups: torch.optim.SGD(groups, lr=LR),
            config=config,
        )
        assert hasattr(engine, "kfac") and rates(engine.basic_optimizer) == [LR, LR]


@pytest.mark.ranks(2)
def test_a_schedule_of_other_groups_is_not_taken_by_place(tmp_path):
    engine = engine_of(2, "named", scheduled)
    # of the groups that are stepped, as it once was
    engine.lr_scheduler = LambdaLR(engine.basic_optimizer, schedule)
    train(engine, 1, steps=3)
    engine.save_checkpoint(str(tmp_path), tag="tag")
    fresh = engine_of(2, "named", scheduled)
    with pytest.raises(CheckpointError, match="3 parameter groups, but this optimizer has 2"):
        fresh.load_checkpoint(str(tmp_path), tag="tag")
    fresh = engine_of(2, "named", scheduled)
    fresh.load_checkpoint(str(tmp_path), tag="tag", load_lr_scheduler_states=False)
    exact(weights(fresh), weights(engine))
    assert fresh.kfac.preconditioner.steps == 3


# what is done to its groups

NEW = {"lr": 0.7 * LR, "weight_decay": 0.3}
"""Of the second group, whose parameters are of layers and of a norm."""


def load(optimizer) -> None:
    saved = copy.deepcopy(optimizer).state_dict()
    saved["param_groups"][1] |= NEW
    optimizer.load_state_dict(saved)


def anew(optimizer) -> None:
    for key, value in NEW.items():
        optimizer.param_groups[1].pop(key)
        optimizer.param_groups[1].setdefault(key, value)


WAYS = {
    "update": lambda optimizer: optimizer.param_groups[1].update(NEW),
    "|=": lambda optimizer: optimizer.param_groups[1].__ior__(NEW),
    "pop and setdefault": anew,
    "load_state_dict": load,
}


@pytest.mark.ranks(1)
def test_a_group_is_what_deepspeed_steps_however_it_is_changed():
    for stage in (0, 2):
        changed_inside = engine_of(stage, "object")
        for group in changed_inside.basic_optimizer.param_groups[1:]:
            group.update(NEW)
        train(changed_inside, 1, steps=3)
        for way, change in WAYS.items():
            engine = engine_of(stage, "object")
            group = engine.given.param_groups[1]
            change(engine.given)
            assert engine.given.param_groups[1] is group
            views = (group, dict(group), group.copy(), group | {})
            assert all(NEW.items() <= view.items() for view in views), way
            assert len(group) == len(list(group)) == len({**group})
            parts = [NEW.items() <= part.items() for part in engine.basic_optimizer.param_groups]
            assert parts == [False, True, True], way
            train(engine, 1, steps=3)
            exact(weights(engine), weights(changed_inside), what=f"{way} {stage}")


@pytest.mark.ranks(1)
def test_what_a_group_in_an_engine_cannot_take_is_said():
    engine = engine_of(0, "object")
    optimizer, inner = engine.given, engine.basic_optimizer
    group, state = optimizer.param_groups[0], {**optimizer.state_dict(), "state": {0: {"step": 1}}}
    fixed, before = '"params" of a parameter group cannot change', "before deepspeed.initialize"
    for change, text in (
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}), before),
        (lambda: inner.add_param_group({"params": [torch.ones(2)]}), before),
        (lambda: group.update(params=[]), fixed),
        (group.clear, fixed),
        (lambda: group.update(adam_lr=0.1), "set adam_lr for the whole optimizer"),
        (lambda: optimizer.load_state_dict(state), "engine.load_checkpoint loads"),
    ):
        assert text in error_of(change), text
    train(engine, 1, steps=1)


def test_before_an_engine_it_is_an_optimizer_like_others_that_nothing_but_deepspeed_steps():
    layer = nn.Linear(3, 2)
    optimizer = ds_kfac.KFACAdamW([layer.weight], 0.1, betas=(0, 0.9))
    optimizer.add_param_group({"params": [layer.bias], "lr": 0.2, "name": "bias"})
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.state_dict() == optimizer.state_dict()
        copied.param_groups[1].update(lr=0.3)
        other = ds_kfac.KFACAdamW([{"params": [layer.weight]}, {"params": [layer.bias]}])
        other.load_state_dict(copied.state_dict())
        assert rates(other) == [0.1, 0.3] and other.param_groups[1]["name"] == "bias"
        copied.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["lr"] == 0.2 and "lr" in optimizer.param_groups[0] | {}
    assert list(map(type, optimizer.param_groups[0]["betas"])) == [float, float]
    with pytest.raises(RuntimeError, match="only a DeepSpeed engine can step"):
        optimizer.step()
    with pytest.raises(ValueError, match="KFACAdamW: lr: got 0; must be above 0 if adam_lr"):
        ds_kfac.KFACAdamW([layer.weight], 0, adam_lr=0.1)
    with pytest.raises(ValueError, match=r"in a parameter group, betas: got .0.9, 1.; must be two"):
        optimizer.add_param_group({"params": [torch.ones(2)], "betas": [0.9, 1]})


def test_an_optimizer_made_of_its_groups_is_recognised():
    """Accelerate replaces it by DeepSpeed's CPU Adam where the optimizer is offloaded."""
    optimizer = ds_kfac.KFACAdamW(nn.Linear(3, 2).parameters(), 0.1)
    other = torch.optim.AdamW(optimizer.param_groups)
    assert rule_in({}, optimizer).optimizer_type == rule_in({}, other).optimizer_type == "KFACAdamW"
    assert rule_in({}, torch.optim.AdamW(nn.Linear(3, 2).parameters())).optimizer_type is None


@pytest.mark.ranks(1)
def test_betas_and_eps_of_a_bias_alone_are_refused_unless_they_are_used():
    """They were ignored: a layer's weight and bias have one pair of moments."""
    for stage, way in ((0, "named"), (2, "object"), (3, "named")):

        def with_biases(exclude=(), **change):
            """An engine whose biases are in a group of their own, with ``change``."""

            def groups(model) -> list[dict]:
                matrices, biases = parameter_groups(model, "decay")
                return [matrices, {**biases, **change}]

            kfac = {"layers": {"exclude": list(exclude)}}
            options = {**OPTIONS, "adam_lr": LR}
            return engine_of(stage, way, options=options, groups=groups, kfac=kfac)  # noqa: B023

        for case, value in (("betas", (0.5, 0.9)), ("eps", 1e-3)):
            said = error_of(lambda: with_biases(**{case: value}))  # noqa: B023
            text = f"first.weight and its bias are in parameter groups of different {case}"
            assert text in said, (stage, way, said)
        with_biases(weight_decay=0.3, lr=LR / 2)
        engine = with_biases(["first", "head"], betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
        before = weights(engine)["head.bias"]
        train(engine, 1, steps=1)
        moved = (weights(engine)["head.bias"] - before).abs()
        rounding = 8 * torch.finfo(torch.float32).eps
        near(moved, torch.full_like(moved, LR), rounding, "the sign's step, from a weight near 1")


# an object that whoever makes the engine does not pass on, as transformers' Trainer

TRAINS_WITH = {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}}


@pytest.mark.parametrize("initialize", [deepspeed.initialize, ds_kfac.initialize])
@pytest.mark.ranks(1)
def test_an_object_that_is_not_passed_on_is_an_error(initialize):
    def said(model, passed=None, **more) -> str:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False, **more}
        given = {"model": model, "optimizer": passed, "config": config}
        if passed is None:
            given["model_parameters"] = model.parameters()
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            error = error_of(lambda: initialize(**given)[0].destroy())
        return error or printed.getvalue()

    def check_silent(*given, **more) -> None:
        text = said(*given, **more)
        assert "KFACAdamW was made" not in text and "Error" not in text, text

    for kind, more in ((None, {"optimizer": TRAINS_WITH, "kfac": {}}), (torch.optim.AdamW, {})):
        model = make_net()
        kept = ds_kfac.KFACAdamW(model.parameters(), LR)
        optimizer = kind(model.parameters(), LR) if kind else None
        text, count = said(model, optimizer, **more), len([*model.parameters()])
        made = f"ValueError: ds_kfac: a KFACAdamW was made for {count} of the parameters"
        assert text.startswith(made) and "optimizer_cls_and_kwargs=" in text, text
        scheduler = LambdaLR(kept, schedule)  # they hold each other
        del kept, scheduler
        check_silent(model, optimizer, **more)
    kept = ds_kfac.KFACAdamW(model.parameters(), LR)
    text = said(model, optimizer={"type": "KFACAdamW", "params": DEFAULTS})
    assert "this engine trains with the learning rates of the config" in text
    check_silent(make_net(), optimizer=TRAINS_WITH)  # another model
    check_silent(model, kept)  # it is passed on
    check_silent(model, optimizer=TRAINS_WITH)  # and stepped no more
    frozen = make_net().requires_grad_(False)
    kept = ds_kfac.KFACAdamW(frozen.parameters(), LR)
    check_silent(frozen)  # is not trained


# what is done in a run


@pytest.mark.ranks(1)
def test_detaching_stops_training():
    engine = by_default(2)
    engine.kfac.detach()
    assert "K-FAC was detached" in error_of(lambda: train(engine, 1, steps=1))


def sizes_and_scales(name: str, clip: float, window: int, halved=()) -> tuple[list, list]:
    """Sizes of a layer's steps, of which some have half the loss; and loss scales, which grow every
    ``window`` steps."""
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": window}
    engine = build(BY_NAME[name], fp16=fp16, gradient_clipping=clip)
    sizes, scales = [], [float(engine.optimizer.loss_scale)]
    with patched(BY_NAME[name]):
        for step in range(12):
            before = weights(engine)["middle.weight"]
            train(engine, 1, steps=1, first=step, times=0.5 if step in halved else 1.0)
            sizes.append(float((weights(engine)["middle.weight"] - before).norm()))
            scales.append(float(engine.optimizer.loss_scale))
    return sizes, scales


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["adam-z0-fp16", "adam-z2-fp16", "adam-z3-fp16"])
def test_a_step_is_as_long_where_the_loss_scale_grows(name):
    """ZeRO doubles the scale before it divides by it, so that the gradients of that step are half
    as large, for every optimizer. Where the scale never grows, that step's loss is half as large
    instead."""
    for clip in (0.0, 1e-3):
        sizes, scales = sizes_and_scales(name, clip, 4)
        grown = [step for step in range(12) if scales[step + 1] > scales[step]]
        wanted, same = sizes_and_scales(name, clip, 1000, () if "z0" in name else grown)
        assert len(grown) > 1 and same[-1] == same[0], scales
        for size, expected in zip(sizes, wanted, strict=True):
            assert 0.99 < size / expected < 1.01, (sizes, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("types", [["Linear"], ["Linear", "LayerNorm"]])
@pytest.mark.parametrize("stage", [0, 2])
def test_what_has_no_rate_stands_still_and_does_not_decay(stage, types):
    """Norms at adam_lr 0, stepped by AdamW or as layers of K-FAC's; everything at a rate of
    zero."""
    params = {"adam_lr": 0, "betas": [0, 0.9], "weight_decay": 0.1}
    factor = {"update_interval": 1, "fisher": "empirical"}
    rates, kfac = [1.0, 0.0, 1.0, 1.0], {"layers": {"types": types}, "factor": factor}
    schedules = lambda made: LambdaLR(made, rates.__getitem__)  # noqa: E731
    engine = by_default(stage, "named", schedules, params=params, kfac=kfac)
    for step in range(3):
        before = weights(engine)
        train(engine, 1, steps=1, first=step)
        moved = {name for name, w in weights(engine).items() if not torch.equal(before[name], w)}
        others = {name for name in before if not name.startswith("norm")}
        assert moved == (others if rates[step] else set()), step
    assert not engine.kfac.counters()["not_finite_layers"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "way"), [(0, "named"), (2, "object"), (3, "named")])
def test_matrices_in_no_layer_and_their_biases_have_lr_and_all_else_adam_lr(stage, way):
    params, kfac = (
        {"weight_decay": 0.0, "eps": 1e-12},
        {"layers": {"exclude": ["^middle", "^first"]}},
    )
    engine = by_default(stage, way, params=params, kfac=kfac)
    before = weights(engine)
    train(engine, 1, steps=1)
    after = weights(engine)
    moved = {name: float((after[name] - w).abs().median()) / 0.01 for name, w in before.items()}
    names = ("middle.weight", "first.weight", "first.bias", "norm.weight")
    # g / |g|, in ten operations
    close([moved[n] for n in names], [1.0, 1.0, 1.0, 8.0], sums=10, dtype=torch.float32)
    said, step = engine.kfac.report.splitlines()[1:3]
    sizes = [f"{name} {before[name].numel()}" for name in ("first.weight", "middle.weight")]
    matrices = said.partition(
        ": AdamW at 8 lr (adam_lr), but at lr in these matrices and their biases: "
    )[2]
    assert sorted(matrices.split(", ")) == sizes
    head = 8 * 128 / 20  # of 19 inputs and a bias
    assert step.endswith(f"orthogonalized at lr, 1 along Adam's direction at {head:.3g} lr")
    logged = engine.kfac.log_constants()
    rates = [logged[f"kfac/lr_{kind}"] for kind in ("heads", "others")]
    close(rates, [head, 8.0], sums=1, dtype=torch.float64)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("key", "groups"), [("lr", slice(2)), ("lr", slice(1)), ("weight_decay", slice(1))]
)
def test_a_rate_that_is_set_for_a_part_of_a_group_alone_is_told_once(stage, key, groups):
    engine = by_default(stage, kfac={"report": "none"})
    with heard() as said:
        train(engine, 1, steps=1)
        for group in engine.optimizer.param_groups[groups]:
            group[key] = 0.5 * group[key]
        train(engine, 1, steps=3, first=1)
    told = sum(f"no longer have the same {key}" in text for text in said)
    assert told == (groups == slice(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_moments_that_a_program_takes_from_the_optimizers_state_begin_at_zero(stage):
    """Those of the layer, or of all where DeepSpeed's parameters are flat."""
    engine = by_default(stage)
    optimizer, middle = engine.optimizer, engine.module.middle.weight

    def updates(action=lambda: None) -> dict[str, float]:
        """How many gradients each layer's moments have in the end."""
        train(engine, 1, steps=4)
        action()
        train(engine, 1, steps=1)
        states = engine.kfac.preconditioner.state.items()
        return {name: float(state.moments.updates) for name, state in states}

    assert set(updates().values()) <= {5}
    assert set(updates(optimizer.state.clear).values()) <= {1}
    if stage:
        return
    for action, of_middle, others in (
        (lambda: optimizer.state.pop(middle), 1, 6),
        (lambda: optimizer.load_state_dict(optimizer.state_dict()), 6, 11),
    ):
        for name, count in updates(action).items():
            assert count == (of_middle if name == "middle" else others), name
