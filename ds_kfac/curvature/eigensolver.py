"""Eigenproblems of many factors: one after the other on a CPU, on a GPU in stacks and over streams; and what is done
about those that fail.

A GPU is not filled by one small matrix, and ``torch.linalg.eigh`` waits for the device at its end (it reads whether it
converged), as cuSOLVER's large solver does in between. So streams of one thread would follow each other: every stream
has a thread. torch releases the GIL in the call and has a cuSOLVER handle per thread.

Shape suffixes: n blocks of width b.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_kfac.curvature.orthogonal_iteration import iterated
from ds_kfac.curvature.solver_batches import LANES, Call, rounds

GROUPED = frozenset({"cuda"})
"""Device types where problems are solved together."""
TOLERANCE = 1e-3
"""Of a decomposition by a GPU: far above fp32 rounding, far below what a wrong one shows."""

Method = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[n, b, b] in any float dtype -> (values fp32 [n, b], vectors fp32 [n, b, b])."""

Start = tuple[Tensor, Tensor]
"""(values [n, b], vectors [n, b, b])."""


@dataclass(frozen=True)
class Problem:
    """Blocks of one width, of one factor.

    Attributes:
        shape: (n, b).
        blocks: makes them, fp32 [n, b, b]; called when it is their turn, for they need memory.
        start: to take a step of orthogonal iteration from; None: exact.
    """

    shape: tuple[int, int]
    blocks: Callable[[], Tensor]
    start: Start | None = None


@dataclass(frozen=True)
class Solution:
    """The eigenbasis of one problem, and how it was found.

    Attributes:
        found: (values [n, b], vectors [n, b, b]); None when every rung of the ladder failed.
        how: whether it is exact.
        retries: attempts that failed.
    """

    found: tuple[Tensor, Tensor] | None
    how: Literal["eigh", "qr"]
    retries: int = 0


def grouped(device: torch.device) -> bool:
    """Whether to batch eigenproblems on this device."""
    return device.type in GROUPED


def solve(problems: Sequence[Problem], method: Method, device: torch.device) -> list[Solution]:
    """In the order given. On a CPU each for itself, so that a result does not depend on what else is solved."""
    if not grouped(device):
        return [_alone(problem.blocks(), problem.start, method) for problem in problems]
    load_solvers(device)
    found: dict[int, Solution] = {}
    for lanes in rounds([problem.shape for problem in problems], [problem.start is not None for problem in problems]):
        # Here, not in the lanes: what unpacking caches belongs to this stream.
        blocks = {index: problems[index].blocks() for lane in lanes for call in lane for index in call}

        def run(lane: Sequence[Call], blocks: dict[int, Tensor] = blocks) -> dict[int, Solution]:
            results: dict[int, Solution] = {}
            for call in lane:
                parts, starts = [blocks[index] for index in call], [problems[index].start for index in call]
                results |= zip(call, _together(parts, starts, method), strict=True)
            return results

        for part in _in_lanes(lanes, run, device):
            found |= part
    return [found[index] for index in range(len(problems))]


def _alone(blocks: Tensor, start: Start | None, method: Method, *, retries: int = 0) -> Solution:
    if start is not None:
        found = _tried(blocks, lambda: iterated(blocks, start[1], start[0]), exact=False)
        if found is not None and all(found[1]):
            return Solution(found[0], "qr", retries)
        retries += 1
    exactly, failures = climb(blocks, method)
    return Solution(exactly, "eigh", retries + failures)


def _together(parts: Sequence[Tensor], starts: Sequence[Start | None], method: Method) -> list[Solution]:
    """Equally wide problems in one call; those it fails for once more, each for itself."""
    stack = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    given = [start for start in starts if start is not None]
    if given:
        values, vectors = (torch.cat(list(pieces)) for pieces in zip(*given, strict=True))
        found = _tried(stack, lambda: iterated(stack, vectors, values), exact=False)
    else:
        found = _tried(stack, lambda: method(stack))
    solutions, first = [], 0
    for part in parts:
        last = first + len(part)
        if found is not None and all(found[1][first:last]):
            # A copy: a view would keep the whole stack in memory, and in checkpoints, as long as any of them.
            pieces = [of.clone() if len(parts) > 1 else of for of in (x[first:last] for x in found[0])]
            solutions.append(Solution((pieces[0], pieces[1]), "qr" if given else "eigh"))
        else:
            solutions.append(_alone(part, None, method, retries=bool(given)))
        first = last
    return solutions


def rungs(blocks: Tensor) -> list[Callable[[], Tensor]]:
    """What is tried on failure: as given, in float64, in float64 on the CPU."""
    elsewhere = [lambda: blocks.double().cpu()] if blocks.device.type != "cpu" else []
    return [lambda: blocks, blocks.double, *elsewhere]


def climb(blocks: Tensor, method: Method) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """Up the ladder of :func:`rungs`. Returns what was found and failures.

    The input is checked by the caller (LAPACK returns NaN for NaN without a word, cuSOLVER raises or does not).
    """

    def at(rung: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        values, vectors = method(rung())
        return values.to(blocks.device), vectors.to(blocks.device)

    ladder = rungs(blocks)
    for failures, rung in enumerate(ladder):
        found = _tried(blocks, functools.partial(at, rung))
        if found is not None and all(found[1]):
            return found[0], failures
    return None, len(ladder)


def _tried(
    blocks: Tensor, attempt: Callable[[], tuple[Tensor, Tensor]], *, exact: bool = True
) -> tuple[tuple[Tensor, Tensor], list[bool]] | None:
    """What was found and, per block, whether it can be right; None if it raised. Synchronises once."""
    try:
        values, vectors = attempt()
        right = torch.isfinite(values).all(-1) & torch.isfinite(vectors).flatten(1).all(-1)
        if grouped(blocks.device):
            right &= credible(blocks, values, vectors, exact=exact)
        return (values, vectors), right.tolist()
    except RuntimeError:  # LinAlgError, cuSOLVER's own, out of memory: the next way is more exact, smaller or elsewhere
        return None


def probe(blocks: Tensor) -> Tensor:
    """The vector that results are checked with, fp32 [b]: no pattern of its own."""
    return torch.cos(1.0 + torch.arange(blocks.shape[-1], device=blocks.device, dtype=torch.float32) ** 2)


def credible(blocks: Tensor, values: Tensor, vectors: Tensor, *, exact: bool) -> Tensor:
    """Bool [n]: whether Q Q^T x = x and, of an exact one, Q^T C x = diag(values) Q^T x, for one x (Freivalds' check).

    torch.linalg.eigh has returned vectors that are not orthogonal from a GPU without an error (pytorch issue 192483).
    Elementwise, O(b^2): no product that TF32 could touch.
    """
    x = probe(blocks)
    turned = (vectors * x.unsqueeze(-1)).sum(-2)
    right = ((vectors * turned.unsqueeze(-2)).sum(-1) - x).norm(dim=-1) <= TOLERANCE * x.norm()
    if not exact:
        return right
    image = (blocks * x).sum(-1)
    off = (vectors * image.unsqueeze(-1)).sum(-2) - values * turned
    return right & (off.norm(dim=-1) <= TOLERANCE * blocks.flatten(1).norm(dim=-1) * x.norm())


def _in_lanes(
    lanes: Sequence[Sequence[Call]], run: Callable[[Sequence[Call]], dict[int, Solution]], device: torch.device
) -> list[dict[int, Solution]]:
    """The first lane here, every other one on a thread and, on a GPU, a stream of its own."""
    if len(lanes) == 1:
        return [run(lanes[0])]
    streams: Sequence[torch.cuda.Stream | None] = [None] * len(lanes)
    ready: torch.cuda.Event | None = None
    ends: list[torch.cuda.Event] = []
    if device.type == "cuda":
        streams, ready = _streams(device, threading.get_ident()), torch.cuda.current_stream(device).record_event()

    def in_lane(number: int) -> dict[int, Solution]:
        stream = streams[number]
        with torch.no_grad(), torch.cuda.stream(stream):  # both belong to a thread; None is no stream
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            found = run(lanes[number])
            if stream is not None:
                ends.append(stream.record_event())
        return found

    with ThreadPoolExecutor(len(lanes) - 1, thread_name_prefix="ds_kfac solver") as pool:
        others = [pool.submit(in_lane, number) for number in range(1, len(lanes))]
        found = [run(lanes[0]), *(other.result() for other in others)]
    for end in ends:
        torch.cuda.current_stream(device).wait_event(end)
    if ends:
        for solution in (solution for part in found[1:] for solution in part.values()):
            for tensor in solution.found or ():  # allocated in another stream, to be freed only after this one's use
                tensor.record_stream(torch.cuda.current_stream(device))
    return found


@functools.cache
def _streams(device: torch.device, caller: int) -> tuple[torch.cuda.Stream, ...]:
    """Of a calling thread's lanes, the same ones each time: memory that the allocator caches belongs to a stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(LANES))


_LOADING = threading.Lock()


@functools.cache
def _loaded(device: torch.device) -> None:
    torch.linalg.eigh(torch.ones(1, 1, 1, device=device))


def load_solvers(device: torch.device) -> None:
    """torch loads its CUDA solvers at the first call, and fails if two threads make it (pytorch issue 90613)."""
    if device.type == "cuda":
        with _LOADING:
            _loaded(device)
