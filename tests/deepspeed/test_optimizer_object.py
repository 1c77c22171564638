"""``ds_kfac.KFACAdamW``, the object, trains as the config's optimizer does, with a scheduler that
was made before."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import ds_kfac
from ds_kfac.checkpoint.files import CheckpointError
from tests.close import close, near
from tests.deepspeed.modes import BY_NAME, LR
from tests.deepspeed.runs import parameter_groups, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
OTHER = {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}}
OPTIONS = {
    "lr": LR,
    "adam_lr": LR / 4,
    "betas": (0.8, 0.9),
    "eps": 0.01,
    "weight_decay": 0.1,
    "torch_adam": True,
}


def schedule(step: int) -> float:
    return (step + 1) / 4  # the first step's rate is not lr


def engine_of(stage: int, *, as_object: bool, initialize=ds_kfac.initialize):
    """An engine and the groups whose rates the scheduler sets."""
    config = {**BY_NAME[f"adam-z{stage}"].config(1, torch.distributed.get_world_size())}
    model = make_net()
    groups = parameter_groups(model, "decay")
    if as_object:
        config.pop("optimizer")
        optimizer = ds_kfac.KFACAdamW(groups, **OPTIONS)
        given = {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, schedule)}
    else:
        config["optimizer"] = {"type": "KFACAdamW", "params": {**OPTIONS, "betas": [0.8, 0.9]}}
        given = {"model_parameters": groups, "lr_scheduler": lambda made: LambdaLR(made, schedule)}
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = initialize(model=model, config=config, **given)
    return engine, given.get("optimizer", engine.basic_optimizer).param_groups


def worker(folder: str) -> dict:
    import deepspeed

    found = {}
    for stage in range(4):
        engine, _ = engine_of(stage, as_object=False)
        train(engine, 1, steps=4)
        expected, rates = weights(engine), engine.get_lr()
        engine.destroy()
        engine, groups = engine_of(stage, as_object=True, initialize=deepspeed.initialize)
        train(engine, 1, steps=2)
        engine.save_checkpoint(f"{folder}/{stage}", tag="tag")
        train(engine, 1, steps=2, first=2)
        straight = weights(engine), engine.get_lr(), [group["lr"] for group in groups]
        engine.destroy()
        engine, groups = engine_of(stage, as_object=True)
        engine.load_checkpoint(f"{folder}/{stage}", tag="tag")
        loaded = [group["lr"] for group in groups]
        train(engine, 1, steps=2, first=2)
        found[stage] = {
            "same": all(torch.equal(straight[0][name], w) for name, w in expected.items()),
            "resumes": all(
                torch.equal(straight[0][name], w) for name, w in weights(engine).items()
            ),
            "rates": (set(rates), set(straight[1]), set(straight[2]), set(loaded), len(groups)),
        }
        engine.destroy()
    return found


def test_the_object_trains_as_the_config_does(tmp_path):
    for stage, found in run_ranks(
        "tests.deepspeed.test_optimizer_object:worker", world=2, payload=str(tmp_path)
    )[0].items():
        assert found["same"] and found["resumes"], (stage, found)
        assert found["rates"] == (
            {schedule(4) * LR},
            {schedule(4) * LR},
            {schedule(4) * LR},
            {schedule(2) * LR},
            2,
        )


def test_it_is_for_deepspeed_only():
    layer = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="only a DeepSpeed engine can step it"):
        ds_kfac.KFACAdamW(layer.parameters(), 0.1).step()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": "1e-2"}, "KFACAdamW: lr: got '1e-2'; must be a number"),
        ({"lr": 0.1, "betas": 0.9}, "KFACAdamW: betas: got 0.9; must be two numbers"),
        ({"lr": 0, "adam_lr": 0.1}, "KFACAdamW: lr: got 0; must be above 0 with adam_lr"),
        ({"lr": 10**400}, "KFACAdamW: lr: got 1000.*; must be a number"),
    ],
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ds_kfac.KFACAdamW(torch.nn.Linear(3, 2).parameters(), **options)


def test_an_optimizer_made_of_its_groups_is_recognised():
    """Accelerate replaces it by DeepSpeed's CPU Adam where the optimizer is offloaded."""
    from ds_kfac.directions.table import rule_in

    optimizer = ds_kfac.KFACAdamW(torch.nn.Linear(3, 2).parameters(), 0.1)
    other = torch.optim.AdamW(optimizer.param_groups)
    assert rule_in({}, optimizer).optimizer_type == rule_in({}, other).optimizer_type == "KFACAdamW"
    assert rule_in({}, torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())).optimizer_type is None


NEW = {"lr": 0.7 * LR, "weight_decay": 0.3}
"""Of the second group, whose parameters are of layers and of a norm."""


def load(optimizer, saved: dict) -> None:
    saved["param_groups"][1] |= NEW
    optimizer.load_state_dict(saved)


def one_by_one(group) -> None:
    for key, value in NEW.items():
        group[key] = value


def anew(group) -> None:
    for key, value in NEW.items():
        group.pop(key)
        group.setdefault(key, value)


WAYS = {
    "items": lambda optimizer: one_by_one(optimizer.param_groups[1]),
    "update": lambda optimizer: optimizer.param_groups[1].update(NEW),
    "|=": lambda optimizer: optimizer.param_groups[1].__ior__(NEW),
    "pop and setdefault": lambda optimizer: anew(optimizer.param_groups[1]),
    "load_state_dict": lambda optimizer: load(optimizer, optimizer.state_dict()),
    "load_state_dict of a copy": lambda optimizer: load(
        optimizer, copy.deepcopy(optimizer).state_dict()
    ),
}


def of_the_object(stage: int):
    model = make_net()
    config = {**BY_NAME[f"adam-z{stage}"].config(1, torch.distributed.get_world_size())}
    config.pop("optimizer")
    optimizer = ds_kfac.KFACAdamW(parameter_groups(model, "decay"), **OPTIONS)
    with contextlib.redirect_stdout(io.StringIO()):
        return ds_kfac.initialize(model=model, config=config, optimizer=optimizer)[0], optimizer


def ways_worker(stages: list[int]) -> dict:
    found = {}
    for stage in stages:
        engine, _ = of_the_object(stage)
        for group in engine.basic_optimizer.param_groups[1:]:
            group.update(NEW)
        train(engine, 1, steps=3)
        expected = weights(engine)
        engine.destroy()
        # what a group passes on is no matter of the stage
        for way, change in list(WAYS.items())[:: 1 + stage]:
            engine, optimizer = of_the_object(stage)
            group = optimizer.param_groups[1]
            change(optimizer)
            found[stage, way] = {
                "parts": [
                    NEW.items() <= part.items() for part in engine.basic_optimizer.param_groups
                ],
                "seen": optimizer.param_groups[1] is group
                and all(
                    NEW.items() <= view.items()
                    for view in (group, dict(group), group.copy(), group | {})
                ),
                "size": len(group) == len(list(group)) == len({**group}),
            }
            train(engine, 1, steps=3)
            same = (torch.equal(expected[name], weight) for name, weight in weights(engine).items())
            found[stage, way]["trains"] = all(same)
            engine.destroy()
    return found


def test_a_group_is_what_deepspeed_steps_however_it_is_changed():
    for case, found in run_ranks(
        "tests.deepspeed.test_optimizer_object:ways_worker", world=1, payload=[0, 2, 3]
    )[0].items():
        assert found.pop("parts") == [False, True, True] and all(found.values()), (case, found)


def refused_worker(_) -> dict:
    engine, optimizer = of_the_object(0)
    group, found = optimizer.param_groups[0], {}
    for case, change in {
        "adding": lambda: optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(2))]}
        ),
        "adding to DeepSpeed's": lambda: engine.basic_optimizer.add_param_group(
            {"params": [torch.ones(2)]}
        ),
        "parameters": lambda: group.update(params=[]),
        "clearing": group.clear,
        "adam_lr": lambda: group.update(adam_lr=0.1),
        "moments": lambda: optimizer.load_state_dict(
            {**optimizer.state_dict(), "state": {0: {"step": 1}}}
        ),
    }.items():
        try:
            change()
        except (RuntimeError, ValueError) as error:
            found[case] = str(error)
    train(engine, 1, steps=1)
    return found


def test_what_a_group_in_an_engine_cannot_take_is_said():
    found = run_ranks("tests.deepspeed.test_optimizer_object:refused_worker", world=1)[0]
    assert all(
        "add groups before deepspeed.initialize" in found[case]
        for case in ("adding", "adding to DeepSpeed's")
    )
    assert '"params" of a parameter group cannot change' in found["parameters"]
    assert '"params" of a parameter group cannot change' in found["clearing"]
    assert "adam_lr in a parameter group: it is the whole optimizer's" in found["adam_lr"]
    assert "load them by engine.load_checkpoint" in found["moments"]


@pytest.mark.parametrize(
    "group, message",
    [
        ({"adam_lr": 0.1}, "adam_lr in a parameter group: it is the whole optimizer's"),
        ({"lr": float("inf")}, "in a parameter group, lr: got inf; must be a number"),
        ({"betas": [0.9, 1]}, "in a parameter group, betas: got .0.9, 1.; must be two numbers"),
    ],
)
def test_wrong_values_of_a_group_are_named(group, message):
    layer = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        ds_kfac.KFACAdamW([{"params": layer.parameters(), **group}])
    optimizer = ds_kfac.KFACAdamW([layer.weight])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [layer.bias], **group})


def test_before_an_engine_it_is_an_optimizer_like_others():
    layer = torch.nn.Linear(3, 2)
    optimizer = ds_kfac.KFACAdamW([layer.weight], 0.1, betas=(0, 0.9))
    optimizer.add_param_group({"params": [layer.bias], "lr": 0.2, "name": "bias"})
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.state_dict() == optimizer.state_dict()
        copied.param_groups[1].update(lr=0.3)
        other = ds_kfac.KFACAdamW([{"params": [layer.weight]}, {"params": [layer.bias]}])
        other.load_state_dict(copied.state_dict())
        assert [group["lr"] for group in other.param_groups] == [0.1, 0.3] and other.param_groups[
            1
        ]["name"] == "bias"
        copied.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["lr"] == 0.2 and "lr" in optimizer.param_groups[0] | {}
    assert list(map(type, optimizer.param_groups[0]["betas"])) == [float, float]


def second(step: int) -> float:
    return 1 / (step + 2)


def lists(optimizer):
    """A scheduler with something of its own for each of the user's two groups."""
    assert len(optimizer.param_groups) == 2, f"{len(optimizer.param_groups)} groups"
    return LambdaLR(optimizer, [schedule, second])


WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": [0.0, 0.01],
        "warmup_max_lr": [0.05, 0.02],
        "warmup_num_steps": 8,
        "warmup_type": "linear",
    },
}


def made_late_worker(stages: list[int]) -> dict:
    import deepspeed

    found = {}
    for stage in stages:
        config = {**BY_NAME[f"adam-z{stage}"].config(1, torch.distributed.get_world_size())}
        block = {"type": "KFACAdamW", "params": {**OPTIONS, "betas": [0.8, 0.9]}}
        alone = {key: value for key, value in config.items() if key != "optimizer"}

        def start(config, initialize=ds_kfac.initialize, steps=3, **given) -> tuple:
            model = make_net()
            groups = parameter_groups(model, "decay")
            with contextlib.redirect_stderr(io.StringIO()):
                engine, *_ = initialize(
                    model=model, model_parameters=groups, config=config, **given
                )
            train(engine, 1, steps=steps)
            result = weights(engine), [group["lr"] for group in engine.basic_optimizer.param_groups]
            result = *result, hasattr(engine, "kfac"), type(engine.lr_scheduler).__name__
            engine.destroy()
            return result

        model = make_net()  # known to be right: both made before
        optimizer = ds_kfac.KFACAdamW(parameter_groups(model, "decay"), **OPTIONS)
        engine, *_ = ds_kfac.initialize(
            model=model, config=alone, optimizer=optimizer, lr_scheduler=lists(optimizer)
        )
        train(engine, 1, steps=3)
        expected = weights(engine), [group["lr"] for group in engine.basic_optimizer.param_groups]
        engine.destroy()

        def make(groups):
            return ds_kfac.KFACAdamW(groups, **OPTIONS)

        ways = {
            "named, scheduler made late": start({**config, "optimizer": block}, lr_scheduler=lists),
            "both made late": start(alone, optimizer=make, lr_scheduler=lists),
            "both made late, by deepspeed": start(
                alone, deepspeed.initialize, optimizer=make, lr_scheduler=lists
            ),
        }
        for way, (trained, rates, has_kfac, _) in ways.items():
            same = all(torch.equal(trained[name], w) for name, w in expected[0].items())
            found[stage, way] = same, rates == expected[1], has_kfac
        warm = {
            "named": start({**config, "optimizer": block, "scheduler": WARMUP}),
            "made late": start({**alone, "scheduler": WARMUP}, optimizer=make),
        }
        for way, (_, rates, has_kfac, scheduler) in warm.items():
            found[stage, "warmup", way] = rates, has_kfac, scheduler
        sgd = start(
            {**alone, "kfac": config["kfac"]},
            optimizer=lambda groups: torch.optim.SGD(groups, lr=LR),
        )
        found[stage, "another optimizer"] = sgd[1:3]
    return found


def test_callables_and_lists_see_the_groups_of_the_user():
    """Not the four that DeepSpeed steps: their errors said that two of something are too few."""
    found = run_ranks(
        "tests.deepspeed.test_optimizer_object:made_late_worker", world=2, payload=[2, 3]
    )[0]
    for case, result in found.items():
        if "warmup" in case:  # after three steps, of eight
            rates, has_kfac, scheduler = result
            first, other = 0.05 * 2 / 8, 0.01 + 0.01 * 2 / 8
            assert has_kfac and scheduler == "WarmupLR", case
            close(rates, [first, other, other], sums=4, what=str(case))
        elif case[1] == "another optimizer":
            assert result == ([LR, LR], True), case
        else:
            assert result == (True, True, True), (case, result)


def own_betas_worker(stages: list[int]) -> dict:
    """Biases in a group of their own, with ``change``; what is said, and how far the head's bias
    goes in a step."""
    found = {}
    for stage in stages:
        config = {**BY_NAME[f"adam-z{stage}"].config(1, torch.distributed.get_world_size())}
        for named in (True, False)[: 1 + (stage == 2)]:
            for case, change, exclude in (
                ("betas", {"betas": (0.5, 0.9)}, []),
                ("eps", {"eps": 1e-3}, []),
                ("decay and rate", {"weight_decay": 0.3, "lr": LR / 2}, []),
                (
                    "excluded",
                    {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0},
                    ["first", "head"],
                ),
            ):
                model, options = make_net(), {**OPTIONS, "adam_lr": LR}
                before = model.head.bias.detach().clone()
                groups = [dict(group) for group in parameter_groups(model, "decay")]
                groups[1] |= change
                own = {**config, "kfac": {**config["kfac"], "layers": {"exclude": exclude}}}
                own["optimizer"] = {"type": "KFACAdamW", "params": {**options, "betas": [0.8, 0.9]}}
                given = {"model_parameters": groups}
                if not named:
                    del own["optimizer"]
                    given = {"optimizer": ds_kfac.KFACAdamW(groups, **options)}
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        engine, *_ = ds_kfac.initialize(model=model, config=own, **given)
                    train(engine, 1, steps=1)
                    moved = (weights(engine)["head.bias"] - before).abs()
                    found[stage, named, case] = moved.min().item(), moved.max().item()
                    engine.destroy()
                except ValueError as error:
                    found[stage, named, case] = str(error)
    return found


def test_betas_and_eps_of_a_bias_alone_are_refused_unless_they_are_used():
    """They were ignored: a layer's weight and bias have one pair of moments."""
    found = run_ranks(
        "tests.deepspeed.test_optimizer_object:own_betas_worker", world=1, payload=[0, 2, 3]
    )[0]
    for (stage, named, case), result in found.items():
        where = stage, named, case, result
        if case in ("betas", "eps"):
            assert (
                f"first.weight and its bias are in parameter groups of different {case}" in result
            ), where
        elif case == "excluded":  # the gradient's sign, by no moments and no eps
            # the step is rounded when it is taken from a weight of about 1
            near(
                result,
                (LR, LR),
                8 * torch.finfo(torch.float32).eps,
                "rounding of weights",
                what=str(where),
            )
        else:
            assert isinstance(result, tuple), where


def schedule_worker(folder: str) -> dict:
    engine, _ = engine_of(2, as_object=False)
    # of the groups that are stepped, as it once was
    engine.lr_scheduler = LambdaLR(engine.basic_optimizer, schedule)
    train(engine, 1, steps=3)
    engine.save_checkpoint(folder, tag="tag")
    saved = weights(engine)
    engine.destroy()
    engine, _ = engine_of(2, as_object=False)
    try:
        engine.load_checkpoint(folder, tag="tag")
        said = ""
    except CheckpointError as error:
        said = str(error)
    engine.destroy()
    engine, _ = engine_of(2, as_object=False)
    engine.load_checkpoint(folder, tag="tag", load_lr_scheduler_states=False)
    loaded = all(torch.equal(w, saved[name]) for name, w in weights(engine).items())
    return {"said": said, "loaded": loaded, "steps": engine.kfac.preconditioner.steps}


def test_a_schedule_of_other_groups_is_not_taken_by_place(tmp_path):
    for found in run_ranks(
        "tests.deepspeed.test_optimizer_object:schedule_worker", world=2, payload=str(tmp_path)
    ):
        assert "has rates of 3 parameter groups, here it has 2" in found["said"], found
        assert found["loaded"] and found["steps"] == 3, found


DROPPED = {
    "AdamW of the config": ({"optimizer": OTHER}, None),
    "another object": ({}, torch.optim.AdamW),
    "K-FAC into AdamW": ({"optimizer": OTHER, "kfac": {}}, None),
    "named in the config": (
        {"optimizer": {"type": "KFACAdamW", "params": {"lr": LR, "torch_adam": True}}},
        None,
    ),
}
"""What an engine trains with in its place: more of the config, and the argument."""


def dropped_worker(_) -> dict:
    """Objects that whoever makes the engine does not pass on, as transformers' Trainer does with
    ``optimizers=``."""
    import deepspeed

    found = {}
    base = {"train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False}
    ways = {"theirs": deepspeed.initialize, "ours": ds_kfac.initialize}

    def start(initialize, model, optimizer, more) -> str:
        with (
            contextlib.redirect_stderr(io.StringIO()) as said,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                parameters = None if optimizer else model.parameters()
                given = {"model_parameters": parameters, "config": {**base, **more}}
                initialize(model=model, optimizer=optimizer, **given)[0].destroy()
            except ValueError as error:
                return f"ValueError: {error}"
        return said.getvalue()

    for way, initialize in ways.items():
        for case, (more, kind) in DROPPED.items():
            model = make_net()
            kept = ds_kfac.KFACAdamW(model.parameters(), LR)
            optimizer = kind and kind(model.parameters(), LR)
            found[way, case] = start(initialize, model, optimizer, more)
            scheduler = LambdaLR(kept, schedule)  # they hold each other
            del kept, scheduler
            found[way, case, "deleted"] = start(initialize, model, optimizer, more)
        model, other = make_net(), make_net()
        kept = ds_kfac.KFACAdamW(model.parameters(), LR)
        found[way, "of another model"] = start(
            initialize, other, None, DROPPED["AdamW of the config"][0]
        )
        found[way, "passed on"] = start(initialize, model, kept, {})
        # and stepped no more
        found[way, "stepped before"] = start(
            initialize, model, None, DROPPED["AdamW of the config"][0]
        )
        frozen = make_net().requires_grad_(False)
        kept = ds_kfac.KFACAdamW(frozen.parameters(), LR)
        found[way, "a model that is not trained"] = start(initialize, frozen, None, {})
    return found


def test_an_object_that_is_not_passed_on_is_an_error():
    found = run_ranks("tests.deepspeed.test_optimizer_object:dropped_worker", world=1)[0]
    for way in ("theirs", "ours"):
        count = len([*make_net().parameters()])
        for case in list(DROPPED)[:3]:
            text = found[way, case]
            assert text.startswith(
                f"ValueError: ds_kfac: a KFACAdamW was made for {count} of the parameters"
            ), found
            assert "optimizer_cls_and_kwargs=" in text and '{"lr": 1e-3}' in text, text
        text = found[way, "named in the config"]
        assert (
            not text.startswith("ValueError")
            and "this engine trains with the learning rates of the config" in text
        )
        fine = ("of another model", "passed on", "stepped before", "a model that is not trained")
        silent = [(way, case, "deleted") for case in DROPPED] + [(way, case) for case in fine]
        assert all(
            "KFACAdamW was made" not in found[case] and "Error" not in found[case]
            for case in silent
        ), found
