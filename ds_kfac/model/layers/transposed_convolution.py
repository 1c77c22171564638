"""nn.ConvTranspose1d, 2d, 3d: a convolution with its roles swapped, weight [C, O / groups, *kernel].

Its input's pixels are the rows of A; the patches of its output's gradient, as the convolution whose transpose it is
would see them, are those of G. The layer's matrix is [O * kernel, C]. A bias is added to every output pixel: it is no
column of that matrix and left to the optimizer.
"""

from operator import ge
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.layers.base import parameter_shape
from ds_kfac.model.layers.convolution import Convolution
from ds_kfac.model.patches import Patches


class TransposedConvolution(Convolution):
    """One of torch's, by its class."""

    without_bias: str | None = "is added to every output pixel, it belongs to no column of the matrix"

    def refusal(self, module: Any) -> str | None:
        reason = super().refusal(module)
        if reason is None and (name := self.overridden(module)) is not None:
            return f"{type(module).__name__} overrides {self.kind.__name__}.{name}, so its patches are not known"
        if reason is None and any(map(ge, module.output_padding, module.stride)):
            return "its output_padding is not below its stride"
        return reason

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        channels, outputs, *kernel = parameter_shape(module.weight)
        return channels // module.groups, outputs * torch.Size(kernel).numel()

    def rows(self, x: Tensor, output: Tensor) -> int:
        return x.numel() // max(1, self.batched(x).shape[1])

    def input_patches(self, module: Any, x: Tensor) -> Patches:
        return super().gradient_patches(module, x)

    def gradient_patches(self, module: Any, gradient: Tensor) -> Patches:
        return super().input_patches(module, gradient)

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return weight.view(*shape[:-2], shape[-1], shape[-2]).mT

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        return (matrix_OI.mT.reshape(-1),)
