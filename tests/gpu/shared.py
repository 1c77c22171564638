"""Several ranks that share one device: gloo, with tensors of the device. NCCL refuses two ranks on
one GPU.

    results = run_apart(target, "tests.gpu.shared:work", 2, device="cuda", payload=..., timeout=...)

Collectives that gloo does not have for CUDA tensors in every torch go by way of the CPU.
"""

from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests import ranks

STAGED = "all_gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single reduce".split()


def work(target: str, folder: str) -> None:
    """What is started instead of ``tests.ranks.work_here``. gloo is there, and what it may lack,
    before DeepSpeed looks for it."""
    dist.init_process_group("gloo")
    for name in STAGED:
        setattr(dist, name, staged(getattr(dist, name)))
    ranks.init_deepspeed = partial(ranks.init_deepspeed, "gloo")
    ranks.work_here(target, folder)


def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective on copies in the CPU's memory, which are copied back: it has ended when it
    returns."""

    @wraps(collective)
    def run(*given: Any, async_op: bool = False, **named: Any) -> Any:
        copies = []

        def host(tensor: torch.Tensor) -> torch.Tensor:
            copies.append((tensor, tensor.detach().cpu().clone()))
            return copies[-1][1]

        given, named = tree_map_only(torch.Tensor, host, (given, named))
        collective(*given, **named)
        with torch.no_grad():
            for original, copy in reversed(copies):  # outputs last: one may lie in an input
                original.copy_(copy)
        ended = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)
        return ended if async_op else None

    return run
