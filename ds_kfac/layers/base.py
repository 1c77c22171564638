"""What K-FAC has to know about a layer. Shape suffixes: N rows, O and I the sides of the layer's matrix."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ds_kfac.side import Side


@dataclass(frozen=True)
class Use:
    """A module whose calls give statistics of a layer. One per layer, but for tied weights.

    Attributes:
        module: its name in the model.
        kind: key of :data:`ds_kfac.layers.registry.LAYERS`.
        A, G: sides of its rows: of its inputs (with a 1 for the bias) and of its output gradients.
        bias: whether the module's bias is part of the layer.
    """

    module: str
    kind: str
    A: Side
    G: Side
    bias: bool


@dataclass(frozen=True)
class LayerSpec:
    """One preconditioned layer, as every rank sees it; plain values only.

    The layer's matrix is [O, I], outputs times inputs, with the bias as last column. For a norm it is a single row of
    (weight, bias) pairs, for a tied embedding that of its head.
    """

    name: str
    weight: str
    """Name of the weight parameter in the model."""
    bias: str | None
    """Name of the bias parameter; None if there is none, or it is frozen."""
    A: Side
    G: Side
    uses: tuple[Use, ...]
    copies: int = 1
    """Tensor-parallel ranks that hold the same layer; 1 if each has a shard of its own."""

    rows: tuple[int, int] | None = None
    """Outputs start .. stop of the weight that are this layer, see ``layers/row_blocks.py``; None: all."""

    @property
    def kind(self) -> str:
        """Of its first use: decides how its parameters form a matrix."""
        return self.uses[0].kind

    @property
    def dim_A(self) -> int:
        return self.A.dim

    @property
    def dim_G(self) -> int:
        return self.G.dim

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def extents(self) -> tuple[tuple[int, int] | None, ...]:
        """Per parameter, the elements start .. stop that are this layer's; None: all."""
        if self.rows is None:
            return (None,) * len(self.parameters)
        start, stop = self.rows
        width = self.dim_A - (self.bias is not None)
        return ((start * width, stop * width), (start, stop))[: len(self.parameters)]

    @property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return self.dim_G * self.dim_A

    @property
    def packed_numel(self) -> int:
        """Elements of both packed factors."""
        return self.A.numel + self.G.numel


class LayerType(Protocol):
    """A row of the table of layer types. One file each; stateless."""

    needs_gradients: bool
    """Whether even its A is made of output gradients, so that it has no statistics without them."""
    takes_bias: bool
    """Whether a bias is part of the layer."""

    def refusal(self, module: nn.Module) -> str | None:
        """None if this type describes ``module``; else why not ("" when it is some other type altogether)."""

    def sides(self, module: nn.Module, bias: bool) -> tuple[int, int]:
        """(I, O), from attributes or ``ds_shape``: ZeRO-3 leaves empty weights behind."""

    def input_rows(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Inputs [.., I without the bias], or indices [..] of one-hot inputs (negative: none); None if A comes with
        the gradient."""

    def gradient_rows(
        self, module: nn.Module, x: Tensor | None, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """From a call's input and output gradient: rows of A if ``input_rows`` gave none, rows of G if it has any."""

    def matrix(self, weight: Tensor, bias: Tensor | None, dims: tuple[int, int]) -> Tensor:
        """Flat (weight | bias) gradients -> [O, I]; ``dims`` is (O, I)."""

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        """Inverse of ``matrix``: flat gradients in the order of ``LayerSpec.parameters``."""

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        """The sides' structure, where the type fixes it."""


def parameter_shape(parameter: Any) -> tuple[int, ...]:
    """The true shape: ZeRO-3 keeps it in ``ds_shape`` while the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def computed_parameter(module: Any) -> str | None:
    """Why a module whose weight or bias is computed (weight_norm and other parametrizations) is not for us, or None."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and name not in module._parameters:
            return f"its {name} is computed by a parametrization, not a parameter"
    return None
