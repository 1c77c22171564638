"""Norms of images [N, C, ..]: BatchNorm and GroupNorm, unit-wise as in ``norm.py``.

A channel's weight and bias are shared by all positions, so the gradient of a loss term is the sum over an example's:
(sum of xhat g, sum of g).
"""

from typing import Any

from torch import Tensor, nn

from ds_kfac.model.layers.norm import Pairs


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
