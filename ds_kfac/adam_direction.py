"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    R = Q_G^T dW Q_A             the clipped, unscaled gradient, rotated
    m <- b1 m + (1 - b1) R       v <- b2 v + (1 - b2) R^2
    U = Q_G [ (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps) ] Q_A^T
    U <- rms sqrt(O I) X / |X|, X = the orthogonal factor of U                (``adam.orthogonalize``)
    W <- W - lr (U + weight_decay W)                                          (in adamw.py)

A layer whose gradient is exactly zero, on all ranks together, was not used: as with a gradient of None in torch, it
takes no step, does not decay and keeps its moments. The same holds for a parameter that is frozen, and for a gradient
that is so large that moments would not hold its square: that one is left out, counted and warned of.

The second moment is that of SOAP (Vyas et al. 2024, arXiv:2409.11321); the eigenbasis is K-FAC's instead of Shampoo's.
The orthogonal factor is Muon's (Jordan et al. 2024), there of plain momentum.

U travels where the gradient was. DeepSpeed will take the norm of all gradients, report it, clip by it and look for
overflow; so the directions are put there at the norm that the layers' gradients have together, and the optimizer is
told the factor. DeepSpeed then sees the norm of the raw gradients, as it would with AdamW. Norms are float64: the
square of a finite gradient may not be finite in fp32.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_kfac.adam_choice import keeps_direction
from ds_kfac.adamw import marked
from ds_kfac.config import KFACConfig
from ds_kfac.direction import Local, Now
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.moments import stacked, unstacked
from ds_kfac.ops.reference import each
from ds_kfac.orthogonal import orthogonalized
from ds_kfac.precision import choose
from ds_kfac.preconditioner import finite_or, norms
from ds_kfac.rotation import Rotations
from ds_kfac.stacking import apart, batches, stacks, together
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout

LARGEST = 1e15
"""Of a gradient's entries that moments take: far from where their squares, or sums of these, leave fp32."""
RANGES = (2.0**-130, 2.0**60)
"""A squared norm travels in fp32, multiplied by each: one of the two holds it, whatever finite norm it is of."""


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
        return keeps_direction(self.config.adam, layer) is None

    def local(self, now: Now, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState]) -> Local:
        device = self.exchange.device
        local = Local.empty(gradients, states, device)
        void, clip = self._clipping(now.norm)
        unscale = clip / self.layout.grad_scale()
        squares = torch.zeros(3, device=device)  # of the directions, of the gradients in both ranges
        for layers in batches(self.stacks, states):
            names = [layer.name for layer in layers]
            gradient = together([gradients[name] for name in names])
            peak = gradient.abs().amax(dim=(-2, -1))
            # An overflowed gradient must reach DeepSpeed's check, though the direction, of old moments, is finite.
            overflowed = ~torch.isfinite(peak) | void
            taken = (peak > 0) & ~overflowed
            new, direction, usable = self._step(layers, [states[name] for name in names], gradient * unscale, taken)
            # A direction gone wrong must not reach the weights.
            direction, finite = finite_or(direction, torch.zeros_like(direction))
            direction = torch.where(each(usable), marked(direction), torch.zeros_like(direction))
            result = torch.where(each(overflowed), gradient, direction)
            for layer, own in zip(layers, apart(result, len(names)), strict=True):
                local.results[layer.name] = self.exchange.without_frozen(layer, own)
            local.states.update(zip(names, new, strict=True))
            local.replaced = local.replaced + (usable & ~finite | overflowed).sum()
            local.unused = local.unused + (peak == 0).sum()
            local.left_out.update(zip(names, apart(taken & ~usable, len(names)), strict=True))
            squared = norms(gradient.flatten(-2)).square()
            parts = [(squared * factor).sum().float() for factor in RANGES]
            squares += torch.stack([result.square().sum(), *parts]) / layers[0].copies
        local.numbers = list(squares.unbind())
        self._clip = clip
        return local

    def finish(
        self, now: Now, local: Local, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        low, high = (total.double() / factor for total, factor in zip(totals[1:], RANGES, strict=True))
        square = torch.where(torch.isfinite(high), high, low)
        scale = torch.sqrt(square / totals[0].double()).float()
        scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))
        undo = self.layout.grad_scale() / (scale * self._clip)
        self.optimizer.direction_scale = torch.where(torch.isfinite(undo), undo, torch.zeros_like(undo))
        return dict.fromkeys(prepared, scale)

    def _clipping(self, norm: Tensor | None) -> tuple[Tensor | bool, Tensor | float]:
        """Whether no gradient of the step is of use, because their norm is no number that DeepSpeed could clip by; and
        the factor that clips them."""
        if norm is None:
            return False, 1.0
        void = ~torch.isfinite(norm.float())
        clip = self.layout.clip_factor(norm)
        return void, torch.where(void, torch.zeros_like(clip), clip)

    def _step(
        self, layers: Sequence[LayerSpec], states: Sequence[LayerState], gradient: Tensor, taken: Tensor
    ) -> tuple[list[LayerState], Tensor, Tensor]:
        """Layers of equal shape: the states with these gradients in their moments, the directions, and which of the
        gradients that may be ``taken`` were. Before the first refresh nothing is rotated: plain Adam."""
        group = self.layout.optimizer.param_groups[self.groups[layers[0].name][0]]
        betas, eps = tuple(group["betas"]), group["eps"]
        bases = [basis for state in states if (basis := state.basis)]
        rotation = self.rotations.of(tuple(layer.name for layer in layers), bases) if bases else None
        rotated = gradient if rotation is None else rotation.rotate(gradient)
        moments = stacked([state.adam for state in states if state.adam is not None])
        usable, options = taken & (rotated.abs().amax(dim=(-2, -1)) < LARGEST), self.config.adam
        direction, moments = moments.divide(rotated, betas=betas, eps=eps, usable=usable, nesterov=options.nesterov)
        if self.orthogonalizes(layers[0]):  # does not care for rotations: the same before and after
            direction = orthogonalized(direction, rms=options.rms, precision=self.rotations.precision)
        adam = unstacked(moments, len(layers))
        new = [replace(state, adam=own) for state, own in zip(states, adam, strict=True)]
        return new, direction if rotation is None else rotation.restore(direction), usable

    def _alike(self, layer: LayerSpec) -> Hashable:
        """Layers with the same may be stacked."""
        return self.groups[layer.name][0], self.orthogonalizes(layer), layer.copies
