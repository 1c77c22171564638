"""Access to DeepSpeed's private attributes, and to those that not every supported version has: one
function for each, which says since when it exists, and what replaces it before. "Since" names the
first of :data:`TESTED` that has it. No other file reads such an attribute. The self-test at attach
proves where a version keeps gradients.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from itertools import accumulate
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

OLDEST = "0.17"
"""Oldest version that attach accepts; older ones reduce gradients otherwise, and are not tested."""
TESTED = ("0.17.0", "0.17.6", "0.18.0", "0.18.9", "0.19.0", "0.19.4", "0.19.8")
"""Versions that ``make versions`` tests, oldest first."""


def check() -> None:
    """Raise ImportError if the installed DeepSpeed cannot be used: what to install."""
    if Version(deepspeed.__version__).release < Version(OLDEST).release:
        raise ImportError(
            f"ds_kfac: deepspeed {deepspeed.__version__} is older than {OLDEST}, the oldest that "
            f"ds_kfac works with: "
            f"pip install 'deepspeed>={OLDEST}' ({TESTED[-1]} is the newest tested one)"
        )


def untested() -> str | None:
    """A line of the attach report if the installed DeepSpeed is newer than all tested versions."""
    if Version(deepspeed.__version__).release <= Version(TESTED[-1]).release:
        return None
    return (
        f"deepspeed {deepspeed.__version__} is newer than the tested {TESTED[-1]}; the "
        f"self-test at attach passed"
    )


# attributes that are others for a while


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Meanwhile an attribute of an instance or a module has this value."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        restore(holder, name, before)


def restore(holder: Any, name: str, before: Any) -> None:
    """Restore an instance's attribute; ``before`` None: the instance had none, only its class."""
    if before is None:
        delattr(holder, name)
    else:
        setattr(holder, name, before)


def wrap_attribute(
    holder: Any, name: str, wrapper: Callable[..., Any], is_active: Callable[[], bool]
) -> Callable[[], None]:
    """Replace a method of an instance by ``wrapper(original, *arguments, **keywords)``. Returns a
    function that takes the wrapper away.

    If someone has wrapped ours since, it stays in their chain. So calls go straight to the original
    where ``is_active`` returns False.
    """
    original = getattr(holder, name)

    @wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if not is_active():
            return original(*arguments, **keywords)
        return wrapper(original, *arguments, **keywords)

    return put_attribute(holder, name, wrapped)


def put_attribute(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an instance. Returns a function that restores it, unless someone else has
    set it since."""
    before = vars(holder).get(name)
    setattr(holder, name, value)

    def remove() -> None:
        if vars(holder).get(name) is value:
            restore(holder, name, before)

    return remove


# faults that some versions have, for the attach report


def offload_faults(micro_batches: int) -> tuple[str, ...]:
    """Faults of ZeRO-1/2 with offload; fixed in 0.19.0."""
    if micro_batches < 3 or Version(deepspeed.__version__).release >= (0, 19):
        return ()
    return (
        "before 0.19 it sums the first and the last micro-batch of a step alone with offload: use "
        "deepspeed 0.19, or 2 "
        "micro-batches a step at most",
    )


def accumulation_faults(optimizer: Any, micro_batches: int) -> tuple[str, ...]:
    """Faults of ZeRO-2 without offload in 0.17.6 and 0.18.0, not in 0.17.0 and 0.18.9; for others
    read from its code."""
    code = inspect.getsource(type(optimizer).independent_gradient_partition_epilogue)
    mended = "all_grad_tensors[i] =" not in code or "in self.all_grad_tensors" in code
    if micro_batches < 2 or mended or not optimizer.partition_gradients:
        return ()
    return (
        "this DeepSpeed forgets all micro-batches of a step but the last: use 0.18.9 or later, or "
        "1 micro-batch a step",
    )


def reduction_faults(optimizer: Any) -> tuple[str, ...]:
    """Faults of ZeRO-1/2 in which gradients are not averaged over ranks: up to 0.19.4, not in
    0.19.8. Read from its code."""
    cls = type(optimizer)
    if optimizer.use_grad_accum_attribute and "grad_accum.to(" in inspect.getsource(
        cls.get_gradient_for_reduction
    ):
        return (
            "ZeRO-1 of this DeepSpeed averages a copy of gradients that are accumulated in "
            "another dtype than the "
            "model's, so each rank trains on its own: use deepspeed 0.19.8, or leave "
            "data_types.grad_accum_dtype out",
        )
    drops = "device_name()" in inspect.getsource(stage_1_and_2.split_half_float_double)
    if drops and not optimizer.contiguous_gradients and get_accelerator().device_name() == "cpu":
        return (
            "on CPUs this DeepSpeed does not average gradients if contiguous_gradients is false: "
            "use deepspeed 0.19.8, "
            "or set it to true",
        )
    return ()


def bf16_optimizer_faults() -> tuple[str, ...]:
    """Faults of BF16_Optimizer: in 0.18.9, not in 0.18.0; fixed in 0.19.0."""
    if not (0, 18, 0) < Version(deepspeed.__version__).release < (0, 19):
        return ()
    return (
        "before 0.19 it adds a step's last micro-batch after gradients were averaged, so each "
        "rank trains on its own: "
        "use deepspeed 0.19",
    )


def pipeline_faults(micro_batches: int) -> tuple[str, ...]:
    """Faults of pipelines: up to 0.18.0 no stage divides by the number of micro-batches; in 0.18.9
    and 0.19.0 all but the last divide twice."""
    if micro_batches < 2 or Version(deepspeed.__version__).release >= (0, 19, 4):
        return ()
    return (
        "before 0.19.4 stages do not average gradients over the micro-batches of a step, but sum "
        "them or divide twice: "
        "use deepspeed 0.19.4, or 1 micro-batch a step",
    )


def gather_faults(backend: str) -> tuple[str, ...]:
    """Faults of ZeRO-3 with gloo, whose gathers end in any order: in 0.19.4, not in 0.19.8. Read
    from its code."""
    code = inspect.getsource(partition_parameters.Init._allgather_params_coalesced)
    if backend != "gloo" or "launch_handles[-1].wait()" not in code:
        return ()
    return (
        "with gloo this DeepSpeed may compute with parameters that are not gathered yet: it waits "
        "for the last of "
        "several gathers alone; use deepspeed 0.19.8, or NCCL",
    )


# engines


INSTRUCTIONS = "_INSTRUCTION_MAP"
"""The pipeline engine's table of instructions, looked up on the instance. All versions."""


def manual_backward(engine: Any) -> bool:
    """Whether the user has scaled the next backward by ``engine.scale``; since 0.18.9."""
    return getattr(engine, "_manual_backward_expected", False)


def caller_sets_boundaries(engine: Any) -> bool:
    """Whether the caller, not the engine, decides where a step ends.
    ``managed_gradient_accumulation`` since 0.19.4."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    return not managed or engine._is_gradient_accumulation_boundary is not None


def computes_norms(engine: Any) -> bool:
    """``zero_optimization.compute_grad_norm``, since 0.19.8; before, always."""
    return getattr(engine, "zero_compute_grad_norm", lambda: True)()


def sent_in(parameter: Any) -> torch.dtype:
    """dtype in which a parameter's gradient travels; with torch_autocast, since 0.17.6, it may not
    be the parameter's."""
    module = sys.modules.get("deepspeed.runtime.torch_autocast")
    return parameter.dtype if module is None else module.get_comm_dtype(parameter)


def reduced_in(engine: Any) -> set[torch.dtype]:
    """dtypes that gradients are added up in: the config's ``communication_data_type``, and ZeRO's
    own, which is that of the first parameter that it was given, though ZeRO-1 and 2 make all
    parameters alike."""
    dtypes = (
        getattr(engine, "communication_data_type", None),
        getattr(engine.optimizer, "dtype", None),
    )
    return {dtype for dtype in dtypes if isinstance(dtype, torch.dtype)}


def autocast(engine: Any) -> torch.dtype | None:
    """dtype of torch_autocast, since 0.17.6; None: off."""
    enabled = getattr(engine, "torch_autocast_enabled", lambda: False)()
    return engine.torch_autocast_dtype() if enabled else None


def zenflow(engine: Any) -> bool:
    """Whether ZenFlow is on; since 0.17.6."""
    return bool(getattr(engine, "zenflow", False))


def offload(engine: Any) -> Any:
    """``zero_optimization.offload_optimizer``; None: no offload. All versions."""
    return getattr(engine._config.zero_config, "offload_optimizer", None)


def writes_in_background(engine: Any) -> bool:
    """Whether checkpoints are written after ``save_checkpoint`` has returned; since 0.17.6."""
    return getattr(engine.checkpoint_engine, "is_decoupled", lambda: False)()


def grad_scaler(engine: Any) -> Any:
    """torch_autocast fp16's GradScaler: ZeRO's since 0.17.6, the engine's at stage 0 since 0.18.0;
    None: none."""
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
    """Loss scale of FP16_Optimizer and FP16_UnfusedOptimizer. In ``loss_scale_config`` since
    0.18.9."""
    return float(getattr(optimizer, "loss_scale_config", optimizer).cur_scale)


def multiplies_loss(optimizer: Any) -> bool:
    """Whether they multiply a loss by it: not since 0.18.9."""
    return not hasattr(optimizer, "loss_scale_config")


def lacks_loss_scale(optimizer: Any) -> bool:
    """Whether they divide by a scale that no loss was multiplied by (deepspeed PR 8393)."""
    return not multiplies_loss(optimizer) and bool(optimizer.loss_scale_config.use_grad_scaling)


# an outer optimizer's step

UNSCALE = "unscale_and_clip_grads"
"""The method by which ZeRO's and the 16-bit optimizers divide gradients by the loss scale and clip
them, in place, before the inner optimizer steps; once for each group. All versions."""


class _Probe:
    """An outer optimizer whose gradients are a single one."""

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
    """What :data:`UNSCALE`, called with these arguments, multiplies gradients by: a scalar on the
    device; None: nothing. It is asked by a gradient of 1. Stages 1, 2 and FP16_Optimizer get
    gradients, stage 3 the number of a sub-group, then all the norm."""
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
    """What BF16_Optimizer has multiplied gradients by in this step; None: nothing, or another
    optimizer. All versions."""
    if not isinstance(optimizer, BF16_Optimizer) or not optimizer.clip_grad:
        return None
    device = get_accelerator().current_device_name()
    norm = torch.as_tensor(optimizer._global_grad_norm, dtype=torch.float32, device=device)
    return (optimizer.clip_grad / (norm + 1e-6)).clamp(max=1.0)


def skips_by_rank(optimizer: Any) -> bool:
    """Whether ZeRO leaves it to a GradScaler to skip a step, which it does on each rank and for
    each group on its own: until 0.19.8. Read from its code: of the whole class, since stage 3 wraps
    its ``step``."""
    return "is_invalid_grad_norm" not in inspect.getsource(type(optimizer))


def gives_gradients(optimizer: Any) -> bool:
    """Whether a 16-bit optimizer calls ``step(grads=..., scale=...)``. All versions."""
    return bool(
        getattr(optimizer, "fused_adam_legacy", False)
        or getattr(optimizer, "fused_lamb_legacy", False)
    )


def never_steps(optimizer: Any) -> bool:
    """Whether FP16_Optimizer returns before every step in fp16: in 0.17.6 and 0.18.0, not in 0.17.0
    and 0.18.9. Read from its code: the return stands outside the branch for an overflow."""
    if (
        not isinstance(optimizer, FP16_Optimizer)
        or optimizer.fp16_groups[0][0].dtype is not torch.float16
    ):
        return False
    code = inspect.getsource(FP16_Optimizer.step)
    found = re.search(r"^( *)if self\.overflow:\n.*?^( *)return\b", code, re.MULTILINE | re.DOTALL)
    return found is not None and len(found[2]) <= len(found[1])


def looks_alone(optimizer: Any) -> bool:
    """Whether each rank of ZeRO-1 skips a step by the gradients of its own slice: in 0.17.6, not in
    0.17.0 and 0.18.0. Read from its code."""
    if getattr(optimizer, "partition_gradients", True) or not getattr(
        optimizer, "check_grad_overflow", False
    ):
        return False  # not ZeRO-1, or it never looks
    is_told = "check_overflow(partition_gradients=" in inspect.getsource(type(optimizer).step)
    return is_told and "if partition_gradients:" in inspect.getsource(type(optimizer).has_overflow)


def backup_optimizer(optimizer: Any) -> Any | None:
    """The second inner optimizer of ZeRO-3 whose first sub-groups are not offloaded. All
    versions."""
    return getattr(optimizer, "backup_optimizer", None)


@contextmanager
def unchanged(optimizer: Any) -> Iterator[None]:
    """Meanwhile an outer optimizer may take a step with gradients that are none: its attributes and
    lists are then those of before, parameters are not linked to states that do not exist, and
    ZeRO-3's are gathered only if they were: of one that is gathered DeepSpeed does not see that a
    module uses another one's."""
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
        if gathered := [param for param in released if is_gathered(param)]:
            gathered[0].partition(gathered)

    with ExitStack() as stack:
        stack.callback(put_back)
        # a scaler has no scale before its first loss
        for name, stand_in in ((link, lambda: None), (scaler, None)):
            if getattr(optimizer, name, None) is not None:
                stack.enter_context(replaced(optimizer, name, stand_in))
        yield


def is_gathered(parameter: Any) -> bool:
    """Whether a parameter of ZeRO-3 is in memory as a whole. All versions."""
    return parameter.ds_status is partition_parameters.ZeroParamStatus.AVAILABLE


# ZeRO

COMPACT = "_use_compact_grad_partition_buffer"


def master_dtype(optimizer: Any) -> torch.dtype:
    """dtype of masters and their gradients with offload. Not always fp32 since 0.18.9."""
    return getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)


def gradient_dtype(optimizer: Any) -> torch.dtype:
    """dtype of gradients without offload: ``data_types.grad_accum_dtype``, at stage 2 only since
    0.19.8; before, the parameters' dtype."""
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
    """``zero_optimization.parameter_alignment``, since 0.19.8."""
    return getattr(optimizer, "parameter_alignment", False)


def applies_nonfinite(optimizer: Any) -> bool:
    """Whether ZeRO-1/2 steps with gradients in bf16 that are not finite: always before 0.17.6
    (``check_grad_overflow``)."""
    return optimizer.dtype == torch.bfloat16 and not getattr(
        optimizer, "check_grad_overflow", False
    )


def offsets(optimizer: Any, group: int) -> Sequence[int]:
    """First element of each of ``round_robin_bit16_groups[group]`` in ZeRO-1/2's flat buffer.
    Stored since 0.19.8, which can align parameters; before, they lie end to end."""
    if (stored := getattr(optimizer, "round_robin_bit16_offsets", None)) is not None:
        return stored[group]
    return list(
        accumulate((p.numel() for p in optimizer.round_robin_bit16_groups[group]), initial=0)
    )[:-1]


def wait_for_offload(optimizer: Any) -> None:
    """Wait for gradients that ZeRO-1/2 copies in the background, since 0.19.8; before, the step
    itself waited."""
    getattr(optimizer, "_wait_for_offload_copies", lambda: None)()


def has_dynamic_scale(optimizer: Any) -> bool:
    """Whether ZeRO's loss scale grows. It does so before gradients are divided by it. All
    versions."""
    return bool(optimizer.dynamic_loss_scale)


def states_are_linked(optimizer: Any) -> bool:
    """Whether ZeRO-1/2 has linked parameters to their optimizer states, as it does in its first
    step. All versions."""
    return optimizer._hp_optimizer_states_linked


def link_states(optimizer: Any) -> bool:
    """Link ZeRO-1/2's parameters to their states again if they were linked; returns whether they
    were. All versions."""
    if not optimizer._hp_optimizer_states_linked:
        return False
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
    return True


def compact_buffer(optimizer: Any, group: int) -> Any:
    """An empty buffer that ZeRO-1/2 accumulates a group's gradients in, since 0.19.8; None: in a
    list of tensors."""
    if not getattr(optimizer, COMPACT, lambda group: False)(group):
        return None
    return optimizer._build_compact_grad_partition_buffer(group)


def flat_partition(optimizer: Any, group: int, gradients: list[Tensor]) -> list[Tensor]:
    """ZeRO-1/2's list of gradients in this rank's slice of a group, cut from ``gradients`` of
    ``params_in_partition``. Since 0.17.6 these are in ``all_grad_tensors``, before in the
    parameters."""
    params = optimizer.params_in_partition[group]
    named = {}
    if (kept := getattr(optimizer, "all_grad_tensors", None)) is not None:
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
    """Drop gradients outside of ``averaged_gradients``, see :func:`flat_partition`; and with
    offload begin anew to count backwards: to gradients of an earlier one DeepSpeed would add the
    next."""
    for name in ("all_grad_tensors", "_offload_accumulated_param_ids"):
        getattr(optimizer, name, set()).clear()
    optimizer.micro_step_id = -1


def accumulated(optimizer: Any) -> list[Any]:
    """ZeRO-1/2's gradients that wait for a step; None in place of others."""
    return [
        *optimizer.averaged_gradients.values(),
        *getattr(optimizer, "all_grad_tensors", {}).values(),
    ]


def accumulated_on_host(optimizer: Any) -> bool:
    """Whether ZeRO-1/2 with offload has gradients that wait for a step.
    ``_offload_accumulated_param_ids`` since 0.19.8; before, the number of backwards since the last
    step, which begins at -1."""
    reduced = getattr(optimizer, "_offload_accumulated_param_ids", None)
    return optimizer.micro_step_id >= 0 if reduced is None else bool(reduced)


def accumulated_at_stage_3(optimizer: Any) -> bool:
    """The same at stage 3, by its number of backwards, which begins at 0; since 0.18.9 the next
    forward increases it, and a flag tells of the last backward."""
    return optimizer.micro_step_id > 0 or getattr(optimizer, "_epilogue_ran_this_backward", False)


# universal checkpoints


def with_global_state(optimizer: Any, new: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Replaces the optimizer-wide state that stages 1, 2 and BF16_Optimizer load from a universal
    checkpoint."""
    if not hasattr(optimizer, "_load_global_state"):
        return nullcontext()
    original = optimizer._load_global_state

    def load(saved: dict[str, Any]) -> Any:
        saved.update(new)
        return original(saved)

    return replaced(optimizer, "_load_global_state", load)
