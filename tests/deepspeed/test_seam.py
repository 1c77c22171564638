"""The doors into DeepSpeed: attach once, detach without a trace, refuse what would be wrong, give
back what was taken; and engines that train beside each other."""

import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_kfac
from ds_kfac.engine.attachment import attached
from ds_kfac.zero.exchange import GradientExchange, Gradients
from ds_kfac.zero.stages import ZeroLayout
from tests.close import exact
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, held, parameter_groups, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import make_net

BLOCK = BY_NAME["z2"].config(1, 1)["kfac"]
OFF = {"enabled": False}


def start(initialize=ds_kfac.initialize, **extra):
    model, config = make_net(), BY_NAME["z2"].config(1, 1)
    del config["kfac"]
    config |= extra
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def changed(engine) -> set[str]:
    """Which parts of an engine K-FAC has changed."""
    found = ATTACHED & set(vars(engine))
    if "step" in vars(engine.optimizer):
        found.add("optimizer.step")
    if engine.basic_optimizer._optimizer_step_pre_hooks:
        found.add("step hooks")
    return found


ATTACHED = {"forward", "backward", "save_checkpoint", "load_checkpoint", "destroy", "kfac"}
ATTACHED |= {"optimizer.step", "step hooks"}
WITHOUT = {"load_checkpoint"}
"""Of an engine without K-FAC, which may be given KFACAdamW's checkpoint."""


def said_by(action) -> str:
    """What DeepSpeed's logger and we ourselves write meanwhile."""
    with heard("INFO") as lines:
        action()
    return "\n".join(line for line in lines if "ds_kfac" in line)


ALREADY = "ds_kfac: this engine already has K-FAC, so this call of ds_kfac.attach changes nothing"


@pytest.mark.ranks(2)
def test_every_door_attaches_once_and_detach_leaves_nothing_behind():
    original = deepspeed.initialize
    plain = start(original)
    assert changed(plain) == WITHOUT
    hooks_without = held(plain.module)["hooks"]
    train(plain, 1)
    engine = start(kfac=BLOCK)
    assert changed(engine) == ATTACHED
    hooks = held(engine.module)["hooks"]
    for again in (lambda: ds_kfac.attach(engine), lambda: ds_kfac.attach(engine, BLOCK)):
        assert said_by(again) == ("" if dist.get_rank() else ALREADY)
    assert ds_kfac.attach(engine) is engine.kfac and held(engine.module)["hooks"] == hooks
    assert "another config" in error_of(lambda: ds_kfac.attach(engine, {"damping": {"value": 3.0}}))
    train(engine, 1, steps=2)
    assert engine.kfac.metrics.counts["steps"] == 2
    attachment = engine.kfac
    attachment.detach()
    attachment.detach()
    assert changed(engine) == set() and held(engine.module)["hooks"] == hooks_without

    engine = start(kfac=BLOCK)
    engine.kfac.detach()
    train(engine, 1)
    exact(weights(engine), weights(plain))
    ds_kfac.attach(engine)
    assert changed(engine) == ATTACHED

    engine = start()
    assert changed(engine) == changed(start(kfac=OFF)) == WITHOUT
    assert 'has no "kfac" block' in error_of(lambda: ds_kfac.attach(engine))
    ds_kfac.attach(engine, OFF)
    assert changed(engine) == WITHOUT
    ds_kfac.attach(engine, BLOCK)
    assert changed(engine) == ATTACHED
    model = error_of(lambda: ds_kfac.attach(make_net()))
    assert "must be the engine that deepspeed.initialize returns" in model
    nothing = error_of(lambda: ds_kfac.initialize(config=BY_NAME["z2"].config(1, 1)))
    assert "model: got none; must be a torch.nn.Module" in nothing


@pytest.mark.ranks(1)
def test_enable_makes_deepspeeds_door_ours_until_disable():
    original = deepspeed.initialize
    ds_kfac.enable()
    ds_kfac.enable()
    ds_kfac.disable()
    assert deepspeed.initialize is original
    ds_kfac.enable()
    ours = deepspeed.initialize
    deepspeed.initialize = lambda *args, **kwargs: ours(*args, **kwargs)  # another library's
    for switch in (ds_kfac.enable, ds_kfac.disable, ds_kfac.enable):
        switch()
        expected = WITHOUT if switch is ds_kfac.disable else ATTACHED
        assert changed(start(deepspeed.initialize, kfac=BLOCK)) == expected, switch


NOT_NAMED = "the DeepSpeed config does not name K-FAC"


@pytest.mark.ranks(2)
def test_a_block_without_effect_is_said_once():
    """By rank 0."""
    first = dist.get_rank() == 0

    def started(initialize, **kfac) -> str:
        return said_by(lambda: start(initialize, **kfac))

    assert started(deepspeed.initialize, kfac={}).count("not attached") == first
    assert ('"enabled": false' in started(ds_kfac.initialize, kfac=OFF)) == first
    assert started(ds_kfac.initialize).count(NOT_NAMED) == first
    engine = start(deepspeed.initialize, optimizer=BY_NAME["adam-z2"].config(1, 2)["optimizer"])
    assert engine.kfac, "an optimizer that only ds_kfac knows needs no enable()"
    ds_kfac.enable()
    assert "not attached" not in started(deepspeed.initialize, kfac={})
    assert "trains without" not in started(deepspeed.initialize), "as others have it"
    ds_kfac.engine.entry._unattached = "as in a program whose first engine this is"
    assert started(deepspeed.initialize).count(NOT_NAMED) == first


@pytest.mark.ranks(1)
def test_a_frozen_model_is_left_as_it_is():
    """A reference model, of which the config is that of a trained one."""
    for name in ("adam-z0", "z0-bf16", "adam-z3", "adam-z3-bf16"):
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        model, x = make_net().requires_grad_(False).to(dtype), torch.ones(1, 3, 13, dtype=dtype)
        expected = model(x)
        engine, *_ = ds_kfac.initialize(model=model, config=BY_NAME[name].config(1, 1))
        assert not hasattr(engine, "kfac"), name
        exact(engine(x), expected, what=name)
    with pytest.raises(ValueError, match="all parameters are frozen: unfreeze the"):
        config = BY_NAME["adam-z2"].config(1, 1)
        ds_kfac.initialize(model=make_net().requires_grad_(False), config=config)


@pytest.mark.ranks(1)
def test_the_report_lists_every_module():
    report = start(kfac={**BLOCK, "report": "full"}).kfac.report
    for text in ("ZeRO stage 2", "DeepSpeedZeroOptimizer", "relayout moves 0 of", "kl-clip 0.0005"):
        assert text in report
    assert "products: highest (fp32); layer by layer" in report
    rows = {line.split()[0]: line.split() for line in report.splitlines() if line.startswith("  ")}
    assert rows["first"][1:] == ["Linear", "17", "14", "yes", "0", "A", "0,", "G", "0"]
    assert rows["middle"][1:] == ["Linear", "19", "17", "no", "0", "A", "0,", "G", "0"]
    assert rows["norm"][1:3] == ["LayerNorm", "34"]
    assert "not in kfac.layers.types" in " ".join(rows["norm"])

    model = make_net()
    engine = build(BY_NAME["z2"], model=model, given={"model_parameters": model.head.parameters()})
    left_out = engine.kfac.report.split("not preconditioned")[1]
    assert left_out.count("not among the optimizer's parameters") == 3


# refusals


PRETENDED = {
    "DeepCompile": ({"is_deepcompile_enabled": lambda: True}, '"deepcompile": false'),
    "ZenFlow": ({"zenflow": True}, 'remove "zenflow"'),
    "mixture of experts at stage 3": (
        {"has_moe_layers": True, "zero_optimization_stage": lambda: 3},
        "stage 0, 1 or 2",
    ),
    "sequence parallelism by mesh_param": ({"mesh_device": object()}, "parallel_state_sp"),
    "no optimizer": ({"optimizer": None}, '"optimizer" block'),
    "torch_autocast fp16 with a fused optimizer": (
        {
            "torch_autocast_enabled": lambda: True,
            "torch_autocast_dtype": lambda: torch.float16,
            "basic_optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True),
        },
        "set fused=False",
    ),
}
"""Modes whose machinery cannot be built here: the engine says that it is in them."""


def with_adagrad(name: str, groups: str) -> str:
    """The report of an engine whose optimizer is torch's Adagrad, with a scheduler."""
    model = make_net()
    adagrad = torch.optim.Adagrad(parameter_groups(model, groups), lr=0.1)
    given = {"lr_scheduler": torch.optim.lr_scheduler.LambdaLR(adagrad, lambda step: 0.5)}
    given |= {"optimizer": adagrad, "model_parameters": None}
    return build(BY_NAME[name], model=model, given=given, optimizer=None).kfac.report


@pytest.mark.ranks(1)
def test_refusals_say_what_to_change():
    def refused(**extra) -> str:
        return error_of(lambda: start(**extra))

    assert "did you mean kfac.damping.value?" in refused(kfac={"damping": {"vlaue": 1}})
    assert 'did you mean "kfac"' in refused(KFAC={"enabled": True})
    named = BY_NAME["adam-z2"].config(1)["optimizer"]
    assert 'without K-FAC, use "AdamW"' in refused(optimizer=named, kfac=OFF)
    assert "matches no module" in refused(kfac={"layers": {"exclude": ["nothing_like_it"]}})
    several = error_of(lambda: with_adagrad("z2", "decay"))
    assert "Adagrad of several parameter groups with ZeRO: " in several
    assert "use one parameter group" in several
    report = with_adagrad("z2", "one")
    assert "rate your scheduler does not change" in " ".join(report.split())
    with_adagrad("z1-bf16-accum32", "decay")  # a wrapper that replaces nothing

    engine = start(deepspeed.initialize)

    def attached() -> str:
        return error_of(lambda: ds_kfac.attach(engine, {"enabled": True}))

    for name, (facts, remedy) in PRETENDED.items():
        with patch.multiple(engine, **facts):
            said = attached()
        assert f"{name}: " in said and remedy in said, (name, said)
    offload = SimpleNamespace(super_offload=True, device="nvme")
    with patch.dict(engine._config.zero_config.__dict__, offload_optimizer=offload):
        said = attached()
    assert "SuperOffload: " in said and '"super_offload": false' in said, said
    assert "NVMe offload: " in said and 'to "cpu"' in said, said
    known = type(engine.optimizer)
    engine.optimizer.__class__ = type("Unknown", (known,), {})
    assert "Unknown, which ds_kfac does not know" in attached()
    engine.optimizer.__class__ = known
    assert attached() == "", "usable after all refusals"


DIFFERENT = {  # what the second rank has otherwise, and what every rank is told
    "damping.value": {"damping": {**KFAC["damping"], "value": 0.04}},
    "enabled": {"enabled": False},
}


@pytest.mark.ranks(3, timeout=60)
def test_a_block_that_is_another_one_on_some_rank_is_an_error_on_every_rank():
    def attempt(own: dict) -> str:
        mode = Mode("", 2, kfac=own if dist.get_rank() == 1 else {})
        return error_of(lambda: build(mode, 1).destroy())

    for name, own in DIFFERENT.items():
        said = attempt(own)
        assert f"kfac.{name} is not the same on all ranks" in said and "on rank 1" in said, said
    assert attempt({"report": "none"}) == "", "a rank may print what it likes"


# the self-test at attach


def shifted(gradient):
    return gradient.flatten().roll(1).view_as(gradient)


def arriving(spoil):
    """Spoil gradients on their way to a worker."""
    plain = Gradients.__getitem__
    return patch.object(Gradients, "__getitem__", lambda self, name: spoil(plain(self, name)))


def written(spoil):
    """Spoil results."""
    plain = GradientExchange.put

    def put(self, layers, matrices):
        plain(self, layers, [spoil(g) for g in matrices])

    return patch.object(GradientExchange, "put", put)


def of_later_groups(spoil):
    """Where a later parameter group's gradients lie is not where they are."""
    plain = ZeroLayout._gradient

    def gradient(self, shard):
        view = plain(self, shard)
        return spoil(view) if shard.group else view

    return patch.object(ZeroLayout, "_gradient", gradient)


LOST, NOT_ARRIVED = "would not step with the gradients", "did not arrive at its worker"
FAULTS = {
    "shifted read": (lambda: arriving(shifted), NOT_ARRIVED),
    "lost write": (lambda: written(torch.zeros_like), LOST),
    "rounded write": (lambda: written(lambda g: g.bfloat16().float()), LOST),
}
LATER = {
    "lost later": (lambda: of_later_groups(torch.clone), f"{LOST} that K-FAC wrote to"),
    "moved later": (lambda: of_later_groups(lambda view: view.roll(1)), NOT_ARRIVED),
}


@pytest.mark.ranks(2, timeout=90)
def test_the_self_test_notices_a_changed_layout_on_every_rank():
    """Though it has changed on one rank alone."""
    names = ("z0", "z1-bf16-accum32", "z2", "z2-offload", "z3-offload", "z3-bf16")
    cases = [(BY_NAME[name], fault) for name in names for fault in FAULTS.items()]
    for name in ("z2", "z1-offload", "z3-sub_groups"):
        cases += [(replace(BY_NAME[name], groups="decay"), fault) for fault in LATER.items()]
    for mode, (fault, (patched_by, text)) in cases:
        with patched_by() if dist.get_rank() == 1 else nullcontext():
            said = error_of(partial(build, mode, 1))
        assert "self-test failed" in said and "rank " in said and text in said, (mode, fault, said)


@pytest.mark.ranks(2, timeout=90)
def test_destroy_gives_everything_back():
    plain = build(BY_NAME["z2"], kfac=OFF)
    before = held(plain.module)
    # ZeRO's own hooks keep an engine that nobody destroys
    ways = ("z2", "detached"), ("z2", "destroyed"), ("z0", "garbage"), ("adam-z3", "destroyed")
    for name, way in ways:
        engine = build(BY_NAME[name])
        train(engine, 1, steps=3)
        model, during = engine.module, held(engine.module)
        assert during["groups"] == before["groups"] + 1 and during["hooks"] > before["hooks"]
        if way == "detached":
            engine.kfac.detach()
        if way == "garbage":  # with its model, whose hooks refer to it
            model = plain.module
        else:
            if dist.get_rank() == 0:
                engine.destroy()
            dist.barrier()  # until then the other rank does nothing, as if it were gone
            engine.destroy()  # on rank 0 for the second time
        del engine
        assert held(model) == before, (name, way)


@pytest.mark.ranks(2)
def test_an_engine_can_be_detached_after_the_jobs_groups_and_has_their_timeout(tmp_path):
    hooks = held(build(BY_NAME["z2"], kfac=OFF).module)["hooks"]
    # as init_distributed(timeout=...) does
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1234), dist.group.WORLD)
    engine = build(BY_NAME["z2"])
    group = engine.kfac.preconditioner.channel.group
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=1234)
    dist.barrier()
    dist.destroy_process_group()
    engine.kfac.detach()  # DeepSpeed's destroy fails then
    assert held(engine.module)["hooks"] == hooks
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)


@pytest.mark.ranks(1)
def test_a_models_callbacks_find_its_newer_engine_when_an_older_one_goes():
    """Of two Trainers, of which the first one's engine goes when the second has one."""
    model = make_net()
    older, newer = (build(BY_NAME["z2"], model=model) for _ in range(2))
    older.destroy()
    assert attached(model) is newer.kfac
    newer.destroy()
    assert attached(model) is None


@pytest.mark.ranks(2)
def test_engines_that_nobody_destroys_share_one_group_and_train_as_if_alone():
    """As those of several Trainers in one process; ZeRO's are never collected."""
    for name in ("z0", "z3"):
        alone, engines = build(BY_NAME[name]), []
        train(alone, 1, steps=4)
        expected = weights(alone)
        alone.destroy()
        before = held()["groups"]
        for _ in range(3):
            engines.append(build(BY_NAME[name]))
            assert held()["groups"] == before + 1
        for step in range(4):  # one after another at each step, in one group
            for engine in engines:
                train(engine, 1, steps=1, first=step)
        for engine in engines:
            exact(weights(engine), expected, what=name)
        engines.pop().destroy()
        assert held()["groups"] == before + 1
        train(engines[-1], 1, steps=1, first=4)
        # here nobody has the group any more, on the other rank two
        for engine in () if dist.get_rank() else engines:
            engine.destroy()
        # by an engine whose batch was too large, as with the Trainer's auto_find_batch_size
        left = make_net()
        sum(parameter.sum() for parameter in left.parameters()).backward()
        later = build(BY_NAME[name], model=left)
        train(later, 1, steps=4)
        exact(weights(later), expected, what=name)
        for engine in (*engines, later) if dist.get_rank() else (later,):
            engine.destroy()
        assert held()["groups"] == before, name


class Wrapper(torch.optim.Optimizer):
    """Has another's groups and calls no initialiser of torch's, as timm's Lookahead."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups
        self.defaults, self.state = base.defaults, base.state

    def step(self, closure=None) -> None:
        self.base.step()

    def state_dict(self) -> dict:
        return self.base.state_dict()

    def load_state_dict(self, state_dict) -> None:
        self.base.load_state_dict(state_dict)


@pytest.mark.ranks(1)
def test_an_optimizer_that_calls_no_initialiser_of_torchs_is_stepped_and_warns_if_loaded(tmp_path):
    """By a program itself, which loses K-FAC's state then. Of a model a layer of which was replaced
    since attach, whose save had failed."""
    model = make_net()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.model = model  # as LOMO has it
    given = {"optimizer": optimizer, "model_parameters": None}
    engine = build(BY_NAME["z1"], model=model, given=given, optimizer=None)
    before = weights(engine)
    train(engine, 1, steps=1)
    assert any(not torch.equal(w, before[name]) for name, w in weights(engine).items())
    model.head = nn.Linear(19, 5)
    engine.save_checkpoint(str(tmp_path))
    with heard() as said:
        optimizer.load_state_dict(optimizer.base.state_dict())
        model.load_state_dict(model.state_dict())
        engine.load_checkpoint(str(tmp_path))
    assert sum("does not load K-FAC's" in text for text in said) == 1
