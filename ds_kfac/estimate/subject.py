"""What an estimate is of: a model's layers, its other parameters and their order in the optimizer. Shapes only."""

import math
from dataclasses import dataclass, field, replace

from torch import nn

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.estimate.mode import Mode
from ds_kfac.estimate.trace import Trace
from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.scan import Skipped, scan
from ds_kfac.model.shared_inputs import agreed
from ds_kfac.plan.plan import sharing_candidates
from ds_kfac.zero.param_groups import split_groups
from ds_kfac.zero.shard_plan import Group


@dataclass(frozen=True)
class Subject:
    """See the module's docstring.

    Attributes:
        groups: parameter groups of the optimizer.
        shared: groups of layers that see one input.
        trace: what a forward of the model showed.
        forward: multiplications that one token (or image) costs in the forward; 0 if it is not known how many of a
            stack's matrices it takes.
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


def subject_of(model: nn.Module, config: KFACConfig, mode: Mode, *, trace: Trace | None = None) -> Subject:
    """Of a model, which may be on the meta device.

    Raises:
        ValueError: it has no layer to precondition, or a pattern of kfac.layers matches nothing.
    """
    trace = trace or Trace()
    found = scan(model, mode.rule.scanned(config))
    found = replace(found, layers=mode.rule.cut(config, found.layers))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    name_of = {id(parameter): name for name, parameter in trained.items()}
    if mode.split_groups:
        groups = [group["params"] for group in split_groups(model, found, None, apart="apart")]
    else:
        groups = [list(trained.values())]
    modules = {layer.name: layer.module for layer in found.layers}
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
        forward=_forward(model, trace) if all(map(trace.knows, found.layers)) else 0.0,
    )


def _forward(model: nn.Module, trace: Trace) -> float:
    """One per parameter and row; a look-up costs nothing, but a head with an embedding's weight does. Of a stack's
    matrices those that a row takes."""
    total, seen = 0.0, set()
    for name, module in model.named_modules():
        own = {} if isinstance(module, nn.Embedding) else dict(module.named_parameters(name, recurse=False))
        each = next((trace.stacked[parameter] for parameter in own if parameter in trace.stacked), None)
        for parameter_name, parameter in own.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                rows = trace.stacked.get(parameter_name, trace.rows.get(name, 1))
                if each is not None and parameter_name.endswith("bias"):  # of a stack's matrices
                    rows = each
                total += math.prod(parameter_shape(parameter)) * rows
    return total
