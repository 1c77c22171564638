"""A running job moves from AdamW to KFACAdamW and back: at stage 0 as it is, else by a universal
checkpoint."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

import ds_kfac
from ds_kfac.checkpoint import moving
from tests.close import exact
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import patched, train, weights
from tests.deepspeed.said import error_of
from tests.models import make_net
from tests.ranks import call_on_ranks

pytestmark = pytest.mark.distributed
KINDS = ("AdamW", "KFACAdamW")
OTHER = dict(zip(KINDS, reversed(KINDS), strict=True))
EPS = {"AdamW": 1e-8, "KFACAdamW": 2e-8}
"""Settings that can be told apart, and make no difference to a step."""


class PerStep(torch.optim.lr_scheduler.LambdaLR):
    """Says by its rate how many steps it has made."""

    def __init__(self, optimizer) -> None:
        super().__init__(optimizer, lambda step: 1 - 0.01 * step)


def engine_of(kind: str, stage: int, *, seed: int = 0, model=None, parameters=None, **more):
    """An engine with an optimizer of a kind, and K-FAC where it is ours.

    Args:
        more: of the config.
    """
    params = {"lr": 0.01, "torch_adam": True, "eps": EPS.get(kind)}
    if kind == "KFACAdamW":
        params["adam_lr"] = 0.01
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": params},
        "kfac": {"enabled": kind == "KFACAdamW", "report": "none"},
        **more,
    }
    if kind == "SGD":
        config["optimizer"]["params"] = {"lr": 0.01, "momentum": 0.9}
    if model is None:
        partitioned = deepspeed.zero.Init(config_dict_or_path=config)
        with partitioned if stage == 3 else contextlib.nullcontext():
            model = make_net(seed=seed)
    return ds_kfac.initialize(
        model=model,
        model_parameters=parameters or model.parameters(),
        config=config,
        lr_scheduler=None if "scheduler" in more else PerStep,
    )[0]


def converted(tags: list[Path]) -> None:
    """To universal checkpoints beside them."""
    script = "import sys; import deepspeed.checkpoint.ds_to_universal as convert\n"
    options = "--inject_missing_state --num_extract_workers 1 --num_merge_workers 1".split()
    for tag in tags:
        given = ["", "--input_folder", str(tag), "--output_folder", f"{tag}_universal", *options]
        script += f"sys.argv = {given!r}; convert.main(convert.parse_arguments())\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def state(engine) -> tuple:
    """What moves beside weights and moments."""
    scale = engine.optimizer.loss_scale if engine.fp16_enabled() else None
    return engine.global_steps, engine.lr_scheduler.get_last_lr()[0], scale


def moments_of_adamw(engine) -> dict:
    """Parameter -> both moments."""
    keys, get = ("exp_avg", "exp_avg_sq"), safe_get_full_optimizer_state
    zero, state = engine.zero_optimization(), engine.optimizer.state
    return {
        name: [get(p, key) if zero else state[p][key].clone() for key in keys]
        for name, p in engine.module.named_parameters()
    }


def moments_of_layers(engine) -> dict:
    """The same of K-FAC layers, which have no basis yet."""
    found, kfac = {}, engine.kfac.preconditioner
    for layer in kfac.layers:
        moments = kfac.state[layer.name].moments
        both, columns = (moments.first_OI, moments.second_OI), layer.A.dim - bool(layer.bias)
        found[layer.weight] = [part[:, :columns] for part in both]
        if layer.bias:
            found[layer.bias] = [part[:, -1] for part in both]
    return found


def check_next_step(before: dict, expected: dict, actual: dict, rounding: float, what) -> None:
    """Parameters that AdamW steps go on as if nothing had happened; all else begins anew."""
    for name, weight in before.items():
        step = float((expected[name] - weight).abs().max())
        difference = float((actual[name] - expected[name]).abs().max()) / step
        # another step is another one by tenths
        assert (difference < rounding) == name.startswith("norm."), (what, name, difference)


MOVES = [((kind, stage), (OTHER[kind], stage)) for kind in KINDS for stage in (0, 1, 2, 3)]
MOVES += [(("AdamW", 1), ("KFACAdamW", 2)), (("AdamW", 2), ("KFACAdamW", 1))]


@pytest.mark.ranks(1)
def test_weights_step_schedule_and_adamws_moments_move_to_the_other_optimizer(tmp_path):
    """DeepSpeed alone leaves all weights but those of the first group as they were, at stages 1 and
    2."""
    saved = {}
    for kind, stage in dict(MOVES):
        engine = engine_of(kind, stage)
        train(engine, 1, steps=4)
        engine.save_checkpoint(f"{tmp_path}/{kind}-{stage}", tag="tag")
        moments = moments_of_adamw(engine) if kind == "AdamW" else {}
        was, at = weights(engine), state(engine)
        train(engine, 1, steps=1, first=4)
        saved[kind, stage] = was, at, moments, weights(engine)
        engine.destroy()
    converted([tmp_path / f"{kind}-{stage}" / "tag" for kind, stage in dict(MOVES) if stage])

    for then, (kind, stage) in MOVES:
        case, universal = f"{then} to {kind} {stage}", then[1] > 0
        was, at, moments, following = saved[then]
        engine = engine_of(kind, stage, seed=99, checkpoint={"load_universal": universal})
        with patch.object(moving.logger, "warning") as warning:
            tag = "tag_universal" if universal else "tag"
            engine.load_checkpoint(f"{tmp_path}/{then[0]}-{then[1]}", tag=tag)
        (said,) = [str(call.args[0]) for call in warning.call_args_list if "ds_kfac: " in str(call)]
        moved = "warm up again" if kind == "AdamW" else "AdamW's moments of all parameters"
        assert moved in said, said
        exact(weights(engine), was, what=case)
        assert state(engine) == at, case
        assert {group["eps"] for group in engine.basic_optimizer.param_groups} == {EPS[kind]}
        if kind == "KFACAdamW":
            own = moments_of_layers(engine)
            exact(own, {name: moments[name] for name in own}, what=case)
            assert all(first.any() for first, _ in own.values())
            engine.save_checkpoint(f"{tmp_path}/moved", tag="tag")
        train(engine, 1, steps=1, first=4)
        check_next_step(was, following, weights(engine), 1e-4, case)  # rounding of a step
        if (kind, stage) == ("AdamW", 0):
            steps = {
                n: engine.optimizer.state[p]["step"] for n, p in engine.module.named_parameters()
            }
            assert all(int(s) == (5 if n.startswith("norm.") else 1) for n, s in steps.items())
        train(engine, 1, steps=8, first=5)
        if kind == "KFACAdamW":
            assert engine.kfac.counters()["steps"] == 9, case
            resumed = engine_of(kind, stage, seed=98)
            resumed.load_checkpoint(f"{tmp_path}/moved", tag="tag")
            train(resumed, 1, steps=9, first=4)
            exact(weights(resumed), weights(engine), what=case)
            resumed.destroy()
        engine.destroy()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = [
    (("bf16", False), ("bf16", True)),
    (("bf16", True), ("bf16", False)),
    (("fp16", False), ("fp16", True)),
    (("fp16", True), ("fp16", False)),
    (("bf16", True), ("fp32", False)),
    (("fp32", False), ("bf16", True)),
    (("fp32", False), ("bf16", False)),
]
"""Into the other wrapper, or another precision: whoever moves may have another torch_adam, or
another machine."""


@contextlib.contextmanager
def in_halves(bits: str, *, fused: bool):
    """Engines of stage 0 in 16 bits, ``fused`` with the wrapper that DeepSpeed takes for its own
    Adam; or in fp32. Yields more of the config."""
    if bits == "fp32":
        yield {}
        return
    with patched(Mode("z0-halves", 0, bits, fused=fused, adam=True)):
        # it grows in four steps
        scale = {"initial_scale_power": 8, "loss_scale_window": 2} if bits == "fp16" else {}
        yield {bits: {"enabled": True, **scale}}


@pytest.mark.ranks(1)
def test_in_16_bits_at_stage_0_fp32_weights_and_moments_move_too(tmp_path):
    """They were refused: DeepSpeed keeps them by group, in lists or one flat tensor."""
    for kind in KINDS:
        for then, now in HALVES:
            case = f"{kind} {then} to {now}"
            with in_halves(then[0], fused=then[1]) as more:
                engine = engine_of(kind, 0, **more)
                train(engine, 1, steps=4)
                engine.save_checkpoint(f"{tmp_path}/{case}", tag="tag")
                was, at = weights(engine), state(engine)
                train(engine, 1, steps=1, first=4)
                following = weights(engine)
            with in_halves(now[0], fused=now[1]) as more:
                engine = engine_of(OTHER[kind], 0, seed=99, **more)
                engine.load_checkpoint(f"{tmp_path}/{case}", tag="tag")
                assert state(engine) == at, case
                assert {g["eps"] for g in engine.basic_optimizer.param_groups} == {EPS[OTHER[kind]]}
                exact(weights(engine), was, what=case)
                halves = {name: weight.to(DTYPES[now[0]]) for name, weight in was.items()}
                exact({n: p.data for n, p in engine.module.named_parameters()}, halves, what=case)
                train(engine, 1, steps=1, first=4)
                # a step in 16 bits
                check_next_step(was, following, weights(engine), 0.05, case)
                train(engine, 1, steps=3, first=5)


def partly_trained(seed: int):
    """With a frozen layer, and a buffer, which are others' at a start anew."""
    model = make_net(seed=seed)
    model.middle.requires_grad_(False)
    model.register_buffer("seen", torch.full((3,), float(seed)))
    return model


PARTLY = [(kind, stage) for kind in KINDS for stage in (0, 2, 3)]


def save_partly_trained(folder) -> None:
    for kind, stage in PARTLY:
        engine = engine_of(kind, stage, model=partly_trained(0))
        train(engine, 1, steps=2)
        engine.save_checkpoint(f"{folder}/{kind}-{stage}", tag="tag")
        torch.save(weights(engine), f"{folder}/{kind}-{stage}/weights")


def load_partly_trained(folder) -> None:
    for kind, stage in PARTLY:
        universal = {"load_universal": stage > 0}
        engine = engine_of(OTHER[kind], stage, model=partly_trained(99), checkpoint=universal)
        engine.load_checkpoint(f"{folder}/{kind}-{stage}", tag="tag" + "_universal" * (stage > 0))
        was = torch.load(f"{folder}/{kind}-{stage}/weights")
        exact(weights(engine), was, what=f"{kind} {stage}")
        assert not engine.module.seen.any(), "the buffer"
        train(engine, 1, steps=1, first=2)


def test_frozen_weights_and_buffers_move_too(tmp_path):
    """DeepSpeed alone leaves them as they are when it loads a universal checkpoint."""
    call_on_ranks(2, save_partly_trained, tmp_path)
    converted([tmp_path / f"{kind}-{stage}" / "tag" for kind, stage in PARTLY if stage])
    call_on_ranks(1, load_partly_trained, tmp_path)


DIRECT = {
    ("AdamW", 0): [("KFACAdamW", 2)],
    ("AdamW", 2): [("KFACAdamW", 2), ("KFACAdamW", 3), ("KFACAdamW", 0)],
    ("AdamW", 3): [("KFACAdamW", 3)],
    ("KFACAdamW", 0): [("KFACAdamW", 3), ("KFACAdamW", 2), ("AdamW", 2), ("SGD", 0)],
    ("KFACAdamW", 1): [("AdamW", 1)],
    ("KFACAdamW", 2): [("KFACAdamW", 3), ("KFACAdamW", 0), ("AdamW", 0), ("AdamW", 2)],
    ("KFACAdamW", 3): [("KFACAdamW", 2), ("KFACAdamW", 0), ("AdamW", 3), ("AdamW", 2)],
    ("SGD", 0): [("KFACAdamW", 0)],
}
SAVED_AT = {0: "stage 0", 1: "stage 1 or 2", 2: "stage 1 or 2", 3: "stage 3"}


@pytest.mark.ranks(1)
def test_what_cannot_be_loaded_is_told_what_to_do(tmp_path):
    """And what it says works, followed to the letter."""
    for then, loaded in DIRECT.items():
        folder = f"{tmp_path}/{then[0]}-{then[1]}"
        engine = engine_of(*then)
        train(engine, 1, steps=2)
        engine.save_checkpoint(folder, tag="tag")
        was = weights(engine)
        engine.destroy()
        for kind, stage in loaded:
            engine = engine_of(kind, stage, seed=99)
            said = error_of(lambda: engine.load_checkpoint(folder, tag="tag"))  # noqa: B023
            engine.destroy()
            case = then, (kind, stage), said
            remedy = {"load_module_only": True, "load_optimizer_states": False}
            if "SGD" in (kind, then[0]):  # whose moments are others
                assert "has other parameter groups" in said and "load_module_only=True" in said, (
                    case
                )
            elif stage == then[1]:
                convert = f"ds_to_universal --inject_missing_state --input_folder {folder}/tag "
                assert convert in said and '"checkpoint": {"load_universal": true}' in said, case
                assert "load_module_only=True, load_optimizer_states=False" in said, case
            else:
                where = f"was saved at ZeRO {SAVED_AT[then[1]]}, this engine has stage {stage}"
                assert where in said, case
                model = make_net(seed=99)
                exec(said.partition("zero.Init: ")[2], {"model": model})
                exact({n: p.data for n, p in model.named_parameters()}, was, what=str(case))
                continue
            engine = engine_of(kind, stage, seed=99)
            engine.load_checkpoint(folder, tag="tag", **remedy)
            exact(weights(engine), was, what=str(case))
            train(engine, 1, steps=1)
            engine.destroy()


COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}}


@pytest.mark.ranks(1)
def test_a_scheduler_of_deepspeeds_goes_on_at_its_place_in_the_first_step(tmp_path):
    """It leaves no initial rates in groups; a fresh engine's rate is that of its first step, 0."""
    rates = {}
    for kind in KINDS:
        universal = {"load_universal": kind == "KFACAdamW"}
        engine = engine_of(kind, 1, scheduler=COSINE, checkpoint=universal)
        if kind == "AdamW":
            train(engine, 1, steps=4)
            engine.save_checkpoint(str(tmp_path), tag="tag")
            converted([tmp_path / "tag"])
        else:
            engine.load_checkpoint(str(tmp_path), tag="tag_universal")
        rates[kind] = [engine.basic_optimizer.param_groups[0]["lr"]]
        train(engine, 1, steps=1, first=4)
        rates[kind].append(engine.basic_optimizer.param_groups[0]["lr"])
    assert rates["AdamW"] == rates["KFACAdamW"] and min(rates["AdamW"]) > 0
