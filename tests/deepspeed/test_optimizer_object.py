"""``ds_kfac.KFACAdamW``, the object, trains as the config's optimizer does, with a scheduler that
was made before."""

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
from tests.deepspeed.runs import parameter_groups, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net

pytestmark = pytest.mark.distributed
OPTIONS = {"lr": LR, "adam_lr": LR / 4, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.1}
OPTIONS["torch_adam"] = True
NAMED = {"type": "KFACAdamW", "params": {**OPTIONS, "betas": [0.8, 0.9]}}


def config_of(stage: int, **more) -> dict:
    config = {**BY_NAME[f"adam-z{stage}"].config(1, dist.get_world_size()), **more}
    return {key: value for key, value in config.items() if value is not None}


def engine_of(stage: int, way: str, schedules=None, *, initialize=ds_kfac.initialize, **more):
    """An engine with two parameter groups, which also has the user's optimizer if there is one.

    Args:
        way: the optimizer is "named" in the config, an "object", or a function, "made late".
        schedules: makes a scheduler of an optimizer.
        more: of the config.
    """
    model, given = make_net(), {}
    groups = parameter_groups(model, "decay")
    if way == "object":
        given["optimizer"] = ds_kfac.KFACAdamW(groups, **OPTIONS)
        if schedules:
            given["lr_scheduler"] = schedules(given["optimizer"])
    else:
        given["model_parameters"] = groups
        if way == "made late":
            given["optimizer"] = lambda groups: ds_kfac.KFACAdamW(groups, **OPTIONS)
        if schedules:
            given["lr_scheduler"] = schedules
    config = config_of(stage, **{"optimizer": NAMED if way == "named" else None, **more})
    engine, *_ = initialize(model=model, config=config, **given)
    engine.given = given.get("optimizer")
    return engine


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
    for stage in range(4):
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
        for way in ("named", "made late"):
            engine = engine_of(stage, way, scheduler=warmup)
            train(engine, 1, steps=3)
            first, other = 0.05 * 2 / 8, 0.01 + 0.01 * 2 / 8
            close(rates(engine.basic_optimizer), [first, other, other], sums=4, what=way)
            assert type(engine.lr_scheduler).__name__ == "WarmupLR"
        model, config = make_net(), config_of(stage, optimizer=None)
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
    with pytest.raises(CheckpointError, match="has rates of 3 parameter groups, here it has 2"):
        fresh.load_checkpoint(str(tmp_path), tag="tag")
    fresh = engine_of(2, "named", scheduled)
    fresh.load_checkpoint(str(tmp_path), tag="tag", load_lr_scheduler_states=False)
    exact(weights(fresh), weights(engine))
    assert fresh.kfac.preconditioner.steps == 3


# what is done to its groups

NEW = {"lr": 0.7 * LR, "weight_decay": 0.3}
"""Of the second group, whose parameters are of layers and of a norm."""


def load(optimizer, saved: dict) -> None:
    saved["param_groups"][1] |= NEW
    optimizer.load_state_dict(saved)


def one_by_one(optimizer) -> None:
    for key, value in NEW.items():
        optimizer.param_groups[1][key] = value


def anew(optimizer) -> None:
    for key, value in NEW.items():
        optimizer.param_groups[1].pop(key)
        optimizer.param_groups[1].setdefault(key, value)


WAYS = {
    "items": one_by_one,
    "update": lambda optimizer: optimizer.param_groups[1].update(NEW),
    "|=": lambda optimizer: optimizer.param_groups[1].__ior__(NEW),
    "pop and setdefault": anew,
    "load_state_dict": lambda optimizer: load(optimizer, optimizer.state_dict()),
    "load a copy's": lambda optimizer: load(optimizer, copy.deepcopy(optimizer).state_dict()),
}


@pytest.mark.ranks(1)
def test_a_group_is_what_deepspeed_steps_however_it_is_changed():
    for stage in (0, 2, 3):
        changed_inside = engine_of(stage, "object")
        for group in changed_inside.basic_optimizer.param_groups[1:]:
            group.update(NEW)
        train(changed_inside, 1, steps=3)
        # what a group passes on is no matter of the stage
        for way, change in list(WAYS.items())[:: 1 + stage]:
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
        (lambda: group.update(adam_lr=0.1), "adam_lr in a parameter group: set it for the whole"),
        (lambda: optimizer.load_state_dict(state), "load them by engine.load_checkpoint"),
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
    with pytest.raises(RuntimeError, match="only a DeepSpeed engine can step it"):
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


def with_biases(stage: int, named: bool, change: dict, exclude: list[str]):
    """An engine whose biases are in a group of their own, with ``change``."""
    model, options = make_net(), {**OPTIONS, "adam_lr": LR}
    groups = [dict(group) for group in parameter_groups(model, "decay")]
    groups[1] |= change
    config = config_of(stage)
    config["kfac"] = {**config["kfac"], "layers": {"exclude": exclude}}
    config["optimizer"] = {"type": "KFACAdamW", "params": {**options, "betas": [0.8, 0.9]}}
    given = {"model_parameters": groups}
    if not named:
        del config["optimizer"]
        given = {"optimizer": ds_kfac.KFACAdamW(groups, **options)}
    return ds_kfac.initialize(model=model, config=config, **given)[0]


@pytest.mark.ranks(1)
def test_betas_and_eps_of_a_bias_alone_are_refused_unless_they_are_used():
    """They were ignored: a layer's weight and bias have one pair of moments."""
    for stage, named in ((0, True), (2, True), (2, False), (3, True)):
        for case, change in (("betas", {"betas": (0.5, 0.9)}), ("eps", {"eps": 1e-3})):
            said = error_of(lambda: with_biases(stage, named, change, []))  # noqa: B023
            text = f"first.weight and its bias are in parameter groups of different {case}"
            assert text in said, (stage, named, said)
        with_biases(stage, named, {"weight_decay": 0.3, "lr": LR / 2}, [])
        sign = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
        engine = with_biases(stage, named, sign, ["first", "head"])
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

    for kind, more in (
        (None, {"optimizer": TRAINS_WITH}),
        (torch.optim.AdamW, {}),
        (None, {"optimizer": TRAINS_WITH, "kfac": {}}),
    ):
        model = make_net()
        kept = ds_kfac.KFACAdamW(model.parameters(), LR)
        optimizer = kind(model.parameters(), LR) if kind else None
        text, count = said(model, optimizer, **more), len([*model.parameters()])
        made = f"ValueError: ds_kfac: a KFACAdamW was made for {count} of the parameters"
        assert text.startswith(made), text
        assert "optimizer_cls_and_kwargs=" in text and '{"lr": 1e-3}' in text, text
        scheduler = LambdaLR(kept, schedule)  # they hold each other
        del kept, scheduler
        check_silent(model, optimizer, **more)
    model = make_net()
    kept = ds_kfac.KFACAdamW(model.parameters(), LR)
    named = {"type": "KFACAdamW", "params": {"lr": LR, "torch_adam": True}}
    text = said(model, optimizer=named)
    assert "this engine trains with the learning rates of the config" in text
    model = make_net()
    kept = ds_kfac.KFACAdamW(model.parameters(), LR)
    check_silent(make_net(), optimizer=TRAINS_WITH)  # another model
    check_silent(model, kept)  # it is passed on
    check_silent(model, optimizer=TRAINS_WITH)  # and stepped no more
    frozen = make_net().requires_grad_(False)
    kept = ds_kfac.KFACAdamW(frozen.parameters(), LR)
    check_silent(frozen)  # is not trained
