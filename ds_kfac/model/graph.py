"""Autograd's graph: names of nodes, what they keep, and walks from a tensor to what it was computed from."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Edge = tuple[int, int]
"""A tensor in a graph: (its node's sequence number, index of the node's output). torch's GradientEdge would hold the
graph."""


def edge_of(x: Tensor) -> Edge:
    """Of a tensor that has a graph."""
    assert x.grad_fn is not None, "a leaf has no node"
    return x.grad_fn._sequence_nr(), x.output_nr


def kind_of(node: Any) -> str:
    """A node's name without "Backward"; "" of a function of a user's."""
    return "" if isinstance(node, torch.autograd.function.BackwardCFunction) else node.name().split("Backward")[0]


def inputs_of(node: Any) -> Iterator[tuple[Any, int, Shape]]:
    """The nodes that made a node's operands, which of their outputs each is, and its shape."""
    for below, output in node.next_functions:
        if below is not None and output < len(metadata := getattr(below, "_input_metadata", ())):
            yield below, output, tuple(metadata[output].shape)


def under(node: Any, goes: Callable[[Any, Shape], bool]) -> Iterator[Any]:
    """A node and those under it, each once, as far as ``goes``, asked with a node and its result's shape, says so."""
    visited, waiting = set[Any](), [node]
    while waiting:
        if (node := waiting.pop()) is None or node in visited:
            continue
        visited.add(node)
        yield node
        waiting += [below for below, _, shape in inputs_of(node) if goes(below, shape)]


def operands(node: Any, result: Shape) -> list[tuple[Any, Shape]]:
    """The nodes of the operands that are neither constants nor parameters, and the operands' shapes. Those of the
    ``result``'s shape go first, then those with as many dimensions: others are repeated, as the weights of an average.
    """
    found = [(below, shape) for below, _, shape in inputs_of(node) if "AccumulateGrad" not in below.name()]
    return sorted(found, key=lambda pair: (pair[1] != result, len(pair[1]) != len(result)))


def operand(node: Any, result: Shape) -> tuple[Any, Shape]:
    """The first of :func:`operands`; (None, ()) where there is none."""
    return next(iter(operands(node, result)), (None, ()))


def made_of(
    losses: Iterable[Tensor], oldest: int, *, without: Collection[Edge] = (), ends: Collection[Edge] = ()
) -> set[Edge]:
    """What losses are computed from, themselves included, other than through ``without`` or what lies behind ``ends``.
    A node's operands are older than the node: what is older than the sequence number ``oldest`` is left out."""
    found, waiting = set(without), list[tuple[Any, int]]((x.grad_fn, x.output_nr) for x in losses)
    while waiting:
        node, output = waiting.pop()
        if (edge := (node._sequence_nr(), output)) in found or edge[0] < oldest:
            continue
        found.add(edge)
        if edge not in ends:
            waiting += [(below, at) for below, at in node.next_functions if below is not None]
    return found.difference(without)


def is_scalar(value: Tensor) -> bool:
    """Whether a tensor is a view of a scalar: a loss of shape [1, 1], and no prediction."""
    node: Any = value.grad_fn if value.numel() == 1 else None
    while node is not None and node._input_metadata and prod(node._input_metadata[0].shape) == 1:
        if not node._input_metadata[0].shape:
            return True
        node = next((below for below, _ in node.next_functions if below is not None), None)
    return False


def saved(node: Any, name: str) -> Any:
    """What a node keeps; None if nothing, if it was changed in place, or if unpacking it would compute it again, as in
    a checkpoint."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    with suppress(RuntimeError):
        return getattr(node, f"_saved_{name}")
    return None


def label_count(node: Any) -> Tensor | None:
    """How many labels of torch's negative log-likelihood have a loss."""
    target = saved(node, "target")
    return None if target is None else (target != signed(node._saved_ignore_index)).sum()


def number(x: Any) -> float:
    """Of one element on the host. Of a number that autograd keeps item() raises under a counter of FLOPs."""
    return float(x.tolist() if getattr(x, "ndim", None) == 0 else x)


def signed(value: int) -> int:
    """torch shows -1 as 2^64 - 1."""
    return value - 2**64 if value >= 2**63 else value


def runs(node: Any) -> bool:
    """Whether the running backward runs a node; of a parameter's, whether it adds to its gradient, as autograd.grad and
    other ``inputs`` do not."""
    with suppress(RuntimeError):  # autograd.grad with its tensor among the inputs: the gradient goes to the caller
        return bool(torch._C._will_engine_execute_node(node))
    return False
