"""How far rounding alone moves a run: what a comparison with tests/oracle.py may differ by, on this
machine.

A number that was measured on one processor is no bound on another: another instruction set sums in
another order, and a nearly singular factor, equal eigenvalues or Adam's division by a small moment
make a thousand roundings out of one. So the reference itself is run again, with its rows in other
orders and in float64, in the same process; the farthest of these runs, times :data:`FACTOR`, is the
bound.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.close import record

PERMUTATIONS = 4
FACTOR = 10.0
"""An engine rounds where the reference does not (micro-batches, packed sums, the wire, a
decomposition of its own) and each of a table's many cases is one draw of a distribution with long
tails, of which the spread is the largest of five. On one machine 180 engine modes were 0.4 to 2.9
spreads away, a wrong sign is 200 or more: see tests/test_comparisons.py."""
FLOOR = 2e-6
"""16 roundings in fp32, relative to how far training moved: where the order of the rows happens to
change nothing."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Variation:
    """One more run of the same mathematics.

    Attributes:
        order: seed of a permutation of every batch's rows; None: as they come.
        exact: all of it in float64.
        rounded: with the roundings to 16 bits that an engine has and the reference has not: of each
            micro-batch's gradient, of their sum, of results that travel.
    """

    order: int | None = None
    exact: bool = False
    rounded: bool = False

    def rows(self, *parts: Tensor | None) -> tuple:
        """Tensors of one batch, in this run's order of their first dimension."""
        if self.order is None:
            return parts
        size = next(len(part) for part in parts if part is not None)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.order))
        return tuple(None if part is None else part[order.to(part.device)] for part in parts)

    def dtype(self, plain: torch.dtype) -> torch.dtype:
        return torch.float64 if self.exact else plain


PLAIN = Variation()
OTHERS = (*(Variation(order=seed) for seed in range(1, PERMUTATIONS + 1)), Variation(exact=True))
IN_16_BITS = (*OTHERS, Variation(rounded=True))


@dataclass(frozen=True)
class Expected:
    """Weights of the plain run, how far the others were from it, and what anything else may differ
    by."""

    weights: dict[str, Tensor]
    spread: float

    @property
    def bound(self) -> float:
        return FACTOR * self.spread + FLOOR


def difference(actual: Weights, expected: Weights, initial: Weights) -> float:
    """Largest over parameters of |actual - expected|, relative to how far training moved all of
    them.

    Args:
        actual: may be a part of the parameters, as a rank of a pipeline has.
    """
    moved = torch.cat(
        [(expected[n].double() - initial[n].double()).flatten() for n in expected]
    ).norm()
    return max(float((actual[n].double() - expected[n].double()).norm() / moved) for n in actual)


def within(where: str, value: float, bound: float) -> list[str]:
    """What to complain about; the ratio is kept for the summary."""
    record(value / bound)
    return [] if value <= bound else [f"{where}: differs by {value:.2e}, allowed {bound:.2e}"]


def expected(
    train: Callable[[Variation], Weights], initial: Weights, others: Iterable[Variation] = OTHERS
) -> Expected:
    """The result of ``train``, with its spread over other runs. It gets its weights from outside:
    what it draws itself differs in the run in float64."""
    plain = train(PLAIN)
    runs = []
    for variation in others:
        with in_float64() if variation.exact else contextlib.nullcontext():
            runs.append(train(variation))
    spread = max(difference(run, plain, initial) for run in runs)
    return Expected({name: value.float() for name, value in plain.items()}, spread)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """New tensors are float64, and ``.float()`` gives float64: what was written for fp32 runs in
    float64.

    Autocast leaves float64 alone. Random numbers must be drawn in a dtype that is named.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    assert "float" not in vars(torch.Tensor), "one at a time"
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.Tensor.float
        torch.set_default_dtype(before)
