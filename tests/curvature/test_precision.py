"""Precision of a step's products: torch's switch is ours for them alone, and what each precision
costs in accuracy."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import (
    HIGHEST,
    Eigenbasis,
    LayerBasis,
    Precision,
    choose,
    fp32_products,
)
from ds_kfac.directions.kfac_gradient import precondition
from ds_kfac.update.rotation import Rotation
from tests.close import near

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TF32 = Precision("tf32", "tf32")
PRODUCTS = {
    torch.Tensor.matmul: 0,
    torch.Tensor.__matmul__: 0,
    torch.matmul: 0,
    torch.addmm: 1,
    torch.baddbmm: 1,
}
"""And which argument is the first operand."""


def switch(device: torch.device) -> str:
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul
    return backend.fp32_precision


class TensorCores(TorchFunctionMode):
    """Products as a GPU makes them: where the switch allows TF32, fp32 operands lose all but 10
    bits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.seen.append((switch(CPU), args[0].dtype))
            if switch(CPU) == "tf32" and args[0].dtype is torch.float32:
                first = PRODUCTS[func]
                operands = (
                    (x.contiguous().view(torch.int32) + (1 << 12)) >> 13 << 13 for x in args[first:]
                )
                args = (*args[:first], *(operand.view(torch.float32) for operand in operands))
        return func(*args, **(kwargs or {}))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def basis(O: int, I: int) -> LayerBasis:  # noqa: E741
    """Eigenvalues over four orders of magnitude, as factors have them."""

    def side(dim: int) -> Eigenbasis:
        return Eigenbasis(
            (torch.linalg.qr(normal(dim, dim, seed=dim)).Q[None],), torch.logspace(-4, 0, dim)
        )

    return LayerBasis(side(O), side(I))


@pytest.fixture(params=["highest", "high", "medium"])
def process(request):
    """What the user has set for the process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("how", ["ieee", "tf32"])
def test_the_switch_is_ours_for_a_while_and_given_back_after_an_error_too(process, how, device):
    before = switch(device), torch.get_float32_matmul_precision()
    with fp32_products(how, device):
        assert switch(device) == how
    assert (switch(device), torch.get_float32_matmul_precision()) == before
    with (
        pytest.raises(RuntimeError, match="ours"),
        fp32_products(how, device),
        fp32_products("ieee", device),
    ):
        assert switch(device) == "ieee"
        raise RuntimeError("ours")
    assert (switch(device), torch.get_float32_matmul_precision()) == before


def test_highest_is_fp32_whatever_the_process_allows(process):
    gradient = normal(39, 67)
    expected, _ = precondition(gradient[None], Rotation.of([basis(39, 67)]), damping=0.1)
    with TensorCores() as cores:
        actual, _ = precondition(gradient[None], Rotation.of([basis(39, 67)], HIGHEST), damping=0.1)
        newton_schulz(gradient)
    assert set(cores.seen) == {("ieee", torch.float32)} and len(cores.seen) == 4 + 5 * 3
    assert torch.equal(actual, expected)


def errors(O: int, I: int) -> dict[str, float]:  # noqa: E741
    """Relative error of a preconditioned gradient in each precision, on products as a GPU makes
    them.

    The gradient's second moment is the Fisher, so most of it lies along few eigenvectors.
    """
    layer, damping = basis(O, I), 1e-5
    Q_G, Q_A = layer.G.vectors[0][0].double(), layer.A.vectors[0][0].double()
    fisher = torch.outer(layer.G.values.double(), layer.A.values.double())
    gradient, e = (Q_G @ (fisher.sqrt() * normal(O, I)) @ Q_A.T).float(), fisher + damping
    exact = Q_G @ ((Q_G.T @ gradient.double() @ Q_A) / e) @ Q_A.T
    found = {}
    for precision in (HIGHEST, TF32):
        with TensorCores():
            (V,), (dot,) = precondition(
                gradient[None], Rotation.of([layer], precision), damping=damping
            )
        found[precision.name] = float((V.double() - exact).norm() / exact.norm())
        dots = exact * gradient.double()
        near(
            dot, dots.sum(), 2**-10 * dots.abs().sum(), "operands of products have 10 bits in TF32"
        )
    half = [Q.bfloat16().float() for Q in (Q_G, Q_A)]
    rotated = (half[0].T @ gradient.bfloat16().float()).bfloat16().float() @ half[1]
    V = (half[0] @ (rotated / e.float()).bfloat16().float()).bfloat16().float() @ half[1].T
    found["all bf16"] = float((V.double() - exact).norm() / exact.norm())
    return found


@pytest.mark.parametrize(("O", "I"), [(63, 129), (257, 63)])
def test_what_each_precision_costs(O, I):  # noqa: E741
    """The products into the eigenbasis set the error: it is divided by small eigenvalues."""
    error = errors(O, I)
    assert error["highest"] < error["tf32"] / 100, error  # 2^-24 against 2^-11 per rounding
    assert 5e-3 < error["tf32"] < 2e-2, error
    assert error["all bf16"] > 5 * error["tf32"], error


def test_a_cpu_says_that_it_has_no_tf32():
    assert choose(None, CPU).name == "highest" and choose("highest", CPU) == HIGHEST
    chosen = choose("tf32", CPU)
    assert chosen.products == "ieee" and "no TF32 on this cpu" in str(chosen)
