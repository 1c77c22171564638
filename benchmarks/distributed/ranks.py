"""Ranks of the distributed benchmark: processes that talk over gloo, one thread each."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
PRELOAD = "benchmarks.distributed.preload"
"""Importing DeepSpeed takes seconds, once is enough.

Programs ask for it, not this module: tests have a server, too.
"""


def on_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 3600
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world`` ranks; return what it returned, by rank.

    Raises:
        RuntimeError: a rank died or did not finish in time; what it wrote is on stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the server starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pipes = [SERVER.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        SERVER.Process(
            target=_rank, args=(rank, world, port, pipe, function, arguments), daemon=True
        )
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process, (_, pipe) in zip(ranks, pipes, strict=True):
        process.start()
        pipe.close()  # this copy, or a dead rank would not be noticed
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while len(results) < world:
            waiting = {
                receiver: rank for rank, (receiver, _) in enumerate(pipes) if rank not in results
            }
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                late = f"ranks {sorted(waiting.values())} of {world} after {timeout} s"
                raise RuntimeError(f"{function.__name__}: {late}")
            for receiver in ready:
                rank = waiting[receiver]
                try:
                    results[rank] = receiver.recv()
                except EOFError:
                    raise RuntimeError(
                        f"{function.__name__}: rank {rank} of {world} died, see above"
                    ) from None
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, port: int, pipe: Connection, function: Callable, arguments: tuple
) -> None:
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        import deepspeed
        import torch

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # it would be compiled in every process
        )
        deepspeed.utils.logger.setLevel("ERROR")
        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo")
        result = function(*arguments)
        torch.distributed.barrier()
        pipe.send(result)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # interpreter shutdown now and then aborts in gloo's threads, after all work is done
