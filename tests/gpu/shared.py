"""Several ranks that share one device: gloo, with tensors of the device. NCCL refuses two ranks on
one GPU.

    results = run_together("tests.deepspeed.runs:compare", world=2, device="cuda", payload=[...])

What gloo cannot do with CUDA tensors goes by way of the CPU and is said; on a CPU nothing does.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        ranks = []
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
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, target, name], env=environment, cwd=ROOT
                )
            )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                # a dead rank leaves the others waiting for ever
                deadline = min(deadline, time.monotonic() + 2)
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
            rank.wait()
        results = [folder / f"result{rank}" for rank in range(world)]
        if not all(result.exists() for result in results):
            logs = [
                f"--- rank {rank}\n{log.read_text()[-4000:]}"
                for rank in range(world)
                if (log := folder / f"log{rank}").exists()
            ]
            raise AssertionError(
                f"{target} on {world} ranks of one {device} did not finish\n" + "\n".join(logs)
            )
        return [pickle.loads(result.read_bytes()) for result in results]


def work(target: str, name: str) -> None:
    """What :func:`run_together` starts."""
    folder, rank, code = Path(name), os.environ["RANK"], 1
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        start()
        module, function = target.split(":")
        found = getattr(importlib.import_module(module), function)(
            pickle.loads((folder / "payload").read_bytes())
        )
        (folder / f"partial{rank}").write_bytes(pickle.dumps(found))
        import torch.distributed as dist

        dist.barrier()
        (folder / f"partial{rank}").rename(folder / f"result{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads now and then abort at exit


def start() -> None:
    """gloo, products in fp32, and what gloo lacks by way of the CPU, before DeepSpeed looks for
    it."""
    import torch
    import torch.distributed as dist

    gpu = os.environ["DS_ACCELERATOR"] == "cuda"
    dist.init_process_group("gloo")
    if gpu:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        print("by way of the CPU:", stage_what_fails("cuda"), flush=True)
    import deepspeed

    if not gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")


def stage_what_fails(device: str, staged_all: bool = False) -> list[str]:
    """Tries each collective on the device; those that raise, or are wrong, are replaced. Returns
    their names."""
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()

    def of(*shape: int) -> Any:
        return torch.full(shape, float(rank + 1), device=device)

    total = float(sum(range(1, world + 1)))
    ranks = torch.arange(1.0, world + 1)

    def tried(
        call: Callable[..., Any], output: Any, expected: Any, *given: Any, **named: Any
    ) -> bool:
        try:
            call(*given, **named)
            got = torch.cat(output) if isinstance(output, list) else output
            return bool(torch.equal(got.cpu(), torch.as_tensor(expected).expand(got.shape)))
        except Exception as problem:
            print(
                f"gloo on {device}: {call.__name__}: {type(problem).__name__}: {problem}"[:300],
                flush=True,
            )
            return False

    x = of(3)
    works = {"all_reduce": tried(dist.all_reduce, x, total, x)}
    x = of(3)
    works["broadcast"] = tried(dist.broadcast, x, 1.0, x, 0)
    parts = [of(1) for _ in range(world)]
    works["all_gather"] = tried(dist.all_gather, parts, ranks, parts, of(1))
    y = of(world)
    works["all_gather_into_tensor"] = tried(dist.all_gather_into_tensor, y, ranks, y, of(1))
    y = of(1)
    works["reduce_scatter_tensor"] = tried(dist.reduce_scatter_tensor, y, total, y, of(world))
    y = of(world)
    works["all_to_all_single"] = tried(dist.all_to_all_single, y, ranks, y, of(world))
    x = of(3)
    works["reduce"] = tried(dist.reduce, x, total if rank == 0 else x.cpu().clone(), x, 0)
    failing = [name for name, good in works.items() if staged_all or not good]
    agreed: list[Any] = [None] * world
    dist.all_gather_object(agreed, failing)
    failing = sorted(set().union(*agreed))
    for name in failing:
        setattr(dist, name, staged(getattr(dist, name)))
    return failing


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

        copies, options = (
            [host(value) for value in given],
            {key: host(value) for key, value in named.items()},
        )
        waits = not options.pop("async_op", False)
        collective(*copies, **options)
        with torch.no_grad():
            for original, copy in originals:
                original.copy_(copy)
        return None if waits else Ended()

    run.__name__ = collective.__name__
    return run


def compare_staged(cases: Any) -> Any:
    """``compare`` with every collective by way of copies, to try that on a CPU."""
    from tests.deepspeed.runs import compare

    assert "reduce_scatter_tensor" in stage_what_fails("cpu", staged_all=True)
    return compare(cases)
