"""The Triton divisions by damped eigenvalues, interpreted, against float64 on odd sizes with poisoned outputs."""

import pytest
import torch

from ds_kfac.ops.guarded import NotMadeFor
from tests.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")

SHAPES = [(1, 1), (2, 63), (33, 129), (63, 2), (129, 65), (9, 257)]


@pytest.fixture(scope="module")
def scale():
    with interpreted("eigen_scale", "corrected_scale", "elementwise") as modules:
        yield modules


def inputs(rows: int, columns: int, transposed: bool):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = (
        torch.randn(columns, rows, generator=generator).T
        if transposed
        else torch.randn(rows, columns, generator=generator)
    )
    return x, torch.rand(rows, generator=generator), torch.rand(columns, generator=generator)


def dots(x, scaled, split):
    return torch.stack([(x * scaled)[:, :split].sum(), (x * scaled)[:, split:].sum()])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("exponent", [1.0, 0.5, 0.3])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_eigen_scale_dot_against_float64(scale, rows, columns, exponent, transposed, poisoned):
    x, values_O, values_I = inputs(rows, columns, transposed)
    expected = x.double() / (torch.outer(values_O.double(), values_I.double()) + 0.1) ** exponent
    actual, sums = scale[0].eigen_scale_dot(
        x, values_O, values_I, torch.tensor(0.1), exponent=exponent, split=columns - 1
    )
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(sums.double(), dots(x.double(), expected, columns - 1), rtol=1e-5, atol=1e-5)
    assert transposed == (actual.stride(0) == 1 and rows > 1) or min(rows, columns) == 1


def test_without_a_split_the_first_dot_has_all(scale, poisoned):
    x, values_O, values_I = inputs(33, 65, False)
    actual, sums = scale[0].eigen_scale_dot(x, values_O, values_I, 0.1)
    assert torch.equal(actual, scale[0].eigen_scale(x, values_O, values_I, 0.1))
    torch.testing.assert_close(sums, torch.stack([(x * actual).sum(), torch.zeros(())]))


def test_a_view_with_other_strides_gives_the_same(scale, poisoned):
    x, values_O, values_I = inputs(33, 65, False)
    expected = scale[0].eigen_scale(x, values_O, values_I, 0.1)
    wide = torch.full((33, 70), float("nan"))
    wide[:, :65] = x
    both = torch.full((66, 130), float("nan"))
    both[::2, ::2] = x
    for view in (wide[:, :65], both[::2, ::2]):
        assert torch.equal(scale[0].eigen_scale(view, values_O, values_I, 0.1), expected)


@pytest.mark.parametrize("moments_transposed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_corrected_scale_dot_against_float64(scale, rows, columns, transposed, moments_transposed, poisoned):
    x, values_O, values_I = inputs(rows, columns, transposed)
    second = torch.outer(values_O, values_I)
    second = second.T.contiguous().T if moments_transposed else second
    r, terms, damping = 0.9, 7.0, 0.01
    new = r * second.double() + (1 - r) * terms * x.double() ** 2
    expected, before = x.double() / (new + damping) ** 0.5, second.clone()
    actual = scale[1].corrected_scale_dot(
        x, second, torch.tensor(r), torch.tensor(terms), damping, exponent=0.5, split=columns - 1
    )
    torch.testing.assert_close(actual[0].double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(actual[1].double(), new, rtol=2e-6, atol=0)
    assert torch.equal(second, before)
    torch.testing.assert_close(actual[2].double(), dots(x.double(), expected, columns - 1), rtol=1e-5, atol=1e-5)


def test_weight_one_keeps_the_moments_whatever_the_gradient(scale, poisoned):
    x, second = torch.full((5, 7), float("inf")), torch.rand(5, 7)
    assert torch.equal(scale[1].corrected_scale_dot(x, second, 1.0, 3.0, 0.1)[1], second)


def test_wrong_arguments_are_named(scale):
    with pytest.raises(ValueError, match=r"values of \(2,\) and \(3,\) do not fit \(2, 2\)"):
        scale[0].eigen_scale(torch.zeros(2, 2), torch.zeros(2), torch.zeros(3), 1.0)
    with pytest.raises(NotMadeFor, match=r"fp32 matrix that is not empty, got torch.bfloat16 \(2, 2\)"):
        scale[0].eigen_scale(torch.zeros(2, 2).bfloat16(), torch.zeros(2), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"second moments of \(3, 2\) do not fit \(2, 2\)"):
        scale[1].corrected_scale_dot(torch.zeros(2, 2), torch.zeros(3, 2), 0.5, 1.0, 1.0)
    with pytest.raises(NotMadeFor, match=r"fp32 with a contiguous side, got torch.float32 \(2, 2\) strides \(2, 1\)"):
        scale[1].corrected_scale_dot(torch.zeros(2, 2), torch.zeros(4, 4)[::2, ::2], 0.5, 1.0, 1.0)
