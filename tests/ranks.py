"""Run a function on several ranks: plain processes with gloo, no launcher, results by file.

    results = run_ranks("tests.deepspeed.worker:main", world=2, payload={...})    # one result per rank

The worker processes leave with ``os._exit``: now and then interpreter shutdown aborts in gloo's threads after all
work is done, so success is judged by the result files.
"""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(target: str, *, world: int, payload=None, timeout: float = 300, env: dict | None = None) -> list:
    """Call ``target`` ("module:function") with ``payload`` on ``world`` ranks; returns its results by rank.

    Raises:
        AssertionError: a rank died or timed out; the message ends with the ranks' output.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "payload").write_bytes(pickle.dumps(payload))
        port, processes = str(free_port()), []
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **(env or {}),
            }  # fmt: skip
            with open(Path(folder) / f"log{rank}", "wb") as log:
                command = [sys.executable, "-m", "tests.ranks", target, folder]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT))
        deadline = time.monotonic() + timeout
        results = [Path(folder) / f"result{rank}" for rank in range(world)]
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) and not r.exists() for p, r in zip(processes, results, strict=True)):
                break  # a dead rank leaves the others waiting for ever
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        if not all(result.exists() for result in results):
            logs = [f"--- rank {r}\n" + (Path(folder) / f"log{r}").read_text()[-4000:] for r in range(world)]
            raise AssertionError(f"{target} on {world} ranks did not finish\n" + "\n".join(logs))
        return [pickle.loads(result.read_bytes()) for result in results]


def init_deepspeed() -> None:
    """gloo and no JIT-compiled CPU communication op (a killed build would block every later run)."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")


def _worker(target: str, folder: str) -> None:
    module, function = target.split(":")
    payload = pickle.loads((Path(folder) / "payload").read_bytes())
    init_deepspeed()
    result = getattr(importlib.import_module(module), function)(payload)
    rank = os.environ["RANK"]
    temporary = Path(folder) / f"partial{rank}"
    temporary.write_bytes(pickle.dumps(result))
    import torch.distributed as dist

    dist.barrier()
    temporary.rename(Path(folder) / f"result{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _worker(*sys.argv[1:])
