"""Which eigenproblems are solved in one call, on which stream, and which wait for memory. Pure."""

from collections.abc import Sequence

STACKED_UP_TO = 512
"""Widest blocks that share a call. A batched call was 110 times as fast as one by one for 500 x [100, 100] in fp32, 32
to 75 times for b = 33..128 in fp64 (pytorch issues 174674, 175585). Wider matrices fill the device sooner, and stacks
of them and their workspace take memory: they get streams. Not measured by us."""
STACK_NUMEL = 1 << 26
"""Elements of a stack at most (256 MB in fp32); the solver's workspace is a multiple of it."""
ROUND_NUMEL = 1 << 29
"""Elements of what is unpacked at once (2 GB in fp32), except for a single larger problem."""
LANES = 4
"""Streams at most. Each has a thread and a cuSOLVER handle, which takes up to 250 MB of the device (pika pull request
1234, where 4 handles were within 10 to 20 % of the best number, 8 to 16)."""

Call = tuple[int, ...]
"""Indices of problems that one call solves."""
Lanes = tuple[tuple[Call, ...], ...]
"""Calls of each stream, in order."""


def rounds(shapes: Sequence[tuple[int, int]], iterates: Sequence[bool]) -> list[Lanes]:
    """All problems, in rounds that follow each other.

    Args:
        shapes: (n, b) of each problem.
        iterates: whether it is a step of orthogonal iteration, which shares no call with exact decompositions.
    """
    found: list[Lanes] = []
    waiting: list[Call] = []
    numel = 0
    for call in sorted(_calls(shapes, iterates), key=lambda call: (-_cost(call, shapes), call)):
        more = _numel(call, shapes)
        if waiting and numel + more > ROUND_NUMEL:
            found.append(_lanes(waiting, shapes))
            waiting, numel = [], 0
        waiting.append(call)
        numel += more
    return [*found, _lanes(waiting, shapes)] if waiting else found


def _calls(shapes: Sequence[tuple[int, int]], iterates: Sequence[bool]) -> list[Call]:
    calls: list[Call] = []
    open_stacks: dict[tuple[bool, int], list[int]] = {}
    for index, (shape, iterate) in enumerate(zip(shapes, iterates, strict=True)):
        if shape[1] > STACKED_UP_TO:
            calls.append((index,))
            continue
        stack = open_stacks.setdefault((iterate, shape[1]), [])
        if stack and _numel((*stack, index), shapes) > STACK_NUMEL:
            calls.append(tuple(stack))
            stack.clear()
        stack.append(index)
    return calls + [tuple(stack) for stack in open_stacks.values()]


def _lanes(calls: Sequence[Call], shapes: Sequence[tuple[int, int]]) -> Lanes:
    """Heaviest first to the least loaded lane."""
    lanes: list[list[Call]] = [[] for _ in range(min(LANES, len(calls)))]
    loads = [0] * len(lanes)
    for call in calls:
        least = loads.index(min(loads))
        lanes[least].append(call)
        loads[least] += _cost(call, shapes)
    return tuple(map(tuple, lanes))


def _numel(call: Sequence[int], shapes: Sequence[tuple[int, int]]) -> int:
    return sum(shapes[index][0] * shapes[index][1] ** 2 for index in call)


def _cost(call: Call, shapes: Sequence[tuple[int, int]]) -> int:
    return sum(shapes[index][0] * shapes[index][1] ** 3 for index in call)
