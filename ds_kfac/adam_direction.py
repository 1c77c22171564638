"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    R = Q_G^T dW Q_A             the clipped, unscaled gradient, rotated
    m <- b1 m + (1 - b1) R       v <- b2 v + (1 - b2) R^2
    U = Q_G [ (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps) ] Q_A^T
    U <- rms sqrt(O I) X / |X|, X = the orthogonal factor of U                (``adam.orthogonalize``)
    W <- W - lr (U + weight_decay W)                                          (in adamw.py)

The second moment is that of SOAP (Vyas et al. 2024, arXiv:2409.11321); the eigenbasis is K-FAC's instead of Shampoo's.
The orthogonal factor is Muon's (Jordan et al. 2024), there of plain momentum.

U travels where the gradient was. DeepSpeed will take the norm of all gradients, report it, clip by it and look for
overflow; so the directions are put there at the norm that the layers' gradients have together, and the optimizer is
told the factor. DeepSpeed then sees the norm of the raw gradients, as it would with AdamW.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config import KFACConfig
from ds_kfac.config_blocks import AdamConfig
from ds_kfac.direction import Local, Now
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.orthogonal import orthogonalized
from ds_kfac.preconditioner import finite_or
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout


def orthogonalizes(options: AdamConfig, layer: LayerSpec) -> bool:
    """Whether a layer's direction is orthogonalized."""
    matrix = layer.kind in ("Linear", "Conv1D") and len(layer.uses) == 1
    return options.orthogonalize and matrix and not any(re.search(p, layer.name) for p in options.except_layers)


class AdamDirection:
    """See the module's docstring.

    Args:
        optimizer: the engine's innermost optimizer, one of ``adamw.py``.
    """

    moments: str | None = "adam"

    def __init__(self, config: KFACConfig, layout: ShardLayout, exchange: GradientExchange, optimizer: Any) -> None:
        self.config, self.layout, self.exchange, self.optimizer = config, layout, exchange, optimizer
        self._clip: Tensor | float = 1.0

    @property
    def needs_norm(self) -> bool:
        """Of the gradients, because Adam's moments are those of clipped ones."""
        return bool(self.layout.engine.gradient_clipping())

    def orthogonalizes(self, layer: LayerSpec) -> bool:
        """Whether a layer's direction is orthogonalized."""
        return orthogonalizes(self.config.adam, layer)

    def local(self, now: Now, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState]) -> Local:
        device = self.exchange.device
        local = Local(dict(gradients), dict(states), [], torch.zeros((), device=device), 0)
        clip = self.layout.clip_factor(now.norm) if now.norm is not None else 1.0
        unscale = clip / self.layout.grad_scale()
        squares = torch.zeros(2, device=device)  # of the directions, of the gradients
        for layer in self.exchange.owned:
            gradient = gradients[layer.name]
            state, direction = self._step(layer, states[layer.name], gradient * unscale)
            # A direction gone wrong must not reach the weights; an overflowed gradient must reach DeepSpeed's check,
            # though the direction, of old moments alone, is finite.
            direction, finite = finite_or(direction, torch.zeros_like(gradient))
            overflowed = ~torch.isfinite(gradient).all()
            local.results[layer.name] = torch.where(overflowed, gradient, direction)
            local.states[layer.name] = state
            local.replaced += ~finite | overflowed
            squares += torch.stack([local.results[layer.name].square().sum(), gradient.square().sum()]) / layer.copies
        local.numbers = list(squares.unbind())
        self._clip = clip
        return local

    def finish(
        self, now: Now, local: Local, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        scale = torch.sqrt(totals[1] / totals[0])
        scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))
        self.optimizer.direction_scale = self.layout.grad_scale() / (scale * self._clip)
        return dict.fromkeys(prepared, scale)

    def _step(self, layer: LayerSpec, state: LayerState, gradient: Tensor) -> tuple[LayerState, Tensor]:
        """The state with this gradient in its moments, and the direction. Before the first refresh nothing is rotated:
        plain Adam."""
        assert state.adam is not None
        group = self.layout.optimizer.param_groups[self.exchange.group_indices(layer)[0]]
        betas, eps = tuple(group["betas"]), group["eps"]
        rotated = gradient if state.basis is None else state.basis.rotate(gradient)
        adam = state.adam.folded(rotated, betas=betas, usable=torch.isfinite(rotated).all())
        options = self.config.adam
        direction = adam.direction(rotated, betas=betas, eps=eps, nesterov=options.nesterov)
        if self.orthogonalizes(layer):  # does not care for rotations: the same before and after
            direction = orthogonalized(direction, rms=options.rms)
        return replace(state, adam=adam), direction if state.basis is None else state.basis.restore(direction)
