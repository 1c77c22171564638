"""Access to DeepSpeed's private attributes, and to attributes that some supported versions lack.

Each such attribute is read by a single function of this file, and by no other code. The function's
docstring says since which version the attribute exists, and what older versions have instead.
"Since 0.18.9" means that 0.18.9 is the first version in :data:`TESTED` that has the attribute. "All
versions" means that all versions in :data:`TESTED` have it. When K-FAC is attached, the self-test
checks where the installed version keeps gradients.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from deepspeed.utils import groups
from packaging.version import Version
from torch import Tensor

from ds_kfac.zero.shards import gapless_starts

OLDEST = "0.17"
"""Oldest version with which K-FAC can be attached. Older versions reduce gradients differently and
are not tested."""
TESTED = ("0.17.0", "0.17.6", "0.18.0", "0.18.9", "0.19.0", "0.19.4", "0.19.8")
"""Versions that ``make versions`` tests, oldest first."""


def check() -> None:
    """Raise ImportError if the installed DeepSpeed is too old. The message says what to install."""
    if Version(deepspeed.__version__).release < Version(OLDEST).release:
        raise ImportError(
            f"ds_kfac: deepspeed {deepspeed.__version__} is older than {OLDEST}, the oldest "
            f"version that ds_kfac works with: pip install 'deepspeed>={OLDEST}' ({TESTED[-1]} is "
            "the newest tested version)"
        )


def untested() -> str | None:
    """Return a line for the attach report if the installed DeepSpeed is newer than all tested
    versions, else None."""
    if Version(deepspeed.__version__).release <= Version(TESTED[-1]).release:
        return None
    return (
        f"deepspeed {deepspeed.__version__} is newer than the tested {TESTED[-1]}; the self-test "
        "at attach passed"
    )


# temporary replacement of attributes

ABSENT = object()
"""Placeholder for the value of an attribute that the instance itself does not have."""


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an instance or a module to ``value`` inside the ``with`` block."""
    before = vars(holder).get(name, ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        restore(holder, name, before)


def restore(holder: Any, name: str, before: Any) -> None:
    """Set an instance's attribute to ``before``. If ``before`` is :data:`ABSENT`, delete the
    instance's attribute, so that the attribute of its class is visible again."""
    if before is ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, before)


def wrap_attribute(
    holder: Any, name: str, wrapper: Callable[..., Any], is_active: Callable[[], bool]
) -> Callable[[], None]:
    """Replace a method of an instance by ``wrapper(original, *arguments, **keywords)``. Return a
    function that removes the wrapper.

    If other code has wrapped our wrapper in the meantime, our wrapper cannot be removed. It then
    stays, but calls only the original method while ``is_active`` returns False.
    """
    original = getattr(holder, name)

    @wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if not is_active():
            return original(*arguments, **keywords)
        return wrapper(original, *arguments, **keywords)

    return put_attribute(holder, name, wrapped)


def put_attribute(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an instance. Return a function that restores the old value. The function
    does nothing if other code has set the attribute in the meantime."""
    before = vars(holder).get(name, ABSENT)
    setattr(holder, name, value)

    def remove() -> None:
        if vars(holder).get(name) is value:
            restore(holder, name, before)

    return remove


# faults that some versions have, for the attach report


def offload_faults(micro_batches: int) -> tuple[str, ...]:
    """Return descriptions of the faults of ZeRO-1/2 with offload. 0.19.0 has fixed these faults."""
    if micro_batches < 3 or Version(deepspeed.__version__).release >= (0, 19):
        return ()
    return (
        "before 0.19, with offload, it uses only the first and the last micro-batch of a step: use "
        "deepspeed 0.19, or at most 2 micro-batches a step",
    )


def accumulation_faults(optimizer: Any, micro_batches: int) -> tuple[str, ...]:
    """Return descriptions of the faults of ZeRO-2 without offload. 0.17.6 and 0.18.0 have such a
    fault, 0.17.0 and 0.18.9 do not. The function inspects DeepSpeed's source, so it works for all
    versions."""
    code = inspect.getsource(type(optimizer).independent_gradient_partition_epilogue)
    mended = "all_grad_tensors[i] =" not in code or "in self.all_grad_tensors" in code
    if micro_batches < 2 or mended or not optimizer.partition_gradients:
        return ()
    return (
        "this DeepSpeed forgets all micro-batches of a step but the last: use 0.18.9 or later, or "
        "1 micro-batch a step",
    )


def reduction_faults(optimizer: Any) -> tuple[str, ...]:
    """Return descriptions of faults that keep ZeRO-1/2 from averaging gradients over ranks.
    Versions up to 0.19.4 have such faults, 0.19.8 does not. The function inspects DeepSpeed's
    source."""
    cls = type(optimizer)
    if optimizer.use_grad_accum_attribute and "grad_accum.to(" in inspect.getsource(
        cls.get_gradient_for_reduction
    ):
        return (
            "if gradients are accumulated in another dtype than the model's, ZeRO-1 of this "
            "DeepSpeed averages only a copy of them, so each rank trains on its own: use deepspeed "
            "0.19.8, or remove data_types.grad_accum_dtype",
        )
    drops = "device_name()" in inspect.getsource(stage_1_and_2.split_half_float_double)
    if drops and not optimizer.contiguous_gradients and get_accelerator().device_name() == "cpu":
        return (
            "on CPUs this DeepSpeed does not average gradients if contiguous_gradients is false: "
            "use deepspeed 0.19.8, or set contiguous_gradients to true",
        )
    return ()


def bf16_optimizer_faults() -> tuple[str, ...]:
    """Return descriptions of the faults of BF16_Optimizer. 0.18.9 has such a fault, 0.18.0 and
    0.19.0 do not."""
    if not (0, 18, 0) < Version(deepspeed.__version__).release < (0, 19):
        return ()
    return (
        "before 0.19 it adds a step's last micro-batch only after it has averaged gradients, so "
        "each rank trains on its own: use deepspeed 0.19",
    )


def pipeline_faults(micro_batches: int) -> tuple[str, ...]:
    """Return descriptions of the faults of pipelines. Up to 0.18.0, no stage divides gradients by
    the number of micro-batches. In 0.18.9 and 0.19.0, all stages but the last divide gradients by
    this number twice."""
    if micro_batches < 2 or Version(deepspeed.__version__).release >= (0, 19, 4):
        return ()
    return (
        "before 0.19.4 pipeline stages sum gradients over the micro-batches of a step instead of "
        "averaging them, or divide the sum twice: use deepspeed 0.19.4, or 1 micro-batch a step",
    )


def gather_faults(backend: str) -> tuple[str, ...]:
    """Return descriptions of the faults of ZeRO-3 with gloo. Gloo may finish gathers in any order.
    0.19.4 has such a fault, 0.19.8 does not. The function inspects DeepSpeed's source."""
    code = inspect.getsource(partition_parameters.Init._allgather_params_coalesced)
    if backend != "gloo" or "launch_handles[-1].wait()" not in code:
        return ()
    return (
        "with gloo this DeepSpeed may compute with parameters that are not gathered yet, because "
        "it waits only for the last of several gathers: use deepspeed 0.19.8, or NCCL",
    )


# engines


INSTRUCTIONS = "_INSTRUCTION_MAP"
"""Name of the attribute that holds a pipeline engine's table of instructions. All versions."""


def manual_backward(engine: Any) -> bool:
    """Return whether the user has called ``engine.scale`` on the loss of the next backward pass.
    Since 0.18.9."""
    return getattr(engine, "_manual_backward_expected", False)


def caller_sets_boundaries(engine: Any) -> bool:
    """Return whether the caller, not the engine, decides which backward pass is the last of a step.
    ``managed_gradient_accumulation`` exists since 0.19.4."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return not managed or engine._is_gradient_accumulation_boundary is not None


def computes_norms(engine: Any) -> bool:
    """Return whether ZeRO computes gradient norms. Since 0.19.8 the config's
    ``zero_optimization.compute_grad_norm`` decides this. Older versions always compute norms."""
    return getattr(engine, "zero_compute_grad_norm", lambda: True)()


def sent_in(parameter: Any) -> torch.dtype:
    """Return the dtype in which a parameter's gradient is sent between ranks. With torch_autocast,
    which exists since 0.17.6, this dtype may differ from the parameter's."""
    module = sys.modules.get("deepspeed.runtime.torch_autocast")
    return parameter.dtype if module is None else module.get_comm_dtype(parameter)


def reduced_in(engine: Any) -> set[torch.dtype]:
    """Return the dtypes in which gradients may be summed over ranks: the config's
    ``communication_data_type``, and the dtype of the ZeRO optimizer. The ZeRO optimizer has the
    dtype of the first parameter that it was given. (ZeRO-1 and 2 give all parameters the same
    dtype.)"""
    dtypes = (
        getattr(engine, "communication_data_type", None),
        getattr(engine.optimizer, "dtype", None),
    )
    return {dtype for dtype in dtypes if isinstance(dtype, torch.dtype)}


def autocast(engine: Any) -> torch.dtype | None:
    """Return the dtype of torch_autocast, or None if it is off. Since 0.17.6."""
    enabled = getattr(engine, "torch_autocast_enabled", lambda: False)()
    return engine.torch_autocast_dtype() if enabled else None


def zenflow(engine: Any) -> bool:
    """Return whether ZenFlow is on. Since 0.17.6."""
    return bool(getattr(engine, "zenflow", False))


def offload(engine: Any) -> Any:
    """Return ``zero_optimization.offload_optimizer``, or None without offload. All versions."""
    return getattr(engine._config.zero_config, "offload_optimizer", None)


def writes_in_background(engine: Any) -> bool:
    """Return whether DeepSpeed writes checkpoints in the background, after ``save_checkpoint`` has
    returned. Since 0.17.6."""
    return getattr(engine.checkpoint_engine, "is_decoupled", lambda: False)()


def grad_scaler(engine: Any) -> Any:
    """Return the GradScaler that torch_autocast uses in fp16, or None. ZeRO has a GradScaler since
    0.17.6, the engine at stage 0 since 0.18.0."""
    optimizer = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return optimizer or getattr(engine, "torch_autocast_z0_gradscaler", None)


# groups of ranks; all versions


def expert_parallel_rank(mixture: str) -> int:
    return groups._get_expert_parallel_rank(mixture)


def expert_data_parallel_group(mixture: str) -> Any:
    return groups._get_expert_data_parallel_group(mixture)


def sequence_parallel_size() -> int:
    return groups._get_sequence_parallel_world_size()


# optimizers in 16 bits at stage 0


def loss_scale(optimizer: Any) -> float:
    """Return the loss scale of an FP16_Optimizer or FP16_UnfusedOptimizer. It is an attribute of
    ``loss_scale_config`` since 0.18.9, and of the optimizer before."""
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)


def multiplies_loss(optimizer: Any) -> bool:
    """Return whether an FP16_Optimizer or FP16_UnfusedOptimizer multiplies the loss by its loss
    scale. Only versions before 0.18.9 do so."""
    return not hasattr(optimizer, "loss_scale_config")


def lacks_loss_scale(optimizer: Any) -> bool:
    """Return whether an FP16_Optimizer or FP16_UnfusedOptimizer divides gradients by a loss scale
    although the loss was not multiplied by it (deepspeed PR 8393)."""
    return not multiplies_loss(optimizer) and bool(optimizer.loss_scale_config.use_grad_scaling)


# an outer optimizer's step

UNSCALE = "unscale_and_clip_grads"
"""Name of the method with which ZeRO and the 16-bit optimizers divide gradients by the loss scale
and clip them, in place. DeepSpeed calls the method once for each parameter group, before the inner
optimizer steps. All versions."""


class _Probe:
    """Stand-in for DeepSpeed's optimizer. Its only gradient has a single element, 1."""

    def __init__(self, optimizer: Any) -> None:
        held = SimpleNamespace(
            grad=torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
        )
        self.optimizer = optimizer
        self.gradient = held.grad
        self.fp32_partitioned_groups_flat = [held]  # of ZeRO-3
        self.fp32_groups = [[held]]  # of FP16_UnfusedOptimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def unscaling(optimizer: Any, *arguments: Any) -> Tensor | None:
    """Return the factor by which the method :data:`UNSCALE` multiplies gradients if it is called
    with these arguments. The factor is a scalar tensor on the device, or None if the method does
    not change gradients.

    The factor is measured by calling the method with a gradient of 1. The first argument is a list
    of gradients (stages 1 and 2, FP16_Optimizer) or the index of a sub-group (stage 3). The last
    argument is always the norm.
    """
    scale = getattr(optimizer, "loss_scale_config", None)
    scale = optimizer.loss_scale if scale is None else scale.cur_scale
    if not optimizer.clip_grad and scale == 1.0:
        return None
    probe = _Probe(optimizer)
    *first, norm = arguments
    first = [[probe.gradient] if isinstance(x, list) else 0 for x in first]
    getattr(type(optimizer), UNSCALE)(probe, *first, norm)
    return probe.gradient.reshape(())


def bf16_clipping(optimizer: Any) -> Tensor | None:
    """Return the factor by which BF16_Optimizer has multiplied gradients in this step. Return None
    if it does not clip, or if ``optimizer`` is of another class. All versions."""
    if not isinstance(optimizer, BF16_Optimizer) or not optimizer.clip_grad:
        return None
    device = get_accelerator().current_device_name()
    norm = torch.as_tensor(optimizer._global_grad_norm, dtype=torch.float32, device=device)
    return (optimizer.clip_grad / (norm + 1e-6)).clamp(max=1.0)


def skips_by_rank(optimizer: Any) -> bool:
    """Return whether ZeRO lets a GradScaler decide whether a step is skipped. The GradScaler then
    decides for each rank and each parameter group separately. Versions before 0.19.8 do this.

    The function inspects the source of the whole class, because stage 3 wraps its ``step``.
    """
    return "is_invalid_grad_norm" not in inspect.getsource(type(optimizer))


def gives_gradients(optimizer: Any) -> bool:
    """Return whether a 16-bit optimizer calls the inner optimizer as ``step(grads=...,
    scale=...)``. All versions."""
    return bool(
        getattr(optimizer, "fused_adam_legacy", False)
        or getattr(optimizer, "fused_lamb_legacy", False)
    )


def never_steps(optimizer: Any) -> bool:
    """Return whether FP16_Optimizer in fp16 always returns before the inner optimizer's step.
    0.17.6 and 0.18.0 do so, 0.17.0 and 0.18.9 do not.

    The function inspects DeepSpeed's source. In faulty versions the ``return`` is outside of the
    branch for an overflow.
    """
    if (
        not isinstance(optimizer, FP16_Optimizer)
        or optimizer.fp16_groups[0][0].dtype is not torch.float16
    ):
        return False
    code = inspect.getsource(FP16_Optimizer.step)
    found = re.search(r"^( *)if self\.overflow:\n.*?^( *)return\b", code, re.MULTILINE | re.DOTALL)
    return found is not None and len(found[2]) <= len(found[1])


def looks_alone(optimizer: Any) -> bool:
    """Return whether each rank of ZeRO-1 looks only at the gradients of its own slice to decide
    whether to skip a step. 0.17.6 does so, 0.17.0 and 0.18.0 do not. The function inspects
    DeepSpeed's source."""
    if getattr(optimizer, "partition_gradients", True) or not getattr(
        optimizer, "check_grad_overflow", False
    ):
        return False  # not ZeRO-1, or no rank looks at gradients
    is_told = "check_overflow(partition_gradients=" in inspect.getsource(type(optimizer).step)
    return is_told and "if partition_gradients:" in inspect.getsource(type(optimizer).has_overflow)


def backup_optimizer(optimizer: Any) -> Any | None:
    """Return ZeRO-3's second inner optimizer, or None. ZeRO-3 has one if its first sub-groups are
    not offloaded. All versions."""
    return getattr(optimizer, "backup_optimizer", None)


@contextmanager
def unchanged(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed's optimizer take a step with artificial gradients inside the ``with`` block,
    and undo the effects of the step afterwards.

    Afterwards the optimizer's attributes and lists are what they were before. During the step,
    parameters are not linked to optimizer states, because no states exist yet. Parameters that
    ZeRO-3 gathers in the step are released again. If a parameter stayed gathered, DeepSpeed would
    not notice that a module uses a parameter of another module.
    """
    link = "_lazy_init_hp_params_optimizer_state"
    scaler = "torch_autocast_gradscaler"
    holders = [
        optimizer,
        getattr(optimizer, "loss_scaler", None),
        getattr(optimizer, "loss_scale_config", None),
    ]
    attributes = [(vars(holder), dict(vars(holder))) for holder in holders if holder is not None]
    lists = [(x, list(x)) for _, values in attributes for x in values.values() if type(x) is list]
    released = [
        param for param in getattr(optimizer, "persistent_parameters", ()) if not is_gathered(param)
    ]

    def put_back() -> None:
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for each, elements in lists:
            each[:] = elements
        gathered = [param for param in released if is_gathered(param)]
        if gathered:
            gathered[0].partition(gathered)

    with ExitStack() as stack:
        stack.callback(put_back)
        # a GradScaler has no scale before its first loss
        for name, stand_in in ((link, lambda: None), (scaler, None)):
            if getattr(optimizer, name, None) is not None:
                stack.enter_context(replaced(optimizer, name, stand_in))
        yield


def is_gathered(parameter: Any) -> bool:
    """Return whether a parameter of ZeRO-3 is gathered, so that the whole parameter is in memory.
    All versions."""
    return parameter.ds_status is partition_parameters.ZeroParamStatus.AVAILABLE


# ZeRO

COMPACT = "_use_compact_grad_partition_buffer"


def master_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype that masters (the tensors that the inner optimizer updates) and their
    gradients have with offload. Before 0.18.9 it is always fp32."""
    return getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)


def gradient_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype of gradients without offload. This is ``data_types.grad_accum_dtype``,
    except at stage 2 before 0.19.8, where it is the parameters' dtype."""
    halves = (
        getattr(optimizer, "partition_gradients", False) and optimizer.dtype is not torch.float32
    )
    if (
        halves
        and hasattr(optimizer, "use_grad_accum_attribute")
        and not hasattr(optimizer, COMPACT)
    ):
        return optimizer.dtype
    return optimizer.gradient_accumulation_dtype


def is_aligned(optimizer: Any) -> bool:
    """Return whether ZeRO-1/2 aligns parameters in its flat buffers. Since 0.19.8
    ``zero_optimization.parameter_alignment`` decides this. Older versions never align them."""
    return getattr(optimizer, "parameter_alignment", False)


def applies_nonfinite(optimizer: Any) -> bool:
    """Return whether ZeRO-1/2 applies bf16 gradients that are not finite. It does so unless
    ``check_grad_overflow`` is set. That option exists since 0.17.6."""
    return optimizer.dtype == torch.bfloat16 and not getattr(
        optimizer, "check_grad_overflow", False
    )


def offsets(optimizer: Any, group: int) -> Sequence[int]:
    """Return the offset of each parameter of ``round_robin_bit16_groups[group]`` in ZeRO-1/2's flat
    buffer, in elements. DeepSpeed stores these offsets since 0.19.8, because that version can align
    parameters. In older versions the parameters follow each other without gaps."""
    stored = getattr(optimizer, "round_robin_bit16_offsets", None)
    if stored is not None:
        return stored[group]
    return gapless_starts(optimizer.round_robin_bit16_groups[group])


def wait_for_offload(optimizer: Any) -> None:
    """Wait for the gradients that ZeRO-1/2 copies to the host in the background. This is needed
    since 0.19.8. In older versions DeepSpeed's step itself waits."""
    getattr(optimizer, "_wait_for_offload_copies", lambda: None)()


def has_dynamic_scale(optimizer: Any) -> bool:
    """Return whether ZeRO's loss scale is dynamic. A dynamic scale grows before gradients are
    divided by it. All versions."""
    return bool(optimizer.dynamic_loss_scale)


def states_are_linked(optimizer: Any) -> bool:
    """Return whether ZeRO-1/2 has linked parameters to their optimizer states. It does so in its
    first step. All versions."""
    return optimizer._hp_optimizer_states_linked


def link_states(optimizer: Any) -> bool:
    """Link ZeRO-1/2's parameters to their optimizer states again, if DeepSpeed has already linked
    them. Return whether DeepSpeed had linked them. All versions."""
    if not optimizer._hp_optimizer_states_linked:
        return False
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
    return True


def compact_buffer(optimizer: Any, group: int) -> Any:
    """Return an empty buffer of the kind in which ZeRO-1/2 accumulates a group's gradients since
    0.19.8. Return None if ZeRO-1/2 accumulates gradients in a list of tensors instead."""
    if not getattr(optimizer, COMPACT, lambda group: False)(group):
        return None
    return optimizer._build_compact_grad_partition_buffer(group)


def flat_partition(optimizer: Any, group: int, gradients: list[Tensor]) -> list[Tensor]:
    """Return the list in which ZeRO-1/2 keeps the gradients of this rank's slice of a parameter
    group.

    Args:
        gradients: whole gradients of the parameters in ``params_in_partition[group]``. DeepSpeed
            cuts this rank's slice from them. It reads the gradients from ``all_grad_tensors`` since
            0.17.6, and from the parameters before.
    """
    params = optimizer.params_in_partition[group]
    named = {}
    kept = getattr(optimizer, "all_grad_tensors", None)
    if kept is not None:
        kept[group] = gradients
        named = {"param_group_idx": group}
    else:
        for param, gradient in zip(params, gradients, strict=True):
            setattr(param, "grad_accum" if optimizer.use_grad_accum_attribute else "grad", gradient)
    slices = optimizer.get_flat_partition(
        params,
        optimizer.first_offset[group],
        optimizer.partition_size[group],
        return_tensor_list=True,
        dtype=optimizer.gradient_accumulation_dtype,
        device=optimizer.device,
        **named,
    )
    if kept is None:
        optimizer.free_grad_in_param_list(params)
    return slices


def forget_gradients(optimizer: Any) -> None:
    """Drop the gradients that ZeRO-1/2 keeps outside of ``averaged_gradients`` (see
    :func:`flat_partition`), and reset its count of backward passes. The reset is needed with
    offload, because otherwise DeepSpeed would add the next gradients to the dropped gradients."""
    for name in ("all_grad_tensors", "_offload_accumulated_param_ids"):
        getattr(optimizer, name, set()).clear()
    optimizer.micro_step_id = -1


def accumulated(optimizer: Any) -> list[Any]:
    """Return a list of the gradients that ZeRO-1/2 keeps until the next step. Each entry holds the
    gradients of one parameter group, and is None if the group has none."""
    return [
        *optimizer.averaged_gradients.values(),
        *getattr(optimizer, "all_grad_tensors", {}).values(),
    ]


def accumulated_on_host(optimizer: Any) -> bool:
    """Return whether ZeRO-1/2 with offload keeps gradients that no step has applied yet.

    If it does, ``_offload_accumulated_param_ids`` is not empty (since 0.19.8), or ``micro_step_id``
    is at least 0 (older versions). ``micro_step_id`` counts backward passes since the last step,
    starting from -1.
    """
    reduced = getattr(optimizer, "_offload_accumulated_param_ids", None)
    return optimizer.micro_step_id >= 0 if reduced is None else bool(reduced)


def accumulated_at_stage_3(optimizer: Any) -> bool:
    """Return whether ZeRO-3 keeps gradients that no step has applied yet.

    ``micro_step_id`` counts backward passes since the last step, starting from 0. Since 0.18.9 the
    counter increases only in the next forward pass, and a flag is set as soon as the last backward
    pass of a step has run.
    """
    return optimizer.micro_step_id > 0 or getattr(optimizer, "_epilogue_ran_this_backward", False)


# universal checkpoints


def with_global_state(optimizer: Any, new: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside the ``with`` block, replace entries of the optimizer-wide state that ZeRO-1, ZeRO-2
    and BF16_Optimizer load from a universal checkpoint."""
    if not hasattr(optimizer, "_load_global_state"):
        return nullcontext()
    original = optimizer._load_global_state

    def load(saved: dict[str, Any]) -> Any:
        saved.update(new)
        return original(saved)

    return replaced(optimizer, "_load_global_state", load)
