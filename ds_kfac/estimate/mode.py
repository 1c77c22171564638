"""What a DeepSpeed config says about an engine, as far as an estimate needs it; the engine itself is not built."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson
import torch
from deepspeed.runtime.config import DtypeEnum

from ds_kfac.config.kfac import KFACConfig, find_block, parse
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS, rule_in
from ds_kfac.engine.asked import Configured, block
from ds_kfac.engine.refusals import configured

DEFAULT: Mapping[str, Any] = {"optimizer": {"type": DIRECTIONS[0].optimizer_type}, "kfac": {}}
"""The config of an estimate without one."""


@dataclass(frozen=True)
class Mode:
    """An engine mode.

    Attributes:
        stage: of ZeRO.
        replicated: whether every rank has every averaged gradient.
        parameters, gradients: dtypes of the model, and of gradients where K-FAC reads them.
        rule: how the optimizer steps.
        split_groups: whether parameter groups are laid out as [preconditioned | rest].
        clips: whether gradients are clipped.
    """

    stage: int
    replicated: bool
    parameters: torch.dtype
    gradients: torch.dtype
    rule: UpdateRule
    split_groups: bool
    round_robin: bool
    clips: bool

    def __str__(self) -> str:
        dtype = str(self.parameters).removeprefix("torch.")
        return f"ZeRO stage {self.stage}, {dtype} parameters" + (
            f", {self.rule.name}" if self.rule.optimizer_type else ""
        )


def read_config(source: Mapping[str, Any] | str | os.PathLike) -> Mapping[str, Any]:
    """A DeepSpeed config.

    Raises:
        ValueError: no such file, or not an object of JSON.
    """
    if isinstance(source, Mapping):
        return source
    try:
        found = hjson.loads(Path(source).read_text())
    except OSError as problem:
        raise ValueError(f"{source}: {problem.strerror or problem}; name a DeepSpeed config file") from None
    except (json.JSONDecodeError, hjson.HjsonDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{source}: not JSON ({problem}); name a DeepSpeed config file") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{source}: not a JSON object; name a DeepSpeed config file")
    return found


def kfac_config(ds_config: Mapping[str, Any]) -> KFACConfig:
    """The ``"kfac"`` block, defaults where there is none, with what depends on the optimizer chosen.

    Raises:
        ValueError: the block is wrong.
    """
    found = find_block(ds_config)
    name = str(block(ds_config, "optimizer").get("type") or "")
    config, _ = rule_in(ds_config).resolved(parse({} if found is None else found), name)
    return config


def mode_of(ds_config: Mapping[str, Any], config: KFACConfig, stage: int | None = None) -> Mode:
    """The mode of the engine that DeepSpeed would build.

    Args:
        stage: in place of the config's.

    Raises:
        ValueError: a stage or a dtype that does not exist, or an engine that K-FAC or the estimator does not know.
    """
    zero = block(ds_config, "zero_optimization")
    stage = zero.get("stage", 0) if stage is None else stage
    _refuse(Configured(ds_config, config, stage))
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage: got {stage!r}; must be 0, 1, 2 or 3")
    parameters = torch.float32
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if block(ds_config, key).get("enabled") is True:
            parameters = dtype
    name = block(ds_config, "data_types").get("grad_accum_dtype")
    try:
        accumulation = parameters if name is None else DtypeEnum(name).value
    except ValueError:
        raise ValueError(f"data_types.grad_accum_dtype: got {name!r}; must be fp32, fp16 or bf16") from None
    offload = block(zero, "offload_optimizer").get("device", "none") not in ("none", None)
    bf16 = stage == 1 and parameters == torch.bfloat16 and accumulation == torch.float32 and not offload
    gradients = parameters if stage == 0 else torch.float32 if offload else accumulation
    rule = rule_in(ds_config)
    return Mode(
        stage=stage,
        replicated=stage == 0 or bf16,
        parameters=parameters,
        gradients=gradients,
        rule=rule,
        split_groups=rule.optimizer_type is not None,
        round_robin=bool(zero.get("round_robin_gradients", False)),
        clips=bool(ds_config.get("gradient_clipping", 0.0)),
    )


def rows_of(ds_config: Mapping[str, Any], world: int, units: int) -> tuple[int, str]:
    """Tokens (or images) of a rank in a step, and where that number is from.

    Args:
        units: tokens (or images) of one example.
    """
    steps, micro, batch = (
        ds_config.get(key)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    origin = ""
    if type(micro) is int:
        count = micro * (steps if type(steps) is int else 1)
    elif type(batch) is int:
        count = max(1, batch // world)
    else:
        count, origin = 1, ", assumed: the config has no batch size"
    return count * units, f"{count} x {units:,} tokens or images{origin}"


def _refuse(asked: Configured) -> None:
    """What attach would refuse, as far as the config shows; and what is not estimated."""
    refused = configured(asked)
    if block(asked.ds_config, "tensor_parallel").get("autotp_size", 0) not in (0, 1):
        refused.append(
            "tensor_parallel.autotp_size: the estimator knows data parallelism only: take it out, and give the "
            "data-parallel ranks as the world"
        )
    if refused:
        raise ValueError("; ".join(refused))
