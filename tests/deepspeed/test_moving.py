"""A running job moves from AdamW to KFACAdamW and back: at stage 0 as it is, else by a universal
checkpoint."""

import contextlib
import io
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
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import patched, train, weights
from tests.models import make_net
from tests.ranks import run_ranks

KINDS = ("AdamW", "KFACAdamW")
EPS = {"AdamW": 1e-8, "KFACAdamW": 2e-8}
"""Settings that can be told apart, and make no difference to a step."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PerStep(torch.optim.lr_scheduler.LambdaLR):
    """Says by its rate how many steps it has made."""

    def __init__(self, optimizer) -> None:
        super().__init__(optimizer, lambda step: 1 - 0.01 * step)


COSINE = {
    "type": "WarmupCosineLR",
    "params": {
        "total_num_steps": 20,
        "warmup_num_steps": 2,
        "warmup_type": "linear",
        "warmup_min_ratio": 0.0,
    },
}


def engine_of(kind: str, stage: int, *, seed: int = 0, model=None, **more):
    params = {
        "lr": 0.01,
        "torch_adam": True,
        **({"adam_lr": 0.01} if kind == "KFACAdamW" else {}),
        "eps": EPS.get(kind),
    }
    params = {"lr": 0.01, "momentum": 0.9} if kind == "SGD" else params
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": params},
        "kfac": {"enabled": kind == "KFACAdamW", "report": "none"},
        **more,
    }
    init = (
        deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext()
    )
    with init:
        model = make_net(seed=seed) if model is None else model
    with contextlib.redirect_stdout(io.StringIO()):
        return ds_kfac.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config,
            lr_scheduler=None if "scheduler" in more else PerStep,
        )[0]


def state(engine) -> dict:
    return {
        "weights": weights(engine),
        "steps": engine.global_steps,
        "lr": engine.lr_scheduler.get_last_lr()[0],
        "eps": {group.get("eps") for group in engine.basic_optimizer.param_groups},
    }


def adamws(engine) -> dict:
    """Parameter -> both moments, of AdamW, or of K-FAC layers that have no basis yet."""
    if kfac := getattr(engine, "kfac", None):
        found = {}
        for layer in kfac.preconditioner.layers:
            moments = kfac.preconditioner.state[layer.name].moments
            both, columns = (moments.first_OI, moments.second_OI), layer.A.dim - bool(layer.bias)
            found[layer.weight] = [part[:, :columns].clone() for part in both]
            found |= {layer.bias: [part[:, -1].clone() for part in both]} if layer.bias else {}
        return found
    keys, get = ("exp_avg", "exp_avg_sq"), safe_get_full_optimizer_state
    zero, state = engine.zero_optimization(), engine.optimizer.state
    return {
        n: [get(p, k) if zero else state[p][k].clone() for k in keys]
        for n, p in engine.module.named_parameters()
    }


def save_worker(payload) -> dict:
    folder, cases = payload
    found = {}
    for kind, stage in [*cases, ("SGD", 0)]:
        engine = engine_of(kind, stage)
        train(engine, 1, steps=4)
        engine.save_checkpoint(f"{folder}/{kind}-{stage}", tag="tag")
        found[kind, stage] = state(engine) | {"moments": adamws(engine) if kind == "AdamW" else {}}
        train(engine, 1, steps=1, first=4)
        found[kind, stage]["next"] = weights(engine)
        engine.destroy()
    return found


def load_worker(payload) -> dict:
    folder, cases = payload
    found = {}
    for saved, (kind, stage) in cases:
        universal = saved[1] > 0
        engine = engine_of(kind, stage, seed=99, checkpoint={"load_universal": universal})
        with patch.object(moving.logger, "warning") as warning:
            engine.load_checkpoint(
                f"{folder}/{saved[0]}-{saved[1]}", tag="tag_universal" if universal else "tag"
            )
        texts = [str(call.args[0]) for call in warning.call_args_list]
        found[saved, (kind, stage)] = {
            **state(engine),
            "moments": adamws(engine) if kind == "KFACAdamW" else {},
            "said": [text for text in texts if "ds_kfac: " in text],
        }
        if kind == "KFACAdamW":
            engine.save_checkpoint(f"{folder}/moved", tag="tag")
        train(engine, 1, steps=1, first=4)
        found[saved, (kind, stage)]["next"] = weights(engine)
        if (kind, stage) == ("AdamW", 0):
            steps = {
                name: float(engine.optimizer.state[p]["step"])
                for name, p in engine.module.named_parameters()
            }
            assert {name for name, step in steps.items() if step == 5} == {
                n for n in steps if n.startswith("norm.")
            }
            assert set(steps.values()) == {1, 5}, steps
        train(engine, 1, steps=8, first=5)
        found[saved, (kind, stage)]["steps of K-FAC"] = (
            engine.kfac.counters()["steps"] if kind == KINDS[1] else None
        )
        ends = weights(engine)
        engine.destroy()
        if kind == "KFACAdamW":
            resumed = engine_of(kind, stage, seed=98)
            resumed.load_checkpoint(f"{folder}/moved", tag="tag")
            train(resumed, 1, steps=9, first=4)
            found[saved, (kind, stage)]["resumed"] = ends, weights(resumed)
            resumed.destroy()
    return found


def scheduled_worker(payload) -> dict:
    """Rates of the first group, when saved, loaded and after a step, by DeepSpeed's own
    scheduler."""
    folder, case = payload
    if case == "save":
        engine = engine_of("AdamW", 1, scheduler=COSINE)
        train(engine, 1, steps=4)
        engine.save_checkpoint(f"{folder}/cosine", tag="tag")
    else:
        engine = engine_of(
            "KFACAdamW", 1, seed=99, scheduler=COSINE, checkpoint={"load_universal": True}
        )
        engine.load_checkpoint(f"{folder}/cosine", tag="tag_universal")
    rates = [engine.basic_optimizer.param_groups[0]["lr"]]
    train(engine, 1, steps=1, first=4)
    found = {"rates": [*rates, engine.basic_optimizer.param_groups[0]["lr"]]}
    engine.destroy()
    return found


def direct_worker(payload) -> dict:
    folder, cases = payload
    found = {}
    for saved, (kind, stage) in cases:
        engine = engine_of(kind, stage, seed=99)
        try:
            engine.load_checkpoint(f"{folder}/{saved[0]}-{saved[1]}", tag="tag")
            found[saved, (kind, stage)] = "loaded"
        except RuntimeError as error:
            found[saved, (kind, stage)] = str(error)
            if "zero.Init: " in str(error):  # what to do, followed to the letter
                model = make_net(seed=99)
                exec(str(error).partition("zero.Init: ")[2], {"model": model})
                found[saved, (kind, stage)] = (
                    str(error),
                    {n: p.detach() for n, p in model.named_parameters()},
                )
        engine.destroy()
    return found


SAVED = [(kind, stage) for kind in KINDS for stage in (0, 1, 2, 3)]
MOVES = [((kind, stage), (KINDS[1 - KINDS.index(kind)], stage)) for kind, stage in SAVED] + [
    (("AdamW", 1), ("KFACAdamW", 2)),
    (("AdamW", 2), ("KFACAdamW", 1)),
]
DIRECT = [
    (("AdamW", 2), ("KFACAdamW", 2)),
    (("AdamW", 3), ("KFACAdamW", 3)),
    (("KFACAdamW", 2), ("KFACAdamW", 3)),
    (("KFACAdamW", 3), ("KFACAdamW", 2)),
    (("AdamW", 2), ("KFACAdamW", 3)),
    (("KFACAdamW", 1), ("AdamW", 1)),
    (("KFACAdamW", 0), ("KFACAdamW", 3)),
    (("KFACAdamW", 3), ("KFACAdamW", 0)),
    (("KFACAdamW", 0), ("KFACAdamW", 2)),
    (("KFACAdamW", 2), ("KFACAdamW", 0)),
    (("AdamW", 0), ("KFACAdamW", 2)),
    (("KFACAdamW", 0), ("AdamW", 2)),
    (("AdamW", 2), ("KFACAdamW", 0)),
    (("KFACAdamW", 2), ("AdamW", 0)),
    (("SGD", 0), ("KFACAdamW", 0)),
    (("KFACAdamW", 0), ("SGD", 0)),
    (("KFACAdamW", 2), ("AdamW", 2)),
    (("KFACAdamW", 3), ("AdamW", 3)),
    (("KFACAdamW", 3), ("AdamW", 2)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    """A folder with eight checkpoints of step 4 and what they are converted to, and what the runs
    were."""
    folder = tmp_path_factory.mktemp("moving")
    found = run_ranks(
        "tests.deepspeed.test_moving:save_worker", world=1, payload=(str(folder), SAVED)
    )[0]
    converted([folder / f"{kind}-{stage}" / "tag" for kind, stage in SAVED if stage])
    return folder, found


def converted(tags: list[Path]) -> None:
    """To universal checkpoints beside them."""
    script = "import sys; import deepspeed.checkpoint.ds_to_universal as convert\n"
    for tag in tags:
        given = [
            "",
            "--input_folder",
            str(tag),
            "--output_folder",
            f"{tag}_universal",
            "--inject_missing_state",
            "--num_extract_workers",
            "1",
            "--num_merge_workers",
            "1",
        ]
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


@pytest.mark.distributed
def test_weights_step_schedule_and_adamws_moments_move_to_the_other_optimizer(saved):
    """DeepSpeed alone leaves all weights but those of the first group as they were, at stages 1 and
    2."""
    folder, before = saved
    after = run_ranks(
        "tests.deepspeed.test_moving:load_worker", world=1, payload=(str(folder), MOVES)
    )[0]
    for (then, now), found in after.items():
        was, case = before[then], f"{then} to {now}"
        assert all(torch.equal(found["weights"][name], W) for name, W in was["weights"].items()), (
            case
        )
        assert (found["steps"], found["lr"], found["eps"]) == (4, was["lr"], {EPS[now[0]]}), case
        assert ("head.weight" in found["moments"]) == (now[0] == "KFACAdamW")
        for name, moments in found["moments"].items():  # until the first basis they are AdamW's own
            assert all(map(torch.equal, moments, was["moments"][name])) and moments[0].any(), (
                case,
                name,
            )
        # with AdamW's moments these go on as if nothing had happened; all else begins anew
        for name in was["weights"]:
            step = was["next"][name] - was["weights"][name]
            difference = float(
                (found["next"][name] - was["next"][name]).abs().max() / step.abs().max()
            )
            goes_on = difference < 1e-4  # rounding of a step; another step is another one by tenths
            assert goes_on == name.startswith("norm."), (case, name, difference)
        assert found["steps of K-FAC"] in (9, None), case
        for name, weight in found["resumed"][0].items() if "resumed" in found else ():
            assert torch.equal(weight, found["resumed"][1][name]), (case, name)
        (said,) = found["said"]
        assert (
            "warm up again" if now[0] == "AdamW" else "AdamW's moments of all parameters"
        ) in said, (case, said)


HALVES = [(bits, fused) for bits in ("bf16", "fp16") for fused in (False, True)]
INTO = {"fp32": [("bf16", False), ("bf16", True)]} | {
    "bf16": [("bf16", False), ("bf16", True), ("fp32", False)],
    "fp16": [("fp16", False), ("fp16", True)],
}
"""Also into the other wrapper, or another precision: whoever moves may have another torch_adam, or
another machine."""


@contextlib.contextmanager
def in_halves(bits: str, *, fused: bool):
    """Engines of stage 0 in 16 bits, ``fused`` with the wrapper that DeepSpeed takes for its own
    Adam; or in fp32."""
    if bits == "fp32":
        yield {}
        return
    with patched(Mode("z0-halves", 0, bits, fused=fused, adam=True)):
        yield {bits: {"enabled": True} | ({"initial_scale_power": 8} if bits == "fp16" else {})}


def half_worker(folder: str) -> dict:
    found = {}
    for bits, fused in [*HALVES, ("fp32", False)]:
        for kind, other in (KINDS, KINDS[::-1]):
            runs, folder_of = [], f"{folder}/{kind}-{bits}-{fused}"
            with in_halves(bits, fused=fused) as more:
                engine = engine_of(kind, 0, **more)
                train(engine, 1, steps=4)
                engine.save_checkpoint(folder_of, tag="tag")
                runs.append(
                    {
                        "masters": weights(engine),
                        "steps": engine.global_steps,
                        "scale": scale_of(engine),
                    }
                )
                train(engine, 1, steps=1, first=4)
                runs[-1]["next"] = weights(engine)
                engine.destroy()
            for into in INTO[bits]:
                with in_halves(into[0], fused=into[1]) as more:
                    engine = engine_of(other, 0, seed=99, **more)
                    engine.load_checkpoint(folder_of, tag="tag")
                    now = {
                        "masters": weights(engine),
                        "steps": engine.global_steps,
                        "scale": scale_of(engine),
                    }
                    now["halves"] = {
                        n: p.detach().float().clone() for n, p in engine.module.named_parameters()
                    }
                    now["eps"] = {group["eps"] for group in engine.basic_optimizer.param_groups}
                    train(engine, 1, steps=1, first=4)
                    runs.append(
                        {
                            **now,
                            "next": weights(engine),
                            "into": type(engine.optimizer).__name__,
                            "bits": into[0],
                        }
                    )
                    train(engine, 1, steps=3, first=5)
                    engine.destroy()
            found[kind, bits, fused] = runs
    return found


def scale_of(engine) -> float | None:
    return engine.optimizer.loss_scale if engine.fp16_enabled() else None


@pytest.mark.distributed
def test_in_16_bits_at_stage_0_fp32_weights_and_moments_move_too(tmp_path):
    """They were refused: DeepSpeed keeps them by group, in lists or one flat tensor."""
    found = run_ranks("tests.deepspeed.test_moving:half_worker", world=1, payload=str(tmp_path))[0]
    for (kind, bits, fused), (was, *moved) in found.items():
        for now in moved:
            case = (kind, bits, fused, now["into"])
            assert (now["steps"], now["scale"]) == (
                4,
                was["scale"] if now["bits"] == bits else None,
            ), case
            assert now["eps"] == {EPS[KINDS[kind == KINDS[0]]]}, case
            for name, W in was["masters"].items():
                assert torch.equal(now["masters"][name], W), (case, name)
                assert torch.equal(now["halves"][name], W.to(DTYPES[now["bits"]]).float()), (
                    case,
                    name,
                )
                step = was["next"][name] - W
                difference = float(
                    (now["next"][name] - was["next"][name]).abs().max() / step.abs().max()
                )
                assert (difference < 0.05) == name.startswith("norm."), (case, name, difference)
        assert {"FP16_Optimizer", "FP16_UnfusedOptimizer"} <= {now["into"] for now in moved}


def frozen_worker(payload) -> dict:
    """With a frozen layer, and a buffer, which are others' at a start anew."""
    folder, cases, saving = payload
    found = {}
    for kind, stage in cases:
        model = make_net(seed=0 if saving else 99)
        model.middle.requires_grad_(False)
        model.register_buffer("seen", torch.ones(3) if saving else torch.zeros(3))
        kind, universal = kind if saving else KINDS[1 - KINDS.index(kind)], stage > 0 and not saving
        engine = engine_of(kind, stage, model=model, checkpoint={"load_universal": universal})
        if saving:
            train(engine, 1, steps=2)
            engine.save_checkpoint(f"{folder}/frozen-{kind}-{stage}", tag="tag")
        else:
            source = f"{folder}/frozen-{KINDS[1 - KINDS.index(kind)]}-{stage}"
            engine.load_checkpoint(source, tag="tag_universal" if universal else "tag")
        name = kind if saving else KINDS[1 - KINDS.index(kind)]
        found[name, stage] = {**weights(engine), "seen": engine.module.seen.clone()}
        if not saving:
            train(engine, 1, steps=1, first=2)
        engine.destroy()
    return found


@pytest.mark.distributed
def test_frozen_weights_and_buffers_move_too(tmp_path):
    """DeepSpeed alone leaves them as they are when it loads a universal checkpoint."""
    cases, run = (
        [(kind, stage) for kind in KINDS for stage in (0, 2, 3)],
        "tests.deepspeed.test_moving:frozen_worker",
    )
    before = run_ranks(run, world=2, payload=(str(tmp_path), cases, True))[0]
    converted([tmp_path / f"frozen-{kind}-{stage}" / "tag" for kind, stage in cases if stage])
    after = run_ranks(run, world=1, payload=(str(tmp_path), cases, False))[0]
    for case, was in before.items():
        wrong = [name for name, tensor in was.items() if not torch.equal(after[case][name], tensor)]
        assert not wrong, (case, wrong)


@pytest.mark.distributed
def test_what_cannot_be_loaded_is_told_what_to_do(saved):
    folder, before = saved
    said = run_ranks(
        "tests.deepspeed.test_moving:direct_worker", world=1, payload=(str(folder), DIRECT)
    )[0]
    for (then, now), text in said.items():
        if "SGD" in (then[0], now[0]):  # whose moments are others
            assert "has other parameter groups" in text and "load_module_only=True" in text, (
                then,
                now,
                text,
            )
        elif then[1] == now[1]:
            assert (
                f"ds_to_universal --inject_missing_state --input_folder "
                f"{folder}/{then[0]}-{then[1]}/tag " in text
            )
            assert '"checkpoint": {"load_universal": true}' in text, text
        else:
            text, found = text
            where = {0: "stage 0", 3: "stage 3"}.get(then[1], "stage 1 or 2")
            assert f"was saved at ZeRO {where}, this engine has stage {now[1]}" in text, text
            assert found.keys() == before[then]["weights"].keys(), text
            assert all(
                torch.equal(found[name], W) for name, W in before[then]["weights"].items()
            ), text


@pytest.mark.distributed
def test_a_scheduler_of_deepspeeds_goes_on_at_its_place_in_the_first_step(tmp_path):
    """It leaves no initial rates in groups; a fresh engine's rate is that of its first step, 0."""
    run = "tests.deepspeed.test_moving:scheduled_worker"
    before = run_ranks(run, world=1, payload=(str(tmp_path), "save"))[0]["rates"]
    converted([tmp_path / "cosine" / "tag"])
    assert (
        run_ranks(run, world=1, payload=(str(tmp_path), "load"))[0]["rates"] == before
        and min(before) > 0
    )
