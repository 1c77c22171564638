"""Tell K-FAC's hooks (``model/capture.py``) when a pipeline runs its backward passes, because a
pipeline never calls ``engine.backward``."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass
from torch import Tensor
from torch.autograd import Function

from ds_kfac.step.job import Job
from ds_kfac.zero.deepspeed_versions import INSTRUCTIONS


def announcing(engine: Any, job: Job) -> dict[type, Any]:
    """Return the engine's table of instructions, changed so that the hooks are told about the
    backward pass of each micro-batch.

    A stage with several outputs runs one backward pass for all of them, see :func:`joined`.
    Wrapping ``engine.backward`` would not work: the last stage calls ``backward`` of DeepSpeed's
    class, not of the engine object, and the other stages start from a received gradient.
    """
    table = getattr(engine, INSTRUCTIONS)

    def backward(self: Any, buffer_id: int) -> None:
        with ExitStack() as stack:
            for kfac in job.preconditioners:
                stack.enter_context(kfac.capture.own_backward())
            if job.active:
                stack.enter_context(joined(self, buffer_id))
            table[BackwardPass](self, buffer_id)

    return {**table, BackwardPass: backward}


class _Joined(Function):
    """A scalar function of a stage's outputs. Its gradient with respect to each output is the
    gradient that the next stage has sent for this output."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ignored: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


@contextmanager
def joined(engine: Any, buffer_id: int) -> Iterator[None]:
    """Make DeepSpeed run one backward pass for all outputs of a stage inside this context.

    DeepSpeed alone runs a backward pass for each floating-point output. A layer would then get its
    gradient in parts, and the sum of the parts' squares is not the square of their sum. So the
    outputs are replaced by one scalar.
    """
    outputs = None if engine.is_last_stage() else engine.pipe_buffers["outputs"][buffer_id]
    floating = []
    if isinstance(outputs, tuple):
        floating = [output for output in outputs if output.is_floating_point()]
    if len(floating) < 2:
        yield
        return
    received = engine.grad_layer
    scalar = _Joined.apply(tuple(received), *floating)
    engine.pipe_buffers["outputs"][buffer_id] = scalar
    engine.grad_layer = torch.ones_like(scalar)
    try:
        yield
    finally:
        engine.grad_layer = received  # DeepSpeed receives the next gradients in this buffer
