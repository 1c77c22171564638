"""The doors into DeepSpeed: attach once, detach without a trace, refuse what would be wrong, give
back what was taken; and engines that train beside each other."""

import contextlib
import io
import os
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_kfac
from ds_kfac.engine.attachment import attached
from ds_kfac.zero.exchange import GradientExchange, Gradients
from ds_kfac.zero.stages import Stage12, ZeroLayout
from tests.close import exact
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build, held, parameter_groups, train, weights
from tests.deepspeed.said import error_of, heard
from tests.models import make_net

BLOCK = BY_NAME["z2"].config(1, 1)["kfac"]
OFF = {"enabled": False}


def plain_config(**extra) -> dict:
    config = BY_NAME["z2"].config(1, 1)
    del config["kfac"]
    return {**config, **extra}


def start(initialize=ds_kfac.initialize, **extra):
    model = make_net()
    config = plain_config(**extra)
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def changed(engine) -> set[str]:
    """Which parts of an engine K-FAC has changed."""
    surface = {"forward", "backward", "save_checkpoint", "load_checkpoint", "destroy", "kfac"}
    found = surface & set(vars(engine))
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
    attachment, said = engine.kfac, repr(engine.kfac)
    assert said.startswith("<ds_kfac.Attachment: ") and "ZeRO stage" in said
    attachment.detach()
    attachment.detach()
    assert changed(engine) == set() and held(engine.module)["hooks"] == hooks_without
    assert repr(attachment) == said.replace(">", ", detached>")

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
    nothing = error_of(lambda: ds_kfac.initialize(config=plain_config(kfac=BLOCK)))
    assert "model: got none; must be a torch.nn.Module" in nothing


@pytest.mark.ranks(1)
def test_enable_makes_deepspeeds_door_ours_until_disable():
    original = deepspeed.initialize
    ds_kfac.enable()
    ds_kfac.enable()
    assert deepspeed.initialize.__name__ == "initialize"
    assert changed(start(deepspeed.initialize, kfac=BLOCK)) == ATTACHED
    ds_kfac.disable()
    assert deepspeed.initialize is original
    ds_kfac.enable()
    ours = deepspeed.initialize
    deepspeed.initialize = lambda *args, **kwargs: ours(*args, **kwargs)  # another library's
    for switch, expected in (
        (ds_kfac.enable, ATTACHED),
        (ds_kfac.disable, WITHOUT),
        (ds_kfac.enable, ATTACHED),
    ):
        switch()
        assert changed(start(deepspeed.initialize, kfac=BLOCK)) == expected, switch


NOT_NAMED = "the DeepSpeed config does not name K-FAC"


@pytest.mark.ranks(2)
def test_a_block_without_effect_is_said_once():
    """By rank 0."""
    first = dist.get_rank() == 0

    def started(initialize, **kfac) -> str:
        return said_by(lambda: start(initialize, **kfac))

    text = started(deepspeed.initialize, kfac={})
    if first:
        assert text.count("not attached") == 1
        assert "ds_kfac.enable()" in text and "DS_KFAC=1" in text
    else:
        assert text == ""
    assert started(deepspeed.initialize) == started(deepspeed.initialize, kfac=OFF) == ""
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
    for name in ("adam-z0", "z0", "adam-z3"):
        for dtype in (torch.float32, torch.bfloat16):
            model = make_net().requires_grad_(False).to(dtype)
            x = torch.ones(1, 3, 13, dtype=dtype)
            expected = model(x)
            config = BY_NAME[name].config(1, 1) | {"bf16": {"enabled": dtype is torch.bfloat16}}
            engine, *_ = ds_kfac.initialize(model=model, config=config)
            assert not hasattr(engine, "kfac"), name
            exact(engine(x), expected, what=name)
    frozen = "all parameters are frozen: unfreeze the"
    with pytest.raises(ValueError, match=frozen):
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

    model, config = make_net(), plain_config(kfac=BLOCK)
    engine, *_ = ds_kfac.initialize(
        model=model, model_parameters=list(model.head.parameters()), config=config
    )
    left_out = engine.kfac.report.split("not preconditioned")[1]
    assert left_out.count("not among the optimizer's parameters") == 3


# refusals


def sgd(**options) -> torch.optim.Optimizer:
    return torch.optim.SGD(make_net().parameters(), lr=0.1, **options)


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
            "basic_optimizer": sgd(fused=True),
        },
        "set fused=False",
    ),
}
"""Modes whose machinery cannot be built here: the engine says that it is in them."""
OFFLOADS = {"SuperOffload": '"super_offload": false', "NVMe offload": 'to "cpu"'}


def with_adagrad(mode: Mode, groups: str) -> str:
    """The report of an engine whose optimizer is torch's Adagrad, with a scheduler."""
    model, config = make_net(), mode.config(1, 1)
    del config["optimizer"]
    adagrad = torch.optim.Adagrad(parameter_groups(model, groups), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adagrad, lambda step: 0.5)
    engine, *_ = ds_kfac.initialize(
        model=model, optimizer=adagrad, config=config, lr_scheduler=scheduler
    )
    return engine.kfac.report


@pytest.mark.ranks(1)
def test_refusals_say_what_to_change():
    def refused(**extra) -> str:
        return error_of(lambda: start(**extra))

    assert "did you mean kfac.damping.value?" in refused(kfac={"damping": {"vlaue": 1}})
    assert 'did you mean "kfac"' in refused(KFAC={"enabled": True})
    named = BY_NAME["adam-z2"].config(1)["optimizer"]
    assert 'without K-FAC, use "AdamW"' in refused(optimizer=named, kfac=OFF)
    assert "matches no module" in refused(kfac={"layers": {"exclude": ["nothing_like_it"]}})
    several = error_of(lambda: with_adagrad(BY_NAME["z2"], "decay"))
    assert "Adagrad of several parameter groups with ZeRO: " in several
    assert "use one parameter group" in several
    report = with_adagrad(BY_NAME["z2"], "one")
    assert "rate your scheduler does not change" in " ".join(report.split())
    with_adagrad(BY_NAME["z1-bf16-accum32"], "decay")  # a wrapper that replaces nothing

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
    for name, remedy in OFFLOADS.items():
        assert f"{name}: " in said and remedy in said, (name, said)
    known = type(engine.optimizer)
    engine.optimizer.__class__ = type("Unknown", (known,), {})
    assert "Unknown, which ds_kfac does not know" in attached()
    engine.optimizer.__class__ = known
    assert attached() == "", "usable after all refusals"


DIFFERENT = {  # what the second rank has otherwise, and what every rank is told
    "damping.value": {"damping": {**KFAC["damping"], "value": 0.04}},
    "eigenbasis.refresh_interval": {"eigenbasis": {"refresh_interval": 3}},
    "layers.exclude": {"layers": {"exclude": ["head"]}},
    "adaptive": {"adaptive": 0.2},
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
    "shifted write": (lambda: written(shifted), LOST),
    "lost write": (lambda: written(torch.zeros_like), LOST),
    "rounded write": (lambda: written(lambda g: g.bfloat16().float()), LOST),
}
LATER = {
    "lost later": (
        lambda: of_later_groups(torch.clone),
        f"{LOST} that K-FAC wrote to",
    ),
    "moved later": (lambda: of_later_groups(lambda view: view.roll(1)), NOT_ARRIVED),
}


@pytest.mark.ranks(2)
def test_the_self_test_notices_a_changed_layout_on_every_rank():
    names = ("z0", "z1-bf16-accum32", "z2", "z2-offload", "z3-offload", "z3-bf16")
    cases = [(BY_NAME[name], fault) for name in names for fault in FAULTS.items()]
    names = ("z2", "z1-offload", "z3-sub_groups")
    cases += [
        (replace(BY_NAME[name], groups="decay"), fault) for name in names for fault in LATER.items()
    ]
    for mode, (fault, (patched_by, text)) in cases:
        with patched_by():
            said = error_of(lambda mode=mode: build(mode, 1))
        assert "self-test failed" in said and "rank " in said and text in said, (mode, fault, said)


@pytest.mark.ranks(2, timeout=90)
def test_a_fault_on_one_rank_is_an_error_on_all():
    """DeepSpeed's partition size is not what the shard map was built from, on one rank."""
    plain = Stage12._shards

    def other_offsets(self):
        return [replace(shard, offset=shard.offset + dist.get_rank()) for shard in plain(self)]

    with patch.object(Stage12, "_shards", other_offsets):
        said = error_of(lambda: build(BY_NAME["z2"], 1))
    # rank 0 misses what rank 1 should have sent, but what lies on rank 0 is where it should be
    assert f"rank 1: DeepSpeed {LOST}" in said and f"rank 0: DeepSpeed {LOST}" not in said, said


def leave_twice(engine, signal) -> None:
    engine.destroy()
    engine.destroy()


def leave_detached(engine, signal) -> None:
    engine.kfac.detach()
    engine.destroy()


def leave_alone(engine, signal) -> None:
    """Rank 1 does nothing until rank 0 is through, as if it were gone."""
    if dist.get_rank() == 0:
        engine.destroy()
        signal.touch()
    deadline = time.monotonic() + 60
    while not signal.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert signal.exists()
    engine.destroy()


@pytest.mark.ranks(2)
def test_destroy_gives_everything_back(tmp_path):
    plain = build(BY_NAME["z2"], kfac=OFF)
    before = held(plain.module)
    # ZeRO's own hooks keep an engine that nobody destroys
    ways = [("z2", leave) for leave in (leave_twice, leave_detached, leave_alone)]
    for name, leave in (*ways, ("z0", None), ("adam-z3", leave_twice), ("adam-z3", leave_twice)):
        engine = build(BY_NAME[name], model=make_net())
        train(engine, 1, steps=3)
        model, during = engine.module, held(engine.module)
        assert during["groups"] == before["groups"] + 1 and during["hooks"] > before["hooks"]
        if leave:
            leave(engine, tmp_path / "signal")
        else:  # garbage, with its model, whose hooks refer to it
            model = plain.module
        del engine
        assert held(model) == before, (name, leave)


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
    for name in ("z0", "adam-z2", "z3"):
        alone, engines = build(BY_NAME[name]), []
        train(alone, 1, steps=4)
        expected = weights(alone)
        alone.destroy()
        before = held()["groups"]
        for _ in range(4):
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
        # here nobody has the group any more, on the other rank three
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def load_state_dict(self, state_dict) -> None:
        self.base.load_state_dict(state_dict)


@pytest.mark.ranks(1)
def test_an_optimizer_that_calls_no_initialiser_of_torchs_is_stepped_and_warns_when_it_loads():
    model = make_net()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "kfac": BLOCK}
    config["zero_allow_untested_optimizer"] = True
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.model = model  # as LOMO has it
    engine, *_ = ds_kfac.initialize(model=model, optimizer=optimizer, config=config)
    train(engine, 1, steps=1)
    assert any(not torch.equal(w, before[name]) for name, w in weights(engine).items())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        optimizer.load_state_dict(optimizer.base.state_dict())
        model.load_state_dict(model.state_dict())
    assert said.getvalue().count("does not load K-FAC's") == 1
