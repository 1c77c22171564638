"""nn.Conv1d, nn.Conv2d, nn.Conv3d: the matrix [O, C * kernel], the bias as last column (KFC, Grosse & Martens 2016,
arXiv:1602.01407).

Its rows of A are the patches it sees, its rows of G the gradients of its output pixels. With groups (depthwise: one
channel each) it is a stack of independent maps [groups, O / groups, C / groups * kernel], each with its own A and G.

Loss terms are the examples unless labels or the model's output say otherwise: A is the mean over examples and
positions, G the sum over positions for each term. That is KFC's Fisher, T A kron (G / T) with T positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.layers.base import computed_parameter, parameter_shape
from ds_kfac.model.layers.linear import Linear
from ds_kfac.model.patches import Patches, Window

FEW_CHANNELS = 4
"""Of an image: gray, colour, with transparency."""


class Convolution(Linear):
    """One of torch's convolutions, by its class."""

    images = True

    def __init__(self, kind: type[nn.modules.conv._ConvNd]) -> None:
        self.kind: Any = kind
        self.dims = int(kind.__name__[-2])

    def batched(self, x: Tensor) -> Tensor:
        """[N, C, *S] of what a convolution took or gave; [C, *S] is a batch of one."""
        return x if x.ndim > self.dims + 1 else x.unsqueeze(0)

    def refusal(self, module: nn.Module) -> str | None:
        if not isinstance(module, self.kind):
            return ""
        return computed_parameter(module)

    def overridden(self, module: nn.Module) -> str | None:
        """Which of the class's functions a module has its own of: its patches are seen only where it calls torch's."""
        names = ("forward", "_conv_forward")
        return next((n for n in names if getattr(type(module), n, None) is not getattr(self.kind, n, None)), None)

    def groups(self, module: Any) -> int:
        return module.groups

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        outputs, channels, *kernel = parameter_shape(module.weight)
        return channels * torch.Size(kernel).numel() + bias, outputs // module.groups

    def keeps_direction(self, module: Any) -> str | None:
        if module.groups > 1 and 1 in (module.in_channels // module.groups, module.out_channels // module.groups):
            return "the filter of one channel is no matrix"
        if module.in_channels <= FEW_CHANNELS:
            return f"it sees the {module.in_channels} channels of an image"
        return None

    def rows(self, x: Tensor, output: Tensor) -> int:
        return output.numel() // max(1, self.batched(output).shape[1])

    def input_patches(self, module: Any, x: Tensor) -> Patches:
        """Whose second moment is A."""
        window, x = Window.of(module), self.batched(x)
        return Patches(x, window, window.positions(tuple(x.shape[2:])))

    def gradient_patches(self, module: Any, gradient: Tensor) -> Patches:
        """Whose second moment is G."""
        gradient = self.batched(gradient)
        size = tuple(gradient.shape[2:])
        return Patches(gradient, Window.pixel(len(size)), size)

    def input_rows(self, module: Any, x: Tensor) -> Tensor | None:
        """Mean patch of each example, [N, I without the bias]: what "reduce" needs."""
        patches = self.input_patches(module, x)
        return patches.sums() * (patches.examples / max(1, patches.count))

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Sum of each example's, for "reduce"."""
        return None, self.gradient_patches(module, gradient).sums()

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        weight_OI = weight.view(*shape[:-1], -1)
        return weight_OI if bias is None else torch.cat([weight_OI, bias.view(*shape[:-1], 1)], dim=-1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.reshape(-1),)
        return matrix_OI[..., :-1].reshape(-1), matrix_OI[..., -1].reshape(-1).contiguous()
