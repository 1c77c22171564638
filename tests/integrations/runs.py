"""Train, resume, evaluate and log with a real package, by its example, at every ZeRO stage, in bf16
and offloaded; on two ranks."""

import contextlib
import hashlib
import importlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

STEPS = 6
EXAMPLES = {
    "transformers Trainer": ("hf_trainer", ("transformers", "accelerate")),
    "TRL SFT with LoRA": ("trl_sft_lora", ("trl", "peft", "transformers", "accelerate")),
    "TRL DPO": ("trl_dpo", ("trl", "transformers", "accelerate")),
    "Accelerate loop": ("accelerate_loop", ("accelerate",)),
    "Lightning": ("lightning_module", ("lightning",)),
}
"""Row of the table -> its example, and the packages that it needs."""
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
MODES: dict[str, dict[str, Any]] = {
    **{str(stage): {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "2 in bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "2 with offload": {"zero_optimization": OFFLOADED, "zero_force_ds_cpu_optimizer": False},
}
"""ZeRO stages, and what else is in the DeepSpeed config. fp16 needs a GPU."""
BF16 = {
    "hf_trainer": ("TrainingArguments", {"bf16": True}),
    "trl_sft_lora": ("SFTConfig", {"bf16": True}),
    "trl_dpo": ("DPOConfig", {"bf16": True}),
    "accelerate_loop": ("Accelerator", {"mixed_precision": "bf16"}),
    "lightning_module": ("pl.Trainer", {"precision": "bf16-true"}),
}
"""Example -> what takes the precision there, in the framework's words."""
CELLS = ("trains", "resumes", "evaluates", "logs")


def digest(engine: Any) -> str:
    from tests.deepspeed.runs import weights

    whole = weights(engine)
    return hashlib.sha256(
        b"".join(whole[name].cpu().numpy().tobytes() for name in sorted(whole))
    ).hexdigest()


def fresh() -> None:
    """These packages keep what they found out about the process."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def in_bf16(module: Any) -> contextlib.AbstractContextManager:
    """The example's framework is told of bf16, too."""
    path, given = BF16[module.__name__.split(".")[-1]]
    *outer, attribute = path.split(".")
    owner = getattr(module, outer[0]) if outer else module
    made = getattr(owner, attribute)
    return mock.patch.object(owner, attribute, lambda *args, **own: made(*args, **own | given))


def run(example: str, *arguments: str, bf16: bool = False) -> dict[str, Any]:
    """What one run of an example ended with."""
    fresh()
    module = importlib.import_module(f"examples.integrations.{example}")
    with in_bf16(module) if bf16 else contextlib.nullcontext():
        result = module.main(["--steps", str(STEPS), *arguments])
    if isinstance(result, tuple):
        engine, last = result
        first: dict[str, float] = {}
        history: list[dict[str, float]] = []
    elif hasattr(result.state, "log_history"):
        engine, history = result.model_wrapped, result.state.log_history
        first = next(entry for entry in history if "loss" in entry)
        last = {name: value for entry in history for name, value in entry.items()}
        last["loss"] = [entry["loss"] for entry in history if "loss" in entry][-1]
    else:
        engine, first, history = result.strategy.model, {}, []
        last = {name: float(value) for name, value in result.callback_metrics.items()}
    found = {
        "digest": digest(engine),
        "kfac steps": engine.kfac.preconditioner.steps,
        "unfit": sorted(engine.kfac.preconditioner.proving.unfit),
        "steps here": engine.kfac.counters()["steps"],
        "factor updates": engine.kfac.counters()["factor_updates"],
        "rewards": [entry["reward"] for entry in history if "reward" in entry],
        "first loss": first.get("loss", math.log(258)),  # of a model that knows nothing
        **{key: last[key] for key in ("loss", "eval_loss", "kfac/step_to_weight") if key in last},
    }
    engine.destroy()
    return found


def cells(straight: dict[str, Any], resumed: dict[str, Any]) -> dict[str, bool]:
    losses = [straight.get(key, math.nan) for key in ("loss", "first loss")]
    return {
        "trains": straight["kfac steps"] == STEPS
        and straight["factor updates"] > 0
        and losses[0] < losses[1],
        "resumes": resumed["digest"] == straight["digest"]
        and (resumed["kfac steps"], resumed["steps here"]) == (STEPS, STEPS - STEPS // 2),
        "evaluates": math.isfinite(straight.get("eval_loss", math.nan)),
        "logs": straight.get("kfac/step_to_weight", 0) > 0,
    }


def checkpoint(folder: Path) -> Path:
    """That of half of the steps, by the name that each package gives it."""
    half = STEPS // 2
    names = (f"checkpoint-{half}", f"step-{half}", f"step={half}.ckpt")
    return next(folder / name for name in names if (folder / name).exists())


def twice(
    example: str, out: Path, blocks: dict[str, Any], *flags: str, bf16: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two runs of an example found, the second one from the first one's checkpoint.

    Args:
        blocks: of the DeepSpeed config.
    """
    import ds_kfac
    from ds_kfac.step import proving
    from examples.integrations import tiny

    proving.RAISES = False  # TRL multiplies by the head in a function: it has no rows
    ds_kfac.enable()
    out.mkdir(exist_ok=True)
    config = tiny.ds_config(Path(tiny.__file__).with_name("ds_config.json"), **blocks)
    path = out / f"config{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    given = ("--out", str(out), "--deepspeed", str(path), *flags)
    with contextlib.redirect_stdout(io.StringIO()):
        straight = run(example, *given, bf16=bf16)
        resumed = run(example, *given, "--resume", str(checkpoint(out)), bf16=bf16)
    return straight, resumed


def worker(payload: tuple[str, str, Sequence[str]]) -> dict[str, Any]:
    """Mode -> what :func:`twice` found; and the cells."""
    from examples.integrations import tiny

    name, folder, modes = payload
    tokens = tiny.tokens
    # three steps an epoch: Lightning does not resume in the middle of one's data
    tiny.tokens = lambda count=48: tokens(min(count, 48))
    found = {}
    for mode in modes:
        runs = twice(EXAMPLES[name][0], Path(folder, mode), MODES[mode], bf16="bf16" in mode)
        found[mode] = *runs, cells(*runs)
    return found
