"""What refusals are asked of: an engine, or a DeepSpeed config alone. Both answer the same questions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.engine import DummyOptim
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups

from ds_kfac.config.errors import AUTO
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.zero.domains import tensor_shard

COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers that average gradients themselves."""


@dataclass(frozen=True)
class Asked:
    """What is asked.

    Attributes:
        config: with its nulls answered.
        own: whether the update rule has an optimizer of its own, and its name.
        optimizer: class or type of the innermost one; empty: the engine cannot train.
        plain_sgd: whether that steps by rate times gradient.
        compressed: whether gradients are not averaged before the step.
        stage: of ZeRO.
        parameters: dtype of the model.
        autocast: dtype of torch_autocast; None: off.
        bf16_optimizer: whether DeepSpeed steps by its BF16_Optimizer.
        clips: whether gradients are clipped.
        computes_norms: whether ZeRO computes gradient norms.
        offload_device, super_offload: of ``offload_optimizer``.
        engine: DeepSpeed's; None: there is only a config, and all below is not known to apply.
        sharded, sequence: whether a tensor-parallel and a sequence-parallel group have several ranks.
    """

    config: KFACConfig
    own: str | None
    optimizer: str
    plain_sgd: bool
    compressed: bool
    stage: int
    parameters: torch.dtype
    autocast: torch.dtype | None
    bf16_optimizer: bool
    clips: bool
    computes_norms: bool
    deep_compiled: bool
    zenflow: bool
    offload_device: str | None
    super_offload: bool
    engine: Any = None
    pipeline: bool = False
    sharded: bool = False
    sequence: bool = False
    experts: bool = False

    @property
    def sampled(self) -> bool:
        return self.config.factor.fisher == "monte_carlo"

    @property
    def quadratic(self) -> bool:
        return self.config.preconditioner.step == "quadratic"

    @property
    def reduced(self) -> bool:
        return self.config.factor.weight_sharing == "reduce"


@dataclass(frozen=True)
class Refusal:
    """A line of :data:`ds_kfac.engine.refusals.REFUSALS`.

    Attributes:
        applies: asked on every rank, in the order of the table; may be collective where there is an engine.
        remedy: why, and what to change.
    """

    applies: Callable[[Asked], bool]
    remedy: str


def without_optimizer(engine: Any) -> bool:
    """Whether an engine cannot train; at ZeRO-3 it has what gathers its parameters in an optimizer's place."""
    return engine.optimizer is None or isinstance(engine.optimizer, (DummyOptim, DeepSpeedZeRoOffload))


def of_engine(engine: Any, config: KFACConfig, own: str | None) -> Asked:
    """Arguments as the attributes of :class:`Asked`."""
    name = "" if without_optimizer(engine) else type(engine.basic_optimizer).__name__
    pipeline = isinstance(engine, PipelineEngine)
    # a pipeline reduces by an instruction of its own
    averages = engine.pipeline_enable_backward_allreduce if pipeline else engine.enable_backward_allreduce
    offload = getattr(engine._config.zero_config, "offload_optimizer", None)
    return Asked(
        config=config,
        own=own,
        optimizer=name,
        plain_sgd=name == "SGD" and not any(_more_than_sgd(group) for group in engine.basic_optimizer.param_groups),
        compressed=not averages,
        stage=int(engine.zero_optimization_stage()),
        parameters=engine.get_data_types()[0],
        autocast=engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None,
        bf16_optimizer=isinstance(engine.optimizer, BF16_Optimizer),
        clips=bool(engine.gradient_clipping()),
        computes_norms=engine.zero_compute_grad_norm(),
        deep_compiled=engine.is_deepcompile_enabled(),
        zenflow=bool(engine.zenflow),
        offload_device=getattr(offload, "device", None),
        super_offload=bool(getattr(offload, "super_offload", False)),
        engine=engine,
        pipeline=pipeline,
        sharded=tensor_shard(engine)[1] > 1,
        sequence=groups._get_sequence_parallel_world_size() > 1,
        experts=engine.has_moe_layers,
    )


def of_config(ds_config: Mapping[str, Any], config: KFACConfig, own: str | None, stage: int | None = None) -> Asked:
    """Of the data-parallel engine that DeepSpeed would build. ``stage``: in place of the config's.

    Raises:
        ValueError: a stage or a dtype that does not exist.
    """
    optimizer, zero = block(ds_config, "optimizer"), block(ds_config, "zero_optimization")
    name, offload = str(optimizer.get("type") or ""), block(zero, "offload_optimizer")
    stage = zero.get("stage", 0) if stage is None else stage
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage: got {stage!r}; must be 0, 1, 2 or 3")
    parameters, device, autocast = torch.float32, offload.get("device"), block(ds_config, "torch_autocast")
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if block(ds_config, key).get("enabled") is True:
            parameters = dtype
    return Asked(
        config=config,
        own=own,
        optimizer=name,
        plain_sgd=name == "SGD" and not _more_than_sgd(block(optimizer, "params")),
        compressed=name.lower() in COMPRESSED,
        stage=stage,
        parameters=parameters,
        autocast=_dtype(autocast, "torch_autocast.dtype") if autocast.get("enabled") is True else None,
        bf16_optimizer=stage == 1
        and parameters is torch.bfloat16
        and accumulation(ds_config) is torch.float32
        and device in ("none", None),
        clips=_clips(ds_config),
        computes_norms=zero.get("compute_grad_norm", True) is not False,
        deep_compiled=bool(block(ds_config, "compile").get("deepcompile")),
        zenflow=bool(zero.get("zenflow")),
        offload_device=device,
        super_offload=bool(offload.get("super_offload")),
    )


def block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside a DeepSpeed config; empty if there is none."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def accumulation(ds_config: Mapping[str, Any]) -> torch.dtype | None:
    """dtype in which a config's gradients are accumulated; None: the model's.

    Raises:
        ValueError: there is no such dtype.
    """
    return _dtype({"dtype": block(ds_config, "data_types").get("grad_accum_dtype")}, "data_types.grad_accum_dtype")


def _dtype(given: Mapping[str, Any], where: str) -> torch.dtype | None:
    name = given.get("dtype")
    try:
        return None if name is None else DtypeEnum(name).value
    except ValueError:
        raise ValueError(f"{where}: got {name!r}; must be fp32, fp16 or bf16") from None


def _clips(ds_config: Mapping[str, Any]) -> bool:
    """A missing key means DeepSpeed's default, and so does the Trainer's "auto" unless it is told otherwise."""
    bound = ds_config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    return bool(GRADIENT_CLIPPING_DEFAULT if bound == AUTO else bound)


def _more_than_sgd(options: Mapping[str, Any]) -> bool:
    return bool(options.get("momentum") or options.get("weight_decay"))
