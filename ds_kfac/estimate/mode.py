"""What a DeepSpeed config says about an engine, as far as an estimate needs it; the engine itself is not built."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson
import torch

from ds_kfac.config.kfac import KFACConfig, find_block, parse
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS, rule_in
from ds_kfac.engine.refusals import accumulation, block, of_config, refused

DEFAULT: Mapping[str, Any] = {"optimizer": {"type": DIRECTIONS[0].optimizer_type}, "kfac": {}}
"""The config of an estimate without one."""


@dataclass(frozen=True)
class Mode:
    """An engine mode.

    Attributes:
        stage: of ZeRO.
        replicated: whether every rank has every averaged gradient.
        in_place: whether results take the places of gradients, see :class:`ds_kfac.zero.layout.ShardLayout`.
        parameters, gradients: dtypes of the model, and of gradients where K-FAC reads them.
        rule: how the optimizer steps.
        optimizer: its type.
        split_groups: whether parameter groups are laid out as [preconditioned | rest].
        clips: whether gradients are clipped.
        scheduled: whether DeepSpeed runs an lr scheduler.
    """

    stage: int
    replicated: bool
    in_place: bool
    parameters: torch.dtype
    gradients: torch.dtype
    rule: UpdateRule
    optimizer: str
    split_groups: bool
    round_robin: bool
    clips: bool
    scheduled: bool

    def __str__(self) -> str:
        dtype = str(self.parameters).removeprefix("torch.")
        return f"ZeRO stage {self.stage}, {dtype} parameters, {self.optimizer}"


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


def with_optimizer(ds_config: Mapping[str, Any], name: str | None) -> Mapping[str, Any]:
    """A config with the optimizer that the script passes, which it may not name itself.

    Raises:
        ValueError: it names one.
    """
    if name is None:
        return ds_config
    if ds_config.get("optimizer") is not None:
        raise ValueError(f"--optimizer {name}: the config has one; leave either out")
    return {**ds_config, "optimizer": {"type": name}}


def answered(ds_config: Mapping[str, Any]) -> tuple[KFACConfig, KFACConfig, tuple[str, ...]]:
    """The ``"kfac"`` block as given, defaults where there is none; with its nulls answered; and how.

    Raises:
        ValueError: the block is wrong.
    """
    found = find_block(ds_config)
    given = parse({} if found is None else found)
    name = str(block(ds_config, "optimizer").get("type") or "")
    return given, *rule_in(ds_config).resolved(given, name)


def kfac_config(ds_config: Mapping[str, Any]) -> KFACConfig:
    """The config of :func:`answered`, its nulls answered."""
    return answered(ds_config)[1]


def mode_of(ds_config: Mapping[str, Any], config: KFACConfig, stage: int | None = None) -> Mode:
    """The mode of the engine that DeepSpeed would build.

    Args:
        stage: in place of the config's.

    Raises:
        ValueError: a stage or a dtype that does not exist, or an engine that K-FAC or the estimator does not know.
    """
    rule = rule_in(ds_config)
    asked = of_config(ds_config, config, rule.optimizer_type, stage)
    problems = refused(asked)
    if block(ds_config, "tensor_parallel").get("autotp_size", 0) not in (0, 1):
        problems.append(
            "tensor_parallel.autotp_size: the estimator knows data parallelism only: take it out, and give the "
            "data-parallel ranks as the world"
        )
    if problems:
        raise ValueError("; ".join(problems))
    offloaded = asked.offload_device not in ("none", None)
    accumulated = accumulation(ds_config) or asked.parameters
    gradients = asked.parameters if asked.stage == 0 else torch.float32 if offloaded else accumulated
    replicated = asked.stage == 0 or asked.bf16_optimizer
    return Mode(
        stage=asked.stage,
        replicated=replicated,
        in_place=not replicated and not offloaded and gradients is not torch.float16,
        parameters=asked.parameters,
        gradients=gradients,
        rule=rule,
        optimizer=asked.optimizer,
        split_groups=rule.optimizer_type is not None,
        round_robin=bool(block(ds_config, "zero_optimization").get("round_robin_gradients", False)),
        clips=asked.clips,
        scheduled=block(ds_config, "scheduler").get("type") is not None,
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
