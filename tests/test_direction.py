"""The sum under kl-clip's root: from the pass that divides where a layer has one learning rate, else part by part."""

from types import SimpleNamespace

import pytest
import torch

from ds_kfac.config import parse
from ds_kfac.direction import KFACGradient, Now
from ds_kfac.eigenbasis import Eigenbasis
from ds_kfac.layer_state import LayerState
from tests.models import linear_layer


def local(gradient: torch.Tensor, rates: tuple, *, values: float = 1.0, **preconditioner):
    """A rank's part of a step for one layer, whose last column is its bias with a parameter group of its own."""
    rows, columns = gradient.shape
    layer, generator = linear_layer("layer", columns, rows), torch.Generator().manual_seed(0)

    def basis(dim: int) -> Eigenbasis:
        Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        return Eigenbasis((Q[None],), values * torch.rand(dim, generator=generator))

    config = parse({"preconditioner": {"kl_clip": 0.001, **preconditioner}})
    exchange = SimpleNamespace(
        owned=(layer,), device=torch.device("cpu"), group_indices=lambda layer: (0, 1),
        parts=lambda layer, matrix: (matrix[:, :-1].flatten(), matrix[:, -1]),
    )  # fmt: skip
    groups = SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])
    layout = SimpleNamespace(grad_scale=lambda: 4.0, optimizer=groups)
    moments = "corrected" if config.preconditioner.eigenvalues == "corrected" else None
    state = LayerState.empty(layer, torch.device("cpu"), moments=moments)
    state = state.rebased(A=basis(columns), G=basis(rows))
    direction = KFACGradient(config, layout, exchange, SimpleNamespace(nu=None), clip_lr="current")
    return direction.local(Now(0, None, {}), {"layer": gradient}, {"layer": state})


@pytest.mark.parametrize("options", [{}, {"graft": "norm"}, {"eigenvalues": "corrected", "exponent": 0.5}])
@pytest.mark.parametrize(
    "rates", [(0.3, 0.3), (0.3, 0.0), (torch.tensor(0.3), torch.tensor(0.3)), (0.3, torch.tensor(0.1))]
)
def test_the_sum_is_that_of_the_parts_with_their_rates(rates, options):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    found = local(gradient, rates, **options)
    products = found.results["layer"].double() * gradient.double() / 4.0**2
    expected = products[:, :-1].sum() * float(rates[0]) ** 2 + products[:, -1].sum() * float(rates[1]) ** 2
    torch.testing.assert_close(found.numbers[0].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.3, 0.2)])
def test_a_gradient_that_passes_through_counts_as_itself(rates):
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    found = local(gradient, rates, values=float("nan"))
    assert torch.equal(found.results["layer"], gradient) and found.replaced == 1
    squares = gradient.square() / 4.0**2
    expected = squares[:, :-1].sum() * rates[0] ** 2 + squares[:, -1].sum() * rates[1] ** 2
    torch.testing.assert_close(found.numbers[0], expected)
