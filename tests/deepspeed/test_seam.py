"""The doors into DeepSpeed: attach once, detach without a trace, refuse what would be wrong, say
what is done."""

import contextlib
import io
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.deepspeed.modes import BY_NAME
from tests.deepspeed.runs import build, parameter_groups, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


SURFACE = {"forward", "backward", "save_checkpoint", "load_checkpoint", "destroy", "kfac"}
"""What K-FAC adds to an engine's attributes."""


def plain_config(**extra) -> dict:
    config = BY_NAME["z2"].config(1, 1)
    config.pop("kfac")
    return {**config, **extra}


def doors_worker(_) -> dict:
    import deepspeed

    import ds_kfac

    kfac, results = BY_NAME["z2"].config(1, 1)["kfac"], {}
    original = deepspeed.initialize

    def start(initialize, config, **kwargs):
        model = make_net()
        engine = initialize(
            model=model, model_parameters=model.parameters(), config=config, **kwargs
        )[0]
        return engine, engine.kfac.report if hasattr(engine, "kfac") else ""

    def names(engine):
        stepped = {"optimizer.step"} if "step" in vars(engine.optimizer) else set()
        stepped |= {"step hooks"} if engine.basic_optimizer._optimizer_step_pre_hooks else set()
        return SURFACE & set(vars(engine)) | stepped

    def hooks(engine):
        modules = list(engine.module.modules())
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    # the plain engine, for comparison
    engine, _ = start(original, plain_config())
    results["plain"] = names(engine), hooks(engine)
    train(engine, 1)
    plain_weights = weights(engine)

    engine, report = start(ds_kfac.initialize, plain_config(kfac={**kfac, "report": "full"}))
    results["drop-in"] = names(engine)
    results["report"] = report
    results["attach twice"] = ds_kfac.attach(engine) is engine.kfac
    before = hooks(engine)
    ds_kfac.attach(engine)
    results["no hook twice"] = hooks(engine) == before
    train(engine, 1, steps=2)
    results["acts"] = engine.kfac.metrics.counts["steps"]
    engine.kfac.detach()
    results["detached"] = names(engine), hooks(engine)

    engine, _ = start(ds_kfac.initialize, plain_config(kfac=kfac))
    engine.kfac.detach()
    train(engine, 1)
    results["detached trains plainly"] = all(
        torch.equal(w, plain_weights[n]) for n, w in weights(engine).items()
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ds_kfac.attach(engine)
    results["attached again"] = names(engine)

    engine, _ = start(ds_kfac.initialize, plain_config())
    results["no block"] = names(engine)
    results["attach a model"] = error_of(lambda: ds_kfac.attach(make_net()))
    results["no model"] = error_of(lambda: ds_kfac.initialize(config=plain_config(kfac=kfac)))
    results["attach without block"] = error_of(lambda: ds_kfac.attach(engine))
    with contextlib.redirect_stdout(io.StringIO()):
        ds_kfac.attach(engine, {"enabled": False})
        results["disabled by config"] = names(engine)
        ds_kfac.attach(engine, kfac)
    results["attach with config"] = names(engine)
    engine, _ = start(ds_kfac.initialize, plain_config(kfac={"enabled": False}))
    results["disabled"] = names(engine)

    ds_kfac.enable()
    ds_kfac.enable()
    results["enabled name"] = deepspeed.initialize.__name__
    engine, _ = start(deepspeed.initialize, plain_config(kfac=kfac))
    results["enabled"] = names(engine)
    ds_kfac.disable()
    results["disabled again"] = deepspeed.initialize is original
    ds_kfac.enable()
    chained = deepspeed.initialize
    # another library wraps ours
    deepspeed.initialize = lambda *args, **kwargs: chained(*args, **kwargs)
    ds_kfac.enable()
    results["enabled in a chain"] = names(start(deepspeed.initialize, plain_config(kfac=kfac))[0])
    ds_kfac.disable()
    results["disabled in a chain"] = names(start(deepspeed.initialize, plain_config(kfac=kfac))[0])
    ds_kfac.enable()
    results["enabled in a chain again"] = names(
        start(deepspeed.initialize, plain_config(kfac=kfac))[0]
    )
    ds_kfac.disable()
    deepspeed.initialize = original
    engine, _ = start(ds_kfac.initialize, plain_config(kfac=kfac))
    results["attach with another config"] = error_of(
        lambda: ds_kfac.attach(engine, {"damping": {"value": 3.0}})
    )
    attachment = engine.kfac
    results["repr"] = repr(attachment)
    attachment.detach()
    attachment.detach()
    results["repr detached"] = repr(attachment)
    model = make_net()
    config = plain_config(kfac=kfac)
    engine, *_ = ds_kfac.initialize(
        model=model, model_parameters=list(model.head.parameters()), config=config
    )
    results["part of the model"] = engine.kfac.report
    return results


@pytest.fixture(scope="module")
def doors() -> dict:
    return run_ranks("tests.deepspeed.test_seam:doors_worker", world=1)[0]


def test_the_doors(doors):
    result = doors
    surface = SURFACE | {"optimizer.step", "step hooks"}
    # of an engine without K-FAC, which may be given KFACAdamW's checkpoint
    without = {"load_checkpoint"}
    assert result["plain"][0] == without
    chain = ("enabled in a chain", "enabled in a chain again")
    for door in ("drop-in", "attached again", "attach with config", "enabled", *chain):
        assert result[door] == surface, door
    for door in ("no block", "disabled", "disabled by config", "disabled in a chain"):
        assert result[door] == without, door
    assert result["attach twice"] and result["no hook twice"] and result["acts"] == 2
    assert result["detached"] == (set(), result["plain"][1]), "detach must leave nothing behind"
    assert result["detached trains plainly"]
    assert result["enabled name"] == "initialize" and result["disabled again"]
    assert 'has no "kfac" block' in result["attach without block"]
    assert "it takes the engine that deepspeed.initialize returns" in result["attach a model"]
    assert "model: got none; must be a torch.nn.Module" in result["no model"]
    assert result["repr"].startswith("<ds_kfac.Attachment: ") and "ZeRO stage" in result["repr"], (
        result["repr"]
    )
    assert result["repr detached"] == result["repr"].replace(">", ", detached>")
    assert "another config" in result["attach with another config"]
    in_tables = result["part of the model"].split("not preconditioned")[1]
    assert in_tables.count("not among the optimizer's parameters") == 3


def test_the_report_lists_every_module(doors):
    report = doors["report"]
    for text in (
        "ZeRO stage 2",
        "DeepSpeedZeroOptimizer",
        "relayout moves 0 of",
        "kl-clip 0.0005",
        "products: highest (fp32); layer by layer",
    ):
        assert text in report
    rows = {line.split()[0]: line.split() for line in report.splitlines() if line.startswith("  ")}
    assert rows["first"] == ["first", "Linear", "17", "14", "yes", "0", "A", "0,", "G", "0"]
    assert rows["middle"] == ["middle", "Linear", "19", "17", "no", "0", "A", "0,", "G", "0"]
    assert rows["norm"][:3] == [
        "norm",
        "LayerNorm",
        "34",
    ] and "not in kfac.layers.types" in " ".join(rows["norm"])


def refusals_worker(_) -> dict:
    import deepspeed

    import ds_kfac

    results = {}

    def attempt(name, *, model=None, optimizer=None, mpu=None, **extra):
        config = {**plain_config(kfac={"enabled": True}), **extra}
        model = make_net() if model is None else model
        groups = parameter_groups(model, "one")
        results[name] = error_of(
            lambda: ds_kfac.initialize(
                model=model, model_parameters=groups, optimizer=optimizer, config=config, mpu=mpu
            )
        )

    attempt("wrong block", kfac={"damping": {"vlaue": 1}})
    config = plain_config(KFAC={"enabled": True})
    results["misspelt"] = error_of(lambda: ds_kfac.initialize(model=make_net(), config=config))
    attempt("pattern", kfac={"layers": {"exclude": ["nothing_like_it"]}})
    adagrads = {
        "several of Adagrad, BF16_Optimizer": ("decay", "z1-bf16-accum32"),
        "one group of Adagrad": ("one", "z2"),
        "Adagrad of several parameter groups with ZeRO": ("decay", "z2"),
    }
    for name, (groups, mode) in adagrads.items():
        model = make_net()
        groups = parameter_groups(model, groups)
        without = {
            key: value for key, value in BY_NAME[mode].config(1, 1).items() if key != "optimizer"
        }
        adagrad = torch.optim.Adagrad(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adagrad, lambda step: 0.5)

        def with_adagrad(model=model, config=without, adagrad=adagrad, scheduler=scheduler):
            made = ds_kfac.initialize(
                model=model, optimizer=adagrad, config=config, lr_scheduler=scheduler
            )
            results["its scheduler"] = made[0].kfac.report

        results[name] = error_of(with_adagrad)

    model = make_net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=plain_config()
    )

    # Modes whose machinery cannot be built here: the engine says it is in them.
    def pretend(name, **attributes):
        saved = {key: getattr(engine, key) for key in attributes}
        for key, value in attributes.items():
            setattr(engine, key, value)
        results[name] = error_of(lambda: ds_kfac.attach(engine, {"enabled": True}))
        for key, value in saved.items():
            setattr(engine, key, value)

    pretend("DeepCompile", is_deepcompile_enabled=lambda: True)
    pretend("ZenFlow", zenflow=True)
    pretend("mixture of experts at stage 3", has_moe_layers=True, zero_optimization_stage=lambda: 3)
    pretend("sequence parallelism by mesh_param", mesh_device=object())
    pretend("compressed-communication optimizer", enable_backward_allreduce=False)
    pretend("no optimizer", optimizer=None)

    class Offload:
        super_offload, device = True, "nvme"

    saved, engine._config.zero_config.__dict__["offload_optimizer"] = (
        engine._config.zero_config.offload_optimizer,
        Offload(),
    )
    results["SuperOffload"] = results["NVMe offload"] = error_of(
        lambda: ds_kfac.attach(engine, {"enabled": True})
    )
    engine._config.zero_config.__dict__["offload_optimizer"] = saved

    class MuonWithAuxAdam(torch.optim.SGD):
        pass

    pretend("Muon", basic_optimizer=MuonWithAuxAdam(make_net().parameters(), lr=0.1))

    pretend(
        "torch_autocast fp16 with a fused optimizer",
        torch_autocast_enabled=lambda: True,
        torch_autocast_dtype=lambda: torch.float16,
        basic_optimizer=torch.optim.SGD(make_net().parameters(), lr=0.1, fused=True),
    )

    class Unknown(type(engine.optimizer)):
        pass

    known, engine.optimizer.__class__ = type(engine.optimizer), Unknown
    results["unknown wrapper"] = error_of(lambda: ds_kfac.attach(engine, {"enabled": True}))
    engine.optimizer.__class__ = known
    results["usable after all refusals"] = error_of(
        lambda: ds_kfac.attach(engine, {"enabled": True})
    )
    return results


def test_refusals_say_what_to_change():
    result = run_ranks("tests.deepspeed.test_seam:refusals_worker", world=1)[0]
    assert "did you mean kfac.damping.value?" in result["wrong block"]
    assert 'did you mean "kfac"' in result["misspelt"]
    assert "matches no module" in result["pattern"]
    modes = {
        "Adagrad of several parameter groups with ZeRO": "one group",
        "DeepCompile": '"deepcompile": false',
        "ZenFlow": 'remove "zenflow"',
        "mixture of experts at stage 3": "stage 0, 1 or 2",
        "sequence parallelism by mesh_param": "parallel_state_sp",
        "compressed-communication optimizer": "AdamW",
        "no optimizer": '"optimizer" block',
        "SuperOffload": '"super_offload": false',
        "NVMe offload": 'to "cpu"',
        "Muon": "choose Muon or K-FAC",
        "torch_autocast fp16 with a fused optimizer": "set fused=False",
    }
    for mode, remedy in modes.items():
        assert f"{mode}: " in result[mode] and remedy in result[mode], (mode, result[mode])
    assert "Unknown, which ds_kfac does not know" in result["unknown wrapper"]
    assert result["usable after all refusals"] == result["one group of Adagrad"] == ""
    assert result["several of Adagrad, BF16_Optimizer"] == "", "it replaces nothing"
    assert "whose rate your scheduler does not change" in " ".join(result["its scheduler"].split())


def arriving(plain, spoil):
    """Gradients.__getitem__ with spoilt gradients."""
    return lambda self, name: spoil(plain(self, name))


def written(plain, spoil):
    """GradientExchange.put with spoilt results."""
    return lambda self, layers, matrices: plain(self, layers, [spoil(g) for g in matrices])


def self_test_worker(names: list[str]) -> dict:
    """Attach to engines whose gradients are not where the map says; on one rank only where that is
    possible."""
    from ds_kfac.zero.exchange import GradientExchange, Gradients

    def shifted(g):
        return g.flatten().roll(1).view_as(g)

    reads, writes = (Gradients, "__getitem__", arriving), (GradientExchange, "put", written)
    faults = {
        "shifted read": (*reads, shifted),
        "shifted write": (*writes, shifted),
        "lost write": (*writes, lambda g: 0 * g),
        "rounded write": (*writes, lambda g: g.bfloat16().float()),
    }
    results = {}
    for name in names:
        for fault, (holder, method, spoilt, spoil) in faults.items():
            with patch.object(holder, method, spoilt(getattr(holder, method), spoil)):
                results[name, fault] = error_of(lambda name=name: build(BY_NAME[name], 1))
        results[name, "none"] = error_of(lambda name=name: build(BY_NAME[name], 1))
    return results


def test_the_self_test_notices_a_changed_layout_on_every_rank():
    names = ["z0", "z1-bf16-accum32", "z2", "z2-offload", "z3-offload", "z3-bf16"]
    for result in run_ranks("tests.deepspeed.test_seam:self_test_worker", world=2, payload=names):
        for (name, fault), text in result.items():
            if fault == "none":
                assert text == "", (name, text)
            else:
                assert "self-test failed" in text and "rank " in text, (name, fault, text)


def partition_worker(_) -> str:
    """DeepSpeed's partition size is not what the shard map was built from, on one rank."""
    import torch.distributed as dist

    from ds_kfac.zero.stages import Stage12

    plain = Stage12._shards

    def other_offsets(self):
        return [replace(shard, offset=shard.offset + dist.get_rank()) for shard in plain(self)]

    Stage12._shards = other_offsets
    return error_of(lambda: build(BY_NAME["z2"], 1))


def test_a_fault_on_one_rank_is_an_error_on_all():
    for text in run_ranks("tests.deepspeed.test_seam:partition_worker", world=2, timeout=90):
        assert "self-test failed" in text
        # rank 0 misses what rank 1 should have sent, but what lies on rank 0 is where it should be
        wrong = "DeepSpeed would not step with the gradients"
        assert f"rank 1: {wrong}" in text and f"rank 0: {wrong}" not in text


def trace_worker(_) -> dict:
    """The self-test must leave gradients, weights and optimizer state untouched."""
    import ds_kfac

    results = {}
    for name in (
        "z0",
        "z2",
        "z2-offload",
        "z2-bf16-accum32",
        "z1-bf16-accum32",
        "z3",
        "z3-offload",
    ):
        off = {"kfac": {"enabled": False}}
        with contextlib.redirect_stdout(io.StringIO()):
            plain, attached = build(BY_NAME[name], 1, **off), build(BY_NAME[name], 1, **off)
            before = weights(attached)
            ds_kfac.attach(attached, {"enabled": True})
        unchanged = all(torch.equal(w, before[n]) for n, w in weights(attached).items())
        attached.kfac.detach()
        train(plain, 1, steps=3), train(attached, 1, steps=3)
        same = all(torch.equal(w, weights(plain)[n]) for n, w in weights(attached).items())
        results[name] = unchanged, same
    return results


def test_the_self_test_leaves_no_trace():
    for result in run_ranks("tests.deepspeed.test_seam:trace_worker", world=2):
        assert all(value == (True, True) for value in result.values()), result
