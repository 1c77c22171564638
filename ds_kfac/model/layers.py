"""The description of a layer that K-FAC preconditions, and the types of linear layers.

**Tensor-parallel linears**: each rank's shard of a weight is a layer. With t ranks:

    column parallel   weight [O / t, I]    A of the unsharded layer, G of the shard's outputs
    row parallel      weight [O, I / t]    A of the shard's inputs, G of the unsharded layer

So the shards together are preconditioned like the unsharded layer with a block-diagonal factor on
one side. DeepSpeed's AutoTP layers, Megatron's layers and transformers' Conv1D are recognised by
name and attributes, and are not imported.

Shape suffixes: O and I, the outputs and inputs of a layer's matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.curvature.factor import Side


def key_of(layer: str, side: str) -> str:
    """Return the key of a layer's factor. ``side`` is "A" or "G"."""
    return f"{layer}/{side}"


@dataclass(frozen=True)
class LayerSpec:
    """The description of a preconditioned layer, equal on all ranks. It holds no tensors and no
    modules.

    Its matrix is [O, I], outputs times inputs, with the bias as last column. The matrix of a norm
    is a single row of (weight, bias) pairs. A layer with groups has several matrices,
    [groups, O, I].
    """

    name: str
    kind: str
    """Key of :data:`ds_kfac.model.registry.LAYERS`."""
    module: str
    """Name of the module from whose calls the layer's statistics are taken."""
    weight: str
    """Name of the weight parameter in the model."""
    bias: str | None
    """Name of the bias parameter; None if the layer has no bias, or a frozen bias."""
    A: Side
    """The input side of the matrix, whose factor is A. Its width includes the 1 that is appended to
    the inputs for a bias."""
    G: Side
    """The output side of the matrix, whose factor is G."""
    product: bool = False
    """Whether the rows of A are taken from matrix products with the parameter, see ``products.py``.
    If not, they are taken from calls of the module."""
    also: tuple[str, ...] = ()
    """Names of other modules of the same type that hold the same parameters. Calls of these modules
    count as calls of this layer."""
    copies: int = 1
    """Number of tensor-parallel ranks that hold a copy of the layer; 1 if each rank holds a
    different shard."""
    cut: tuple[int, int] = (1, 1)
    """(m, n): tensor parallelism cuts the outputs of the unsharded layer into m parts, and its
    inputs into n parts. This layer is one of the m * n shards."""
    groups: int = 1
    """Number of independent maps of equal shape, such as the groups of a convolution. Each map has
    a block of A and a block of G."""
    keeps_direction: str | None = None
    """Reason why the directions of the layer's updates are not orthogonalized; None if they are
    orthogonalized."""
    makes_words: bool = False
    """Whether the layer is the head of a language model. The last layer is taken for a head if it
    has the shape of an embedding."""
    part: tuple[int, int] = (0, 1)
    """(index, count): the layer's parameters are cut into ``count`` equal parts, and this layer is
    part ``index``. Each expert of a stack is such a part."""
    blocks: tuple[int, ...] = ()
    """Number of rows of each block, for a matrix that consists of several maps. The blocks repeat
    down to the last row, so every ``sum(blocks)`` rows contain each block once. Empty: the matrix
    is one map."""
    guessed: str = ""
    """Text for the report if the matrix has one of the names in
    :data:`ds_kfac.model.blocks.SEVERAL`. It says whether the blocks were chosen by this name, or
    the matrix is treated as one map. Empty for other names."""
    shares: str | None = None
    """Name of another layer whose A this layer uses, if this is known before training, as for the
    experts of a stack. Otherwise None."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's matrix: (O, I), or (groups, O, I)."""
        if self.groups == 1:
            return self.G.dim, self.A.dim
        return self.groups, self.G.dim // self.groups, self.A.dim // self.groups

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the unsharded layer, of which this layer may be a tensor-parallel shard."""
        *groups, O, I = self.shape  # noqa: E741
        return *groups, O * self.cut[0], I * self.cut[1]

    @cached_property
    def maps(self) -> tuple[tuple[int, int], ...]:
        """(O, I) of each map in the layer. Each block in the matrix of each group is a map."""
        O, I = self.shape[-2:]  # noqa: E741
        rows = [size * (O // sum(self.blocks)) for size in self.blocks] or [O]
        return tuple((size, I) for size in rows) * self.groups

    @cached_property
    def keys(self) -> tuple[str, str]:
        """Keys of the layer's own factors, A and G."""
        return key_of(self.name, "A"), key_of(self.name, "G")

    @cached_property
    def numel(self) -> int:
        """Number of elements of the layer's gradient."""
        return prod(self.shape)


def parameter_shape(parameter: Any) -> tuple[int, ...]:
    """Return a parameter's full shape. Under ZeRO-3 it is in ``ds_shape``, because the parameter
    itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
        return
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return
    for value in values:
        yield from tensors_of(value)


def value_of(place: Any, name: str) -> Any:
    """Return an attribute of an object; None if the object lacks the attribute, or if the attribute
    is a property that raises an error because the model does not run yet."""
    try:
        return getattr(place, name, None)
    except Exception:
        return None


def is_autoep(module: nn.Module) -> bool:
    """Return whether a module is a mixture of experts that DeepSpeed's AutoEP has made. Its
    ``experts`` hold this rank's stacks w1, w2 and w3, each [E, O, I]."""
    return getattr(module, "_is_autoep_layer", False) is True


def computed_parameter(module: Any) -> str | None:
    """Return why a module is left alone if its weight or bias is computed, for example by
    weight_norm or a parametrization; None if neither is computed.

    The attribute is looked up without computing it, because a parametrization may draw random
    numbers.
    """
    for name in ("weight", "bias"):
        if name in module._parameters:
            continue
        classes = [vars(kind) for kind in type(module).__mro__]
        attributes = (vars(module), module._buffers, module._modules, *classes)
        if any(isinstance(x, Mapping) and x.get(name) is not None for x in attributes):
            return f"its {name} is computed, for example by a parametrization"
    return None


class LayerType(ABC):
    """A type of layer, an entry of :data:`ds_kfac.model.registry.LAYERS`. It has no state.

    Attributes:
        needs_gradients: whether the rows of A are computed from inputs and output gradients.
        without_bias: reason why a bias is not part of the layer; None if a bias is part of it.
        transposed: whether a linear map's weight is stored [I, O].
        images: whether inputs and outputs are images [N, C, ..], so that no mask [N, T] fits their
            rows.
        kind: class, or classes, of the modules that the type may describe.
    """

    needs_gradients = False
    without_bias: str | None = None
    transposed = False
    images = False
    kind: Any = nn.Module

    @abstractmethod
    def refusal(self, module: Any) -> str | None:
        """Return None if this type describes ``module``, "" if the module is of an unrelated kind,
        and otherwise the reason why the type does not describe the module."""

    @abstractmethod
    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        """Return (I, O) of a module's matrix, where I counts the bias as an input. The sizes must
        be read from attributes or ``ds_shape``, because weights are empty under ZeRO-3."""

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        """Return the sides (A, G) with the blocks that this type of layer requires; by default, the
        given sides."""
        return side_A, side_G

    def keeps_direction(self, module: Any) -> str | None:
        """Return why the directions of the module's updates are not orthogonalized; None if they
        are."""
        return None

    def rows(self, x: Tensor, output: Tensor) -> int:
        """Return how many rows a call has, including rows that do not count."""
        return output.numel() // max(1, output.shape[-1])

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        """Return the rows of G, or of A if the type ``needs_gradients``.

        Args:
            module: the module.
            x: the call's input; None if the type does not need it.
            gradient: the gradient of the call's output.
        """
        return gradient

    @abstractmethod
    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the layer's gradient as a matrix, given the flat gradients of its weight and bias.
        ``shape`` is ``LayerSpec.shape``."""

    @abstractmethod
    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        """Split the layer's matrix into flat gradients, in the order of ``LayerSpec.parameters``.
        This is the inverse of ``matrix``."""


class Linear(LayerType):
    """nn.Linear, y = x W^T + b: a matrix [O, I] with the bias as last column."""

    def refusal(self, module: Any) -> str | None:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module).forward is not nn.Linear.forward:
            return f"{type(module).__name__} overrides nn.Linear.forward, so its rows are unknown"
        return computed_parameter(module)

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        sides = parameter_shape(module.weight)
        out_features, in_features = sides[::-1] if self.transposed else sides
        return in_features + bias, out_features

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        *groups, O, _ = shape  # noqa: E741
        if self.transposed:
            weight_OI = weight.view(*groups, -1, O).mT
        else:
            weight_OI = weight.view(*groups, O, -1)
        if bias is None:
            return weight_OI
        return torch.cat([weight_OI, bias.view(*groups, O, 1)], dim=-1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        weight_OI = matrix_OI[..., :-1] if has_bias else matrix_OI
        weight = (weight_OI.mT if self.transposed else weight_OI).reshape(-1)
        if not has_bias:
            return (weight,)
        return weight, matrix_OI[..., -1].reshape(-1).contiguous()


class Conv1D(Linear):
    """transformers' Conv1D (GPT-2), y = x W + b: :class:`Linear` with the weight [I, O]."""

    transposed = True

    def refusal(self, module: Any) -> str | None:
        is_conv1d = type(module).__name__ == "Conv1D"
        if not is_conv1d or not hasattr(module, "nf") or not hasattr(module, "weight"):
            return ""
        reason = computed_parameter(module)
        if reason is not None:
            return reason
        shape = parameter_shape(module.weight)
        if len(shape) != 2 or shape[1] != module.nf:
            return (
                f"named Conv1D, but its weight {shape} is not [in, nf={module.nf}] as in "
                "transformers"
            )
        return None


AUTOTP_KINDS = {"LinearLayer": "ColumnParallelLinear", "LinearAllreduce": "RowParallelLinear"}


class _Shard(Linear):
    """A shard of a tensor-parallel linear, DeepSpeed's or Megatron's.

    Attributes:
        name: name of Megatron's class.
        shape: name of the attribute in which Megatron stores the size of the cut side.
        unfit: (name of a flag, value of the flag, reason why K-FAC leaves a layer with this value
            alone).
    """

    name: str
    shape: str
    unfit: tuple[str, bool, str]

    def refusal(self, module: Any) -> str | None:
        kind = type(module)
        if kind.__module__ == "deepspeed.module_inject.layers":
            if AUTOTP_KINDS.get(kind.__name__) == self.name:
                return computed_parameter(module)
            # both types of shards are asked about an unknown class, but only one of them reports it
            if kind.__name__ in AUTOTP_KINDS or self.name != "ColumnParallelLinear":
                return ""
            return (
                f"AutoTP's {kind.__name__}: it is unknown which part of the weight this shard holds"
            )
        if kind.__name__ != self.name or isinstance(module, nn.Linear):
            return ""
        if not hasattr(module, self.shape) or getattr(module, "weight", None) is None:
            return (
                f"named {self.name}, but unlike Megatron's class it lacks {self.shape} or a weight "
                "of its own"
            )
        for owner in (module, getattr(module, "config", None)):
            for flag in ("sequence_parallel", "sequence_parallel_enabled"):
                if getattr(owner, flag, False):
                    return f"{flag}: its rows are spread over the tensor-parallel ranks"
        flag, unfit_value, why = self.unfit
        if bool(getattr(module, flag, False)) is unfit_value:
            return why
        return computed_parameter(module)


class ColumnParallelLinear(_Shard):
    """A shard of the outputs: rows of W, and the bias of these rows."""

    name = "ColumnParallelLinear"
    shape = "output_size_per_partition"
    unfit = "gather_output", True, "gather_output: it returns the outputs of all shards"

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        # an AutoTP layer may return the outputs of the unsharded layer
        if getattr(module, "gather_output", False):
            sizes = module._partition_sizes
            gradient = gradient.narrow(-1, sum(sizes[: module.tp_index]), sizes[module.tp_index])
        return gradient


class RowParallelLinear(_Shard):
    """A shard of the inputs: columns of W."""

    name = "RowParallelLinear"
    shape = "input_size_per_partition"
    unfit = (
        "input_is_parallel",
        False,
        "input_is_parallel is false: it gets the inputs of all shards",
    )
    without_bias: str | None = (
        "is added to the sum over tensor-parallel ranks, so it belongs to no shard"
    )
