"""What an attach report warns of: keys without effect, modes that cannot know all they need, faults, memory."""

from collections.abc import Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.model.layers.base import LayerSpec
from ds_kfac.step.preconditioner import KFACPreconditioner

SHARE = 0.1
"""Of a device's free memory: K-FAC that needs more is worth a line."""


def attach_warnings(kfac: KFACPreconditioner, given: KFACConfig) -> list[str]:
    """Lines of the report."""
    engine = kfac.layout.engine
    faults = [*kfac.layout.faults, *_of_batch_norms(kfac)]
    if engine.torch_autocast_enabled() and kfac.layout.grad_scaler:
        faults.append("torch_autocast fp16 skips overflowed steps without notice; ds_kfac watches its scale")
    idle = without_effect(kfac.rule, given, kfac.layers, type(kfac.target.inner).__name__)
    return [
        *(f"  WARNING: {text}" for text in (*idle, *_of_stages(kfac), *_of_zero_norms(kfac), *_of_memory(kfac))),
        *(f"  known fault of this mode in DeepSpeed: {fault}" for fault in faults),
    ]


def without_effect(rule: UpdateRule, config: KFACConfig, layers: Sequence[LayerSpec], optimizer: str) -> list[str]:
    """Keys that were given but belong to another update rule, or touch no layer.

    Args:
        config: as given.
        optimizer: whose rule it is.
    """
    others = {block for other in DIRECTIONS for block in other.blocks} - set(rule.blocks)
    given = [(b, key) for b in sorted(others) for key in sorted(getattr(config, b).model_fields_set)]
    keys = [f"kfac.{b}.{key}" for b, key in given if key not in ("precision", "method")]
    keys += rule.idle(config, layers)
    return [f"without effect with {rule.optimizer_type or optimizer}: {', '.join(keys)}"] if keys else []


def _of_stages(kfac: KFACPreconditioner) -> list[str]:
    """What a pipeline's stages do not know of the loss, where G's scale counts."""
    engine = kfac.layout.engine
    if not isinstance(engine, PipelineEngine) or engine.num_stages == 1 or "damping" not in kfac.rule.blocks:
        return []
    return [
        "a pipeline stage takes the loss for a mean over all positions of its output; if the loss has fewer "
        "terms (a pooled head, ignored labels), set engine.kfac.read_batch to return their number "
        "(docs/model_parallelism.md), else G is too large"
    ]


def _of_zero_norms(kfac: KFACPreconditioner) -> list[str]:
    """Norms that begin at zero, with a damping that knows no absolute size."""
    if "damping" not in kfac.rule.blocks or kfac.config.damping.kind != "relative":
        return []
    norms: list[Any] = [
        (name, module.weight)
        for name, module in kfac.layout.engine.module.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) and module.weight is not None
    ]
    # at ZeRO-3 a weight may not be there
    names = [name for name, weight in norms if weight.numel() and not weight.detach().any()]
    if not names:
        return []
    return [
        f"{len(names)} norms begin with a weight of zero ({names[0]}, ..): the layers below get hardly any "
        "gradient at first, and relative damping makes full steps of it. If training stands still use "
        'kfac.damping {"kind": "tikhonov"}, KFACAdamW, or let them begin at one (docs/tuning.md)'
    ]


def _of_batch_norms(kfac: KFACPreconditioner) -> list[str]:
    """What happens to running statistics, which are buffers."""
    every: list[Any] = [
        m for m in kfac.layout.engine.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    kinds = [m for m in every if m.running_mean is not None]
    faults = []
    if kfac.layout.world > 1 and any(not isinstance(m, nn.SyncBatchNorm) for m in kinds):
        faults.append(
            "BatchNorm's running statistics stay each rank's own, and a checkpoint has those of rank 0; average them "
            "before evaluation and saving (examples/job.py does)"
        )
    if kfac.device.type == "cpu" and any(
        m.weight is not None and m.weight.dtype != m.running_mean.dtype for m in kinds
    ):
        faults.append(
            'BatchNorm does not run on a CPU with 16-bit weights and fp32 statistics; set "data_types": '
            '{"buffer_dtype": ...} to the weights\' dtype'
        )
    return faults


def _of_memory(kfac: KFACPreconditioner) -> list[str]:
    """Of this rank, against what its device has left."""
    plan, reducer = kfac.plan, kfac.curvature.reducer
    slots = reducer.layout.slots(frozenset(kfac.curvature.specs), 0)
    sums = sum(4 * slot.numel for slot in slots if kfac.rank in {slot.owner, *slot.contributors})
    state, free = int(plan.assignment.memory[kfac.rank]), get_accelerator().available_memory()
    if state + sums <= SHARE * free:
        return []
    return [
        f"K-FAC needs {state / 1e9:.1f} GB on this rank and {sums / 1e9:.1f} GB more in a step that updates all "
        f"factors, {(state + sums) / free:.0%} of the {free / 1e9:.1f} GB that are free: see kfac.factor.dense_max and "
        "max_dim, kfac.layers.exclude, kfac.offload, or assignment.memory_budget_gb at ZeRO stage 0"
    ]
