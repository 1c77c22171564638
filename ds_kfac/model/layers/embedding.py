"""nn.Embedding: y = W[x], weight [I, O] with I the vocabulary. Its input is one-hot, so A is a diagonal of counts."""

from typing import Any

from torch import Tensor, nn

from ds_kfac.curvature.side import Side
from ds_kfac.model.layers.base import computed_parameter
from ds_kfac.model.layers.conv1d import Conv1D


class Embedding(Conv1D):
    """Like :class:`Conv1D` without a bias: its weight lies the same way."""

    def refusal(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.Embedding):
            return ""
        if type(module).forward is not nn.Embedding.forward:
            return f"{type(module).__name__} overrides nn.Embedding.forward, so its rows are not known"
        for name, value in (
            ("sparse gradients", module.sparse),
            ("scale_grad_by_freq", module.scale_grad_by_freq),
            ("max_norm, which changes weights in the forward", module.max_norm is not None),
        ):
            if value:
                return f"an embedding with {name}"
        return computed_parameter(module)

    def input_rows(self, module: Any, x: Tensor) -> Tensor | None:
        # its gradient is zero by definition
        return x if module.padding_idx is None else x.masked_fill(x == module.padding_idx, -1)

    def keeps_direction(self, module: nn.Module) -> str | None:
        return "Embedding is no linear map's matrix"

    def structured(self, side_A: Side, side_G: Side, bias: bool) -> tuple[Side, Side]:
        return Side.diagonal(side_A.dim), side_G
