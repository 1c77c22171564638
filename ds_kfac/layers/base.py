"""What K-FAC has to know about a layer. Shape suffixes: N rows, O and I the sides of the layer's matrix."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ds_kfac.ops.functional import packed_numel


@dataclass(frozen=True)
class LayerSpec:
    """One preconditioned layer, as every rank sees it; plain values only.

    The layer's matrix is [O, I] with O = ``out_features`` and I = ``in_features`` plus one column for the bias.
    """

    name: str
    kind: str
    """Key of :data:`ds_kfac.layers.registry.LAYERS`."""
    in_features: int
    out_features: int
    weight: str
    """Name of the weight parameter in the model."""
    bias: str | None
    """Name of the bias parameter; None if there is none, or it is frozen."""

    @property
    def dim_A(self) -> int:
        return self.in_features + (self.bias is not None)

    @property
    def dim_G(self) -> int:
        return self.out_features

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def numel(self) -> int:
        """Elements of the layer's gradient."""
        return self.dim_G * self.dim_A

    @property
    def packed_numel(self) -> int:
        """Elements of both packed factors."""
        return packed_numel(self.dim_A) + packed_numel(self.dim_G)


class LayerType(Protocol):
    """A row of the table of layer types. One file each; stateless."""

    def refusal(self, module: nn.Module) -> str | None:
        """None if this type describes ``module``; else why not ("" when it is some other type altogether)."""

    def features(self, module: nn.Module) -> tuple[int, int]:
        """(in_features, out_features), from attributes or ``ds_shape``: ZeRO-3 leaves empty weights behind."""

    def rows(self, tensor: Tensor) -> Tensor:
        """An input or an output gradient as rows [N, D]."""

    def matrix(self, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """Flat (weight | bias) gradients -> [O, I]."""

    def split(self, matrix_OI: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
        """Inverse of ``matrix``: flat gradients in the order of ``LayerSpec.parameters``."""


def parameter_shape(parameter: Any) -> tuple[int, ...]:
    """The true shape: ZeRO-3 keeps it in ``ds_shape`` while the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def computed_parameter(module: Any) -> str | None:
    """Why a module whose weight or bias is computed (weight_norm and other parametrizations) is not for us, or None."""
    for name in ("weight", "bias"):
        if getattr(module, name) is not None and name not in module._parameters:
            return f"its {name} is computed by a parametrization, not a parameter"
    return None
