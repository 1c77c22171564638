"""Announces a pipeline's backward passes to the capture: no ``engine.backward`` does."""

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
    """The engine's table of instructions, in which a micro-batch's backward pass is announced to
    the capture. Several outputs get one backward, see :func:`joined`.

    Wrapping ``engine.backward`` would not do: the last stage calls DeepSpeed's function, others get
    a gradient.
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
    """A scalar whose gradients with respect to a stage's outputs are those that the next stage has
    sent."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ignored: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


@contextmanager
def joined(engine: Any, buffer_id: int) -> Iterator[None]:
    """Wraps a backward pass: DeepSpeed runs one for each floating output of a stage, so a layer
    would get its gradient in parts, and the sum of their squares is not the square of their sum.
    Here one scalar output takes their place."""
    outputs = None if engine.is_last_stage() else engine.pipe_buffers["outputs"][buffer_id]
    floating = (
        [output for output in outputs if output.is_floating_point()]
        if isinstance(outputs, tuple)
        else []
    )
    if len(floating) < 2:
        yield
        return
    received = engine.grad_layer
    whole = _Joined.apply(tuple(received), *floating)
    engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer = whole, torch.ones_like(whole)
    try:
        yield
    finally:
        engine.grad_layer = received  # the buffer that the next ones are received in
