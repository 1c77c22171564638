"""One extra backward through the current micro-batch's graph, invisible to DeepSpeed: gradients of layer outputs only.

    extra = ExtraBackward(engine)                    # once, before the first forward
    gradients = extra(sampled_loss, edges, seed)     # edges: where the outputs' gradients arrive
    engine.backward(loss)                            # the user's own; bit-identical to what it is without the above

``autograd.grad`` with inputs runs no AccumulateGrad, so ZeRO's gradient hooks do not fire. What would still see the
pass is switched off for its duration: the hooks that ``engine.forward`` puts on its outputs, and at stage 3 the
modules' counters and the parameter coordinator.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

_MISSING = object()
_HELD = -1
"""In ``param.ds_active_sub_modules``: nobody releases the parameter. Modules' ds_id start at 0."""
_WHAT = 'kfac.factor.fisher "monte_carlo" needs a second backward through the graph'
_CHECKPOINTING = (
    f"{_WHAT}, which this activation checkpointing refuses; use torch's with use_reentrant=False (not torch's "
    "reentrant one, nor deepspeed.checkpointing of either kind)"
)
_DONATED = (
    f"{_WHAT}; compiled graphs give their buffers away in the first backward; set "
    "torch._functorch.config.donated_buffer = False before the first forward"
)


class ExtraBackward:
    """Remembers the hooks that DeepSpeed puts on the outputs of every forward, and runs the pass without them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._managers: WeakSet = WeakSet()  # DeepSpeed's OutputBackwardHookManager of forwards whose outputs live
        self._handle = engine.register_forward_hook(lambda module, inputs, output: _collect(output, self._managers))

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, sampled_loss: Tensor, edges: Sequence[GradientEdge], seed: Tensor) -> list[Tensor | None]:
        """Gradients of ``sampled_loss * seed`` at ``edges``; None where it does not reach. Collective at stage 3.

        Args:
            sampled_loss: a scalar computed from tensors of forwards without a backward so far.
            edges: released by the caller after use, they keep the graph alive.
            seed: what the scalar's gradient is; it arrives as it is, whatever loss scale and accumulation there is.

        Raises:
            ValueError: the graph or the engine does not allow a second backward.
        """
        if not sampled_loss.requires_grad or not edges:
            return [None] * len(edges)
        visited = list(graph(sampled_loss.grad_fn))
        self._refuse(visited)
        seed = seed.to(sampled_loss.device, sampled_loss.dtype).reshape(sampled_loss.shape)
        with ExitStack() as stack:
            stack.enter_context(self._no_output_hooks())
            if self.engine.zero_optimization_partition_weights():
                stack.enter_context(_no_trace_left(self.engine, visited))
            try:
                found = torch.autograd.grad(sampled_loss, list(edges), seed, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if "not compatible with .grad()" in str(error):  # DeepSpeed's non-reentrant kind has no node to find
                    raise ValueError(_CHECKPOINTING) from error
                if "donated buffers" in str(error):
                    raise ValueError(_DONATED) from error
                raise
        return list(found)

    def _refuse(self, nodes: Sequence[Node]) -> None:
        names = {type(node).__name__ for node in nodes}
        if "CheckpointFunctionBackward" in names:  # torch's and DeepSpeed's
            raise ValueError(_CHECKPOINTING)
        if getattr(self.engine.optimizer, "leaf_parameters", None):
            raise ValueError(
                f"{_WHAT}; ZeRO-3 leaf modules reduce in a full backward hook, which would fire: remove "
                "set_z3_leaf_modules / leaf_module / stage3_module_granularity_threshold"
            )

    @contextmanager
    def _no_output_hooks(self) -> Iterator[None]:
        """Outputs of ``engine.forward`` pass gradients on as they are and start no engine backward."""
        saved = [(one, one.preprocess_done, one.preprocess_per_tensor_fn) for one in self._managers]
        for manager, _, _ in saved:
            manager.preprocess_done, manager.preprocess_per_tensor_fn = True, None
        try:
            yield
        finally:
            for manager, done, function in saved:
                manager.preprocess_done, manager.preprocess_per_tensor_fn = done, function


def _collect(output: Any, managers: WeakSet) -> None:
    if isinstance(output, Tensor):
        managers.update(getattr(output, "_backward_hook_managers", ()))
    elif isinstance(output, (tuple, list, dict)):  # as OutputBackwardHookManager traverses
        for value in output.values() if isinstance(output, dict) else output:
            _collect(value, managers)


def graph(root: Node | None) -> Iterator[Node]:
    """All nodes that a backward from ``root`` may run."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(next_node for next_node, _ in node.next_functions)


@contextmanager
def _no_trace_left(engine: Any, nodes: Sequence[Node]) -> Iterator[None]:
    """Stage 3: fetch and release weights with a coordinator of our own; DeepSpeed's sees no step.

    Ours never records a trace, so it neither prefetches nor expects an order. What is available at entry (persistent,
    prefetched, or kept for the coming backward) stays; what is fetched for the pass is released in it.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # DeepSpeedZeRoOffload
    modules = list(engine.module.modules())
    counters = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")
    saved = [(m, {name: m.__dict__.get(name, _MISSING) for name in counters}) for m in modules]
    stack_depth = len(parameter_offload.FWD_MODULE_STACK)
    held = [p for p in engine.module.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
    active = [(p, set(p.ds_active_sub_modules)) for p in engine.module.parameters()]
    recompute = [(m, set(m.ds_recompute_parameters)) for m in modules if getattr(m, "ds_recompute_parameters", None)]
    for p in held:
        p.ds_active_sub_modules.add(_HELD)
    own = PartitionedParameterCoordinator(
        prefetch_bucket_sz=0,
        max_reuse_distance_in_numel=0,
        max_available_parameters_in_numel=0,
        allgather_stream=offload._DeepSpeedZeRoOffload__allgather_stream,
        inflight_param_registry=engine.module.ds_inflight_param_registry,
        zero_quantized_weights=offload.zero_quantized_weights,
        zero_quantized_nontrainable_weights=offload.zero_quantized_nontrainable_weights,
    )
    theirs, offload.param_coordinator = offload.param_coordinator, own
    try:
        for module in _enclosing(modules, nodes):
            own.fetch_sub_module(module, forward=False)
        yield
    finally:
        own.release_backward_leftovers()
        offload.param_coordinator = theirs
        for p, before in active:
            p.ds_active_sub_modules.clear()
            p.ds_active_sub_modules.update(before)
        for p in engine.module.parameters():
            if p.ds_status == ZeroParamStatus.AVAILABLE and not any(p is one for one in held):
                p.partition()  # fetched in a recomputation that stopped early, or persistent and not yet resident
        for module, before in recompute:
            module.ds_recompute_parameters.update(before)
        del parameter_offload.FWD_MODULE_STACK[stack_depth:]
        for module, values in saved:
            for name, value in values.items():
                if value is not _MISSING:
                    setattr(module, name, value)
                elif name in module.__dict__:
                    delattr(module, name)


def _enclosing(modules: Sequence[nn.Module], nodes: Sequence[Node]) -> list[nn.Module]:
    """Modules with own parameters around modules of the graph, whose own backward hook the pass does not reach.

    The hook sits on a module's output: a loss formed from an inner tensor runs below it.
    """
    candidates = [m for m in modules if any(True for _ in m.children()) and any(True for _ in iter_params(m))]
    if not candidates:
        return []
    pre_backward: Sequence[Any] = nodes  # custom functions carry attributes that Node does not declare
    reached = {n.module for n in pre_backward if type(n).__name__ == "PreBackwardFunctionForModuleBackward"}
    return [m for m in candidates if m not in reached and any(child in reached for child in m.modules())]
