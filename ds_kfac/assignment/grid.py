"""The KAISA grid (Pauloski et al. 2021): which ranks precondition a layer together, and who gets their result.

World W, g gradient workers a layer, p = W / g columns: rank r stands in column r % p and row r // p. A layer belongs to
a column, whose g ranks all precondition it; each hands its result to its row, p consecutive ranks, mostly of one node.
g = 1 is MEM-OPT, g = W COMM-OPT.
"""

from bisect import bisect_right

ROUNDING = 0.01
"""A fraction this close, relatively, to a valid one means it: 0.33 of 3 ranks."""


def worker_counts(world: int) -> tuple[int, ...]:
    """Every possible g: the divisors of ``world``, ascending."""
    return tuple(count for count in range(1, world + 1) if world % count == 0)


def workers_for(fraction: float, world: int) -> int:
    """g = max(1, fraction W).

    Raises:
        ValueError: outside 0..1, or g does not divide W; names the nearest fractions.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"gradient worker fraction: got {fraction}; must be between 0 and 1")
    wanted = max(1.0, fraction * world)
    counts = worker_counts(world)
    nearest = min(counts, key=lambda count: abs(count - wanted))
    if abs(nearest - wanted) <= ROUNDING * wanted:
        return nearest
    above = bisect_right(counts, wanted)
    options = " or ".join(f"{count / world:.6g} (g = {count})" for count in counts[above - 1 : above + 1])
    raise ValueError(
        f"gradient worker fraction: got {fraction}, which is {wanted:.6g} of {world} ranks; the number of workers must "
        f"divide {world}: {options}"
    )


def column(index: int, *, world: int, workers: int) -> tuple[int, ...]:
    """Ranks of a column, ascending, one per row."""
    return tuple(range(index, world, world // workers))
