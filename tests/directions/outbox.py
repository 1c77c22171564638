"""A rank's exchange in tests of a direction alone: one rank, and results by layer in place of
shards."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.layers import LayerSpec
from ds_kfac.zero.exchange import Gradients


def whole(gradients: Mapping[str, Tensor]) -> Gradients:
    """Gradients by layer as an exchange gives them."""
    return Gradients({name: (gradient, None) for name, gradient in gradients.items()})


class Exchange(SimpleNamespace):
    """What a direction reads of an exchange.

    Attributes:
        results: layer name -> matrix, of the last step.
    """

    def memory(self, layers: Sequence[LayerSpec]) -> None:
        return None

    def put(self, layers: Sequence[LayerSpec], matrices: Sequence[Tensor]) -> None:
        assert not any(layer.name in self.results for layer in layers)
        self.results.update(zip([layer.name for layer in layers], matrices, strict=True))

    def begin(self) -> None:
        self.results = {}


def exchange_of(
    layers: Sequence[LayerSpec],
    device: torch.device | str = "cpu",
    parts: Callable[..., Any] = lambda layer, matrix: (matrix.flatten(),),
    groups: tuple[int, ...] = (0,),
) -> Any:
    """An exchange of these layers.

    Args:
        parts: a layer and its matrix -> its parameters.
        groups: their parameter groups.
    """
    return Exchange(
        results={},
        owned=tuple(layers),
        device=torch.device(device),
        group_indices=lambda layer: groups,
        parts=parts,
        layout=SimpleNamespace(rank=0),
        plan=SimpleNamespace(of_layer={}),
        shards={},
        params={},
    )
