"""Measure the state that K-FAC keeps on a rank."""

from dataclasses import is_dataclass
from typing import Any

from torch import Tensor


def bytes_in(*kept: Any) -> int:
    """Return the bytes of the tensors in dataclasses and sequences, each tensor once.

    A history's last value may be the average itself.
    """
    found, left = dict[int, int](), list(kept)
    while left:
        x = left.pop()
        if isinstance(x, Tensor):
            found[id(x)] = x.nbytes
        elif isinstance(x, list | tuple):
            left += x
        elif is_dataclass(x):
            left += vars(x).values()
    return sum(found.values())


def nbytes_of(kfac: Any) -> tuple[int, int]:
    """Bytes of a preconditioner's factors and eigenbases, and of its moments."""
    states = kfac.state.values()
    bases = bytes_in(*(side for state in states for side in (state.A, state.G)))
    return bytes_in(*kfac.curvature.factors.values()) + bases, bytes_in(
        *(state.moments for state in states)
    )
