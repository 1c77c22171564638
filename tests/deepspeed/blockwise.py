"""The reference for layers that are cut over ranks: a piece of a side is damped by its own mean."""

import torch
from torch import Tensor

from tests.oracle import ReferenceKFAC


class BlockwiseInverse(ReferenceKFAC):
    """Method "inverse" with damping "relative", where blocks are pieces that know nothing of each
    other."""

    def step(self, lr: float) -> None:
        assert self.method == "inverse" and self.damping_kind == "relative"
        self.update()
        results, quadratic = {}, 0.0
        for name, layer in self.layers.items():
            dW, (A, G) = layer.matrix(), layer.factors
            at_refresh = [Q @ torch.diag(e) @ Q.T for e, Q in layer.bases]
            A, G = (
                inverses(C, block, layer.damping)
                for C, block in zip(at_refresh, layer.blocks, strict=True)
            )
            results[name] = V = G @ dW @ A
            quadratic += float((V * dW).sum()) * lr**2
        self.nu = min(1.0, (self.kl_clip / quadratic) ** 0.5) if self.kl_clip else 1.0
        for name, layer in self.layers.items():
            layer.write(self.nu * results[name])


def inverses(C: Tensor, block: int, damping: float) -> Tensor:
    """Of every block, damped by sqrt(damping) times its own mean."""
    parts = [C[i : i + block, i : i + block] for i in range(0, len(C), block)]
    damped = [
        part + damping**0.5 * part.trace() / len(part) * torch.eye(len(part)) for part in parts
    ]
    return torch.block_diag(*map(torch.linalg.inv, damped))
