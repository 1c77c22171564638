"""Inverse roots of factors: every kind of side, by products and from eigenvalues, in fp32 and TF32; what fails."""

import dataclasses

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ds_kfac.curvature import eigen as eigensolver
from ds_kfac.curvature import inverse as root
from ds_kfac.curvature.factor import Side
from ds_kfac.curvature.inverse import DampedInverse, LayerInverse, by_products, order_of, refresh_root
from tests.close import close
from tests.curvature.test_eigenbasis import SIDES, factor, matrix

KEPT = [side for side in SIDES if side.block]
DAMPING = 0.01


class TF32(TorchFunctionMode):
    """Operands of products rounded to 10 bits, as a GPU does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = [((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in args]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(eigensolver, "GROUPED", frozenset({"cpu", "cuda"}))


def expected_root(kept, power: float) -> torch.Tensor:
    """In float64, by the textbook."""
    C = matrix(kept).double()
    values, vectors = torch.linalg.eigh(C / (C.trace() / len(C)))
    return vectors @ torch.diag((values + DAMPING) ** -power) @ vectors.T


def whole(inverse: DampedInverse, dim: int) -> torch.Tensor:
    return LayerInverse(inverse, DampedInverse()).apply(torch.eye(dim))


def rooted(kept, power: float, how: str) -> torch.Tensor:
    found = refresh_root(kept, power=power, damping=DAMPING, products="ieee")
    assert (found.how, found.retries) == (how if kept.side.block > 1 else "diagonal", 0)
    return whole(found.basis, kept.side.dim)


def spectrum(n: int, condition: float) -> torch.Tensor:
    """A damped second moment of mean one, its eigenvalues evenly spread on a logarithmic scale."""
    generator = torch.Generator().manual_seed(n)
    vectors = torch.linalg.qr(torch.randn(n, n, generator=generator)).Q
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), n)
    return (vectors * (values / values.mean() + DAMPING)) @ vectors.T


@pytest.mark.parametrize("power", [0.125, 0.25, 0.5, 1 / 3])
@pytest.mark.parametrize("side", KEPT, ids=str)
def test_equals_the_root_in_float64_and_is_symmetric_to_the_bit(side, power):
    kept = factor(side)
    got = rooted(kept, power, "eigh")
    expected = expected_root(kept, power)
    close(got, expected, sums=4 * side.dim, condition=power * torch.linalg.cond(expected) ** (1 / power))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("power", [0.125, 0.25, 1.0])
@pytest.mark.parametrize("side", KEPT, ids=str)
def test_products_find_the_same_root(side, power, as_on_a_gpu):
    kept = factor(side)
    got = rooted(kept, power, "newton")
    expected = expected_root(kept, power)
    close(got, expected, sums=2 * 5 * 10 * side.dim, condition=power * torch.linalg.cond(expected) ** (1 / power))
    assert torch.equal(got, got.T)


@pytest.mark.parametrize("order", [1, 2, 4, 8, 3])
@pytest.mark.parametrize("condition", [1e2, 1e6])
@pytest.mark.parametrize("mode", [None, TF32], ids=["fp32", "tf32"])
def test_what_is_accepted_is_a_root(order, condition, mode):
    most, C = (root.CREDIBLE / order if mode else 2e-4), spectrum(97, condition)
    if mode is None:
        found = by_products(C[None], order, "ieee")
    else:
        with mode():
            found = by_products(C[None], order, "ieee")
    if found is None:  # then it is taken again: the inverse itself is too much for TF32 here, the default root is not
        assert mode is TF32 and order < 3 and condition > 1e2
        return
    values, vectors = torch.linalg.eigh(C.double())
    expected = (vectors * values ** (-1 / order)) @ vectors.T
    assert float((found[0].double() - expected).norm() / expected.norm()) < most


def test_steps_end_where_tf32_stalls(monkeypatch):
    steps, power = [], torch.linalg.matrix_power
    monkeypatch.setattr(torch.linalg, "matrix_power", lambda T, order: (steps.append(1), power(T, order))[1])
    with TF32():
        assert by_products(spectrum(97, 1e6)[None], 8, "ieee") is not None
    assert 2 * 5 * len(steps) <= root.FLOPS


def test_a_root_that_products_do_not_find_is_taken_from_eigenvalues(as_on_a_gpu, monkeypatch):
    kept, asked = factor(Side.dense(20)), []
    monkeypatch.setattr(root, "by_products", lambda C, order, products: asked.append(products))
    found = refresh_root(kept, power=0.25, damping=DAMPING, products="tf32")
    assert asked == ["tf32", "ieee"] and (found.how, found.retries) == ("eigh", 2)
    expected = expected_root(kept, 0.25)
    close(whole(found.basis, 20), expected, sums=4 * 20, condition=0.25 * torch.linalg.cond(expected) ** 4)


def test_what_is_no_second_moment_has_no_root():
    broken = torch.diag(torch.tensor([1.0, -0.5, 0.2]))
    assert by_products(broken[None], 4, "ieee") is None
    assert by_products(torch.full((1, 3, 3), float("nan")), 4, "ieee") is None


@pytest.mark.parametrize("how", ["eigh", "newton"])
@pytest.mark.parametrize("block", [6, 3, 1])
def test_each_group_of_a_layer_has_its_own_mean(block, how, monkeypatch):
    """As eigenbases whiten; groups that see inputs of other sizes would not be whitened alike otherwise."""
    if how == "newton":
        monkeypatch.setattr(eigensolver, "GROUPED", frozenset({"cpu", "cuda"}))
    own = factor(Side(6, block))
    groups = torch.stack([own.packed_P, 100 * own.packed_P]).flatten()
    both = dataclasses.replace(own, side=Side(6, block).repeated(2), packed_P=groups)
    options = {"power": 0.125, "damping": DAMPING, "products": "ieee"}
    alone = whole(refresh_root(own, **options).basis, 6)
    found = whole(refresh_root(both, **options, groups=2).basis, 12)
    for group in (found[:6, :6], found[6:, 6:]):
        close(group, alone, sums=24, condition=DAMPING**-1)
    assert not found[:6, 6:].any()


def test_whitens_columns_of_one_matrix_and_of_a_stack():
    layer = LayerInverse(DampedInverse(), DampedInverse((torch.diag(torch.tensor([1.0, 2.0, 3.0]))[None],)))
    x = torch.ones(2, 3)
    assert torch.equal(layer.apply(x), x * torch.tensor([1.0, 2.0, 3.0]))
    per_group = LayerInverse(DampedInverse(), DampedInverse(diagonal=torch.arange(1.0, 7.0)))
    stack = per_group.apply(torch.ones(2, 4, 3))
    assert torch.equal(stack[1, 0], torch.tensor([4.0, 5.0, 6.0])) and stack.shape == (2, 4, 3)


@pytest.mark.parametrize("power, order", [(0.125, 8), (0.25, 4), (1.0, 1), (0.3, None), (0.0, None)])
def test_roots_are_of_whole_orders(power, order):
    assert order_of(power) == order
