"""A layer's gradient as a matrix [O, I]: that of its outputs by its inputs, whichever way its
parameters lie."""

import pytest
import torch
from torch import nn

from ds_kfac.model.registry import LAYERS
from tests.close import close


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self, outputs: int, inputs: int, bias: bool) -> None:
        super().__init__()
        self.nf, self.weight = outputs, nn.Parameter(torch.randn(inputs, outputs))
        self.register_parameter("bias", nn.Parameter(torch.randn(outputs)) if bias else None)

    def forward(self, x):
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class NameRMSNorm(nn.Module):
    """As transformers' LlamaRMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def flat_gradients(module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    (module(x) * g).sum().backward()
    return [
        p.grad.reshape(-1) for p in (module.weight, getattr(module, "bias", None)) if p is not None
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_the_matrix_is_that_of_outputs_by_inputs(kind, bias):
    module = nn.Linear(3, 5, bias=bias) if kind == "Linear" else Conv1D(5, 3, bias)
    x, g = torch.randn(7, 3), torch.randn(7, 5)
    flats = flat_gradients(module, x, g)
    a = torch.cat([x, torch.ones(7, 1)], dim=1) if bias else x
    matrix = LAYERS[kind].matrix(flats[0], flats[1] if bias else None, (5, a.shape[1]))
    close(matrix, g.T @ a, sums=7)
    for part, flat in zip(LAYERS[kind].split(matrix, bias), flats, strict=True):
        assert torch.equal(part, flat)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("LayerNorm", lambda eps: nn.LayerNorm(4, eps=eps)),
        ("LayerNorm", lambda eps: nn.LayerNorm(4, eps=eps, bias=False)),
        ("RMSNorm", lambda eps: nn.RMSNorm(4, eps=eps)),
        ("RMSNorm", lambda eps: NameRMSNorm(4, eps)),
    ],
)
def test_a_norms_rows_sum_to_its_gradient(kind, make, eps):
    module, x, g = make(eps), torch.randn(7, 4), torch.randn(7, 4)
    flats = flat_gradients(module, x, g)
    bias = len(flats) == 2
    matrix = LAYERS[kind].matrix(flats[0], flats[1] if bias else None, (1, 4 * len(flats)))
    rows = LAYERS[kind].gradient_rows(module, x, g)
    close(rows.sum(0, keepdim=True), matrix, sums=7 + 4)
    for part, flat in zip(LAYERS[kind].split(matrix, bias), flats, strict=True):
        assert torch.equal(part, flat)
