"""The Triton kernels over a layer's matrix, interpreted, against float64 on odd sizes with poisoned outputs."""

import pytest
import torch

from ds_kfac.ops.check import NotMadeFor
from tests.close import close
from tests.ops.test_ops_layers import adam_wanted
from tests.ops.triton_tools import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")

SHAPES = [(1, 1), (2, 63), (33, 129), (63, 2), (129, 65), (9, 257)]


@pytest.fixture(scope="module")
def scale():
    with interpreted("scale") as (module,):
        yield module


def inputs(rows: int, columns: int, transposed: bool):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = (
        torch.randn(columns, rows, generator=generator).T
        if transposed
        else torch.randn(rows, columns, generator=generator)
    )
    return x, torch.rand(rows, generator=generator), torch.rand(columns, generator=generator)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_eigen_scale_dot_against_float64(scale, rows, columns, transposed, poisoned):
    x, values_O, values_I = inputs(rows, columns, transposed)
    expected = x.double() / (torch.outer(values_O.double(), values_I.double()) + 0.1)
    actual, dot = scale.eigen_scale_dot(x, values_O, values_I, torch.tensor(0.1))
    close(actual, expected, sums=4, scale=expected.abs())
    close(dot, (x.double() * expected).sum(), sums=x.numel())
    assert transposed == (actual.stride(0) == 1 and rows > 1) or min(rows, columns) == 1


def test_a_view_with_other_strides_gives_the_same(scale, poisoned):
    x, values_O, values_I = inputs(33, 65, False)
    expected = scale.eigen_scale_dot(x, values_O, values_I, 0.1)[0]
    wide = torch.full((33, 70), float("nan"))
    wide[:, :65] = x
    both = torch.full((66, 130), float("nan"))
    both[::2, ::2] = x
    for view in (wide[:, :65], both[::2, ::2]):
        assert torch.equal(scale.eigen_scale_dot(view, values_O, values_I, 0.1)[0], expected)


@pytest.mark.parametrize("moments_transposed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_corrected_scale_dot_against_float64(scale, rows, columns, transposed, moments_transposed, poisoned):
    x, values_O, values_I = inputs(rows, columns, transposed)
    second = torch.outer(values_O, values_I)
    second = second.T.contiguous().T if moments_transposed else second
    r, terms, damping = 0.9, 7.0, 0.01
    new = r * second.double() + (1 - r) * terms * x.double() ** 2
    expected, before = x.double() / (new + damping), second.clone()
    actual = scale.corrected_scale_dot(x, second, torch.tensor(r), torch.tensor(terms), damping)
    close(actual[0], expected, sums=8, scale=expected.abs())
    close(actual[1], new, sums=4, scale=new)
    assert torch.equal(second, before)
    close(actual[2], (x.double() * expected).sum(), sums=x.numel())


def test_weight_one_keeps_the_moments_whatever_the_gradient(scale, poisoned):
    x, second = torch.full((5, 7), float("inf")), torch.rand(5, 7)
    assert torch.equal(scale.corrected_scale_dot(x, second, 1.0, 3.0, 0.1)[1], second)


@pytest.mark.parametrize(("updates", "betas"), [(0, (0.9, 0.999)), (5, (0.0, 0.95)), (10_000, (0.95, 0.4))])
@pytest.mark.parametrize("transposed", [(False,) * 3, (True,) * 3, (True, False, True), (False, True, True)])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_adam_scale_against_float64(scale, rows, columns, transposed, updates, betas, poisoned):
    x, first, second = (inputs(rows, columns, turned)[0] for turned in transposed)
    first, second = (first + 1) * bool(updates), 2 * second.square() * bool(updates)
    updates = torch.tensor(float(updates))
    wanted = adam_wanted(x, first, second, updates, betas, 1e-3)
    sizes = adam_wanted(x.abs(), first.abs(), second, updates, betas, 1e-3)  # of terms that may cancel
    before = [part.clone() for part in (first, second, updates)]
    found = scale.adam_scale(x, first, second, updates, torch.tensor(True), betas=betas, eps=1e-3)
    for part, expected, size in zip(found, wanted, sizes, strict=True):
        close(part, expected, sums=10, scale=size)
        assert part.stride() == x.stride() or 1 in (rows, columns), "laid out like x"
    assert all(map(torch.equal, before, (first, second, updates)))


@pytest.mark.parametrize("updates", [0.0, 1.0, 2.0, 100.0, 1e6])
def test_adam_scale_corrects_the_bias_as_float64_does(scale, updates, poisoned):
    """fp32 powers near 1 would lose half of the digits."""
    ones = torch.ones(1, 1)
    for betas in ((0.9, 0.999), (0.99999, 0.9999)):
        state = (0 * ones, 0 * ones, torch.tensor(updates)) if not updates else (ones, ones, torch.tensor(updates))
        found = scale.adam_scale(ones, *state, torch.tensor(True), betas=betas, eps=0.0)
        close(found[0], adam_wanted(ones, *state, betas, 0.0)[0], sums=10)


def test_adam_scale_keeps_the_moments_from_what_is_not_usable(scale, poisoned):
    x, first, second = torch.full((5, 7), float("nan")), torch.randn(5, 7), torch.rand(5, 7)
    state = (first, second, torch.tensor(3.0), torch.tensor(False))
    direction, *kept = scale.adam_scale(x, *state, betas=(0.9, 0.99), eps=1e-3)
    assert torch.equal(kept[0], first) and torch.equal(kept[1], second)
    assert torch.isnan(direction).all()


def test_wrong_arguments_are_named(scale):
    with pytest.raises(ValueError, match=r"values of \(2,\) and \(3,\) do not fit \(2, 2\)"):
        scale.eigen_scale_dot(torch.zeros(2, 2), torch.zeros(2), torch.zeros(3), 1.0)
    with pytest.raises(NotMadeFor, match=r"fp32 matrix that is not empty, got torch.bfloat16 \(2, 2\)"):
        scale.eigen_scale_dot(torch.zeros(2, 2).bfloat16(), torch.zeros(2), torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"second moments of \(3, 2\) do not fit \(2, 2\)"):
        scale.corrected_scale_dot(torch.zeros(2, 2), torch.zeros(3, 2), 0.5, 1.0, 1.0)
    with pytest.raises(NotMadeFor, match=r"fp32 with a contiguous side, got torch.float32 \(2, 2\) strides \(2, 1\)"):
        scale.corrected_scale_dot(torch.zeros(2, 2), torch.zeros(4, 4)[::2, ::2], 0.5, 1.0, 1.0)
    square, scalars = torch.zeros(2, 2), (torch.zeros(()), torch.tensor(True))
    with pytest.raises(ValueError, match=r"moments do not fit x, got torch.float32 \(2, 2\)"):
        scale.adam_scale(square, torch.zeros(3, 2), square, *scalars, betas=(0.9, 0.99), eps=0.1)
    with pytest.raises(NotMadeFor, match=r"expected fp32 and bool, got torch.float64"):
        scale.adam_scale(square, square.double(), square, *scalars, betas=(0.9, 0.99), eps=0.1)
    with pytest.raises(NotMadeFor, match="betas and eps as numbers, got tensors"):
        scale.adam_scale(square, square, square, *scalars, betas=(torch.tensor(0.9), 0.99), eps=0.1)
