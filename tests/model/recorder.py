"""A captured step without DeepSpeed: compared with tests/truth.py, or proven by
ds_kfac/model/proof.py alone."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.masks import ReadMask
from ds_kfac.model.proof import Proof, RowCheck, eps_of, row_checks
from ds_kfac.model.registry import LAYERS, MATRICES
from ds_kfac.model.rows import PASSES, ROWS, TERMS, RowSums
from ds_kfac.model.scan import LayerChoice, scan
from tests.close import close, exact
from tests.ops.specification import symmetric_pack
from tests.truth import Truth

Program = Callable[[Any, Callable[..., None]], object]
"""(model, backward) -> the forwards and backward passes of a step."""


class Factors(NamedTuple):
    """Factors of one step: packed, None where the layer has no row; numbers of rows of A, and the
    sum of R_p."""

    A: Tensor | None
    G: Tensor | None
    rows: float
    terms: float


class Recorder:
    """A model with capture, as an engine drives it on one rank. Convolutions take every position.

    Args:
        choice: which layers to capture.
        layers: those to capture; None: all that a scan with ``choice`` finds.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: LayerChoice | None = None,
        *,
        layers: tuple[LayerSpec, ...] | None = None,
        sharing: str = "expand",
        positions: bool = False,
        sampled: bool = False,
        scale: float = 1.0,
        mask: ReadMask | None = None,
    ) -> None:
        self.model = model
        choice = choice or LayerChoice(types=MATRICES)
        self.layers = scan(model, choice).layers if layers is None else layers
        self.capture = Capture(
            model,
            self.layers,
            lambda announced: scale,
            rows=RowSums(sharing, positions),
            sampled=sampled,
            counts_terms=True,
        )
        self.capture.read_mask = mask or self.capture.read_mask
        self.begin()

    def begin(self, step: int = 0, *, stride: int = 1, active: bool = True, **options) -> None:
        """Begin a step, which captures all factors, of one row in ``stride``, if it is active."""
        keys = {self.capture.inputs.key(layer) for layer in self.layers}
        keys |= {key_of(layer.name, "G") for layer in self.layers}
        strides = dict.fromkeys(keys, stride) if active else None
        self.capture.begin_step(strides, step, **options)

    def backward(self, loss: Tensor, **options) -> None:
        """As ``engine.backward``."""
        with self.capture.own_backward():
            loss.backward(**options)

    def sample(self, loss: Tensor) -> None:
        """Ask for the gradients of a sampled loss."""
        capture = self.capture
        calls = list(capture.pending)
        edges = [call.edge for call in calls]
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
        capture.add_asked(calls, gradients, 1.0)
        capture.end_pass()

    def factors(self) -> dict[str, Factors]:
        """End the step, and begin another one. Returns the factors of the layers that had a row."""
        capture = self.capture
        capture.end_step()
        found = {}
        for layer in self.layers:
            A, G = (capture.sums.get(key) for key in (capture.inputs.key(layer), layer.keys[1]))
            if A is None or not A.counts[ROWS] > 0:
                continue
            has_G = G is not None and G.counts[ROWS] > 0
            of_gradients = key_of(layer.name, "A") in capture.of_gradients
            found[layer.name] = Factors(
                A.sum_P * (A.counts[PASSES] if of_gradients else 1 / A.counts[ROWS]),
                G.sum_P * G.counts[PASSES] if has_G else None,
                float(A.counts[ROWS]),
                float(A.counts[TERMS]),
            )
        self.begin(capture.step)
        return found

    def rows(self) -> dict[str, float]:
        """Layer -> its number of rows in the step, which ends."""
        return {name: found.rows for name, found in self.factors().items()}


def unannounced(loss: Tensor, **how) -> None:
    """A plain ``loss.backward()``."""
    loss.backward(**how)


def compared(
    model: nn.Module, program: Program, *, plain: bool = False, sharing: str = "expand", **options
) -> dict[str, Factors]:
    """Run a program with capture and with the truth of tests/truth.py, assert that A, G and counts
    are the same, and return them.

    Args:
        plain: whether the captured program calls ``loss.backward()``, which nobody announces.
        options: of :class:`Recorder`.
    """
    truth = Truth(copy.deepcopy(model), sharing=sharing, mask=options.get("mask"))
    recorder = Recorder(model, sharing=sharing, **options)
    recorder.begin(measure=True)
    program(model, unannounced if plain else recorder.backward)
    assert not recorder.capture.failed
    measured = recorder.capture.measured
    found = recorder.factors()
    if sharing == "expand":
        assert {name: float(rows) for name, rows in measured.items() if rows > 0} == {
            name: factors.rows for name, factors in found.items()
        }
    with truth:
        program(truth.model, unannounced)
    same(found, true_factors(truth, recorder.layers))
    return found


def true_factors(truth: Truth, layers: tuple[LayerSpec, ...]) -> dict[str, Factors]:
    """Return what the truth has of these layers. The groups of a convolution are one layer."""
    terms, factors = float(truth.sums()["terms"]), truth.factors()
    found = {}
    for layer in layers:
        names = [layer.name]
        if layer.groups > 1:
            names = [f"{layer.name}:{group}" for group in range(layer.groups)]
        groups = [factors[name] for name in names if name in factors]
        if groups:
            A, G = (torch.cat([symmetric_pack(each[side]) for each in groups]) for side in (0, 1))
            found[layer.name] = Factors(A, G, float(groups[0][2]), terms)
    return found


def same(found: Mapping[str, Factors], expected: Mapping[str, Factors], sums: float = 1000) -> None:
    """Factors of two computations are equal up to rounding, and counts are equal."""
    assert expected and found.keys() == expected.keys()
    for name, true in expected.items():
        assert found[name][2:] == true[2:], name
        close(found[name][:2], true[:2], sums=sums, what=name)


def equal_bits(found: Mapping[str, Factors], expected: Mapping[str, Factors]) -> None:
    assert expected
    exact({**found}, {**expected})


def proven(
    model: nn.Module,
    layers: Sequence[LayerSpec],
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] = lambda model, batch: model(batch),
    stride: int = 1,
    **options,
) -> Mapping[str, RowCheck]:
    """Layer name -> whether its captured rows make up its gradient, see :mod:`ds_kfac.model.proof`.
    The gradient is of the batches' summed losses; parameters have it in ``.grad`` afterwards.

    Args:
        loss: (model, batch) -> scalar loss; by default the model returns it.
        options: of :class:`Recorder`.
    """
    parameters = dict(model.named_parameters())
    device = next(model.parameters()).device
    recorder = Recorder(model, layers=tuple(layers), positions=True, **options)
    capture = recorder.capture
    proof = Proof(layers, capture.inputs.key, 0, device)
    try:
        recorder.begin(stride=stride, proof=proof)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            with capture.uses or nullcontext():
                value = loss(model, batch)
            recorder.backward(value)
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


class Watched:
    """Which inputs of modules live: their memory, whether Python knows of them or not."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0
        for module in model.modules():
            module.register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, inputs: tuple) -> None:
        self.most = max(self.most, self.living())
        self.seen.append(StorageWeakRef(inputs[0].untyped_storage()))

    def living(self) -> int:
        return len({one.cdata for one in self.seen if not one.expired()})
