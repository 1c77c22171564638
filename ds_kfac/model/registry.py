"""The table of layer types, :data:`LAYERS`, and norms with the unit-wise Fisher.

To add a layer type, write a class and add a line to the table.

The factor of a norm has a 2 x 2 block for each channel. The block is the second moment of (xhat g,
g), the gradient of (weight, bias) for one loss term. RMSNorm has no bias, so its blocks are single
numbers. The layer is a matrix of one row, in which a channel's weight and bias are neighbours. A
has blocks of 2, and G is the identity. In norms of images [N, C, ..] the gradient of a loss term is
the sum over an example's positions.

Source: SP-NGD, Osawa et al. 2020 (arXiv:2002.06015), sec. 4.2.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model import layers
from ds_kfac.model.convolutions import Convolution, TransposedConvolution


class Norm(layers.LayerType):
    needs_gradients = True

    def refusal(self, module: Any) -> str | None:
        return self.unfit(module) if type(module) is self.kind else ""

    @abstractmethod
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """Return xhat, the normalized input before weight and bias are applied."""

    def of_term(self, gradient: Tensor) -> Tensor:
        """Return the gradient for each loss term, given the gradient for each position. Channels
        are the last dimension of rows, and the second dimension of images."""
        return gradient

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        (channels,) = layers.parameter_shape(module.weight)  # one dimension, see :meth:`unfit`
        return channels * (1 + bias), 1

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return Side(side_A.dim, 1 + bias), Side.identity(1)

    def keeps_direction(self, module: Any) -> str | None:
        return f"the weight of {type(module).__name__} is not the matrix of a linear map"

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        assert x is not None  # capture keeps inputs of types with needs_gradients
        gradient = gradient.float()
        rows = self.of_term(self.normalized(module, x.float()) * gradient)
        if module._parameters.get("bias") is not None:
            rows = torch.stack([rows, self.of_term(gradient)], dim=-1).flatten(-2)
        return rows

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        return (weight if bias is None else torch.stack([weight, bias], dim=1)).view(1, -1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        if not has_bias:
            return (matrix_OI.reshape(-1),)
        pairs = matrix_OI.view(-1, 2)
        return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()

    def unfit(self, module: Any) -> str | None:
        """Return why a module of this class cannot be preconditioned; None if it can."""
        if getattr(module, "weight", None) is None:
            return "it has no weight"
        if len(layers.parameter_shape(module.weight)) != 1:
            return "it normalizes over more than one dimension"
        bias = module._parameters.get("bias")
        if bias is not None and bias.requires_grad != module.weight.requires_grad:
            return "only one of its weight and bias is trained"
        return layers.computed_parameter(module)


class LayerNorm(Norm):
    """nn.LayerNorm over its last dimension."""

    kind = nn.LayerNorm

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], eps=module.eps)


class RMSNorm(Norm):
    """nn.RMSNorm, and RMSNorms of transformers such as LlamaRMSNorm, which are recognised by their
    name and ``variance_epsilon``."""

    def refusal(self, module: Any) -> str | None:
        is_named = type(module).__name__.endswith("RMSNorm")
        of_transformers = is_named and hasattr(module, "variance_epsilon")
        if type(module) is not nn.RMSNorm and not of_transformers:
            return ""
        reason = self.unfit(module)
        if reason is None and getattr(module, "bias", None) is not None:
            return "it has a bias"
        return reason

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


class _ImageNorm(Norm):
    images = True

    def rows(self, x: Tensor, output: Tensor) -> int:
        return len(output)

    def of_term(self, gradient: Tensor) -> Tensor:
        return gradient.flatten(2).sum(dim=2) if gradient.ndim > 2 else gradient


class BatchNorm(_ImageNorm):
    """nn.BatchNorm1d, 2d, 3d.

    xhat is computed from the input. It cannot be computed from the output y, because (y - bias) /
    weight is 0 / 0 where a weight is zero, as with zero_init_residual.
    """

    kind = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm

    def refusal(self, module: Any) -> str | None:
        if isinstance(module, nn.SyncBatchNorm):
            return "it normalizes by statistics of all ranks, but K-FAC sees only this rank's input"
        if type(module).forward is not nn.BatchNorm2d.forward:
            return f"{type(module).__name__} overrides BatchNorm2d.forward"
        return self.unfit(module)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if module.training or module.running_mean is None:
            return nn.functional.batch_norm(x, None, None, training=True, eps=module.eps)
        mean = module.running_mean.float()
        variance = module.running_var.float()
        return nn.functional.batch_norm(x, mean, variance, eps=module.eps)


class GroupNorm(_ImageNorm):
    kind = nn.GroupNorm

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, module.num_groups, eps=module.eps)


LAYERS: dict[str, layers.LayerType] = {
    "Linear": layers.Linear(),
    "Conv1D": layers.Conv1D(),
    "Conv1d": Convolution(nn.Conv1d),
    "Conv2d": Convolution(nn.Conv2d),
    "Conv3d": Convolution(nn.Conv3d),
    "ConvTranspose1d": TransposedConvolution(nn.ConvTranspose1d),
    "ConvTranspose2d": TransposedConvolution(nn.ConvTranspose2d),
    "ConvTranspose3d": TransposedConvolution(nn.ConvTranspose3d),
    "LayerNorm": LayerNorm(),
    "RMSNorm": RMSNorm(),
    "BatchNorm": BatchNorm(),
    "GroupNorm": GroupNorm(),
    "ColumnParallelLinear": layers.ColumnParallelLinear(),
    "RowParallelLinear": layers.RowParallelLinear(),
}
SHARDS = {"ColumnParallelLinear": 0, "RowParallelLinear": 1}
"""Dict from a type of tensor-parallel shard of a Linear to the side of the matrix [O, I] that is
cut: 0 for O, 1 for I."""
MATRICES = tuple(
    x for x in LAYERS if isinstance(LAYERS[x], layers.Linear | Convolution) and x not in SHARDS
)
"""Default of ``kfac.layers.types``: linear maps and convolutions."""
TYPES = tuple(kind for kind in LAYERS if kind not in SHARDS)


def is_linear_map(module: nn.Module) -> bool:
    """Return whether a module is a linear map or a convolution, even if K-FAC cannot precondition
    it."""
    named = ("Conv1D", *layers.AUTOTP_KINDS, *SHARDS)
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or type(module).__name__ in named
