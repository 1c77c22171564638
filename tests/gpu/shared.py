"""Several ranks that share one device: gloo, with tensors of the device. NCCL refuses two ranks on
one GPU.

    results = run_together("tests.deepspeed.runs:compare", world=2, device="cuda", payload=[...])

Collectives that gloo does not have for CUDA tensors in every torch go by way of the CPU.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ranks
from tests.ranks import ROOT, free_port


def run_together(
    target: str, *, world: int, device: str, payload: Any = None, timeout: float = 400
) -> list:
    """Call ``target`` on ``world`` ranks of one device; returns its results by rank.

    Raises:
        AssertionError: a rank died or timed out; the message ends with the ranks' output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(free_port())
        (folder / "payload").write_bytes(pickle.dumps(payload))
        code = "import sys; from tests.gpu import shared; shared.work(sys.argv[1], sys.argv[2])"
        processes = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(world),
                "LOCAL_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DS_ACCELERATOR": device,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            }
            command = [sys.executable, "-c", code, target, name]
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(one.poll() is None for one in processes):
            if any(one.poll() for one in processes):
                # a dead rank leaves the others waiting for ever
                deadline = min(deadline, time.monotonic() + 2)
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        results = [folder / f"result{rank}" for rank in range(world)]
        if not all(result.exists() for result in results):
            logs = [path.read_text()[-4000:] for path in sorted(folder.glob("log*"))]
            message = f"{target} on {world} ranks of one {device} did not finish\n"
            raise AssertionError(message + "\n--- next rank\n".join(logs))
        return [pickle.loads(result.read_bytes()) for result in results]


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
