"""How close two floating-point results must be: from what was computed, never from what one
processor shows.

Processors, libraries and numbers of threads add the same terms in other orders. :func:`close`
allows what that can change, stated at the call in terms of the computation; :func:`exact` is for
the same code on the same data; :func:`near` is for what differs by more than rounding (a sample's
noise, a format's size), with its reason in words. Whole runs of engines, where no such count of
operations exists, have tests/spread.py.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

FACTOR = 8.0
"""Roundings are independent and at most eps / 2, of variance eps^2 / 12. A sum of n terms makes n
of them, each relative to a partial sum no larger than the scale: two orders of summation differ by
sqrt(n / 6) eps, the largest of 10^6 elements by five times that, 2 sqrt(n) eps (Higham and Mary
2019, doi:10.1137/18M1226312, have the same sqrt(n)). Times four: a processor that does worse than
any seen still passes, and a test is near its bound long before it fails.
"""

RATIOS: dict[str, float] = {}
"""Test -> largest difference it met / allowed; conftest and tests/processors.py print
it."""


def close(
    actual: Any,
    expected: Any,
    *,
    sums: float = 1,
    condition: Any = 1.0,
    scale: Any = None,
    dtype: torch.dtype | None = None,
    what: str = "",
) -> None:
    """Two computations of one number agree up to rounding.

        |actual - expected| <= 8 eps sqrt(sums) condition scale

    Args:
        actual, expected: tensors, numbers, or lists, tuples and dicts of these; of equal shapes,
            compared in float64.
        sums: terms added one after another on the way to one element, the lengths of all sums of a
            chain together: D for a product over D, O + I for Q_G^T W Q_A; k for k elementwise
            operations one after another.
        condition: by how much the result moves, relatively, when what it is made of moves by 1: of
            a solved matrix its condition number, of a power its exponent, of 1 - x for x near 1 its
            inverse.
        scale: what a rounding is relative to; None: the largest finite |expected|. The size of the
            terms where they cancel, ``expected.abs()`` where every element is relative to itself.
        dtype: the coarsest format that was computed in; None: the coarser one of the two results.
            Numbers of Python are float64: pass the tensor, not ``float(tensor)``.
        what: words for the message, as the case of a loop.
    """
    for path, a, e in _pairs(actual, expected, what):
        eps = torch.finfo(dtype).eps if dtype else max(_eps(a), _eps(e))
        a, e = (torch.as_tensor(x, dtype=torch.float64) for x in (a, e))
        finite = e.isfinite()
        exact(a[~finite], e[~finite], what=f"{path} where not finite")
        largest = e[finite].abs().max() if finite.any() else 0.0
        size = torch.as_tensor(largest if scale is None else scale, dtype=torch.float64)
        bound = FACTOR * eps * math.sqrt(sums) * torch.as_tensor(condition).double() * size
        terms = f"eps {eps:.1e}, sums {sums:g}"
        ratio, message = _largest(path, a, e, bound, finite, terms)
        record(ratio)
        assert ratio <= 1, message


def exact(actual: Any, expected: Any, *, what: str = "") -> None:
    """The same code on the same data: equal in every element, NaN where NaN is; same shapes, same
    dtypes of tensors."""
    for path, a, e in _pairs(actual, expected, what):
        if isinstance(a, Tensor) and isinstance(e, Tensor):
            assert a.dtype == e.dtype, f"{path}: {a.dtype}, expected {e.dtype}"
        a, e = torch.as_tensor(a), torch.as_tensor(e)
        differ = ~((a == e) | ((a != a) & (e != e)))
        assert not differ.any(), (
            f"{path}: {int(differ.sum())} of {differ.numel()} elements differ: {a}, expected {e}"
        )


def near(actual: Any, expected: Any, bound: Any, because: str, *, what: str = "") -> None:
    """|actual - expected| <= bound for a reason that is not rounding.

    Args:
        bound: absolute; a tensor is elementwise.
        because: what makes the difference, and why it is no larger.
    """
    assert because, "say what makes the difference"
    for path, a, e in _pairs(actual, expected, what):
        a, e, limit = (torch.as_tensor(x, dtype=torch.float64) for x in (a, e, bound))
        everywhere = torch.ones_like(e, dtype=torch.bool)
        ratio, message = _largest(path, a, e, limit, everywhere, because)
        assert ratio <= 1, message


def polar_condition(x: Tensor) -> Tensor:
    """``condition`` of an orthogonal factor: |x| / smallest singular value (Higham 1986,
    doi:10.1137/0907079).

    Args:
        x: [..., M, N], of full rank.

    Returns float64 [..., 1, 1].
    """
    values = torch.linalg.svdvals(x.detach().double())
    return (values.norm(dim=-1) / values[..., -1])[..., None, None]


def record(ratio: float) -> None:
    """Keep the largest difference / allowed of the running test for the summary."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    RATIOS[test] = max(RATIOS.get(test, 0.0), ratio)


def _pairs(actual: Any, expected: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, Mapping):
        alike = isinstance(actual, Mapping) and actual.keys() == expected.keys()
        assert alike, f"{path}: {actual}, expected {expected}"
        for key in expected:
            yield from _pairs(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        alike = isinstance(actual, list | tuple) and len(actual) == len(expected)
        assert alike, f"{path}: {actual}, expected {expected}"
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            yield from _pairs(*pair, f"{path}[{index}]")
    elif expected is None or actual is None:
        assert actual is expected, f"{path}: {actual}, expected {expected}"
    else:
        shapes = [tuple(getattr(x, "shape", ())) for x in (actual, expected)]
        assert shapes[0] == shapes[1], f"{path}: shape {shapes[0]}, expected {shapes[1]}"
        yield path, *(x.detach() if isinstance(x, Tensor) else x for x in (actual, expected))


def _eps(x: Any) -> float:
    is_array = isinstance(x, Tensor) or hasattr(x, "__array__")
    dtype = torch.as_tensor(x).dtype if is_array else torch.float64
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _largest(
    path: str, actual: Tensor, expected: Tensor, bound: Tensor, where: Tensor, terms: str
) -> tuple[float, str]:
    """Largest |actual - expected| / bound, and a message; 0 / 0 is 0, and NaN is as far as can
    be."""
    difference = (actual - expected).abs()
    if not difference.numel():
        return 0.0, ""
    bound = bound.to(difference.device).expand_as(difference)
    ratios = torch.where(where & (difference != 0), difference / bound, 0.0)
    ratios = ratios.nan_to_num(math.inf, math.inf)
    worst = int(ratios.argmax())
    a, e, allowed, ratio = (float(x.flatten()[worst]) for x in (actual, expected, bound, ratios))
    values = f"element {worst} is {a:.9g}, expected {e:.9g}, allowed {allowed:.2e}"
    return ratio, f"{path}: {values} ({terms}); {ratio:.3g} of that"
