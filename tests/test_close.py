"""What tests/close.py allows: other orders of sums, and no more."""

import math
from functools import partial, reduce

import pytest
import torch

from tests.close import RATIOS, close, exact, near


@pytest.fixture(autouse=True)
def apart():
    """These ratios are no comparisons of ours."""
    before = dict(RATIOS)
    yield
    RATIOS.clear()
    RATIOS.update(before)


def ratio(*args, **terms):
    RATIOS.clear()
    try:
        close(*args, **terms)
    except AssertionError:
        pass
    (found,) = RATIOS.values()
    return found


@pytest.mark.parametrize("length", [7, 301, 10007])
def test_orders_of_a_sum_stay_below_a_quarter_of_what_is_allowed(length):
    x = torch.randn(401, length, generator=torch.Generator().manual_seed(length))
    order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    # one term after another: no library sums in a worse order
    one, other = (reduce(torch.add, terms.unbind(1)) for terms in (x, x[:, order]))
    assert 0 < ratio(one, other, sums=length) < 0.25
    assert ratio(one, x.double().sum(1), sums=length) < 0.25


def test_a_term_of_a_sum_left_out_is_outside():
    x = torch.ones(1000)
    assert ratio(x[1:].sum(), x.sum(), sums=1000) > 1


def test_the_bound_is_of_the_coarser_format_and_scales_with_every_term():
    wanted = torch.tensor([1.0, 3.0])
    off = wanted.double() + torch.tensor([0.0, 2**-20])
    plain = 2**-20 / (8 * 2**-23 * 3)
    for expected, terms, factor in (
        (wanted, {}, 1),
        (wanted.double(), {"dtype": torch.float32}, 1),
        (wanted, {"sums": 4}, 1 / 2),
        (wanted, {"condition": 2}, 1 / 2),
        (wanted, {"scale": 6.0}, 1 / 2),
        (wanted, {"scale": wanted.abs()}, 1),
        (wanted, {"scale": 1.0}, 3),
        (wanted.bfloat16(), {}, 2**-16),
    ):
        assert ratio(off, expected, **terms) == plain * factor, terms
    assert ratio(off[1].item(), 3.0) > 1e8
    close(torch.zeros(3), torch.zeros(3))
    assert ratio(torch.full((3,), 1e-30), torch.zeros(3)) == math.inf, "zero allows zero only"


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("compare", "actual", "expected", "message"),
    [
        *((kind, [NAN, NAN, INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        *((kind, [1.0, 2.0, INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        *((kind, [1.0, NAN, -INF], [1.0, NAN, INF], "") for kind in (close, exact)),
        (partial(near, bound=5.0, because="a test"), NAN, 1.0, ""),
        (close, {"a": 1.0}, {"b": 1.0}, ""),
        (close, [1.0], [1.0, 2.0], ""),
        (close, torch.ones(1), torch.ones(1, 1), "shape"),
        (close, None, 1.0, ""),
        (exact, torch.ones(1), torch.ones(1).bfloat16(), "bfloat16"),
        (
            partial(near, bound=0.1, because="noise", what="case"),
            [1.0, 2.0],
            [1.0, 3.0],
            r"case\[1\]: element 0 is 2, expected 3, allowed 1\.00e-01 \(noise\); 10 of",
        ),
        (partial(near, bound=0.1, because=""), 1.0, 1.0, "say what"),
    ],
)
def test_what_is_not_alike_is_told(compare, actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        compare(actual, expected)


def test_structures_and_numbers_that_are_not_finite_may_be_alike():
    for compare in (close, exact):
        compare({"a": [1.0, (2.0, None)]}, {"a": [1.0, (2.0, None)]})
        compare(torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF]))
