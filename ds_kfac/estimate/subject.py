"""What an estimate is of: a model's layers, its other parameters and their order in the optimizer. Shapes only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.estimate.mode import Mode
from ds_kfac.estimate.trace import Trace
from ds_kfac.grouping import kfac_first
from ds_kfac.layers.base import LayerSpec, Use, parameter_shape
from ds_kfac.planning import sharing_candidates
from ds_kfac.scan import Choice, Scan, Skipped, scan
from ds_kfac.shared_inputs import agreed
from ds_kfac.side import Side
from ds_kfac.zero.shard_plan import Group


@dataclass(frozen=True)
class Subject:
    """See the module's docstring.

    Attributes:
        groups: parameter groups of the optimizer.
        shared: groups of layers that see one input.
        trace: what a forward of the model told.
        forward: multiplications that one token (or image) costs in the forward.
    """

    layers: tuple[LayerSpec, ...]
    skipped: tuple[Skipped, ...]
    groups: tuple[Group, ...]
    shared: tuple[tuple[str, ...], ...] = ()
    trace: Trace = field(default_factory=Trace)
    forward: float = 0

    @property
    def parameters(self) -> int:
        return sum(numel for group in self.groups for _, numel in group)

    @property
    def preconditioned(self) -> int:
        """Parameters in K-FAC layers."""
        return sum(layer.numel for layer in self.layers)


def subject_of(
    model: nn.Module,
    config: KFACConfig,
    mode: Mode,
    *,
    trace: Trace | None = None,
    convolutions: bool = False,
) -> Subject:
    """Of a model, which may be on the meta device.

    Args:
        convolutions: as if nn.Conv2d were preconditioned, by dense factors of its kernel's patches and its channels.

    Raises:
        ValueError: it has no layer to precondition, or a pattern of kfac.layers matches nothing.
    """
    trace = trace or Trace()
    found = scan(model, config.choice)
    if convolutions:
        found = with_convolutions(found, model, config.choice)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    name_of = {id(parameter): name for name, parameter in trained.items()}
    if mode.split_groups:
        groups = [group["params"] for group in kfac_first(model, found, None)]
    else:
        groups = [list(trained.values())]
    modules = {layer.name: layer.uses[0].module for layer in found.layers}
    inputs = {name: trace.inputs[module] for name, module in modules.items() if module in trace.inputs}
    return Subject(
        layers=found.layers,
        skipped=found.skipped,
        groups=tuple(
            tuple((name_of[id(p)], math.prod(parameter_shape(p))) for p in group if id(p) in name_of)
            for group in groups
        ),
        shared=agreed([inputs], sharing_candidates(found.layers, config.preconditioner.method)),
        trace=trace,
        forward=_forward(model, trace.rows),
    )


def subject_of_shapes(shapes: Sequence[tuple[int, int, bool]], config: KFACConfig) -> Subject:
    """Of linear layers, given by (inputs, outputs, bias)."""
    layers = tuple(_dense(f"layer{i}", shape, config.choice) for i, shape in enumerate(shapes))
    group = []
    for layer, (inputs, outputs, bias) in zip(layers, shapes, strict=True):
        group += [(layer.weight, inputs * outputs)] + ([(layer.bias or "", outputs)] if bias else [])
    return Subject(layers, (), (tuple(group),), forward=sum(layer.numel for layer in layers))


def with_convolutions(found: Scan, model: nn.Module, choice: Choice) -> Scan:
    """With every nn.Conv2d as the matrix [channels out, channels in * kernel] that it is on patches."""
    layers: dict[str, list[LayerSpec]] = {}
    for layer in found.layers:
        layers.setdefault(layer.uses[0].module, []).append(layer)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1:
            inputs = module.in_channels * math.prod(module.kernel_size)
            layers[name] = [_dense(name, (inputs, module.out_channels, module.bias is not None), choice)]
    order = [layer for name, _ in model.named_modules() for layer in layers.get(name, ())]
    return Scan(tuple(order), tuple(s for s in found.skipped if s.name not in layers))


def _dense(name: str, shape: tuple[int, int, bool], choice: Choice) -> LayerSpec:
    """A layer that ``scan`` would find in a Linear of this shape."""
    inputs, outputs, bias = shape
    given = {"A": choice.large_input, "G": choice.large_output}
    large = {which: "diagonal" if kind == "skip" else kind for which, kind in given.items()}
    A = Side.limited(inputs + bias, max_dim=choice.max_dim, large=large["A"])
    G = Side.limited(outputs, max_dim=choice.max_dim, large=large["G"])
    G = G if choice.gradients else Side.identity(outputs)
    return LayerSpec(name, f"{name}.weight", f"{name}.bias" if bias else None, A, G, (Use(name, "Linear", A, G, bias),))


def _forward(model: nn.Module, rows: Mapping[str, float]) -> float:
    """One per parameter and row; a look-up costs nothing, but a head with an embedding's weight does."""
    total, seen = 0.0, set()
    for name, module in model.named_modules():
        for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total += math.prod(parameter_shape(parameter)) * rows.get(name, 1)
    return total
