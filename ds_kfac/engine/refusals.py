"""A table of the engine modes and config combinations in which K-FAC would be wrong or silently
off. An engine can be checked against the table, and so can a DeepSpeed config without an engine."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DummyOptim
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import nn

from ds_kfac.comm.message import gathered
from ds_kfac.config.deepspeed_config import accumulation, block, dtype_of
from ds_kfac.config.keys import Block, KFACConfig
from ds_kfac.model.layers import is_autoep
from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.registry import is_waiting, tensor_shard

COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers that average gradients themselves, in compressed form."""


@dataclass(frozen=True)
class Context:
    """The facts on which refusals depend.

    Attributes:
        config: the "kfac" block, in which every null is replaced by the value chosen for it.
        own: name of the update rule's own optimizer; None if the rule preconditions gradients for
            another optimizer.
        optimizer: class name of the innermost optimizer, or its type in the config; empty if the
            engine cannot train.
        compressed: True if the engine does not average gradients before the optimizer's step.
        parameters: dtype of the model.
        autocast: dtype of torch_autocast; None if it is off.
        computes_norms: whether ZeRO computes gradient norms.
        offload_device, parameter_device: devices of offload_optimizer and offload_param.
        engine: the DeepSpeed engine; None if there is only a config. In that case the fields below
            keep their defaults.
        sharded: whether the tensor-parallel group has more than one rank.
        sequence: whether the sequence-parallel group has more than one rank.
    """

    config: KFACConfig
    own: str | None
    optimizer: str
    compressed: bool
    stage: int
    parameters: torch.dtype
    autocast: torch.dtype | None
    bf16_optimizer: bool
    computes_norms: bool
    deep_compiled: bool
    zenflow: bool
    offload_device: str | None
    super_offload: bool
    parameter_device: str | None = None
    engine: Any = None
    pipeline: bool = False
    sharded: bool = False
    sequence: bool = False
    experts: bool = False

    @property
    def sampled(self) -> bool:
        return self.config.factor.fisher == "monte_carlo"

    @property
    def reduced(self) -> bool:
        return self.config.factor.weight_sharing == "reduce"

    @property
    def mixtures(self) -> list[Any]:
        """Mixtures of experts that AutoEP has put into the engine's model."""
        if self.engine is None:
            return []
        return [module for module in self.engine.module.modules() if is_autoep(module)]


def without_optimizer(engine: Any) -> bool:
    """Return whether an engine has no optimizer and cannot train. The ``optimizer`` attribute of
    such an engine may still hold an object. With ZeRO-3 this object gathers parameters. With bf16
    it is a wrapper with master weights around a dummy optimizer."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return inner is None or isinstance(inner, (DummyOptim, DeepSpeedZeRoOffload))


def of_engine(engine: Any, config: KFACConfig, own: str | None) -> Context:
    """Return the facts of an engine. :class:`Context` explains ``config`` and ``own``."""
    name = "" if without_optimizer(engine) else type(engine.basic_optimizer).__name__
    pipeline = isinstance(engine, PipelineEngine)
    # a pipeline reduces gradients in an instruction of its own, not in the backward pass
    if pipeline:
        averages = engine.pipeline_enable_backward_allreduce
    else:
        averages = engine.enable_backward_allreduce
    offload = deepspeed_versions.offload(engine)
    return Context(
        config=config,
        own=own,
        optimizer=name,
        compressed=not averages,
        stage=int(engine.zero_optimization_stage()),
        parameters=engine.get_data_types()[0],
        autocast=deepspeed_versions.autocast(engine),
        bf16_optimizer=isinstance(engine.optimizer, BF16_Optimizer),
        computes_norms=deepspeed_versions.computes_norms(engine),
        deep_compiled=engine.is_deepcompile_enabled(),
        zenflow=deepspeed_versions.zenflow(engine),
        offload_device=getattr(offload, "device", None),
        super_offload=bool(getattr(offload, "super_offload", False)),
        parameter_device=getattr(engine.zero_offload_param(), "device", None),
        engine=engine,
        pipeline=pipeline,
        sharded=tensor_shard(engine)[1] > 1,
        sequence=deepspeed_versions.sequence_parallel_size() > 1,
        experts=engine.has_moe_layers,
    )


def of_config(
    ds_config: Mapping[str, Any], config: KFACConfig, own: str | None, stage: int | None = None
) -> Context:
    """Return the facts of the data-parallel engine that DeepSpeed would build from a config.
    ``stage`` overrides the config's ZeRO stage. Raises ValueError for a stage or a dtype that does
    not exist."""
    optimizer = block(ds_config, "optimizer")
    zero = block(ds_config, "zero_optimization")
    name = str(optimizer.get("type") or "")
    offload = block(zero, "offload_optimizer")
    stage = zero.get("stage", 0) if stage is None else stage
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage: got {stage!r}; must be 0, 1, 2 or 3")
    parameters = torch.float32
    device = offload.get("device")
    autocast = block(ds_config, "torch_autocast")
    for key, dtype in (
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
    ):
        if block(ds_config, key).get("enabled") is True:
            parameters = dtype
    return Context(
        config=config,
        own=own,
        optimizer=name,
        compressed=name.lower() in COMPRESSED,
        stage=stage,
        parameters=parameters,
        autocast=dtype_of(autocast.get("dtype"), "torch_autocast.dtype")
        if autocast.get("enabled") is True
        else None,
        bf16_optimizer=(stage, parameters, accumulation(ds_config))
        == (1, torch.bfloat16, torch.float32)
        and device in ("none", None),
        computes_norms=zero.get("compute_grad_norm", True) is not False,
        deep_compiled=bool(block(ds_config, "compile").get("deepcompile")),
        zenflow=bool(zero.get("zenflow")),
        offload_device=device,
        super_offload=bool(offload.get("super_offload")),
        parameter_device=block(zero, "offload_param").get("device"),
    )


SAMPLED = 'kfac.factor.fisher "monte_carlo"'
STEP_MEAN = 'kfac.factor.loss_mean "step"'
REDUCED = 'kfac.factor.weight_sharing "reduce"'
NO_OPTIMIZER = "no optimizer"


REFUSALS: Mapping[str, tuple[Callable[[Context], bool], str]] = {
    NO_OPTIMIZER: (
        lambda e: not e.optimizer,
        'K-FAC preconditions an optimizer\'s gradients: add an "optimizer" block, or pass '
        "optimizer= (with the commands check and estimate, pass --optimizer)",
    ),
    "middle of a step": (
        lambda e: e.engine is not None and is_waiting(e.engine),
        "there are gradients that no step has used yet, and attaching would lose them: attach "
        "before the first backward pass of a step, or after the engine.step() that ends a step",
    ),
    "pipeline of another kind": (
        lambda e: e.pipeline and type(e.engine) is not PipelineEngine,
        "only DeepSpeed's plain PipelineEngine is supported: train with its default schedule",
    ),
    "pipeline with a model axis": (
        lambda e: e.pipeline and e.engine.is_model_parallel,
        "pipelines of tensor-parallel stages are not supported: use a topology that has only the "
        "axes pipe and data",
    ),
    "mixture of experts at stage 3": (
        lambda e: e.experts and e.stage == 3 and not e.mixtures,
        "DeepSpeed does not partition deepspeed.moe's experts: use ZeRO stage 0, 1 or 2",
    ),
    "mixture of experts in BF16_Optimizer": (
        lambda e: e.experts and e.bf16_optimizer,
        'this combination is not tested: remove "data_types": {"grad_accum_dtype": "fp32"}',
    ),
    "mixture of experts with other model parallelism": (
        lambda e: e.experts and (e.sharded or e.pipeline or e.sequence),
        "experts are supported with data parallelism only: set the tensor, pipeline and sequence "
        "parallel sizes to 1",
    ),
    "AutoEP with AutoTP": (
        lambda e: bool(e.mixtures) and e.engine.autotp_size() > 1,
        "tokens are also spread over tensor-parallel ranks: set tensor_parallel.autotp_size to 1",
    ),
    "AutoEP with DeepEP": (
        lambda e: any(mixture.comm_backend != "comm" for mixture in e.mixtures),
        'this combination is not tested: set expert_parallel.comm_backend to "comm"',
    ),
    "AutoEP with Triton's grouped products": (
        lambda e: any(mixture.experts.use_triton_grouped_mm for mixture in e.mixtures),
        "K-FAC cannot see the rows of these products: set "
        "expert_parallel.disable_triton_grouped_mm to true, or use_grouped_mm to false",
    ),
    "AutoEP with one product for gate and up": (
        lambda e: any(mixture.experts.gate_up_impl != "separate" for mixture in e.mixtures),
        "this product uses a copy of the two weights: set expert_parallel.gate_up_impl to "
        '"separate"',
    ),
    "tensor and sequence parallelism": (
        lambda e: e.sharded and e.sequence,
        "only one of the two is supported: make the other group a group of one rank",
    ),
    "sequence parallelism by mesh_param": (
        lambda e: e.engine is not None and e.engine.mesh_device is not None,
        "with mesh_param DeepSpeed does not sum gradients over the sequence group: instead pass "
        "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp, or an object with the same "
        "functions",
    ),
    "DeepCompile": (
        lambda e: e.deep_compiled,
        'it reduces gradients inside the compiled graph, where K-FAC has no hook: set "compile": '
        '{"deepcompile": false}',
    ),
    "ZenFlow": (
        lambda e: e.zenflow,
        'it updates parameters outside the step: remove "zenflow" from zero_optimization',
    ),
    "SuperOffload": (
        lambda e: e.super_offload,
        'it updates parameters during backward: set "super_offload": false in offload_optimizer',
    ),
    "NVMe offload": (
        lambda e: e.offload_device == "nvme",
        'gradients are swapped out when K-FAC needs them: set offload_optimizer.device to "cpu"',
    ),
    "NVMe offload of parameters": (
        lambda e: e.parameter_device == "nvme",
        'this combination is not tested: set offload_param.device to "cpu"',
    ),
    "compressed-communication optimizer": (
        lambda e: e.compressed,
        "with such an optimizer DeepSpeed does not average gradients before the step: use an "
        "optimizer without built-in communication, such as AdamW",
    ),
    "torch_autocast fp16 without gradient norms": (
        lambda e: e.stage > 0 and e.autocast is torch.float16 and not e.computes_norms,
        "after an overflow each rank would decide alone whether to skip the step: set "
        "zero_optimization.compute_grad_norm to true",
    ),
    "torch_autocast fp16 with ZeRO in this DeepSpeed": (
        lambda e: (
            e.engine is not None
            and e.stage > 0
            and e.autocast is torch.float16
            and deepspeed_versions.skips_by_rank(e.engine.optimizer)
        ),
        "each rank decides alone, for each parameter group, whether to skip a step, and ranks "
        "that do not skip would wait forever for one that does: use deepspeed 0.19.8, or bf16",
    ),
    "torch_autocast fp16 with a fused optimizer": (
        lambda e: (
            e.engine is not None
            and e.autocast is torch.float16
            and getattr(e.engine.basic_optimizer, "_step_supports_amp_scaling", False)
        ),
        "the fused optimizer divides gradients by the loss scale inside its kernel, and its step "
        "runs even after an overflow: set fused=False",
    ),
    "an optimizer that is given gradients": (
        lambda e: e.engine is not None and deepspeed_versions.gives_gradients(e.engine.optimizer),
        "with legacy fusion or unfused Lamb, DeepSpeed passes scaled 16-bit gradients as an "
        "argument to the optimizer's step, where K-FAC does not see them: remove "
        '"legacy_fusion", or use another optimizer',
    ),
    "fp16 at stage 0 in this DeepSpeed": (
        lambda e: e.engine is not None and deepspeed_versions.never_steps(e.engine.optimizer),
        "in deepspeed 0.17.6 and 0.18.0 FP16_Optimizer.step always returns before it has updated "
        "the parameters: use another version",
    ),
    "skipped steps at ZeRO stage 1 in this DeepSpeed": (
        lambda e: (
            e.engine is not None
            and e.engine.dp_world_size != 1
            and deepspeed_versions.looks_alone(e.engine.optimizer)
        ),
        "in deepspeed 0.17.6 each rank looks for overflow in its own gradients alone: if one rank "
        "skipped a step, the others would wait for it. Use another version, or ZeRO stage 2. In "
        "bf16 you can also set bf16.check_grad_overflow to false",
    ),
    "Adagrad of several parameter groups with ZeRO": (
        lambda e: (
            e.engine is not None
            and e.stage > 0
            and not e.bf16_optimizer  # BF16_Optimizer does not replace the optimizer
            and isinstance(e.engine.basic_optimizer, torch.optim.Adagrad)
            and len(e.engine.basic_optimizer.param_groups) > 1
        ),
        "DeepSpeed replaces the optimizer by an Adagrad with one parameter group, and its first "
        "step fails: use one parameter group, ZeRO stage 0 or another optimizer",
    ),
    "Muon": (
        lambda e: "muon" in e.optimizer.lower(),
        "it replaces gradients by its own updates before K-FAC sees them: choose Muon or K-FAC",
    ),
    '"use_node_local_storage" on several nodes': (
        lambda e: (
            e.engine is not None
            and e.engine.use_node_local_storage()
            and len(set(gathered(socket.gethostname()))) > 1
        ),
        "all ranks save their parts of K-FAC's state to one folder, which every rank must see: "
        'set "use_node_local_storage" to false and save to a shared file system',
    ),
    f"{SAMPLED} with a pipeline": (
        lambda e: e.sampled and e.pipeline,
        'the sampled loss needs a second backward pass through all stages: use "empirical"',
    ),
    f"{SAMPLED} at ZeRO stage 3": (
        lambda e: e.sampled and e.stage == 3,
        "the sampled loss needs a second backward pass, which would fetch weights in another "
        'order than DeepSpeed has recorded: use stage 0, 1 or 2, or "empirical"',
    ),
    f"{SAMPLED} with tensor parallelism": (
        lambda e: e.sampled and e.sharded,
        'each rank would sample different labels for the same example: use "empirical"',
    ),
    f"{SAMPLED} with a mixture of experts": (
        lambda e: e.sampled and e.experts,
        'this combination is not tested: use "empirical"',
    ),
    f"{STEP_MEAN} with a mixture of experts": (
        lambda e: e.config.factor.mean_over_step and e.experts,
        "the ranks of an expert do not know the number of loss terms on other ranks: use "
        '"micro_batch"',
    ),
    f"{REDUCED} with a mixture of experts": (
        lambda e: e.reduced and e.experts,
        'the tokens of a sequence go to several experts: use "expand"',
    ),
    f"{REDUCED} with sequence parallelism": (
        lambda e: e.reduced and e.sequence,
        '"reduce" needs the sum over a sequence, whose rows are on several ranks: use "expand"',
    ),
    "kfac.rescale_weights with tensor parallelism": (
        lambda e: e.config.rescale_weights and e.sharded,
        "each rank knows only the norm of its own shard: set rescale_weights to false",
    ),
    "KFACAdamW with pipeline stages of different numbers of parameter groups": (
        lambda e: (
            bool(e.own and e.pipeline and e.stage)
            and len(set(gathered(len(e.engine.optimizer.param_groups)))) > 1
        ),
        "ZeRO-1 computes one norm per group across stages and would deadlock: give every stage "
        "both K-FAC layers and other parameters, or give every stage only one of the two "
        "(kfac.layers.types)",
    ),
    "KFACAdamW with AutoTP": (
        lambda e: bool(e.own and e.engine is not None and e.engine.autotp_size() > 1),
        "KFACAdamW makes its parameter groups before AutoTP cuts the layers: use another "
        "optimizer, or build the layers as shards, as Megatron does",
    ),
}
"""dict from the name of a refused mode or combination to a pair (applies, remedy). The function
``applies`` returns whether a :class:`Context` has the mode or combination. The text ``remedy`` says
why K-FAC refuses it and what to change. :func:`ds_kfac.attach` and the estimator use this table.

Every rank checks the entries in this order, because some checks are collective if there is an
engine.
"""


def refused(context: Context) -> list[str]:
    """Return a line for each refusal that applies: what is refused, why, and what to change.
    Collective if there is an engine."""
    if not context.optimizer:  # other refusals need the optimizer
        return [f"{NO_OPTIMIZER}: {REFUSALS[NO_OPTIMIZER][1]}"]
    return [f"{name}: {remedy}" for name, (applies, remedy) in REFUSALS.items() if applies(context)]


def check_config(config: KFACConfig) -> None:
    """Raise ValueError on every rank if the ranks' "kfac" blocks differ. With different plans,
    ranks would wait for each other forever. Collective."""
    values = {block: getattr(config, block) for block in KFACConfig.model_fields}
    flat = {
        f"{block}.{key}" if isinstance(value, Block) else block: repr(getattr(value, key, value))
        for block, value in values.items()
        for key in (type(value).model_fields if isinstance(value, Block) else [block])
    }
    # ``report`` may differ: it only decides what a rank prints
    everyone = gathered({key: value for key, value in flat.items() if key != "report"})
    for key, value in everyone[0].items():
        rank = next((rank for rank, theirs in enumerate(everyone) if theirs[key] != value), None)
        if rank is not None:
            raise ValueError(
                f"ds_kfac: kfac.{key} is not the same on all ranks: {value} on rank 0, "
                f"{everyone[rank][key]} on rank {rank}. Give every rank the same config"
            )


def check_model(model: nn.Module, config: KFACConfig) -> None:
    """Raise ValueError if the module that ``kfac.factor.prediction`` names does not exist."""
    name = config.factor.prediction
    if (
        config.factor.fisher == "monte_carlo"
        and name is not None
        and name not in dict(model.named_modules())
    ):
        raise ValueError(f"kfac.factor.prediction: the model has no module {name!r}")
