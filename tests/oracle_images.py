"""tests/oracle.py for images: convolutions and the norms between them.

Patches are what the module itself sees: its own convolution with filters of a single 1. Every group
of a convolution is a layer of its own, named "<module>:<group>". A transposed convolution's A is
made of its input's pixels, its G of the patches of its output's gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import ReferenceKFAC, _Layer, _Use

CONVOLUTIONS = (nn.modules.conv._ConvNd,)
TRANSPOSED = (nn.modules.conv._ConvTransposeNd,)
NORMS = {
    "BatchNorm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "GroupNorm": (nn.GroupNorm,),
}


def patches(module: Any, x: Tensor) -> Tensor:
    """What a convolution, or the one that a transposed one is the transpose of, sees of x: [N, T,
    groups, D]."""
    seen = x.shape[1] // module.groups * module.weight[0, 0].numel()
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[x.ndim - 2]
    picks = kind(
        x.shape[1],
        seen * module.groups,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        False,
        module.padding_mode,
        device=x.device,
        dtype=x.dtype,
    )
    with torch.no_grad():
        picks.weight.copy_(torch.eye(seen).repeat(module.groups, 1).view(picks.weight.shape))
        return pixels(picks(x), module.groups)


def pixels(x: Tensor, groups: int) -> Tensor:
    """[N, C, ..] -> [N, T, groups, C / groups]."""
    return x.flatten(2).mT.unflatten(-1, (groups, -1))


class ImageUse(_Use):
    """A module's, or one group's."""

    def __init__(self, owner: ReferenceKFAC, module: Any, group: int = 0) -> None:
        super().__init__(owner, module)
        self.group, self.inputs = group, isinstance(module, CONVOLUTIONS)
        self.bias = self.bias and not isinstance(module, TRANSPOSED)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x, g, module = x.float(), g.detach().float(), self.module
        if self.inputs:
            groups = module.groups
            transposed = isinstance(module, TRANSPOSED)
            a, g = (
                (pixels(x, groups), patches(module, g))
                if transposed
                else (patches(module, x), pixels(g, groups))
            )
            return a[:, :, self.group], g[:, :, self.group]
        if isinstance(module, nn.GroupNorm):
            normal = F.group_norm(x, module.num_groups, eps=module.eps)
        elif module.training:
            normal = F.batch_norm(x, None, None, training=True, eps=module.eps)
        else:
            normal = F.batch_norm(
                x, module.running_mean.to(x), module.running_var.to(x), eps=module.eps
            )
        parts = [(normal * g).flatten(2).sum(-1), g.flatten(2).sum(-1)]
        return torch.stack(parts, -1).flatten(1)[:, None], parts[1][:, None]


class ImageLayer(_Layer):
    """Of a convolution's group or a norm."""

    def __init__(self, use: ImageUse, block_A: int, block_G: int) -> None:
        super().__init__(use, block_A, block_G)
        if use.inputs:
            inputs, outputs = self.module.in_channels, self.module.out_channels
            few = (
                1 in (inputs // self.module.groups, outputs // self.module.groups)
                and self.module.groups > 1
            )
            self.orthogonal = not few and inputs > 4

    def _of_group(self, weight: Tensor) -> Tensor:
        own = weight.unflatten(0, (self.module.groups, -1))[self.use.group].flatten(1)
        return own.mT if isinstance(self.module, TRANSPOSED) else own

    def matrix(self) -> Tensor:
        if self.norm:
            return super().matrix()
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        W = self._of_group(self.params[0].grad.float())
        if len(self.params) == 1:
            return W
        bias = self.params[1].grad.float().view(self.module.groups, -1)[self.use.group]
        return torch.cat([W, bias[:, None]], 1)

    def write(self, V: Tensor) -> None:
        if self.norm:
            return super().write(V)
        with torch.no_grad():
            own = self._of_group(self.params[0].grad)
            own.copy_(V[:, : own.shape[1]])
            if len(self.params) > 1:
                self.params[1].grad.view(self.module.groups, -1)[self.use.group].copy_(V[:, -1])
        return None


class ImageKFAC(ReferenceKFAC):
    """Of models with convolutions; sides are dense."""

    def __init__(self, model: nn.Module, *, types: Any = ("Linear",), **options: Any) -> None:
        super().__init__(
            model, types=tuple(t for t in types if t in ("Linear", "LayerNorm")), **options
        )
        no_G = self.fisher == "activations_only"
        for name, m in model.named_modules():
            kind = next(
                (kind for kind, classes in NORMS.items() if isinstance(m, classes)),
                type(m).__name__,
            )
            if kind not in types or kind in ("Linear", "LayerNorm"):
                continue
            if isinstance(m, CONVOLUTIONS):
                transposed = isinstance(m, TRANSPOSED)
                kernel, groups = m.weight[0, 0].numel(), m.groups
                A, G = m.in_channels // groups, m.out_channels // groups
                A, G = (A, G * kernel) if transposed else (A * kernel + (m.bias is not None), G)
                for group in range(groups):
                    self.layers[f"{name}:{group}"] = ImageLayer(
                        ImageUse(self, m, group), A, 0 if no_G else G
                    )
            else:
                self.layers[name] = ImageLayer(ImageUse(self, m), 2, 0)

    def means(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Of all groups."""
        own = [
            layer
            for other, layer in self.layers.items()
            if other.split(":")[0] == name.split(":")[0]
        ]
        A, G = (torch.cat([layer.bases[side][0] for layer in own]).mean() for side in (0, 1))
        return A, G, torch.stack([layer.e for layer in own]).mean() if self.corrected else A * G
