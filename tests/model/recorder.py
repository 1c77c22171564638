"""A captured step without DeepSpeed, and an independent truth to compare it with."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.rows import PASSES, ROWS, TERMS, RowSums
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.model.shared import SharedInputs
from tests.close import close
from tests.ops.specification import symmetric_pack

LINEAR = LayerChoice(types=("Linear", "Conv1D"))


class Factors(NamedTuple):
    """Factors of one step: packed, None where the layer has no row; numbers of rows of A, and the
    sum of R_p."""

    A: Tensor | None
    G: Tensor | None
    rows: float
    terms: float


class Recorder:
    """A model with capture, as an engine drives it on one rank.

    Args:
        layers: those to capture; None: all that a scan with ``choice`` finds.
    """

    def __init__(
        self,
        model: nn.Module,
        choice: LayerChoice = LINEAR,
        *,
        layers: tuple[LayerSpec, ...] | None = None,
        sharing: str = "expand",
        positions: bool = True,
        sampled: bool = False,
        inputs: SharedInputs | None = None,
        scale: float = 1.0,
    ) -> None:
        self.model = model
        self.layers = scan(model, choice).layers if layers is None else layers
        rows = RowSums(sharing, positions)
        self.capture = Capture(
            model,
            self.layers,
            lambda announced: scale,
            rows=rows,
            inputs=inputs,
            sampled=sampled,
            counts_terms=True,
        )
        self.begin()

    def begin(self, step: int = 0, *, stride: int = 1, **options) -> None:
        """Begin a captured step of all factors, of one row in ``stride``."""
        keys = {self.capture.inputs.key(layer) for layer in self.layers}
        keys |= {key_of(layer.name, "G") for layer in self.layers}
        self.capture.begin_step(dict.fromkeys(keys, stride), step, **options)

    def backward(self, loss: Tensor, **options) -> None:
        """As ``engine.backward``."""
        with self.capture.own_backward():
            loss.backward(**options)

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
            scale_A = (
                A.counts[PASSES]
                if key_of(layer.name, "A") in capture.of_gradients
                else 1 / A.counts[ROWS]
            )
            found[layer.name] = Factors(
                A.sum_P * scale_A,
                G.sum_P * G.counts[PASSES] if has_G else None,
                float(A.counts[ROWS]),
                float(A.counts[TERMS]),
            )
        self.begin(capture.step)
        return found

    def rows(self) -> dict[str, float]:
        """Layer -> its number of rows in the step, which ends."""
        return {name: found.rows for name, found in self.factors().items()}


# the truth


@dataclass(eq=False)
class SeenCall:
    """A call of a linear layer: its inputs, and what the test says about its rows."""

    layer: str
    x: Tensor
    mask: Tensor | None
    forward: int


class Truth:
    """Every input and output gradient of a step, kept by plain hooks; and the factors by a loop
    over rows in float64.

    Args:
        masks: leading dimensions of a call -> which of its rows are no padding. The test writes it
            out for each shape.
    """

    def __init__(
        self, model: nn.Module, masks: Mapping[tuple[int, ...], Tensor] | None = None
    ) -> None:
        self.model = model
        self.masks = masks or {}
        self.calls: list[SeenCall] = []
        self.passes: list[list[tuple[SeenCall, Tensor]]] = []
        self._arrived: list[tuple[SeenCall, Tensor]] = []
        self._forward = 0
        model.register_forward_pre_hook(self._begin_forward)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *values, name=name: self._called(name, *values))

    def _begin_forward(self, module: nn.Module, inputs: tuple) -> None:
        self._forward += 1

    def _called(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        x = inputs[0].detach().double()
        if module.bias is not None:
            x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        call = SeenCall(name, x, self.masks.get(tuple(x.shape[:-1])), self._forward)
        self.calls.append(call)
        # output + 0: its gradient is the output's
        probe = torch.zeros_like(output, requires_grad=True)
        probe.register_hook(lambda gradient: self._arrived.append((call, gradient.double())))
        return output + probe

    def backward(self, loss: Tensor, **options) -> None:
        """A backward pass, with those inside of the forward before it."""
        loss.backward(**options)
        self.passes.append(self._arrived)
        self._arrived = []

    def factors(self, layers: tuple[LayerSpec, ...], sharing: str = "expand") -> dict[str, Factors]:
        terms = [self._rows_of_nearest(arrived, sharing) for arrived in self.passes]
        found = {}
        for layer in layers:
            if not self.model.get_parameter(layer.weight).requires_grad:
                continue
            A = torch.zeros(layer.A.dim, layer.A.dim, dtype=torch.float64)
            G = torch.zeros(layer.G.dim, layer.G.dim, dtype=torch.float64)
            rows = 0
            for number, arrived in zip(terms, self.passes, strict=True):
                for call, gradient in arrived:
                    if call.layer != layer.name or not gradient.any():
                        continue
                    of_A, of_G = rows_of(call, gradient, sharing)
                    rows += len(of_A)
                    for a in of_A:
                        A += torch.outer(a, a)
                    for g in of_G:
                        G += len(self.passes) * number * torch.outer(g, g)
            if rows:
                found[layer.name] = Factors(
                    symmetric_pack(A / rows), symmetric_pack(G), float(rows), float(sum(terms))
                )
        return found

    def _rows_of_nearest(self, arrived: list[tuple[SeenCall, Tensor]], sharing: str) -> int:
        """R_p of a pass."""
        nearest = next((call.layer for call, gradient in arrived if gradient.any()), None)
        forwards = {call.forward for call, _ in arrived}
        total = 0
        for call in self.calls:
            if call.layer == nearest and call.forward in forwards:
                gradients = [gradient for each, gradient in arrived if each is call]
                counts = (
                    torch.ones(call.x.shape[:-1], dtype=torch.bool)
                    if call.mask is None
                    else call.mask
                )
                for gradient in gradients:
                    counts = counts | (gradient != 0).any(dim=-1)
                total += int(
                    counts.sum()
                    if sharing == "expand"
                    else counts.reshape(len(counts), -1).any(dim=1).sum()
                )
        return total


def rows_of(call: SeenCall, gradient: Tensor, sharing: str) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of A and of G of a call whose gradient is not zero."""
    has_bias = call.x.shape[-1] > 1 and bool((call.x[..., -1] == 1).all())
    kept = torch.zeros(call.x.shape[:-1], dtype=torch.bool)
    for place in range(kept.numel()):
        x, g = call.x.flatten(0, -2)[place], gradient.flatten(0, -2)[place]
        is_masked = call.mask is not None and not call.mask.flatten()[place]
        is_empty = not (x[:-1] if has_bias else x).any()
        kept.view(-1)[place] = bool(g.any()) or not (is_masked or is_empty)
    if sharing == "expand":
        return list(call.x[kept]), list(gradient.flatten(0, -2))
    means = [x[own].mean(dim=0) for x, own in zip(call.x, kept, strict=True) if own.any()]
    return means, [g.reshape(-1, g.shape[-1]).sum(dim=0) for g in gradient]


def compared(
    model: nn.Module,
    program: Callable[[nn.Module, Callable[..., None]], object],
    *,
    true_program: Callable[[nn.Module, Callable[..., None]], object] | None = None,
    masks: Mapping[tuple[int, ...], Tensor] | None = None,
    sharing: str = "expand",
    plain: bool = False,
    **options,
) -> dict[str, Factors]:
    """Run a program with capture and with :class:`Truth`, assert that A, G and counts are the same,
    and return them.

    Args:
        program: (model, backward) -> the forwards and backward passes of a step.
        true_program: what the truth runs in place of it.
        plain: whether the captured program calls ``loss.backward()``, which nobody announces.
        options: of :class:`Recorder`.
    """
    truth = Truth(copy.deepcopy(model), masks)
    recorder = Recorder(model, sharing=sharing, **options)
    program(model, (lambda loss, **how: loss.backward(**how)) if plain else recorder.backward)
    assert not recorder.capture.failed
    found = recorder.factors()
    (true_program or program)(truth.model, truth.backward)
    same(found, truth.factors(recorder.layers, sharing))
    return found


def same(found: Mapping[str, Factors], expected: Mapping[str, Factors], sums: float = 1000) -> None:
    """Factors of two computations are equal up to rounding, and counts are equal."""
    assert expected and found.keys() == expected.keys()
    for name, true in expected.items():
        assert (found[name].rows, found[name].terms) == (true.rows, true.terms), name
        close(found[name].A, true.A, sums=sums, what=f"A of {name}")
        close(found[name].G, true.G, sums=sums, what=f"G of {name}")


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
