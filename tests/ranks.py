"""Run a function on several ranks: plain processes with gloo, no launcher, results by file.

    results = run_ranks("tests.deepspeed.worker:main", world=2, payload={...})   # one per rank
    @pytest.mark.ranks(2)                               # the whole test runs, and asserts, there
    result = run_alone("tests.deepspeed.worker:main", device="cuda", payload={...})   # NCCL

Ranks are forked from a server process that has imported torch and deepspeed once, which alone takes
seconds. They leave with ``os._exit``: now and then interpreter shutdown aborts in gloo's threads
after all work is done, so success is judged by the result files.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preload"])
STORE = "TESTS_STORE"
"""Environment variable: a file by which ranks meet, for the first time; no port that another
process may take."""


def keep_imports() -> None:
    """No collection of garbage goes through what is there now; DeepSpeed collects several times an
    engine."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extensions call it leaked


def free_port() -> int:
    """Below those that a system gives to whoever connects: one of them may be given again before it
    is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(target: str, *, world: int, payload, folder: Path) -> list:
    """Fork the ranks; their logs and results will be in ``folder``. Returns their processes."""
    processes = []
    for rank, environment in enumerate(environments(world, payload, folder)):
        environment[STORE] = f"file://{folder}/store?rank={rank}&world_size={world}"
        environment["LOCAL_RANK"] = str(rank)
        processes.append(SERVER.Process(target=_worker, args=(target, folder, environment)))
        processes[-1].start()
    return processes


def environments(world: int, payload, folder: Path) -> list[dict[str, str]]:
    """Of ranks of one job, whose payload is written to the folder."""
    (folder / "payload").write_bytes(pickle.dumps(payload))
    job = {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port())
    return [{"RANK": str(rank), "LOCAL_RANK": "0", **job} for rank in range(world)]


def run_ranks(
    target: str, *, world: int, payload=None, timeout: float = 300, after: float = 0.0
) -> list:
    """Call ``target`` ("module:function") with ``payload`` on ``world`` ranks; returns its results
    by rank. When one has died the others have ``after`` seconds to end by themselves.

    Raises:
        AssertionError: a rank died or timed out; the message ends with the ranks' output.
    """
    __tracebackhide__ = True  # of a failure only the ranks' output says something
    with tempfile.TemporaryDirectory() as name:
        processes = start_ranks(target, world=world, payload=payload, folder=Path(name))
        return results_of(processes, target, Path(name), timeout, after)


def results_of(processes: list, target: str, folder: Path, timeout: float, after: float) -> list:
    """Wait for processes of ranks, forked or started; see :func:`run_ranks`."""
    __tracebackhide__ = True
    results = [folder / f"result{rank}" for rank in range(len(processes))]
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [p.poll() if isinstance(p, subprocess.Popen) else p.exitcode for p in processes]
        if None not in codes:
            break
        ended = [r for r, code in zip(results, codes, strict=True) if code is not None]
        if not all(result.exists() for result in ended):
            # a dead rank leaves the others waiting for ever
            deadline = min(deadline, time.monotonic() + after)
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait() if isinstance(process, subprocess.Popen) else process.join()
    if not all(result.exists() for result in results):
        logs = [(path.name[3:], path.read_text()[-6000:]) for path in sorted(folder.glob("log*"))]
        told = [f"--- rank {rank}\n{text}" for rank, text in logs]
        raise AssertionError(f"{target} on {len(results)} ranks did not finish\n" + "\n".join(told))
    return [pickle.loads(result.read_bytes()) for result in results]


def bodies(calls: list[tuple[str, str, str, dict]]) -> dict[str, float]:
    """Run the bodies of several tests one after the other, with their engines destroyed in between;
    return what tests/close.py measured in each. See tests/rank_marks.py.

    Args:
        calls: for each test its id, its module, its function and its arguments.
    """
    import torch

    from tests.close import RATIOS
    from tests.deepspeed import runs

    for test, module, function, arguments in calls:
        os.environ["PYTEST_CURRENT_TEST"] = test
        print(f"running {test}")
        getattr(importlib.import_module(module), function)(**arguments)
        torch.set_default_dtype(torch.float32)
        runs.destroy_all()
    return RATIOS


def call_on_ranks(world: int, function, *arguments) -> None:
    """Call a function on so many ranks. What it asserts is asserted there."""
    from tests.close import record

    names = list(inspect.signature(function).parameters)
    given = dict(zip(names, arguments, strict=True))
    calls = [(function.__name__, function.__module__, function.__name__, given)]
    for ratios in run_ranks("tests.ranks:bodies", world=world, payload=calls):
        record(max(ratios.values(), default=0.0))


def of_ranks(value) -> list:
    """Return this value of every rank. Collective."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_0(action, *given):
    """Return to every rank what ``action`` returns on the first one, while the others wait.
    Collective."""
    import torch.distributed as dist

    found = [action(*given) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def run_alone(target: str, *, device: str, payload=None, timeout: float = 900):
    """:func:`run_ranks` for one rank in a process of its own on ``device``: "cuda" with NCCL, or
    "cpu" with gloo.

    A server that has looked for an accelerator cannot fork children for another one.
    """
    (found,) = run_apart(
        target, "tests.ranks:work_here", 1, device=device, payload=payload, timeout=timeout
    )
    return found


def run_apart(target: str, start: str, world: int, *, device: str, payload, timeout: float) -> list:
    """:func:`run_ranks` in processes that are not forked; ``start`` ("module:function") gets the
    target and the folder."""
    module, function = start.split(":")
    code = f"import sys; import {module} as own; own.{function}(sys.argv[1], sys.argv[2])"
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as name:
        processes = []
        for of_rank in environments(world, payload, Path(name)):
            environment = os.environ | of_rank | {"DS_ACCELERATOR": device, "PYTHONPATH": path}
            command = [sys.executable, "-c", code, target, name]
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
        return results_of(processes, target, Path(name), timeout, after=2.0)


def work_here(target: str, folder: str) -> None:
    """What :func:`run_alone` starts."""
    import tests.preload  # noqa: F401

    _worker(target, Path(folder), {"RANK": os.environ["RANK"]})


def ended(launch, *given, **named):
    """Wait for what is launched."""
    if (work := launch(*given, **named)) is not None:
        work.wait()
    return work


def init_deepspeed(backend: str = "") -> None:
    """gloo and no JIT-compiled CPU communication op (a killed build would block every later run);
    NCCL on a GPU.

    On a GPU products are in fp32, not TF32, as what they are compared with.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_kfac.zero import deepspeed_versions

    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # before 0.19.8 gloo cannot gather into its flat weights, views of which it has given away;
        # lists it can
        deepspeed.comm.has_all_gather_into_tensor = lambda: False
        if deepspeed_versions.gather_faults("gloo"):
            for name in ("all_gather", "all_gather_into_tensor"):
                setattr(deepspeed.comm, name, partial(ended, getattr(deepspeed.comm, name)))
    else:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(
        backend or ("gloo" if on_cpu else "nccl"), init_method=os.environ.pop(STORE, None)
    )


def _worker(target: str, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    rank = environment["RANK"]
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        module, function = target.split(":")
        payload = pickle.loads((folder / "payload").read_bytes())
        init_deepspeed()
        from ds_kfac.step import proving

        proving.RAISES = True  # here, whatever the server has imported
        result = getattr(importlib.import_module(module), function)(payload)
        temporary = folder / f"partial{rank}"
        temporary.write_bytes(pickle.dumps(result))
        import torch.distributed as dist

        dist.barrier()
        temporary.rename(folder / f"result{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
