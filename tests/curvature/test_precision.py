"""Precision of a step's products: torch's switch is ours for them alone."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.single import newton_schulz
from ds_kfac.curvature.eigen import HIGHEST, fp32_products
from ds_kfac.directions.kfac_gradient import precondition
from ds_kfac.update.rotation import Rotation
from tests.curvature.one_factor import random_basis

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TENSOR = torch.Tensor
PRODUCTS = {TENSOR.matmul, TENSOR.__matmul__, torch.matmul, torch.addmm, torch.baddbmm}


def switch(device: torch.device) -> str:
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul
    return backend.fp32_precision


class Products(TorchFunctionMode):
    """The switch and the dtype of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.seen.append((switch(CPU), args[0].dtype))
        return func(*args, **(kwargs or {}))


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
    raises = pytest.raises(RuntimeError, match="ours")
    with raises, fp32_products(how, device), fp32_products("ieee", device):
        assert switch(device) == "ieee"
        raise RuntimeError("ours")
    assert (switch(device), torch.get_float32_matmul_precision()) == before


def test_highest_is_fp32_whatever_the_process_allows(process):
    gradient, basis = torch.randn(39, 67), random_basis(39, 67)
    expected, _ = precondition(gradient[None], Rotation.of([basis]), damping=0.1)
    with Products() as products:
        actual, _ = precondition(gradient[None], Rotation.of([basis], HIGHEST), damping=0.1)
        newton_schulz(gradient)
    assert set(products.seen) == {("ieee", torch.float32)} and len(products.seen) == 4 + 5 * 3
    assert torch.equal(actual, expected)
