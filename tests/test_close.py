"""What tests/close.py allows: other orders of sums, and no more."""

import math
from functools import reduce

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


def test_nan_and_infinity_must_be_where_they_are_expected():
    values = torch.tensor([1.0, math.nan, math.inf])
    close(values, values)
    exact(values, values)
    for other in ([math.nan, math.nan, math.inf], [1.0, 2.0, math.inf], [1.0, math.nan, -math.inf]):
        for compare in (close, exact):
            with pytest.raises(AssertionError):
                compare(torch.tensor(other), values)
    with pytest.raises(AssertionError):
        near(math.nan, 1.0, 5.0, "a test")


def test_parts_shapes_and_formats_must_agree():
    close({"a": [1.0, (2.0, None)]}, {"a": [1.0, (2.0, None)]})
    for actual, expected in [
        ({"a": 1.0}, {"b": 1.0}),
        ([1.0], [1.0, 2.0]),
        (torch.ones(1), torch.ones(1, 1)),
        (None, 1.0),
    ]:
        with pytest.raises(AssertionError):
            close(actual, expected)
    with pytest.raises(AssertionError, match="bfloat16"):
        exact(torch.ones(1), torch.ones(1).bfloat16())
    message = r"case\[1\]: element 0 is 2, expected 3, allowed 1\.00e-01 \(noise\); 10 of"
    with pytest.raises(AssertionError, match=message):
        near([1.0, 2.0], [1.0, 3.0], 0.1, "noise", what="case")
    with pytest.raises(AssertionError, match="say what"):
        near(1.0, 1.0, 0.1, "")
