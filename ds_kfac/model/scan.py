"""Find the layers of a model that K-FAC preconditions, and list everything that it leaves alone,
with the reason."""

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
"""Regex for the names that PEFT and torchtune give to the two matrices of a low-rank adapter. Only
the short side of each matrix gets a factor. The gradient's rank is at most the length of the short
side, and a factor of the long side would be thousands of times as large as the matrix."""
LONGEST = 16384
"""If a side is longer than this, such as a vocabulary, its factor is diagonal. The block-diagonal
factor of a side of this length takes half a GB."""
LONGEST_INPUT = 65536
"""Takes the place of :data:`LONGEST` if G is the identity. In this case only inputs have factors,
and no input is as long as a vocabulary. With this limit, the inputs of a large MLP keep their
blocks."""


@dataclass(frozen=True)
class Skipped:
    """Something that K-FAC leaves alone, and why. It is a module with parameters of its own, or a
    single parameter."""

    name: str
    kind: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Scan:
    """Result of :func:`scan`: the layers to precondition, and the modules and parameters that K-FAC
    leaves alone."""

    layers: tuple[LayerSpec, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class LayerChoice:
    """Which layers are preconditioned, and the structure of their sides. ``include``, ``exclude``
    and ``types`` are the settings of the same names in ``kfac.layers``.

    Attributes:
        dense_max: length of the longest side that has a dense factor; None: all sides are dense.
        curvature: whether there are factors at all; without them both sides are identities.
        gradients: whether statistics of output gradients are collected; without them G is the
            identity.
        shares: whether several layers may share one A.
        blocks: pairs (regex for the end of a weight's name, blocks of its matrix), see
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
    """Return (words, width) of every embedding in a model. For a tensor-parallel embedding, words
    is the number of words in this rank's shard."""
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
    """Find the layers that K-FAC preconditions, in the order of the modules. Reads shapes and flags
    of parameters, never their values.

    Args:
        model: the model.
        choice: which layers to precondition; None: all layers of known types.
        optimized: the optimizer's parameters; None: all that require a gradient.
        head_shapes: shapes (words, width) of embeddings. The last layer is a language model's head
            if its (O, I) is one of them. None: the shapes of the embeddings in ``model``. In a
            pipeline they must be given, because the embedding may be in another stage.

    Raises:
        ValueError: a pattern matches no module with parameters, a module is lazy, the chosen blocks
            do not fit a matrix, or no layer can be preconditioned.
    """
    choice = choice or LayerChoice()
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"kfac: {lazy[0]} has no shape yet (a lazy module): run the model on one example first"
        )
    scanner = _Scanner(model, choice, model.parameters() if optimized is None else optimized)
    _check_patterns("include", choice.include, scanner.modules)
    _check_patterns("exclude", choice.exclude, scanner.modules)
    layers: list[LayerSpec] = []
    skipped: list[Skipped] = []
    for name, module in scanner.modules.items():
        layers_or_reason = scanner.layers_of(name, module)
        if isinstance(layers_or_reason, list):
            layers += layers_or_reason
        elif layers_or_reason is not None:
            size = sum(map(numel, module.parameters(recurse=False)))
            skipped.append(Skipped(name, type(module).__name__, size, layers_or_reason))
    skipped += scanner.skipped_parameters(layers)
    if not layers:
        reasons = "; ".join(f"{s.name} ({s.kind}): {s.reason}" for s in skipped[:8])
        raise ValueError(
            f"kfac: {type(model).__name__} has no layer to precondition (known types: "
            f"{', '.join(TYPES)}); check kfac.layers, or use AdamW. Modules left alone: "
            f"{reasons or 'no module has parameters'}"
        )
    if head_shapes is None:
        head_shapes = embedding_shapes(model)
    modules = dict(model.named_modules())
    layers = [
        with_blocks(layer, modules, choice.blocks) for layer in _with_head(layers, head_shapes)
    ]
    classes_of.cache_clear()  # parsed sources are large, and no longer needed
    return Scan(tuple(layers), tuple(skipped))


def _check_patterns(key: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Check that each pattern of ``kfac.layers.<key>`` matches the name of a module."""
    names = list(names)
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"kfac.layers.{key}: pattern {pattern!r} matches no module with parameters; names "
                "look like: " + ", ".join(names[:6])
            )


def _with_head(
    layers: Sequence[LayerSpec], shapes: Collection[tuple[int, int]]
) -> Sequence[LayerSpec]:
    """Return the layers with a language model's head marked, see :attr:`LayerSpec.makes_words`.

    The head is the last layer, if it has the shape of an embedding. A layer in the middle of the
    model is not a head, even if it has the shape of a position embedding. A head whose weight is
    tied to the embedding is not preconditioned. The last preconditioned layer then has another
    shape, so no layer is marked. A tensor-parallel head has some of the words, while a plain
    embedding in the same model has all words.
    """
    head = layers[-1]
    outputs = head.G.dim
    inputs = head.A.dim - (head.bias is not None)
    if head.kind == "ColumnParallelLinear":
        is_head = any(words % outputs == 0 and width == inputs for words, width in shapes)
    else:
        is_head = head.kind in ("Linear", "Conv1D") and (outputs, inputs) in shapes
    if not is_head:
        return layers
    return [*layers[:-1], replace(head, makes_words=True)]


class _Scanner:
    """The rules by which modules become layers.

    Args:
        model: the model.
        choice: which layers to precondition.
        optimized: the optimizer's parameters.

    Attributes:
        modules: name -> module, for all modules that hold parameters themselves.
        names: parameter -> its name.
        users: parameter -> names of the modules that hold it. The key None, which stands for a
            missing bias, has no users.
        trained: the parameters that are trained.
        tied_stages: the parameters that a PipelineModule shares between its stages.
        borrowed: child module -> how its parent's code uses the child's weight. For example,
            torch's attention multiplies by the weight of its ``out_proj``.
        tables: the parameters in which rows are looked up.
    """

    def __init__(
        self, model: nn.Module, choice: LayerChoice, optimized: Iterable[nn.Parameter]
    ) -> None:
        self.choice = choice
        self.modules = {
            name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))
        }
        self.names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
        self.trained = {parameter for parameter in optimized if parameter.requires_grad}
        self.users: defaultdict[nn.Parameter | None, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self.users[parameter].append(name)
        # DeepSpeed's PipelineModule makes this ModuleDict from its TiedLayerSpecs
        tied = dict(model.named_children()).get("tied_modules")
        self.tied_stages = set[nn.Parameter]()
        if isinstance(tied, nn.ModuleDict):
            self.tied_stages.update(tied.parameters())
        self.tables = tables(model)
        self.borrowed = {
            weight.module: weight
            for module in model.modules()
            for weight in borrowed_weights(module)
        }

    def layers_of(self, name: str, module: nn.Module) -> list[LayerSpec] | str | None:
        """Return the layers of a module, or the reason why it is left alone.

        Returns None if this module belongs to the layer of another module that has the same
        parameters.
        """
        kind, why = _kind(module)
        if why is not None:
            return self._products(name, module) or why
        layer_type = LAYERS[kind]
        borrowed = self.borrowed.get(module)
        is_called = borrowed is None or borrowed.is_called
        if isinstance(module, nn.Linear) and borrowed is not None:
            if borrowed.matrices > 1 and not is_called:
                return self._products(name, module, borrowed.matrices)

        bias = module._parameters.get("bias")
        members = self._members(name, module, kind)
        others = [user for user in self.users[bias] if user not in members]
        # If a module without a known type has the same bias, as RoBERTa's head has, it is assumed
        # not to add the bias. If it does add it, the proof of rows fails.
        sharing = [user for user in others if _kind(self.modules[user])[1] is None]
        reason = self._refusal(name, "weight", module, sharing, members)
        if reason is not None:
            return reason
        if name != members[0]:
            return None
        is_trained_bias = bias in self.trained and layer_type.without_bias is None
        reason = self._refused_type(kind, has_frozen_bias=bias is not None and not is_trained_bias)
        if reason is not None:
            return reason

        dims = layer_type.sides(module, is_trained_bias)
        sides = layer_type.structured(*_sides(name, dims, self.choice), is_trained_bias)
        groups: Any = module.groups if isinstance(layer_type, Convolution) else 1
        A, G = (side.repeated(groups) for side in sides)
        is_product = False
        method = layer_type.overridden(module) if isinstance(layer_type, Convolution) else None
        if method is not None:
            is_product = convolves(module)
            if not is_product and self.choice.gradients:
                return (
                    f"{type(module).__name__} overrides {kind}.{method}, and does not convolve "
                    "with its unchanged weight"
                )
            if not is_product:
                # without A the direction depends on the gradient alone, which is right whatever the
                # module computes
                A = Side.identity(A.dim)
        if borrowed is not None and isinstance(module, nn.Linear):
            is_product = True
        elif not is_called:
            return "its parent module uses the weight without calling this module"
        layer = LayerSpec(
            name=name,
            kind=kind,
            module=name,
            weight=self.names[module.weight],
            bias=self.names[bias] if is_trained_bias else None,
            A=A,
            G=G,
            product=is_product,
            also=tuple(members[1:]),
            groups=groups,
            keeps_direction=layer_type.keeps_direction(module),
        )
        return [layer]

    def _members(self, name: str, module: nn.Module, kind: str) -> list[str]:
        """Return the names of the modules that form one layer together with this module.

        Modules of one type that share weight and bias are one layer with several names.
        """
        weight: Any = getattr(module, "weight", None)
        if weight is None:
            raise TypeError(
                f"ds_kfac: the layer type {kind} describes module {name or '(model)'} of class "
                f"{type(module).__name__}, which has no weight. Call the parameters of the module "
                "weight and bias, or let the type's refusal() leave out the module"
            )
        users = self.users[weight]
        holders = [self.modules[user] for user in users]
        biases = {holder._parameters.get("bias") for holder in holders}
        is_same_layer = len(biases) == 1 and all(
            _kind(holder)[0] == kind and holder not in self.borrowed for holder in holders
        )
        return users if is_same_layer else [name]

    def _refused_type(self, kind: str, *, has_frozen_bias: bool) -> str | None:
        """Return why layers of this type are left alone; None if they are preconditioned."""
        if ("Linear" if kind in SHARDS else kind) not in self.choice.types:
            return f"{kind} is not in kfac.layers.types"
        if not LAYERS[kind].needs_gradients:
            return None
        if not self.choice.gradients:
            return (
                'its factor needs output gradients, which kfac.factor.fisher "activations_only" '
                "does not collect"
            )
        return "only one of its weight and bias is trained" if has_frozen_bias else None

    def _products(self, name: str, module: nn.Module, borrowed: int = 1) -> list[LayerSpec] | str:
        """Return the layers of a module whose type is not in the table, or the reason why it has
        none.

        Layers are the matrices by which the module's code multiplies rows. In a stack of matrices
        [n, .., ..] each matrix is a layer.

        Args:
            name: name of the module.
            module: the module.
            borrowed: number of matrices into which the parent's code cuts the weight of a linear
                module; 1 for any other module.
        """
        layouts = dict(multiplied(module))
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            layouts.setdefault("weight", MatrixLayout(False))
        if borrowed > 1:
            layouts["weight"] = MatrixLayout(False, stack=borrowed)
        shapes = {
            parameter: layout.shape(parameter_shape(module._parameters[parameter]))
            for parameter, layout in layouts.items()
        }
        stacks = [parameter for parameter, shape in shapes.items() if len(shape) == 3]
        layers: list[LayerSpec] = []
        reason = ""
        for parameter, shape in shapes.items():
            if len(shape) not in (2, 3):
                continue
            is_transposed = layouts[parameter].transposed
            layer = self._product(name, module, parameter, shape, is_transposed)
            if isinstance(layer, str):
                reason = layer
                continue
            if len(shape) == 2:
                layers.append(layer)
            else:
                is_first = parameter == stacks[0]
                is_last = parameter == stacks[-1]
                layers += self._experts(layer, shape[0], layers, is_first=is_first, is_last=is_last)
        return layers or reason

    def _product(
        self,
        module_name: str,
        module: nn.Module,
        parameter: str,
        shape: tuple[int, ...],
        is_transposed: bool,
    ) -> LayerSpec | str:
        """Return the layer of a matrix, or of one matrix of a stack. If the matrix is left alone,
        return the reason.

        Args:
            module_name, module: the module that holds the parameter.
            parameter: name of the parameter in the module.
            shape: shape of the matrix, or of the stack, as the module's code uses it.
            is_transposed: whether a matrix is stored as [I, O].
        """
        name = f"{module_name}.{parameter}".lstrip(".")
        if parameter == "weight":
            name = module_name
        weight = module._parameters[parameter]
        bias = _bias(module, parameter, shape, is_transposed)
        sharing = [user for user in self.users[bias] if user != module_name]
        reason = self._refusal(name, parameter, module, sharing, [module_name])
        if reason is not None:
            return reason
        kind = "Conv1D" if is_transposed else "Linear"
        if kind not in self.choice.types:
            return f"{kind} is not in kfac.layers.types"
        is_trained_bias = bias in self.trained
        O, I = shape[-2:]  # noqa: E741
        if is_transposed:
            O, I = I, O  # noqa: E741
        A, G = _sides(name, (I + is_trained_bias, O), self.choice)
        return LayerSpec(
            name=name,
            kind=kind,
            module=module_name,
            weight=self.names[weight],
            bias=self.names[bias] if is_trained_bias else None,
            A=A,
            G=G,
            product=True,
        )

    def _experts(
        self,
        stack: LayerSpec,
        count: int,
        before: Sequence[LayerSpec],
        *,
        is_first: bool,
        is_last: bool,
    ) -> list[LayerSpec]:
        """Return the layers of a stack of matrices, such as a weight of a module of experts.

        If the inputs of the stack are tokens, all experts share one A, because tokens have the
        same distribution, whichever expert gets them. If each expert has computed its input itself,
        each expert has its own A. But if I > O, this A would be larger than the weight, so the
        experts share one A. The plan may replace a shared A by one A for each expert
        (:mod:`ds_kfac.plan.common`).

        Args:
            stack: the layer of one matrix, except that it has the name of the stack.
            count: number of matrices.
            before: layers of the module's parameters that the code uses before this stack.
            is_first, is_last: whether it is the first or the last stack in the module's code.
        """
        # earlier stacks with as many matrices and inputs, such as gates that precede their values
        twins = [x for x in before if x.part[1] == count and x.A == stack.A]
        has_twin = bool(twins) and not is_last
        takes_tokens = is_first or has_twin
        leader = f"{stack.name}.0"
        if takes_tokens and twins:
            leader = twins[0].name
        O = stack.G.dim  # noqa: E741
        I = stack.A.dim - (stack.bias is not None)  # noqa: E741
        share_A = self.choice.shares and (takes_tokens or I > O) and stack.A.block > 0
        experts = []
        for index in range(count):
            expert = f"{stack.name}.{index}"
            shares = leader if share_A and expert != leader else None
            experts.append(replace(stack, name=expert, part=(index, count), shares=shares))
        return experts

    def _refusal(
        self,
        name: str,
        parameter: str,
        module: nn.Module,
        bias_users: Sequence[str],
        members: Sequence[str],
    ) -> str | None:
        """Return why the layer of a module's parameter is left alone; None if it is preconditioned.

        Args:
            name: name of the layer.
            parameter: name of its weight in the module.
            module: the module.
            bias_users: names of other layers that have the same bias.
            members: names of the modules whose calls are calls of the layer.
        """
        weight: Any = module._parameters[parameter]
        reason = self._not_chosen(name)
        if reason is not None:
            return reason
        if not numel(weight):
            return "weight has no elements"
        if not weight.is_floating_point():
            return (
                f"weight is {str(weight.dtype).removeprefix('torch.')}, not a floating-point dtype"
            )
        if not weight.requires_grad:
            return "weight is frozen"
        if weight not in self.trained:
            return "weight is not among the optimizer's parameters"
        if getattr(weight, "_ds_grad_allreduce_registered", False):
            return (
                "AutoTP sums its gradient over tensor-parallel ranks, each of which has different "
                "rows"
            )
        if weight in self.tied_stages:
            return (
                "tied by a TiedLayerSpec: its gradient is a sum over several pipeline stages, but "
                "this stage has only its own rows"
            )
        if bias_users:
            return f"bias is shared with {', '.join(bias_users)}"
        users = self.users[weight]
        if len(users) > len(members):
            return f"{parameter} is shared by {', '.join(users)}"
        if weight in self.tables:
            return f"rows are looked up in {parameter}: it is a table"
        return None

    def _not_chosen(self, name: str) -> str | None:
        """Return why the user's choice leaves out a layer of this name; None if it does not."""
        include = self.choice.include
        if include and not any(re.search(pattern, name) for pattern in include):
            return "not matched by kfac.layers.include"
        for pattern in self.choice.exclude:
            if re.search(pattern, name):
                return f"matched by kfac.layers.exclude {pattern!r}"
        return None

    def skipped_parameters(self, layers: list[LayerSpec]) -> list[Skipped]:
        """Return the parameters of preconditioned modules that are not part of a layer."""
        skipped: dict[Skipped, None] = {}
        covered = {name for layer in layers for name in layer.parameters}
        for layer in {layer.module: layer for layer in layers}.values():
            for name, parameter in self.modules[layer.module].named_parameters(recurse=False):
                if self.names[parameter] in covered:
                    continue
                reason = LAYERS[layer.kind].without_bias if name == "bias" else None
                if layer.product:
                    reason = "is not seen to multiply anything"
                if parameter not in self.trained:
                    reason = "is frozen"
                reason = f"it {reason or 'is not part of its matrix'}"
                place = f"{layer.module}.{name}".lstrip(".")
                skipped[Skipped(place, "parameter", numel(parameter), reason)] = None
        return list(skipped)


def _kind(module: nn.Module) -> tuple[str, str | None]:
    """Return (name of a module's type, None), or ("", reason why no type describes the
    module)."""
    reasons = []
    for kind, layer_type in LAYERS.items():
        reason = layer_type.refusal(module) if isinstance(module, layer_type.kind) else ""
        if reason is None:
            return kind, None
        if reason:
            reasons.append(reason)
    reason = "; ".join(reasons) or "no K-FAC layer type for it"
    if isinstance(module, ParametrizationList):
        reason = (
            "it is a parametrization, from which the weight of the module around it is computed"
        )
    return "", reason


def _bias(
    module: nn.Module, parameter: str, shape: tuple[int, ...], transposed: bool
) -> nn.Parameter | None:
    """Return the bias of a module's weight ``parameter``, found by its name; None if there is none.

    Args:
        shape: shape of the matrix or stack. The bias of a matrix is [O], and of a stack [n, O].
        transposed: whether a matrix is stored as [I, O].
    """
    outputs = (*shape[:-2], shape[-1] if transposed else shape[-2])
    for name in (f"{parameter}_bias", parameter.removesuffix("weight") + "bias"):
        bias = module._parameters.get(name)
        if bias is not None and name != parameter and parameter_shape(bias) == outputs:
            return bias
    return None


def _sides(name: str, dims: tuple[int, int], choice: LayerChoice) -> tuple[Side, Side]:
    """Return (A, G) of a layer whose matrix has the sides ``dims`` = (I, O)."""
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
    """Return the number of a parameter's elements, even if ZeRO-3 has partitioned the parameter."""
    return prod(parameter_shape(parameter))
