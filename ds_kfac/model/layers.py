"""What K-FAC has to know about a layer; linear layers. Shape suffixes: O and I, the sides of the layer's matrix.

**Tensor-parallel linears**: this rank's shard of a weight is a layer of its own.

    column parallel   weight [O / t, I]    A is the whole layer's, G the diagonal block of the own outputs
    row parallel      weight [O, I / t]    A is the diagonal block of the own inputs, G the whole layer's

Together the shards are the whole layer with one side block-diagonal. DeepSpeed's AutoTP layers, Megatron's, and
transformers' Conv1D are found by name and attributes; none is imported.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.curvature.factor import Side


def key_of(layer: str, side: str) -> str:
    """Key of a layer's own factor; ``side`` is "A" or "G"."""
    return f"{layer}/{side}"


@dataclass(frozen=True)
class LayerSpec:
    """One preconditioned layer, as every rank sees it; plain values only.

    Its matrix is [O, I], outputs times inputs, the bias as last column; of a norm a single row of (weight, bias) pairs.
    With groups it is a stack of such matrices.
    """

    name: str
    kind: str
    """Key of :data:`ds_kfac.model.registry.LAYERS`."""
    module: str
    """Name of the module whose calls give its statistics."""
    weight: str
    """Name of the weight parameter in the model."""
    bias: str | None
    """Name of the bias parameter; None if there is none, or it is frozen."""
    A: Side
    """Of its inputs, with a 1 for the bias."""
    G: Side
    """Of its output gradients."""
    product: bool = False
    """Whether its rows are those that a product with its parameter is seen to take, see ``products.py``; else those of
    the module's calls."""
    also: tuple[str, ...] = ()
    """Names of other modules of the kind with the same parameters, whose calls are calls of this one."""
    copies: int = 1
    """Tensor-parallel ranks that hold the same layer; 1 if each has a shard of its own."""
    cut: tuple[int, int] = (1, 1)
    """Into how many tensor-parallel shards the whole layer's outputs and inputs are cut; this is one of them."""
    groups: int = 1
    """Independent maps of equal shape (a convolution's groups), each with its own block of A and of G."""
    keeps_direction: str | None = None
    """Why its directions are not to be orthogonalized."""
    part: tuple[int, int] = (0, 1)
    """(index, count): it is this one of so many equal parts of its parameters, such as an expert of a stack."""
    blocks: tuple[int, ...] = ()
    """Of output rows, for a matrix that is several maps in one: block k is the k-th so many rows of every
    ``sum(blocks)``. Empty: it is one."""
    guessed: str = ""
    """What is to be said of its blocks, if the code does not show them."""
    shares: str | None = None
    """The layer whose A is its own, too; known before training, as that of a stack's experts."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's matrix: (O, I), or (groups, O, I)."""
        if self.groups == 1:
            return self.G.dim, self.A.dim
        return self.groups, self.G.dim // self.groups, self.A.dim // self.groups

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """The same of the layer that this is a shard of."""
        *groups, O, I = self.shape  # noqa: E741
        return *groups, O * self.cut[0], I * self.cut[1]

    @cached_property
    def maps(self) -> tuple[tuple[int, int], ...]:
        """(O, I) of each map in the layer: of its groups, and of the blocks in its matrix."""
        O, I = self.shape[-2:]  # noqa: E741
        rows = [size * (O // sum(self.blocks)) for size in self.blocks] or [O]
        return tuple((size, I) for size in rows) * self.groups

    @cached_property
    def keys(self) -> tuple[str, str]:
        """Of its own factors, A and G."""
        return key_of(self.name, "A"), key_of(self.name, "G")

    @cached_property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return prod(self.shape)


def parameter_shape(parameter: Any) -> tuple[int, ...]:
    """The true shape: ZeRO-3 keeps it in ``ds_shape`` while the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def computed_parameter(module: Any) -> str | None:
    """Why a module whose weight or bias is computed (weight_norm and other parametrizations) is not for us, or None."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and name not in module._parameters:
            return f"its {name} is computed by a parametrization, not a parameter"
    return None


class LayerType(ABC):
    """A row of the table of layer types; stateless.

    Attributes:
        needs_gradients: even its A is made of output gradients.
        without_bias: why a bias is not part of the layer; None: it is.
        transposed: the weight of a linear map lies [I, O].
        images: its tensors are images [N, C, ..]: no mask [N, T] is for their rows.
        kind: class of the modules that it may describe.
    """

    needs_gradients = False
    without_bias: str | None = None
    transposed = False
    images = False
    kind: Any = nn.Module

    @abstractmethod
    def refusal(self, module: Any) -> str | None:
        """None if this type describes ``module``; else why not ("" when it is some other type altogether)."""

    @abstractmethod
    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        """(I, O), from attributes or ``ds_shape``: ZeRO-3 leaves empty weights behind."""

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        """The sides' structure, where the type fixes it."""
        return side_A, side_G

    def keeps_direction(self, module: Any) -> str | None:
        """Why its directions are not to be orthogonalized."""
        return None

    def rows(self, x: Tensor, output: Tensor) -> int:
        """How many rows a call has, whichever of them count."""
        return output.numel() // max(1, output.shape[-1])

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        """From a call's input and output gradient: rows of G, of A if it ``needs_gradients``."""
        return gradient

    @abstractmethod
    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Flat (weight | bias) gradients -> the layer's matrix, of ``LayerSpec.shape``."""

    @abstractmethod
    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        """Inverse of ``matrix``: flat gradients in the order of ``LayerSpec.parameters``."""


class Linear(LayerType):
    """nn.Linear, y = x W^T + b: a matrix [O, I], its bias as last column."""

    def refusal(self, module: Any) -> str | None:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module).forward is not nn.Linear.forward:
            return f"{type(module).__name__} overrides nn.Linear.forward, so its rows are not known"
        return computed_parameter(module)

    def sides(self, module: Any, bias: bool) -> tuple[int, int]:
        sides = parameter_shape(module.weight)
        out_features, in_features = sides[::-1] if self.transposed else sides
        return in_features + bias, out_features

    def matrix(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        *groups, O, _ = shape  # noqa: E741
        weight_OI = weight.view(*groups, -1, O).mT if self.transposed else weight.view(*groups, O, -1)
        return weight_OI if bias is None else torch.cat([weight_OI, bias.view(*groups, O, 1)], dim=-1)

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        weight_OI = matrix_OI[..., :-1] if has_bias else matrix_OI
        weight = (weight_OI.mT if self.transposed else weight_OI).reshape(-1)
        return (weight, matrix_OI[..., -1].reshape(-1).contiguous()) if has_bias else (weight,)


class Conv1D(Linear):
    """transformers' (GPT-2), y = x W + b: like :class:`Linear`, with the weight [I, O]."""

    transposed = True

    def refusal(self, module: Any) -> str | None:
        if type(module).__name__ != "Conv1D" or not hasattr(module, "nf") or not hasattr(module, "weight"):
            return ""
        if computed := computed_parameter(module):
            return computed
        shape = parameter_shape(module.weight)
        if len(shape) != 2 or shape[1] != module.nf:
            return f"named Conv1D, but its weight {shape} is not [in, nf={module.nf}] as in transformers"
        return None


AUTOTP_KINDS = {"LinearLayer": "ColumnParallelLinear", "LinearAllreduce": "RowParallelLinear"}


class _Shard(Linear):
    name: str
    shape: str
    """What Megatron calls the size of the cut side."""
    unfit: tuple[str, bool, str]
    """Flag of a Megatron layer, and what it says and why where the tensors are not its shard's rows."""

    def refusal(self, module: Any) -> str | None:
        kind = type(module)
        if kind.__module__ == "deepspeed.module_inject.layers":
            if AUTOTP_KINDS.get(kind.__name__) == self.name:
                return computed_parameter(module)
            known = kind.__name__ in AUTOTP_KINDS or self.name != "ColumnParallelLinear"  # one of the two reports it
            return "" if known else f"AutoTP's {kind.__name__}: how it cuts the weight's rows or columns is not known"
        if kind.__name__ != self.name or isinstance(module, nn.Linear):
            return ""
        if not hasattr(module, self.shape) or getattr(module, "weight", None) is None:
            return f"named {self.name}, but without {self.shape} and a weight of its own, as Megatron's have"
        for owner in (module, getattr(module, "config", None)):
            for flag in ("sequence_parallel", "sequence_parallel_enabled"):
                if getattr(owner, flag, False):
                    return f"{flag}: its rows are spread over the tensor-parallel ranks"
        flag, bad, why = self.unfit
        return why if bool(getattr(module, flag, False)) is bad else computed_parameter(module)


class ColumnParallelLinear(_Shard):
    """A shard of outputs: rows of W, with their part of the bias."""

    name, shape = "ColumnParallelLinear", "output_size_per_partition"
    unfit = "gather_output", True, "gather_output: its output is not its shard's"

    def gradient_rows(self, module: Any, x: Tensor | None, gradient: Tensor) -> Tensor:
        if getattr(module, "gather_output", False):  # AutoTP's, whose output is the whole layer's
            sizes = module._partition_sizes
            gradient = gradient.narrow(-1, sum(sizes[: module.tp_index]), sizes[module.tp_index])
        return gradient


class RowParallelLinear(_Shard):
    """A shard of inputs: columns of W."""

    name, shape = "RowParallelLinear", "input_size_per_partition"
    unfit = "input_is_parallel", False, "its input is not its shard's: input_is_parallel is false"
    without_bias: str | None = "is added to the sum over tensor-parallel ranks, it belongs to no shard"
