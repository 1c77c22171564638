"""One extra backward through the current micro-batch's graph, invisible to DeepSpeed: gradients of layer outputs only.

    extra = ExtraBackward(engine)                    # once, before the first forward
    gradients = extra(sampled_loss, edges, seed)     # edges: where the outputs' gradients arrive
    engine.backward(loss)                            # the user's own; bit-identical to what it is without the above

``autograd.grad`` with inputs runs no AccumulateGrad, so ZeRO's gradient hooks do not fire. What would still see the
pass is switched off for its duration: the hooks that ``engine.forward`` puts on its outputs. At stage 3 it would also
have to fetch and release weights behind the back of DeepSpeed's parameter coordinator: refused at attach.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

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
        self._managers: WeakSet = WeakSet()  # DeepSpeed's OutputBackwardHookManager of forwards whose outputs live
        self._handle = engine.register_forward_hook(lambda module, inputs, output: _collect(output, self._managers))

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, sampled_loss: Tensor, edges: Sequence[GradientEdge], seed: Tensor) -> list[Tensor | None]:
        """Gradients of ``sampled_loss * seed`` at ``edges``; None where it does not reach.

        Args:
            sampled_loss: a scalar computed from tensors of forwards without a backward so far.
            edges: released by the caller after use, they keep the graph alive.
            seed: what the scalar's gradient is; it arrives as it is, whatever loss scale and accumulation there is.

        Raises:
            ValueError: the graph does not allow a second backward.
        """
        if not sampled_loss.requires_grad or not edges:
            return [None] * len(edges)
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph(sampled_loss.grad_fn)):
            raise ValueError(_CHECKPOINTING)  # torch's and DeepSpeed's
        seed = seed.to(sampled_loss.device, sampled_loss.dtype).reshape(sampled_loss.shape)
        with self._no_output_hooks():
            try:
                found = torch.autograd.grad(sampled_loss, list(edges), seed, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if "not compatible with .grad()" in str(error):  # DeepSpeed's non-reentrant kind has no node to find
                    raise ValueError(_CHECKPOINTING) from error
                if "donated buffers" in str(error):
                    raise ValueError(_DONATED) from error
                raise
        return list(found)

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
