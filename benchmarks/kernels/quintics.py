"""Coefficients of Newton-Schulz steps that are minimax for a number of steps.

    python -m benchmarks.kernels.quintics [--steps 3 4 5] [--smallest 1e-3]

A step is an odd quintic p(x) = x (a + b x^2 + c x^4) of the singular values. Of all compositions of
so many the one that minimises max |1 - x| over singular values in [smallest, 1] takes in each step
the quintic that is nearest to 1 on the interval that is left, which equioscillates: |1 - p| is the
same at both ends and at both extrema between them, in turn below and above (Amsel et al. 2025,
Polar Express, arXiv:2505.16932).

Two margins, theirs too. An interval's lower end is taken to be at least CUSHION of the upper one:
with a smaller one a quintic is nearly 0 somewhere above it, and what has been rounded stays small.
And every step but the last is scaled for an interval 1 % longer, as 16 bits, and the Gram form's
squares, round a singular value of 1 to something above.
"""

import argparse
from collections.abc import Sequence

import numpy as np

CUSHION, MARGIN = 0.024, 1.01
SMALLEST = {3: 1e-2, 4: 3e-3, 5: 1e-3}
"""By steps: what they lift to 0.73, 0.79 and 0.88 at least."""
Row = tuple[float, float, float]


def value(row: Row, x: np.ndarray) -> np.ndarray:
    """p(x)."""
    a, b, c = row
    return x * (a + b * x**2 + c * x**4)


def nearest(lower: float, upper: float) -> tuple[Row, float]:
    """The odd quintic nearest to 1 on [lower, upper], and its largest distance from it; by Remez'
    exchange."""
    points = np.array([lower, (3 * lower + upper) / 4, (lower + 3 * upper) / 4, upper])
    signs, error = np.array([1.0, -1.0, 1.0, -1.0]), np.inf
    while True:
        a, b, c, found = np.linalg.solve(
            np.stack([points, points**3, points**5, signs], axis=1), np.ones(4)
        )
        if not abs(found - error) > 1e-14:  # 1e-14: rounding of what is of the size of 1
            return (float(a), float(b), float(c)), float(found)
        error = found
        root = np.sqrt(9 * b**2 - 20 * a * c)
        points[1:3] = np.sqrt((-3 * b - root) / (10 * c)), np.sqrt((-3 * b + root) / (10 * c))


def rows(steps: int, smallest: float) -> tuple[list[Row], float]:
    """A row a step, and where the smallest singular value ends: all others are between it and 2
    minus it."""
    lower, upper, found = smallest, 1.0, list[Row]()
    for step in range(steps):
        row, _ = nearest(max(lower, CUSHION * upper), upper)
        low, high = value(row, np.array([lower, upper]))
        row = tuple(2 / (low + high) * part for part in row)  # with the margins, around 1 again
        lower = float(value(row, np.array(lower)))
        upper = 2 - lower
        margin = MARGIN if step < steps - 1 else 1.0
        found.append((row[0] / margin, row[1] / margin**3, row[2] / margin**5))
    return found, lower


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", type=int, default=list(SMALLEST))
    parser.add_argument(
        "--smallest", type=float, help=f"singular value; default by steps: {SMALLEST}, else 1e-3"
    )
    arguments = parser.parse_args(argv)
    for steps in arguments.steps:
        smallest = arguments.smallest or SMALLEST.get(steps, 1e-3)
        found, lower = rows(steps, smallest)
        print(f"{steps} steps: {smallest:g} .. 1 -> {lower:.3f} .. {2 - lower:.3f}")
        print("\n".join(f"    ({a:.4f}, {b:.4f}, {c:.4f})," for a, b, c in found))


if __name__ == "__main__":
    main()
