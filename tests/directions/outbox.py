"""A rank's exchange in tests of a direction alone: one rank, and results by layer in place of shards."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.layers import LayerSpec


class Results(dict):
    """Layer name -> matrix."""

    def memory(self, layers: Sequence[LayerSpec]) -> None:
        return None

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        assert not any(layer.name in self for layer in layers)
        self.update(zip([layer.name for layer in layers], matrices, strict=True))


def exchange_of(
    layers: Sequence[LayerSpec],
    device: torch.device | str = "cpu",
    parts: Callable[..., Any] = lambda layer, matrix: (matrix.flatten(),),
    groups: tuple[int, ...] = (0,),
) -> Any:
    """What a direction reads of an exchange.

    Args:
        parts: a layer and its matrix -> its parameters.
        groups: their parameter groups.
    """
    return SimpleNamespace(
        owned=tuple(layers), device=torch.device(device), group_indices=lambda layer: groups, parts=parts,
        layout=SimpleNamespace(rank=0, last_first=False), plan=SimpleNamespace(of_layer={}), shards={}, params={},
    )  # fmt: skip
