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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config import KFACConfig
from ds_kfac.config_blocks import AdamConfig
from ds_kfac.direction import Local, Now
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import stacked, unstacked
from ds_kfac.ops.reference import each
from ds_kfac.orthogonal import orthogonalized
from ds_kfac.precision import choose
from ds_kfac.preconditioner import finite_or
from ds_kfac.rotation import Rotations
from ds_kfac.stacking import apart, batches, stacks, together
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
        options = config.preconditioner
        self.groups = {layer.name: exchange.group_indices(layer) for layer in exchange.owned}
        self.rotations = Rotations(choose(options.precision, exchange.device))
        self.stacks = stacks(exchange.owned, alike=self._alike if options.stacks(exchange.device) else None)

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
        for layers in batches(self.stacks, states):
            names = [layer.name for layer in layers]
            gradient = together([gradients[name] for name in names])
            new, direction = self._step(layers, [states[name] for name in names], gradient * unscale)
            # A direction gone wrong must not reach the weights; an overflowed gradient must reach DeepSpeed's check,
            # though the direction, of old moments alone, is finite.
            direction, finite = finite_or(direction, torch.zeros_like(gradient))
            overflowed = ~torch.isfinite(gradient).flatten(-2).all(dim=-1)
            result = torch.where(each(overflowed), gradient, direction)
            local.results.update(zip(names, apart(result, len(names)), strict=True))
            local.states.update(zip(names, new, strict=True))
            local.replaced += (~finite | overflowed).sum()
            squares += torch.stack([result.square().sum(), gradient.square().sum()]) / layers[0].copies
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

    def _step(
        self, layers: Sequence[LayerSpec], states: Sequence[LayerState], gradient: Tensor
    ) -> tuple[list[LayerState], Tensor]:
        """Layers of equal shape: the states with these gradients in their moments, and the directions. Before the first
        refresh nothing is rotated: plain Adam."""
        group = self.layout.optimizer.param_groups[self.groups[layers[0].name][0]]
        betas, eps = tuple(group["betas"]), group["eps"]
        bases = [basis for state in states if (basis := state.basis)]
        rotation = self.rotations.of(tuple(layer.name for layer in layers), bases) if bases else None
        rotated = gradient if rotation is None else rotation.rotate(gradient)
        moments = stacked([state.adam for state in states if state.adam is not None])
        usable, options = torch.isfinite(rotated).flatten(-2).all(dim=-1), self.config.adam
        direction, moments = moments.divide(rotated, betas=betas, eps=eps, usable=usable, nesterov=options.nesterov)
        if self.orthogonalizes(layers[0]):  # does not care for rotations: the same before and after
            direction = orthogonalized(direction, rms=options.rms, precision=self.rotations.precision)
        adam = unstacked(moments, len(layers))
        new = [replace(state, adam=own) for state, own in zip(states, adam, strict=True)]
        return new, direction if rotation is None else rotation.restore(direction)

    def _alike(self, layer: LayerSpec) -> Hashable:
        """Layers with the same may be stacked."""
        return self.groups[layer.name][0], self.orthogonalizes(layer), layer.copies
