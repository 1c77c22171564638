"""Engine modes, and combinations of one with the config, in which K-FAC would be wrong or silently off: one table."""

import socket
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DummyOptim
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ds_kfac.comm.agreement import gathered
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.engine.asked import Configured, Engine, Refusal, block

SAMPLED = 'kfac.factor.fisher "monte_carlo"'
QUADRATIC = 'kfac.preconditioner.step "quadratic"'
REDUCED = 'kfac.factor.weight_sharing "reduce"'
RESCALED = "kfac.rescale_weights"
NO_OPTIMIZER = "no optimizer"


def without_optimizer(engine: Any) -> bool:
    """Whether an engine cannot train; at ZeRO-3 it has what gathers its parameters in an optimizer's place."""
    return engine.optimizer is None or isinstance(engine.optimizer, (DummyOptim, DeepSpeedZeRoOffload))


def plain_sgd(optimizer: Any) -> bool:
    """Whether it steps by rate times gradient."""
    plain = type(optimizer).__name__ == "SGD"
    return plain and not any(group.get("momentum") or group.get("weight_decay") for group in optimizer.param_groups)


REFUSALS: Mapping[str, Refusal] = {
    NO_OPTIMIZER: Refusal(
        lambda e: without_optimizer(e.engine),
        'K-FAC preconditions an optimizer\'s gradients: add an "optimizer" block, or pass optimizer=',
    ),
    "pipeline of another kind": Refusal(
        lambda e: e.pipeline and type(e.engine) is not PipelineEngine,
        "only DeepSpeed's plain PipelineEngine is known: train with its default schedule",
    ),
    "pipeline with a model axis": Refusal(
        lambda e: e.pipeline and e.engine.is_model_parallel,
        "pipelines of tensor-parallel stages are not supported: use a topology of pipe and data only",
    ),
    "mixture of experts at stage 3": Refusal(
        lambda e: e.experts and e.stage_3, "DeepSpeed does not partition experts: use ZeRO stage 0, 1 or 2"
    ),
    "mixture of experts in BF16_Optimizer": Refusal(
        lambda e: e.experts and isinstance(e.engine.optimizer, BF16_Optimizer),
        'it is not tested: leave "data_types": {"grad_accum_dtype": "fp32"} out',
    ),
    "mixture of experts with other model parallelism": Refusal(
        lambda e: e.experts and (e.sharded or e.pipeline or e.sequence),
        "experts are supported with data parallelism only: give the other dimensions a size of one",
    ),
    "AutoEP": Refusal(
        lambda e: any("AutoEP" in type(module).__name__ for module in e.engine.module.modules()),
        "its experts' weights are grouped in tensors of three dimensions: use deepspeed.moe, or disable kfac",
    ),
    "tensor and sequence parallelism": Refusal(
        lambda e: e.sharded and e.sequence,
        "only one of them is supported: make one of the two groups a group of one rank",
    ),
    "sequence parallelism by mesh_param": Refusal(
        lambda e: e.engine.mesh_device is not None,
        "DeepSpeed does not sum its gradients over the sequence group: pass mpu=deepspeed.runtime.sequence_parallel."
        "parallel_state_sp, or one like it, instead",
    ),
    "DeepCompile": Refusal(
        lambda e: e.engine.is_deepcompile_enabled(),
        'it reduces gradients inside the compiled graph, past our hook: set "compile": {"deepcompile": false}',
        lambda c: bool(block(c.ds_config, "compile").get("deepcompile")),
    ),
    "ZenFlow": Refusal(
        lambda e: bool(e.engine.zenflow),
        'it updates parameters outside the step: remove "zenflow" from zero_optimization',
        lambda c: bool(c.zero.get("zenflow")),
    ),
    "SuperOffload": Refusal(
        lambda e: bool(getattr(e.offload, "super_offload", False)),
        'it steps during backward: set "super_offload": false in offload_optimizer',
        lambda c: bool(c.offload.get("super_offload")),
    ),
    "NVMe offload": Refusal(
        lambda e: getattr(e.offload, "device", None) == "nvme",
        'gradients are swapped out when K-FAC needs them: set offload_optimizer.device to "cpu"',
        lambda c: c.offload.get("device") == "nvme",
    ),
    "compressed-communication optimizer": Refusal(
        # a pipeline reduces by an instruction of its own
        lambda e: (
            not (e.engine.pipeline_enable_backward_allreduce if e.pipeline else e.engine.enable_backward_allreduce)
        ),
        "gradients are not averaged before the step: use an optimizer without built-in communication, such as AdamW",
        lambda c: c.optimizer in ("onebitadam", "onebitlamb", "zerooneadam"),
    ),
    "torch_autocast fp16 without gradient norms": Refusal(
        lambda e: (
            e.engine.zero_optimization()
            and getattr(e.engine.optimizer, "torch_autocast_gradscaler", None) is not None
            and not e.engine.zero_compute_grad_norm()
        ),
        "each rank would skip overflowed steps on its own: set zero_optimization.compute_grad_norm to true",
    ),
    "Muon": Refusal(
        lambda e: "muon" in e.inner.lower(),
        "it replaces gradients by its own updates before K-FAC sees them: choose Muon or K-FAC",
        lambda c: c.optimizer == "muon",
    ),
    '"use_node_local_storage" on several nodes': Refusal(
        lambda e: e.engine.use_node_local_storage() and len(set(gathered(socket.gethostname()))) > 1,
        "K-FAC's state is spread over all ranks and is saved to one folder that all of them see: set it to false and "
        "save to a shared file system",
    ),
    f"{SAMPLED} with a pipeline": Refusal(
        lambda e: e.sampled and e.pipeline,
        'the sampled loss needs a second backward through all stages: use "empirical"',
    ),
    f"{SAMPLED} at ZeRO stage 3": Refusal(
        lambda e: e.sampled and e.stage_3,
        "its second backward would fetch weights out of the order that DeepSpeed has recorded: use stage 0, 1 or 2, "
        'or "empirical"',
        lambda c: c.stage == 3 and c.config.factor.fisher == "monte_carlo",
    ),
    f"{SAMPLED} with tensor parallelism": Refusal(
        lambda e: e.sampled and e.sharded,
        'each rank would sample different labels for the same example: use "empirical"',
    ),
    f"{SAMPLED} with a mixture of experts": Refusal(
        lambda e: e.sampled and e.experts, 'it is not tested: use "empirical"'
    ),
    f"{QUADRATIC} with model parallelism": Refusal(
        lambda e: e.quadratic and (e.pipeline or e.sharded or e.experts or e.sequence),
        'its forwards would have to run in step over other ranks: use "fixed"',
    ),
    f"{QUADRATIC} in 16 bits": Refusal(
        lambda e: (
            (e.quadratic and any(dtype != torch.float32 for dtype in e.engine.get_data_types()[:1]))
            or (e.quadratic and e.engine.torch_autocast_enabled())
        ),
        "the difference of two predictions is lost in their rounding: train in fp32",
    ),
    f"{QUADRATIC} with another optimizer than plain SGD": Refusal(
        lambda e: e.quadratic and not plain_sgd(e.engine.basic_optimizer),
        'the model gives rate and momentum: use {"type": "SGD", "params": {"lr": 1}}, no momentum, no weight decay',
    ),
    f"{QUADRATIC} with gradient_clipping": Refusal(
        lambda e: bool(e.quadratic and e.engine.gradient_clipping()),
        'the model gives the size of the step: set "gradient_clipping": 0 (DeepSpeed\'s default is 1)',
    ),
    f"{REDUCED} with a mixture of experts": Refusal(
        lambda e: e.reduced and e.experts, 'the tokens of a sequence go to several experts: use "expand"'
    ),
    f"{REDUCED} with sequence parallelism": Refusal(
        lambda e: e.reduced and e.sequence,
        'the rows of a sequence lie on several ranks, and their sum is needed: use "expand"',
    ),
    f"{RESCALED} in BF16_Optimizer": Refusal(
        lambda e: e.rescaled and isinstance(e.engine.optimizer, BF16_Optimizer),
        'its masters are cut otherwise: leave "data_types": {"grad_accum_dtype": "fp32"} out',
    ),
    f"{RESCALED} with tensor parallelism": Refusal(
        lambda e: e.rescaled and e.sharded, "each rank knows the norm of its own shard only: set it to false"
    ),
    "KFACAdamW with gradient_clipping and model parallelism": Refusal(
        lambda e: bool(e.own and (e.pipeline or e.sharded or e.experts) and e.engine.gradient_clipping()),
        "its moments are those of clipped gradients, and the norm over all ranks is not known before the step: set "
        '"gradient_clipping": 0',
    ),
    "KFACAdamW with pipeline stages of different numbers of parameter groups": Refusal(
        lambda e: (
            bool(e.own and e.pipeline and e.engine.zero_optimization())
            and len(set(gathered(len(e.engine.optimizer.param_groups)))) > 1
        ),
        "ZeRO-1 computes one norm per group across stages, so it would deadlock: give every stage both K-FAC and other "
        "parameters, or only one kind (kfac.layers.types)",
    ),
    "KFACAdamW with AutoTP": Refusal(
        lambda e: bool(e.own) and e.engine.autotp_size() > 1,
        "its parameter groups are made before AutoTP cuts the layers: use another optimizer, or layers that are made "
        "as shards (Megatron's)",
    ),
}
"""Mode or combination -> when it applies, and what to change. Read by attach and by the estimator."""


def check(engine: Any, config: KFACConfig, own: str | None) -> None:
    """Collective.

    Args:
        own: see :class:`Engine`.

    Raises:
        ValueError: names everything that is refused, and what to change.
    """
    asked, refused = Engine(engine, config, own), []
    for name, refusal in REFUSALS.items():
        if refusal.applies(asked):
            refused.append(f"{name}: {refusal.remedy}")
            if name == NO_OPTIMIZER:  # the others ask the optimizer
                break
    if refused:
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(refused))


def configured(asked: Configured) -> list[str]:
    """What would be refused of the engine that a DeepSpeed config makes, as far as it says."""
    return [
        f"{name}: {refusal.remedy}"
        for name, refusal in REFUSALS.items()
        if refusal.configured is not None and refusal.configured(asked)
    ]
