"""Whether captured rows make up the layers' gradients, without an engine: ``python -m ds_kfac check --data``."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.engine.report import folded
from ds_kfac.model.batch import ArgumentReader, ReadBatch
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.loss import returned_loss
from ds_kfac.model.proof import Proof, RowCheck, eps_of, row_checks
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import RowSums
from ds_kfac.step.proving import FOREIGN_MASK, ZERO_ROWS

BATCHES = 4
"""Batches of the data that are used, at most."""


def proven(
    model: nn.Module,
    layers: Sequence[LayerSpec],
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    rows: RowSums | None = None,
    read_batch: ReadBatch | None = None,
) -> Mapping[str, RowCheck]:
    """Layer name -> whether its captured rows make up its gradient, see :mod:`ds_kfac.model.proof`. The gradient is of
    the batches' summed losses; parameters have it in ``.grad`` afterwards.

    Args:
        loss: (model, batch) -> scalar loss; None: the model returns it, called with the batch as its arguments.

    Raises:
        ValueError: the model returns no loss.
    """
    parameters = dict(model.named_parameters())
    device = next(model.parameters()).device
    capture = Capture(model, layers, lambda: 1.0, rows=rows, read_batch=read_batch)
    proof = Proof(layers, capture.inputs.key, 0, device)
    try:
        capture.begin_step(frozenset(key for layer in layers for key in layer.keys), 0, proof=proof)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            with capture.uses or nullcontext():
                value = called(model, batch) if loss is None else loss(model, batch)
            with capture.own_backward():
                value.backward()
        numbers = proof.numbers(capture.sums)
    finally:
        capture.remove()
    ratios = torch.zeros(len(proof.layers), dtype=torch.float64, device=device)
    for place, layer in enumerate(proof.layers):
        eps = eps_of(parameters[layer.weight].dtype)
        gradient = matrix_of(layer, parameters)
        ratios[place] = proof.ratio(layer, numbers[place], gradient, divisor=1, world=1, eps=eps, floor=0)
    names = [layer.name for layer in proof.layers]
    return dict(zip(names, row_checks(numbers, ratios, [capture.used(name) for name in names]), strict=True))


def proof_lines(model: nn.Module, layers: Sequence[LayerSpec], config: KFACConfig, data: str) -> list[str]:
    """Lines of ``check``'s report on ``data``, "module:function". Raises ValueError: there are no such batches, or some
    layer's rows do not make up its gradient."""
    module, _, function = data.partition(":")
    try:
        batches = list(islice(getattr(importlib.import_module(module), function)(0, 1), BATCHES))
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"--data {data}: {problem}; must be module:function, (rank, ranks) -> batches") from problem
    if not batches:
        raise ValueError(f"--data {data}: has no batches")
    rows, reader = RowSums(config.factor.weight_sharing), ArgumentReader(model, count=config.padding.count)
    checks = proven(model.train(), layers, batches, rows=rows, read_batch=reader)
    if wrong := [(name, str(check)) for name, check in checks.items() if not check.is_finite or not check.fits]:
        raise ValueError(
            "the captured rows of these layers do not make up their gradients: "
            + "; ".join(f"{name}: {why}" for name, why in folded(wrong))
        )
    zero = [(name, f"{x.zero / x.rows:.0%}") for name, x in checks.items() if x.zero > ZERO_ROWS * x.rows]
    lines = [f"  rows: those of {len(checks)} layers make up their gradients, on {len(batches)} batches"]
    if zero:
        text = ", ".join(f"{name} {part}" for name, part in folded(zero))
        lines.append(f"  WARNING: rows count whose gradient is zero to the last bit: {text} (docs/capture.md)")
    if foreign := [(name, "") for name, check in checks.items() if check.foreign]:
        text = ", ".join(name for name, _ in folded(foreign))
        lines.append(f"  WARNING: {FOREIGN_MASK}: {text} (docs/capture.md)")
    return lines


def called(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns for a batch. Raises ValueError if it returns none."""
    if isinstance(batch, Mapping):
        loss = returned_loss(model(**batch))
    else:
        loss = returned_loss(model(*batch) if isinstance(batch, (tuple, list)) else model(batch))
    if loss is None:
        raise ValueError(f"{type(model).__name__} returned no loss (a scalar): its batches need labels")
    return loss


def matrix_of(layer: LayerSpec, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """A layer's gradient as its matrix, of ``layer.shape``; zeros where a parameter has none."""
    index, count = layer.part
    flats = []
    for name in layer.parameters:
        parameter = parameters[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flats.append(gradient.reshape(-1).chunk(count)[index])
    return LAYERS[layer.kind].matrix(flats[0], flats[1] if layer.bias else None, layer.shape)
