"""Several ranks that share one device: gloo, with tensors of the device. NCCL refuses two ranks on
one GPU.

    results = run_together("tests.deepspeed.runs:compare", world=2, device="cuda", payload=[...])

Collectives that gloo does not have for CUDA tensors in every torch go by way of the CPU.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ranks


def run_together(target: str, *, world: int, device: str, payload: Any = None) -> list:
    """Call ``target`` on ``world`` ranks of one device; returns its results by rank."""
    start = "tests.gpu.shared:work"
    return ranks.run_apart(target, start, world, device=device, payload=payload, timeout=400)


def work(target: str, name: str) -> None:
    """What :func:`run_together` starts."""
    ranks.init_deepspeed = start
    ranks._worker(target, Path(name), {"RANK": os.environ["RANK"]})


def start() -> None:
    """gloo, products in fp32, and what gloo may lack by way of the CPU, before DeepSpeed looks for
    it."""
    import torch
    import torch.distributed as dist

    gpu = os.environ["DS_ACCELERATOR"] == "cuda"
    dist.init_process_group("gloo")
    if gpu:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        stage()
    import deepspeed

    if not gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")


STAGED = (
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "reduce",
)


def stage() -> None:
    """Replace collectives that gloo does not have for CUDA tensors in every torch."""
    import torch.distributed as dist

    for name in STAGED:
        setattr(dist, name, staged(getattr(dist, name)))


def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective on copies in the CPU's memory, which are copied back: it has ended when it
    returns."""
    import torch

    class Ended:
        def wait(self, *_: Any) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

    def run(*given: Any, **named: Any) -> Any:
        originals: list[tuple[Any, Any]] = []

        def host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                originals.append((value, value.detach().cpu().clone()))
                return originals[-1][1]
            return [host(one) for one in value] if isinstance(value, list | tuple) else value

        copies = [host(value) for value in given]
        options = {key: host(value) for key, value in named.items()}
        waits = not options.pop("async_op", False)
        collective(*copies, **options)
        with torch.no_grad():
            for original, copy in originals:
                original.copy_(copy)
        return None if waits else Ended()

    run.__name__ = collective.__name__
    return run


def compare_staged(cases: Any) -> Any:
    """``compare`` with collectives by way of copies, to try that on a CPU."""
    from tests.deepspeed.runs import compare

    stage()
    return compare(cases)
