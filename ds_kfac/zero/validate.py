"""Engine modes in which K-FAC would be wrong or silently off: refused at attach, with what to change."""

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DummyOptim
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from ds_kfac.zero.domains import tensor_shard


def _offload(engine: Any) -> Any:
    return getattr(engine._config.zero_config, "offload_optimizer", None)


def _inner(engine: Any) -> str:
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return type(optimizer).__name__


def _tensor_and_sequence(engine: Any) -> bool:
    return tensor_shard(engine)[1] > 1 and groups._get_sequence_parallel_world_size() > 1


REFUSALS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "no optimizer": (
        lambda engine: engine.optimizer is None or isinstance(engine.optimizer, DummyOptim),
        'K-FAC preconditions an optimizer\'s gradients: add an "optimizer" block, or pass optimizer=',
    ),
    "pipeline of another kind": (
        lambda engine: isinstance(engine, PipelineEngine) and type(engine) is not PipelineEngine,
        "only DeepSpeed's plain PipelineEngine is known: train with its default schedule",
    ),
    "pipeline with a model axis": (
        lambda engine: isinstance(engine, PipelineEngine) and engine.is_model_parallel,
        "pipelines of tensor-parallel stages are not supported: use a topology of pipe and data only",
    ),
    "mixture of experts at stage 3": (
        lambda engine: engine.has_moe_layers and engine.zero_optimization_partition_weights(),
        "DeepSpeed does not partition experts: use ZeRO stage 0, 1 or 2",
    ),
    "mixture of experts in BF16_Optimizer": (
        lambda engine: engine.has_moe_layers and isinstance(engine.optimizer, BF16_Optimizer),
        'it is not tested: leave "data_types": {"grad_accum_dtype": "fp32"} out',
    ),
    "mixture of experts with other model parallelism": (
        lambda engine: (
            engine.has_moe_layers
            and (
                tensor_shard(engine)[1] > 1
                or isinstance(engine, PipelineEngine)
                or groups._get_sequence_parallel_world_size() > 1
            )
        ),
        "experts are supported with data parallelism only: give the other dimensions a size of one",
    ),
    "AutoEP": (
        lambda engine: any("AutoEP" in type(module).__name__ for module in engine.module.modules()),
        "its experts' weights are grouped in tensors of three dimensions: use deepspeed.moe, or disable kfac",
    ),
    "tensor and sequence parallelism": (
        _tensor_and_sequence,
        "only one of them is supported: make one of the two groups a group of one rank",
    ),
    "sequence parallelism by mesh_param": (
        lambda engine: engine.mesh_device is not None,
        "DeepSpeed does not sum its gradients over the sequence group: pass mpu=deepspeed.runtime.sequence_parallel."
        "parallel_state_sp, or one like it, instead",
    ),
    "DeepCompile": (
        lambda engine: engine.is_deepcompile_enabled(),
        'it reduces gradients inside the compiled graph, past our hook: set "compile": {"deepcompile": false}',
    ),
    "ZenFlow": (
        lambda engine: bool(engine.zenflow),
        'it updates parameters outside the step: remove "zenflow" from zero_optimization',
    ),
    "SuperOffload": (
        lambda engine: bool(getattr(_offload(engine), "super_offload", False)),
        'it steps during backward: set "super_offload": false in offload_optimizer',
    ),
    "NVMe offload": (
        lambda engine: getattr(_offload(engine), "device", None) == "nvme",
        'gradients are swapped out when K-FAC needs them: set offload_optimizer.device to "cpu"',
    ),
    "compressed-communication optimizer": (
        # a pipeline reduces by an instruction of its own
        lambda engine: (
            not (
                engine.pipeline_enable_backward_allreduce
                if isinstance(engine, PipelineEngine)
                else engine.enable_backward_allreduce
            )
        ),
        "gradients are not averaged before the step: use an optimizer without built-in communication, such as AdamW",
    ),
    "torch_autocast fp16 without gradient norms": (
        lambda engine: (
            engine.zero_optimization()
            and getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None
            and not engine.zero_compute_grad_norm()
        ),
        "ranks would skip overflowed steps each for itself: set zero_optimization.compute_grad_norm to true",
    ),
    "Muon": (
        lambda engine: "muon" in _inner(engine).lower(),
        "it replaces gradients by its own updates before K-FAC sees them: choose Muon or K-FAC",
    ),
}


def validate(engine: Any) -> None:
    """Raise ValueError naming every refused mode of ``engine`` and what to change."""
    refused = []
    for mode, (applies, remedy) in REFUSALS.items():
        if applies(engine):
            refused.append(f"{mode}: {remedy}")
            if mode == "no optimizer":  # the others ask the optimizer
                break
    if refused:
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(refused))
