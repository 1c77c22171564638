"""Whether captured rows make up the layers' gradients, without an engine: the proof of
ds_kfac/model/proof.py alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.masks import ReadMask
from ds_kfac.model.proof import Proof, RowCheck, eps_of, row_checks
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import RowSums
from tests.close import exact


def proven(
    model: nn.Module,
    layers: Sequence[LayerSpec],
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch),
    rows: RowSums | None = None,
    read_mask: ReadMask | None = None,
    stride: int = 1,
) -> Mapping[str, RowCheck]:
    """Layer name -> whether its captured rows make up its gradient, see :mod:`ds_kfac.model.proof`.
    The gradient is of the batches' summed losses; parameters have it in ``.grad`` afterwards.

    Args:
        loss: (model, batch) -> scalar loss; by default the model returns it.
    """
    parameters = dict(model.named_parameters())
    device = next(model.parameters()).device
    capture = Capture(model, layers, lambda announced: 1.0, rows=rows)
    capture.read_mask = read_mask or capture.read_mask
    proof = Proof(layers, capture.inputs.key, 0, device)
    try:
        keys = [key for layer in layers for key in layer.keys]
        capture.begin_step(dict.fromkeys(keys, stride), 0, proof=proof)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            with capture.uses or nullcontext():
                value = loss(model, batch)
            with capture.own_backward():
                value.backward()
        numbers = proof.numbers()
    finally:
        capture.remove()
    accuracies = [eps_of(parameters[layer.weight].dtype) for layer in proof.layers]
    eps = torch.tensor(accuracies, device=device).double()
    gradients = {layer.name: matrix_of(layer, parameters) for layer in proof.layers}
    ratios = proof.ratios(numbers, gradients, divisor=1, world=1, eps=eps, floor=0)
    names = [layer.name for layer in proof.layers]
    checks = row_checks(numbers, ratios, [capture.used(name) for name in names])
    return dict(zip(names, checks, strict=True))


def matrix_of(layer: LayerSpec, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """A layer's gradient as its matrix, of ``layer.shape``; zeros where a parameter has none."""
    index, count = layer.part
    flats = []
    for name in layer.parameters:
        parameter = parameters[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flats.append(gradient.reshape(-1).chunk(count)[index])
    kind, has_bias = LAYERS[layer.kind], layer.bias is not None
    matrix = kind.matrix(flats[0], flats[1] if has_bias else None, layer.shape)
    exact(list(kind.split(matrix, has_bias)), flats, what="split undoes matrix")
    return matrix
