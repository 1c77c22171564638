"""Pipeline engines: every backward pass of a micro-batch is announced to the capture, as no ``engine.backward`` is.

The last stage calls DeepSpeed's backward past the engine's attribute, others start from a received gradient. Several
forwards may lie between a micro-batch's forward and its backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass

from ds_kfac.step.job import Job

TABLE = "_INSTRUCTION_MAP"
"""The pipeline engine's table of instructions, looked up on the instance."""


def announce_backwards(engine: Any, job: Job) -> Callable[[], None]:
    """Wrap the engine's backward instruction; returns what takes the wrapper off."""
    table = getattr(engine, TABLE)
    original = table[BackwardPass]

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        with job.own_backward():
            if job.active:
                scale = job.preconditioners[0].layout.manual_scale()
                if not isinstance(scale, torch.Tensor):
                    scale = torch.full((), scale, device=self.device)  # by a kernel, nobody waits for it
                job.begin_backward(scale / self.gradient_accumulation_steps())
            original(self, *args, **kwargs)

    wrapped = {**table, BackwardPass: backward}
    previous = vars(engine).get(TABLE)
    setattr(engine, TABLE, wrapped)

    def remove() -> None:
        if vars(engine).get(TABLE) is wrapped:
            if previous is None:
                delattr(engine, TABLE)
            else:
                setattr(engine, TABLE, previous)

    return remove
