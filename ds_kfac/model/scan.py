"""Model -> the layers K-FAC preconditions, and everything it leaves alone with the reason."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
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
from ds_kfac.model.product_code import (
    MatrixLayout,
    borrowed_weights,
    classes_of,
    convolves,
    multiplied,
    tables,
)
from ds_kfac.model.registry import LAYERS, SHARDS, TYPES

ADAPTER = re.compile(r"(^|\.)lora_[ab](\.|$)", re.IGNORECASE)
"""Names of the two matrices of a low-rank adapter, as PEFT and torchtune give them. Only the short
side of each gets a factor: the gradient has no higher rank, and a factor of the long side would be
thousands of times the matrix's size."""
LONGEST, LONGEST_INPUT = 16384, 65536
"""Longest side with a block-diagonal factor (half a GB); a longer one, such as a head's vocabulary,
has a diagonal. LONGEST_INPUT holds where G is the identity: then no side is a vocabulary's, and an
MLP's inputs stay in blocks."""


@dataclass(frozen=True)
class Skipped:
    """A module with direct parameters that K-FAC does not touch, and why."""

    name: str
    kind: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Scan:
    """Result of :func:`scan`: the layers to precondition, and the modules and parameters left
    alone."""

    layers: tuple[LayerSpec, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class LayerChoice:
    """Which layers are preconditioned, and the structure of their sides. ``include``, ``exclude``
    and ``types`` are the config's keys of ``kfac.layers``.

    Attributes:
        dense_max: longest side with a dense factor; None: all sides are dense.
        curvature: whether there are factors at all; without them both sides are identities.
        gradients: whether statistics of output gradients are collected; without them G is the
            identity.
        shares: whether several layers may share one A.
        blocks: (regex for the end of a weight's name, maps in its matrix), see
            :mod:`ds_kfac.model.blocks`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    types: tuple[str, ...] = TYPES
    dense_max: int | None = None
    curvature: bool = True
    gradients: bool = True
    shares: bool = True
    blocks: tuple[tuple[str, Blocks], ...] = ()


def embedding_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """Return (words, width) of every embedding in a model. The words of a tensor-parallel one are
    its shard's."""
    shapes = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            shapes.add((module.num_embeddings, module.embedding_dim))
        elif type(module).__name__ == "VocabParallelEmbedding" and "weight" in module._parameters:
            words, width = parameter_shape(module._parameters["weight"])
            shapes.add((words, width))
    return shapes


def scan(
    model: nn.Module,
    choice: LayerChoice | None = None,
    *,
    optimized: Iterable[nn.Parameter] | None = None,
    head_shapes: Collection[tuple[int, int]] | None = None,
) -> Scan:
    """Find the layers, in module order. Pure: reads shapes and flags, never values.

    Args:
        optimized: the optimizer's parameters; None: all that require a gradient.
        head_shapes: shapes (O, I) by which the last layer is a language model's head. None: those
            of the model's own embeddings. A pipeline stage is a part of a model, and its embedding
            may be in another stage.

    Raises:
        ValueError: a pattern matches no module with parameters, a module is lazy, blocks do not
            fit, or no layer is left to precondition.
    """
    choice = choice or LayerChoice()
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"kfac: {lazy[0]} has no shape yet (a lazy module): run the model on one example before"
        )
    scanner = _Scanner(model, choice, model.parameters() if optimized is None else optimized)
    for key, patterns in (("include", choice.include), ("exclude", choice.exclude)):
        for pattern in (
            x for x in patterns if not any(re.search(x, name) for name in scanner.modules)
        ):
            raise ValueError(
                f"kfac.layers.{key}: pattern {pattern!r} matches no module with parameters; names "
                f"look like: " + ", ".join(list(scanner.modules)[:6])
            )
    layers, skipped = list[LayerSpec](), list[Skipped]()
    for name, module in scanner.modules.items():
        layers_or_reason = scanner.layers_of(name, module)
        if isinstance(layers_or_reason, list):
            layers += layers_or_reason
        elif layers_or_reason is not None:
            size = sum(map(numel, module.parameters(recurse=False)))
            skipped.append(Skipped(name, type(module).__name__, size, layers_or_reason))
    skipped += scanner.skipped_parameters(layers)
    if not layers:
        raise ValueError(
            f"kfac: {type(model).__name__} has no layer to precondition (known types: "
            f"{', '.join(TYPES)}); "
            "check kfac.layers, or train it by AdamW. Left alone: "
            + (
                "; ".join(f"{s.name} ({s.kind}): {s.reason}" for s in skipped[:8])
                or "no module has parameters"
            )
        )
    if head_shapes is None:
        head_shapes = embedding_shapes(model)
    modules = dict(model.named_modules())
    layers = [
        with_blocks(layer, modules, choice.blocks) for layer in _with_head(layers, head_shapes)
    ]
    classes_of.cache_clear()  # parsed sources are large, and no longer needed
    return Scan(tuple(layers), tuple(skipped))


def _with_head(
    layers: Sequence[LayerSpec], shapes: Collection[tuple[int, int]]
) -> Sequence[LayerSpec]:
    """A language model's head is marked, see :attr:`LayerSpec.makes_words`: the last layer, where
    it has the shape of an embedding. A layer between, as wide as there are positions, is none, nor
    is the last one of a tied model."""
    head = layers[-1]
    shape = (head.G.dim, head.A.dim - (head.bias is not None))
    if head.kind not in ("Linear", "Conv1D", "ColumnParallelLinear") or shape not in shapes:
        return layers
    return [*layers[:-1], replace(head, makes_words=True)]


class _Scanner:
    """The rules by which modules become layers.

    Attributes:
        modules: name -> module, of all modules with direct parameters.
        names: id of a parameter -> its name.
        users: id of a parameter -> names of the modules that hold it.
        trained: ids of the parameters that are trained.
        tied_stages: ids of the parameters that a PipelineModule ties over its stages.
        borrowed: id of a module whose weight its parent uses directly, as torch's attention does ->
            whether the module is called, too, and into how many matrices the weight is cut.
        tables: ids of the parameters in which rows are looked up.
    """

    def __init__(
        self, model: nn.Module, choice: LayerChoice, optimized: Iterable[nn.Parameter]
    ) -> None:
        self.choice = choice
        self.modules = {
            name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))
        }
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = {id(p) for p in optimized if p.requires_grad}
        self.users: defaultdict[int, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self.users[id(parameter)].append(name)
        # DeepSpeed's PipelineModule has them, from its TiedLayerSpecs
        tied = dict(model.named_children()).get("tied_modules")
        self.tied_stages = (
            {id(p) for p in tied.parameters()} if isinstance(tied, nn.ModuleDict) else set()
        )
        self.tables = tables(model)
        self.borrowed = {
            id(child): how for module in model.modules() for child, *how in borrowed_weights(module)
        }

    def layers_of(self, name: str, module: nn.Module) -> list[LayerSpec] | str | None:
        """The layers of a module, why it is left alone, or None if another module's layer includes
        it."""
        kind, why = _kind(module)
        if why is not None:
            return self._products(name, module) or why
        layer_type, product, choice = LAYERS[kind], False, self.choice
        called, stack = self.borrowed.get(id(module), (True, 1))
        if stack > 1 and not called and isinstance(module, nn.Linear):
            return self._products(name, module, stack)
        users, bias = self.users[id(module.weight)], module._parameters.get("bias")
        holders = [self.modules[user] for user in users]
        biases = {id(holder._parameters.get("bias")) for holder in holders}
        # modules of one kind that share weight and bias are one layer with several names
        same_layer = len(biases) == 1 and all(
            _kind(holder)[0] == kind and id(holder) not in self.borrowed for holder in holders
        )
        members = users if same_layer else [name]
        others = [user for user in self.users[id(bias)] if user not in members]
        # a module of no known type, such as RoBERTa's head, holds it only; if it adds it, too, the
        # proof fails
        sharing = [user for user in others if _kind(self.modules[user])[1] is None]
        reason = self._refusal(name, "weight", module, sharing, members)
        if reason is not None:
            return reason
        if name != members[0]:
            return None
        if ("Linear" if kind in SHARDS else kind) not in choice.types:
            return f"{kind} is not in kfac.layers.types"
        if layer_type.needs_gradients and not choice.gradients:
            return (
                "its factor needs output gradients, which kfac.factor.fisher "
                '"activations_only" does not collect'
            )
        trained_bias = (
            bias is not None and id(bias) in self.trained and layer_type.without_bias is None
        )
        if layer_type.needs_gradients and bias is not None and not trained_bias:
            return "only one of its weight and bias is trained"
        sides = layer_type.structured(
            *_sides(name, layer_type.sides(module, trained_bias), choice), trained_bias
        )
        groups: Any = module.groups if isinstance(layer_type, Convolution) else 1
        A, G = (side.repeated(groups) for side in sides)
        method = layer_type.overridden(module) if isinstance(layer_type, Convolution) else None
        if method is not None:
            product = convolves(module)
            if not product and choice.gradients:
                return (
                    f"{type(module).__name__} overrides {kind}.{method}, and does not convolve "
                    f"with its weight alone"
                )
            # without A the direction needs the gradient alone, which is right whatever the module
            # computes
            A = A if product else Side.identity(A.dim)
        is_borrowed_linear = id(module) in self.borrowed and isinstance(module, nn.Linear)
        if not (called or is_borrowed_linear):
            return "its parent module uses its weight without calling it"
        product = product or is_borrowed_linear
        bias_name = self.names[id(bias)] if trained_bias else None
        weight_name, also = self.names[id(module.weight)], tuple(members[1:])
        layer = LayerSpec(name, kind, name, weight_name, bias_name, A, G, product, also)
        return [replace(layer, groups=groups, keeps_direction=layer_type.keeps_direction(module))]

    def _products(self, name: str, module: nn.Module, borrowed: int = 1) -> list[LayerSpec] | str:
        """Layers of a module of no known type, from the parameters that its code multiplies rows
        by.

        A matrix is a layer; in a stack of matrices [n, .., ..] each matrix is one. If there is no
        layer: why. ``borrowed``: number of matrices in the weight of a linear layer, if other code
        multiplies by it.
        """
        layouts = dict(multiplied(module))
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            layouts.setdefault("weight", MatrixLayout(False))
        if borrowed > 1:
            layouts["weight"] = MatrixLayout(False, stack=borrowed)
        shapes = {
            name: layout.shape(parameter_shape(module._parameters[name]))
            for name, layout in layouts.items()
        }
        stacks = [parameter for parameter, shape in shapes.items() if len(shape) == 3]
        layers, reason = list[LayerSpec](), ""
        for parameter, shape in shapes.items():
            if len(shape) not in (2, 3):
                continue
            place = name if parameter == "weight" else f"{name}.{parameter}".lstrip(".")
            weight, transposed = module._parameters[parameter], layouts[parameter].transposed
            bias, kind = (
                _bias(module, parameter, shape, transposed),
                "Conv1D" if transposed else "Linear",
            )
            sharing = [user for user in self.users[id(bias)] if user != name]
            reason = self._refusal(place, parameter, module, sharing, [name]) or ""
            if not reason and kind not in self.choice.types:
                reason = f"{kind} is not in kfac.layers.types"
            if reason:
                continue
            trained_bias = bias is not None and id(bias) in self.trained
            O, I = shape[:-3:-1] if transposed else shape[-2:]  # noqa: E741
            sides = _sides(place, (I + trained_bias, O), self.choice)
            names = self.names[id(weight)], self.names[id(bias)] if trained_bias else None
            layer = LayerSpec(place, kind, name, *names, *sides, product=True)
            if len(shape) == 2:
                layers.append(layer)
                continue
            # All experts share the A of their input: tokens have one distribution, whichever expert
            # takes them. What an expert computes gets an A per expert, unless that A would be
            # larger than the weight (I > O). A plan may give more of them their own
            first = next(
                (other for other in layers if other.part[1] == shape[0] and other.A == layer.A),
                None,
            )
            entering = parameter == stacks[0] or (first is not None and parameter != stacks[-1])
            leader = first.name if entering and first is not None else f"{place}.0"
            common = self.choice.shares and (entering or I > O) and layer.A.block > 0
            for index in range(shape[0]):
                expert = f"{place}.{index}"
                shares = leader if common and expert != leader else None
                layers.append(replace(layer, name=expert, part=(index, shape[0]), shares=shares))
        return layers or reason

    def _refusal(
        self,
        name: str,
        parameter: str,
        module: nn.Module,
        bias_users: Sequence[str],
        members: Sequence[str],
    ) -> str | None:
        """Why a layer is left alone whose weight is this parameter of a module, or None.
        ``bias_users``: other layers with its bias; ``members``: the modules whose calls are its
        calls."""
        weight: Any = module._parameters[parameter]
        if self.choice.include and not any(
            re.search(pattern, name) for pattern in self.choice.include
        ):
            return "not matched by kfac.layers.include"
        for pattern in self.choice.exclude:
            if re.search(pattern, name):
                return f"matched by kfac.layers.exclude {pattern!r}"
        if not numel(weight):
            return "weight has no elements"
        if not weight.is_floating_point():
            return (
                f"weight is {str(weight.dtype).removeprefix('torch.')}; factors are of real numbers"
            )
        if not weight.requires_grad:
            return "weight is frozen"
        if id(weight) not in self.trained:
            return "weight is not among the optimizer's parameters"
        if getattr(weight, "_ds_grad_allreduce_registered", False):
            return (
                "AutoTP sums its gradient over tensor-parallel ranks, each of which has other rows"
            )
        if id(weight) in self.tied_stages:
            return (
                "tied by a TiedLayerSpec: its gradient sums uses in several stages, and other "
                "stages have the rows"
            )
        if bias_users:
            return f"bias is shared with {', '.join(bias_users)}"
        if len(users := self.users[id(weight)]) > len(members):
            return f"{parameter} is shared by {', '.join(users)}"
        return (
            f"rows are looked up in {parameter}: it is a table"
            if id(weight) in self.tables
            else None
        )

    def skipped_parameters(self, layers: list[LayerSpec]) -> list[Skipped]:
        """Parameters of preconditioned modules that are not part of the layer."""
        skipped: dict[Skipped, None] = {}
        covered = {name for layer in layers for name in layer.parameters}
        for layer in {layer.module: layer for layer in layers}.values():
            for name, parameter in self.modules[layer.module].named_parameters(recurse=False):
                if self.names[id(parameter)] not in covered:
                    reason = (
                        "is not seen to multiply anything"
                        if layer.product
                        else LAYERS[layer.kind].without_bias
                    )
                    reason = (
                        "is frozen"
                        if id(parameter) not in self.trained
                        else reason or "is no part of its matrix"
                    )
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
        return (
            "",
            "it is a parametrization, from which the weight of the module around it is computed",
        )
    return "", "; ".join(reasons) or "no K-FAC layer type for it"


def _bias(
    module: nn.Module, parameter: str, shape: tuple[int, ...], transposed: bool
) -> nn.Parameter | None:
    """The bias of a module's weight ``parameter``, found by name: [O] of a matrix, [n, O] of a
    stack; else None."""
    outputs = (*shape[:-2], shape[-1] if transposed else shape[-2])
    for name in (f"{parameter}_bias", parameter.removesuffix("weight") + "bias"):
        bias = module._parameters.get(name)
        if bias is not None and name != parameter and parameter_shape(bias) == outputs:
            return bias
    return None


def _sides(name: str, dims: tuple[int, int], choice: LayerChoice) -> tuple[Side, Side]:
    """(A, G) of a layer with the sides ``dims`` = (I, O)."""
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
