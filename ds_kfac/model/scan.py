"""Model -> the layers K-FAC preconditions, and everything it leaves alone with the reason."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ds_kfac.curvature.factor import Side
from ds_kfac.model.blocks import Blocks, with_blocks
from ds_kfac.model.convolutions import Convolution
from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import MatrixLayout, borrowed_weights, classes_of, convolves, multiplied, reads
from ds_kfac.model.registry import LAYERS, SHARDS, TYPES
from ds_kfac.model.tables import tables

ADAPTER = re.compile(r"(^|\.)lora_[ab](\.|$)", re.IGNORECASE)
"""Names of the two factors of a low-rank update, as PEFT and torchtune give them. Their gradients have the rank of the
small side, which alone gets a factor: one of the long side would be thousands of times the layer's own size."""
LONGEST, LONGEST_INPUT = 16384, 65536
"""Longest side in blocks, half a GB of factor: a longer one, such as a head's vocabulary, has a diagonal. The second
where G is the identity: then no side is a vocabulary's, and an MLP's inputs stay in blocks."""

TABLE = "rows are looked up in {}: it is a table"


@dataclass(frozen=True)
class Skipped:
    """A module with parameters of its own that K-FAC does not touch."""

    name: str
    kind: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Scan:
    """What :func:`scan` found."""

    layers: tuple[LayerSpec, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class LayerChoice:
    """Which layers, and the structure of their sides; keys of the config, and:

    Attributes:
        dense_max: None: all sides are dense.
        curvature: whether there are factors at all; without, both sides are identities.
        gradients: whether there are statistics of output gradients; without, G is the identity.
        shares: whether layers may have one A.
        blocks: (regex for the end of a weight's name, maps in its matrix), see :mod:`ds_kfac.model.blocks`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    types: tuple[str, ...] = TYPES
    dense_max: int | None = None
    curvature: bool = True
    gradients: bool = True
    shares: bool = True
    blocks: tuple[tuple[str, Blocks], ...] = ()


def scan(
    model: nn.Module, choice: LayerChoice | None = None, *, optimized: Iterable[nn.Parameter] | None = None
) -> Scan:
    """Find the layers, in module order. Pure: reads shapes and flags, never values.

    Args:
        optimized: the optimizer's parameters; None: all that require a gradient.

    Raises:
        ValueError: a pattern that matches no module with parameters, a lazy module, blocks that do not fit, or no
            layer left to precondition.
    """
    choice = choice or LayerChoice()
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(f"kfac: {lazy[0]} has no shape yet (a lazy module): run the model on one example before")
    scanner = _Scanner(model, choice, model.parameters() if optimized is None else optimized)
    for key, patterns in (("include", choice.include), ("exclude", choice.exclude)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in scanner.modules):
                raise ValueError(
                    f"kfac.layers.{key}: pattern {pattern!r} matches no module with parameters; names look like: "
                    + ", ".join(list(scanner.modules)[:6])
                )
    layers: list[LayerSpec] = []
    skipped = []
    for name, module in scanner.modules.items():
        found = scanner.of(name, module)
        if isinstance(found, list):
            layers += found
        elif found is not None:
            own = sum(map(numel, module.parameters(recurse=False)))
            skipped.append(Skipped(name, type(module).__name__, own, found))
    skipped += scanner.left_over(layers)
    if not layers:
        raise ValueError(
            f"kfac: {type(model).__name__} has no layer to precondition (known types: {', '.join(TYPES)}); "
            "check kfac.layers. Left alone: "
            + ("; ".join(f"{s.name} ({s.kind}): {s.reason}" for s in skipped[:8]) or "no module has parameters")
        )
    holders = dict(model.named_modules())
    layers = [with_blocks(layer, holders, choice.blocks) for layer in layers]
    classes_of.cache_clear()  # large, and read
    return Scan(tuple(layers), tuple(skipped))


class _Scanner:
    """The rules.

    Attributes:
        modules: those with parameters of their own.
        names, users: id of a parameter -> its name, the modules that hold it.
        trained, tied_stages: ids of parameters that are, that a PipelineModule ties over its stages.
        borrowed: id of a module whose weight a module around it takes, as torch's attention does -> whether it is
            called, too.
        tables: ids of parameters that rows are looked up in.
    """

    def __init__(self, model: nn.Module, choice: LayerChoice, optimized: Iterable[nn.Parameter]) -> None:
        self.choice = choice
        self.modules = {name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))}
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = {id(p) for p in optimized if p.requires_grad}
        self.users: defaultdict[int, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self.users[id(parameter)].append(name)
        tied = getattr(model, "tied_modules", None)  # of TiedLayerSpec
        self.tied_stages = {id(p) for p in tied.parameters()} if isinstance(tied, nn.ModuleDict) else set()
        self.tables = tables(model)
        self.borrowed = {id(child): called for module in model.modules() for child, called in borrowed_weights(module)}

    def of(self, name: str, module: nn.Module) -> list[LayerSpec] | str | None:
        """The layers of a module, why it is left alone, or None if it is part of a layer found elsewhere."""
        kind, why = _kind(module)
        if why is not None:
            return self._products(name, module) or why
        known, product, choice = LAYERS[kind], False, self.choice
        users, bias = self.users[id(module.weight)], module._parameters.get("bias")
        holders = [self.modules[user] for user in users]
        biases = {id(holder._parameters.get("bias")) for holder in holders}
        # modules with one weight are one layer by several names: all of its kind, with one bias
        one = len(biases) == 1 and all(
            _kind(holder)[0] == kind and id(holder) not in self.borrowed for holder in holders
        )
        alike = users if one else [name]
        reason = self._unfit(name, module._parameters["weight"], bias, len(alike))
        if reason is not None:
            return reason
        if len(users) > len(alike):
            return f"weight is shared by {', '.join(users)}"
        if id(module.weight) in self.tables:
            return TABLE.format("weight")
        if name != alike[0]:
            return None
        if ("Linear" if kind in SHARDS else kind) not in choice.types:
            return f"{kind} is not in kfac.layers.types"
        if known.needs_gradients and not choice.gradients:
            return 'its factor needs output gradients, which kfac.factor.fisher "activations_only" does not collect'
        trained_bias = bias is not None and id(bias) in self.trained and known.without_bias is None
        if known.needs_gradients and bias is not None and not trained_bias:
            return "only one of its weight and bias is trained"
        sides = known.structured(*_sides(name, known.sides(module, trained_bias), choice), trained_bias)
        groups: Any = module.groups if isinstance(known, Convolution) else 1
        A, G = (side.repeated(groups) for side in sides)
        if isinstance(known, Convolution) and (own := known.overridden(module)) is not None:
            product = convolves(module)
            if not product and choice.gradients:
                return f"{type(module).__name__} overrides {kind}.{own}, and its weight is not what it convolves with"
            # a direction that needs no curvature is right for any matrix
            A = A if product else Side.identity(A.dim)
        if id(module) in self.borrowed:
            if isinstance(module, nn.Linear):
                product = True
            elif not self.borrowed[id(module)]:
                return "the module around it takes its weight, and does not call it"
        own_bias = self.names[id(bias)] if trained_bias else None
        layer = LayerSpec(name, kind, name, self.names[id(module.weight)], own_bias, A, G, product, tuple(alike[1:]))
        return [replace(layer, groups=groups, keeps_direction=known.keeps_direction(module))]

    def _products(self, name: str, module: nn.Module) -> list[LayerSpec] | str:
        """Layers of what a module of no known type multiplies rows by: matrices, or stacks of them with a layer for
        each; why there are none."""
        layouts = dict(multiplied(module))
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            layouts.setdefault("weight", MatrixLayout(False))
        shapes = {name: layout.shape(parameter_shape(module._parameters[name])) for name, layout in layouts.items()}
        stacks = [parameter for parameter, shape in shapes.items() if len(shape) == 3]
        layers: list[LayerSpec] = []
        reason = ""
        for parameter, shape in shapes.items():
            if len(shape) not in (2, 3):
                continue
            place = name if parameter == "weight" else f"{name}.{parameter}".lstrip(".")
            weight, transposed = module._parameters[parameter], layouts[parameter].transposed
            bias, kind = _bias(module, parameter, shape, transposed), "Conv1D" if transposed else "Linear"
            reason = self._unfit(place, weight, bias) or ""
            if not reason and len(self.users[id(weight)]) > 1:
                reason = f"{parameter} is shared by {', '.join(self.users[id(weight)])}"
            if not reason and id(weight) in self.tables:
                reason = TABLE.format(parameter)
            if not reason and kind not in self.choice.types:
                reason = f"{kind} is not in kfac.layers.types"
            if reason:
                continue
            trained_bias = bias is not None and id(bias) in self.trained
            O, I = shape[:-3:-1] if transposed else shape[-2:]  # noqa: E741
            found = _sides(place, (I + trained_bias, O), self.choice)
            names = self.names[id(weight)], self.names[id(bias)] if trained_bias else None
            layer = LayerSpec(place, kind, name, *names, *found, product=True)
            if len(shape) == 2:
                layers.append(layer)
                continue
            # Tokens that enter are of one kind, whichever expert takes them. What an expert makes of them has an A of
            # its own, as long as that is no larger than the weight
            first = next((other for other in layers if other.part[1] == shape[0] and other.A == layer.A), None)
            entering = parameter == stacks[0] or (first is not None and parameter != stacks[-1])
            leader = first.name if entering and first is not None else f"{place}.0"
            common = self.choice.shares and (entering or I > O) and layer.A.block > 0
            for index in range(shape[0]):
                own = f"{place}.{index}"
                shares = leader if common and own != leader else None
                layers.append(replace(layer, name=own, part=(index, shape[0]), shares=shares))
        return layers or reason

    def _unfit(self, name: str, weight: Any, bias: nn.Parameter | None, users: int = 1) -> str | None:
        """Why a layer of such parameters, which so many modules hold, is left alone, or None."""
        if self.choice.include and not any(re.search(pattern, name) for pattern in self.choice.include):
            return "not matched by kfac.layers.include"
        for pattern in self.choice.exclude:
            if re.search(pattern, name):
                return f"matched by kfac.layers.exclude {pattern!r}"
        if not numel(weight):
            return "weight has no elements"
        if not weight.requires_grad:
            return "weight is frozen"
        if id(weight) not in self.trained:
            return "weight is not among the optimizer's parameters"
        if getattr(weight, "_ds_grad_allreduce_registered", False):
            return "AutoTP sums its gradient over tensor-parallel ranks, each of which has other rows"
        if id(weight) in self.tied_stages:
            return "tied by a TiedLayerSpec: its gradient is a sum over uses of which other stages have the rows"
        if bias is not None and self._readers(bias) > users:
            return "bias is shared with another module; its gradient is a sum over both uses"
        return None

    def _readers(self, parameter: nn.Parameter) -> int:
        """How many modules do something with it."""
        users = self.users[id(parameter)]
        if len(users) == 1:
            return 1
        own = {user: next(n for n, p in self.modules[user]._parameters.items() if p is parameter) for user in users}
        return sum(reads(self.modules[user], name) for user, name in own.items())

    def left_over(self, layers: list[LayerSpec]) -> list[Skipped]:
        """Parameters of preconditioned modules that are not part of the layer."""
        skipped: dict[Skipped, None] = {}
        covered = {name for layer in layers for name in layer.parameters}
        for layer in {layer.module: layer for layer in layers}.values():
            for name, parameter in self.modules[layer.module].named_parameters(recurse=False):
                if self.names[id(parameter)] not in covered:
                    reason = "is not seen to multiply anything" if layer.product else LAYERS[layer.kind].without_bias
                    reason = "is frozen" if id(parameter) not in self.trained else reason or "is no part of its matrix"
                    place = f"{layer.module}.{name}".lstrip(".")
                    skipped[Skipped(place, "parameter", numel(parameter), f"it {reason}")] = None
        return list(skipped)


def _kind(module: nn.Module) -> tuple[str, str | None]:
    """The type's name and None, or "" and why no type takes this module."""
    reasons = []
    for kind, layer_type in LAYERS.items():
        reason = layer_type.refusal(module) if isinstance(module, layer_type.kind) else ""
        if reason is None:
            return kind, None
        if reason:
            reasons.append(reason)
    if isinstance(module, ParametrizationList):
        return "", "the weight of the module around it is computed of it by a parametrization"
    return "", "; ".join(reasons) or "no K-FAC layer type for it"


def _bias(module: nn.Module, parameter: str, shape: tuple[int, ...], transposed: bool) -> nn.Parameter | None:
    """What is added to the product with a parameter, by the names in use: of each matrix's outputs one."""
    outputs = (*shape[:-2], shape[-1] if transposed else shape[-2])
    for name in (f"{parameter}_bias", parameter.removesuffix("weight") + "bias"):
        bias = module._parameters.get(name)
        if bias is not None and name != parameter and parameter_shape(bias) == outputs:
            return bias
    return None


def _sides(name: str, dims: tuple[int, int], choice: LayerChoice) -> tuple[Side, Side]:
    """Of I and O."""
    sides: list[Side] = []
    for dim, other in (dims, dims[::-1]):
        dense = choice.dense_max or dim
        if not choice.curvature or (ADAPTER.search(name) and dim > other):
            sides.append(Side.identity(dim))
        elif dim <= dense:
            sides.append(Side.dense(dim))
        elif dim <= (LONGEST if choice.gradients else LONGEST_INPUT):
            sides.append(Side.blocks_of(dim, max(dense // 2, min(other, dense))))
        else:
            sides.append(Side.diagonal(dim))
    A, G = sides
    return A, G if choice.gradients else Side.identity(G.dim)


def numel(parameter: Any) -> int:
    return prod(parameter_shape(parameter))
