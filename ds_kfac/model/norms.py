"""Norms by unit-wise Fisher (SP-NGD, Osawa et al. 2020, arXiv:2002.06015, sec. 4.2).

A channel's (weight, bias) gets the 2 x 2 second moment of its own gradient (xhat g, g) per loss term; RMSNorm, without
a bias, a single number. As a layer: a matrix of one row, weight and bias of a channel side by side, whose side A is
block-diagonal with blocks of 2, and no G.

In norms of images [N, C, ..] all positions share a channel's weight and bias, so the gradient of a loss term is the sum
over an example's: (sum of xhat g, sum of g).
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.curvature.factor import Side
from ds_kfac.model.layers import computed_parameter, parameter_shape


class Norm(ABC):
    """What all norms have in common."""

    needs_gradients = True
    without_bias: str | None = None
    turned = False
    images = False

    @abstractmethod
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """xhat, the input before weight and bias."""

    def of_term(self, gradient: Tensor) -> Tensor:
        """Gradients of the parameters at each position, [.., channels] -> of each loss term."""
        return gradient

    def sides(self, module: nn.Module, bias: bool) -> tuple[int, int]:
        (channels,) = parameter_shape(module.weight)
        return channels * (1 + bias), 1

    def groups(self, module: nn.Module) -> int:
        return 1

    def keeps_direction(self, module: nn.Module) -> str | None:
        return f"{type(module).__name__} is no linear map's matrix"

    def rows(self, x: Tensor, output: Tensor) -> int:
        return output.numel() // max(1, output.shape[-1])

    def input_rows(self, module: nn.Module, x: Tensor) -> Tensor | None:
        return None

    def gradient_rows(self, module: nn.Module, x: Tensor | None, gradient: Tensor) -> Tensor:
        assert x is not None  # kept, because needs_gradients
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

    def unfit(self, module: nn.Module) -> str | None:
        """Why no norm of this kind can be taken, or None."""
        if getattr(module, "weight", None) is None:
            return "it has no weight"
        if len(parameter_shape(module.weight)) != 1:
            return "it normalizes over more than one dimension"
        bias = module._parameters.get("bias")
        if bias is not None and bias.requires_grad != module.weight.requires_grad:
            return "only one of its weight and bias is trained"
        return computed_parameter(module)


class Pairs(Norm):
    """A norm with a bias, or maybe without."""

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return Side(side_A.dim, 1 + bias), Side.identity(1)


class LayerNorm(Pairs):
    """nn.LayerNorm over its last dimension."""

    def refusal(self, module: nn.Module) -> str | None:
        return self.unfit(module) if type(module) is nn.LayerNorm else ""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], eps=module.eps)


class RMSNorm(Norm):
    """torch's, and transformers' (LlamaRMSNorm and its kin, found by their name and ``variance_epsilon``)."""

    def refusal(self, module: nn.Module) -> str | None:
        kin = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
        if type(module) is not nn.RMSNorm and not kin:
            return ""
        return self.unfit(module) or ("it has a bias" if getattr(module, "bias", None) is not None else None)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return Side.diagonal(side_A.dim), Side.identity(1)


class _ImageNorm(Pairs):
    turned = False
    images = True

    def rows(self, x: Tensor, output: Tensor) -> int:
        return len(output)

    def of_term(self, gradient: Tensor) -> Tensor:
        return gradient.flatten(2).sum(dim=2) if gradient.ndim > 2 else gradient


class BatchNorm(_ImageNorm):
    """nn.BatchNorm1d, 2d, 3d. xhat is made of its input again, never of its output: (y - bias) / weight is no number
    where a weight is zero, as zero_init_residual leaves it."""

    KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def refusal(self, module: nn.Module) -> str | None:
        if isinstance(module, nn.SyncBatchNorm):
            return "its statistics are those of all ranks, which its input does not show"
        if not isinstance(module, self.KINDS):
            return ""
        if type(module).forward is not nn.BatchNorm2d.forward:
            return f"{type(module).__name__} overrides {nn.BatchNorm2d.__name__}.forward"
        return self.unfit(module)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if module.training or module.running_mean is None:
            return nn.functional.batch_norm(x, None, None, training=True, eps=module.eps)
        mean, variance = module.running_mean.float(), module.running_var.float()
        return nn.functional.batch_norm(x, mean, variance, eps=module.eps)


class GroupNorm(_ImageNorm):
    """nn.GroupNorm."""

    def refusal(self, module: nn.Module) -> str | None:
        return self.unfit(module) if type(module) is nn.GroupNorm else ""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, module.num_groups, eps=module.eps)
