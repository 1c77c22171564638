"""The norm of all gradients, for update rules that ask for it: it travels with the gradients."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from ds_kfac.step.target import Target


class GradientNorm:
    """Of one step.

    Args:
        names, scalars: of the message; this rank's norm is added.
    """

    def __init__(self, target: Target, names: list[list[Hashable]], scalars: dict[Hashable, Tensor], rank: int) -> None:
        self.world = len(names)
        self.own = target.layout.squared_norm() + target.rest.squared_norm()
        self.summed = not target.layout.replicated
        if self.summed:
            for source in range(self.world):
                names[source].append(("norm", source))
            scalars["norm", rank] = self.own.sqrt()  # in fp32, where its square might be infinite

    def total(self, received: Mapping[Hashable, Tensor]) -> Tensor:
        """Over all ranks, as stored, from the scalars of the message."""
        if not self.summed:
            return self.own.sqrt()
        parts = [received["norm", source] for source in range(self.world)]
        return torch.stack(parts).double().square().sum().sqrt()
