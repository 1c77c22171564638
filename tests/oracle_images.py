"""tests/oracle.py for images: convolutions and the norms between them.

Every group of a convolution is a layer of its own, named "<module>:<group>".
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import ReferenceKFAC, _Layer, _Use
from tests.truth import CONVOLUTIONS, TRANSPOSED

NORMS = {
    "BatchNorm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "GroupNorm": (nn.GroupNorm,),
}


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
                few = groups > 1 and 1 in (m.in_channels // groups, m.out_channels // groups)
                for group in range(groups):
                    layer = _Layer(_Use(self, m, group), A, 0 if no_G else G)
                    layer.orthogonal = not few and m.in_channels > 4
                    self.layers[f"{name}:{group}"] = layer
            else:
                self.layers[name] = _Layer(_Use(self, m), 2, 0)
        self.listen(model)

    def means(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Of all groups."""
        own = [
            layer
            for other, layer in self.layers.items()
            if other.split(":")[0] == name.split(":")[0]
        ]
        A, G = (torch.cat([layer.bases[side][0] for layer in own]).mean() for side in (0, 1))
        return A, G, torch.stack([layer.e for layer in own]).mean() if self.corrected else A * G
