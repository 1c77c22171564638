"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    R = Q_G^T dW Q_A             the clipped, unscaled gradient, rotated
    m <- b1 m + (1 - b1) R       v <- b2 v + (1 - b2) R^2
    U = m^ / (sqrt(v / (1 - b2^k)) + eps),  0 where alpha is rounding         (Rotation.seen; m^ Nesterov's)
    X = (the orthogonal factor of U S) S,  S = diag(alpha / mean alpha + c)^-p        (``adam.whiten`` p, c 0.01)
    U <- size sqrt(max(O, I)) X / |X|                                                            (size.py)
    W <- W - lr (Q_G U Q_A^T + weight_decay W)                                        (in optimizer.py)

With ``preconditioner.method`` "root" there is no eigenbasis: R is dW itself and S the matrix (A / mean A + c)^-p.

A layer whose averaged gradient is exactly zero was not used: as with a gradient of None in torch, it takes no step,
does not decay and keeps its moments. A tensor-parallel shard is asked by itself. The same holds
for a parameter that is frozen, and for a gradient that is so large that moments would not hold its square: that one is
left out, counted and warned of.

The second moment is that of SOAP (Vyas et al. 2024, arXiv:2409.11321); the eigenbasis is K-FAC's instead of Shampoo's.
The orthogonal factor is Muon's (Jordan et al. 2024), there of plain momentum. S makes it the steepest descent step
under the norm |U A^p|, which bounds the response to each input direction in place of the weight's: as in Mousse
(arXiv:2603.09697), there on both sides, of momentum.

U travels where the gradient was. DeepSpeed will take the norm of all gradients, report it, clip by it and look for
overflow; so the directions are put there at the norm that the layers' gradients have together, and the optimizer gets
the factor. DeepSpeed then sees the norm of the raw gradients, as it would with AdamW. Norms are float64: the
square of a finite gradient may not be finite in fp32.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.curvature.precision import fp32_products
from ds_kfac.directions.base import LocalResult, StepContext
from ds_kfac.directions.kfac_adamw.optimizer import IN_USE
from ds_kfac.directions.kfac_adamw.part import Block, Part, blocks_of, of_one_shape, put_back, row_blocks
from ds_kfac.directions.kfac_adamw.size import SIZE, adam_factor, keeps_direction, step_norm
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.reference import each
from ds_kfac.plan.plan import Plan
from ds_kfac.update.kfac import lengths
from ds_kfac.update.layer_state import LayerState
from ds_kfac.update.moments import stacked, unstacked
from ds_kfac.update.newton_schulz import orthogonal_factors, scale_to
from ds_kfac.update.rotation import Rotations
from ds_kfac.update.stacking import apart, batches, in_order, rounds, stacks, together
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout

LARGEST = 1e15
"""Norm of a gradient that moments take: far from where its square leaves fp32."""
RANGES = (2.0**-130, 2.0**60)
"""A squared norm travels in fp32, multiplied by each: one of the two holds it, whatever finite norm it is of."""


class AdamDirection:
    """See the module's docstring.

    Args:
        optimizer: the engine's innermost optimizer, one of ``adamw.py``.
    """

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any) -> None:
        self.config, self.layout, self.exchange, self.optimizer = plan.config, layout, exchange, optimizer
        self.groups = {layer.name: exchange.group_indices(layer) for layer in exchange.owned}
        self.rotations = Rotations(plan.precision)
        self.together, self.waits, self.size = plan.stacks, plan.waits, SIZE
        found = stacks(exchange.owned, alike=self._alike if plan.stacks else None)
        self.stacks = in_order(found)
        of_all = partial(torch.tensor, device=exchange.device)  # of every layer, in the order of the stacks
        layers = [layer for stack in self.stacks for layer in stack]
        scaled = [self.orthogonalizes(layer) and self._whole(layer) for layer in layers]
        self.orthogonal = of_all(scaled, dtype=torch.bool)
        self.root = of_all([layer.numel**0.5 for layer in layers], dtype=torch.float32)
        self.target = of_all([self.size * step_norm(layer) for layer in layers], dtype=torch.float32)
        ratios = [adam_factor(self.config.adam, layer, optimizer.adam_ratio) for layer in layers]
        self.ratio = of_all(ratios, dtype=torch.float32)
        self.copies = of_all([layer.copies for layer in layers], dtype=torch.float64)

    def orthogonalizes(self, layer: LayerSpec) -> bool:
        """Whether a layer's direction is orthogonalized."""
        return keeps_direction(self.config.adam, layer) is None

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        local = LocalResult.empty(states, self.exchange)
        void, local.clip = self._clipping(context.norm)
        parts = Part.of_all(batches(self.stacks, states))
        if not parts:
            local.numbers = list(torch.zeros(3, device=self.exchange.device).unbind())
            return local
        names = [layer.name for part in parts for layer in part.layers]
        # All flags are of every layer, in this order, and follow from norms: no pass looks for what is not finite.
        unscale, length = local.clip / self.layout.grad_scale(), lengths([gradients[name] for name in names])
        finite = (length < math.inf) & ~void
        fits = length * unscale < LARGEST
        usable = finite & fits & (length > 0)
        # A direction gone wrong must not reach the weights. An overflowed gradient must reach DeepSpeed's check, so
        # what is in its place has its norm.
        overflowed = ~finite & (length != 0)
        shift = torch.where(overflowed, length / self.root, IN_USE).float()
        scale, norm, good = torch.zeros_like(self.target), torch.zeros_like(self.target), torch.zeros_like(usable)
        for some in rounds(parts, lambda part: part.layers):
            for part in some:
                taken = (gradients.pop(layer.name) for layer in part.layers)
                self._step(part, [states[layer.name] for layer in part.layers], taken, unscale, part.of(usable))
                local.folds.append(part.fold)
                local.states.update(zip([layer.name for layer in part.layers], part.states, strict=True))
            own = slice(some[0].start, some[-1].start + len(some[-1].layers))
            scale[own], norm[own] = self._restore(some, own)
            good[own] = usable[own] & (norm[own] < math.inf)
            factor = scale[own].masked_fill(overflowed[own], 0.0)
            # at adam_lr 0 they stand still, without decay
            dead = ~(overflowed[own] | good[own] & (self.ratio[own] > 0))
            for part in some:
                result = part.x_OI.mul_(each(part.of(factor, own))).add_(each(part.of(shift)))
                result.masked_fill_(each(part.of(dead, own)), 0.0)
                for layer, matrix in zip(part.layers, apart(result, len(part.layers)), strict=True):
                    local.outbox.add(layer, matrix)
                del part.x_OI, result, matrix
        squared = torch.where(overflowed, length.square(), torch.where(good, (norm * scale).square(), 0.0))
        local.replaced = local.replaced + (usable & ~good | ~finite).sum()
        local.unused = local.unused + (length == 0).sum()
        local.left_out = dict(zip(names, (finite & ~fits).unbind(), strict=True))
        squares = squared, *(length.square() * factor for factor in RANGES)
        local.numbers = [(square / self.copies).sum().float() for square in squares]
        return local

    def finish(
        self, context: StepContext, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        low, high = (total.double() / factor for total, factor in zip(totals[1:], RANGES, strict=True))
        square = torch.where(torch.isfinite(high), high, low)
        scale = torch.sqrt(square / totals[0].double()).float()
        scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, torch.ones_like(scale))
        undo = self.layout.grad_scale() / (scale * local.clip)
        self.optimizer.direction_scale = torch.where(torch.isfinite(undo), undo, torch.zeros_like(undo))
        return dict.fromkeys(prepared, scale)

    def _clipping(self, norm: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Whether no gradient of the step is of use, because their norm is no number that DeepSpeed could clip by; and
        the factor that clips them."""
        if norm is None:
            return torch.zeros((), dtype=torch.bool, device=self.exchange.device), 1.0
        void = ~torch.isfinite(norm.float())
        clip = self.layout.clip_factor(norm)
        return void, torch.where(void, torch.zeros_like(clip), clip)

    def _step(
        self,
        part: Part,
        states: Sequence[LayerState],
        gradients: Iterable[Tensor],
        unscale: Tensor | float,
        usable: Tensor,
    ) -> None:
        """Adam in the eigenbasis, the gradients in the moments that are ``usable``. Before the first refresh nothing is
        rotated: plain Adam."""
        group = self.layout.optimizer.param_groups[self.groups[part.layers[0].name][0]]
        bases = [basis for state in states if (basis := state.basis)]
        part.rotation = self.rotations.of(tuple(layer.name for layer in part.layers), bases) if bases else None
        part.root = states[0].preconditioner if states[0].form.whitens else None
        whole = together(list(gradients))  # as it is stored, which may be DeepSpeed's own
        rotated = whole * unscale if whole.dtype is torch.float32 else whole.float().mul_(unscale)
        del whole
        if part.rotation is not None:
            rotated = part.rotation.rotated(rotated)
        moments = stacked([state.moments for state in states])
        part.x_OI, part.fold = moments.divide(
            rotated,
            betas=tuple(group["betas"]),
            eps=group["eps"],
            usable=usable,
            turns=[state.turn for state in states],
            waits=self.waits,
        )
        own = unstacked(moments, len(states))
        part.states = [replace(state, moments=kept, turn=None) for state, kept in zip(states, own, strict=True)]

    def _restore(self, parts: Sequence[Part], own: slice) -> tuple[Tensor, Tensor]:
        """Adam's directions, or their orthogonal factors, out of the eigenbases, in their place. Returns what each is
        still to be multiplied by, and its norm.

        Args:
            own: the places of their layers.
        """
        self._orthogonalize([part for part in parts if self.orthogonalizes(part.layers[0])])
        for part in parts:
            if part.rotation is not None:
                if part.sizes is None:  # no whitening has left out what no input has a part in
                    part.rotation.only_seen(part.x_OI)
                back = part.rotation.restore_columns if self._rows_are_back(part) else part.rotation.restored
                part.x_OI = back(part.x_OI)
            if not self._whole(part.layers[0]) and part.sizes is not None:
                self._scale_maps(part)
        norm = lengths([matrix for part in parts for matrix in apart(part.x_OI, len(part.layers))], torch.float32)
        size = torch.cat([(part.of(norm) if part.sizes is None else part.sizes[0]).view(-1) for part in parts])
        scale = scale_to(self.target[own], size=size, norm=norm, root=self.root[own])
        return torch.where(self.orthogonal[own], scale, self.ratio[own]), norm

    def _orthogonalize(self, parts: Sequence[Part]) -> None:
        """Directions become their orthogonal factors, in their place; nothing else of them is kept."""
        blocks = [self._blocks(part) for part in parts]
        self._iterate([block for own in blocks for block in own])
        for part, own in zip(parts, blocks, strict=True):
            put_back(own)
            part.sizes = [block.norm for block in own]
            own.clear()
            part.x_OI = self._whitened(part, part.x_OI)

    def _iterate(self, blocks: Sequence[Block]) -> None:
        """Of one shape together."""
        for group in of_one_shape(blocks, self.together):
            directions, whitenings = [block.x_OI for block in group], [self._whitening(block.part) for block in group]
            found = orthogonal_factors(directions, whitenings, precision=self.rotations.precision)
            for block, (factor, size) in zip(group, found, strict=True):  # rotated or not, the factor is the same
                block.x_OI, block.size = factor, size if block.size is None else block.size

    def _blocks(self, part: Part) -> list[Block]:
        """What is orthogonalized of a part, each with its norm if that changes before."""
        if self._rows_are_back(part):
            assert part.rotation is not None
            part.x_OI = part.rotation.restore_rows(part.x_OI)
        blocks = blocks_of(part)
        if part.root is None:
            return blocks
        sizes = [torch.linalg.vector_norm(block.x_OI, dim=(-2, -1)) for block in blocks]
        part.x_OI = self._whitened(part, part.x_OI)
        return [replace(block, size=size) for block, size in zip(blocks_of(part), sizes, strict=True)]

    def _scale_maps(self, part: Part) -> None:
        """Each group of a layer, or each block of its rows, to its own size."""
        assert part.sizes is not None
        layer = part.layers[0]
        for rows, size in zip(row_blocks(part.x_OI, layer.blocks), part.sizes, strict=True):
            norm = torch.linalg.vector_norm(rows, dim=(-3, -2, -1))
            target = self.size * step_norm(layer, rows.shape[-3] * rows.shape[-2])
            root = rows.shape[-3:].numel() ** 0.5
            rows.mul_(scale_to(target, size=size, norm=norm, root=root)[..., None, None, None])
        part.sizes = None

    def _rows_are_back(self, part: Part) -> bool:
        """Whether a rotation is undone in two halves: blocks are rows of the weight, not of R."""
        layer = part.layers[0]
        return bool(layer.blocks and part.rotation is not None and part.rotation.G) and self.orthogonalizes(layer)

    @staticmethod
    def _whole(layer: LayerSpec) -> bool:
        """Whether it is a single map."""
        return layer.groups == 1 and not layer.blocks

    def _whitening(self, part: Part) -> Tensor | None:
        options = self.config.adam
        if part.rotation is None or not options.rotate:
            return None
        return part.rotation.whitening(options.whiten, groups=part.layers[0].groups)

    def _whitened(self, part: Part, x_OI: Tensor) -> Tensor:
        """By the inverse root, where there is one."""
        if part.root is None:
            return x_OI
        with fp32_products(self.rotations.precision.products, x_OI.device):
            return part.root.whiten(x_OI).contiguous()

    def _alike(self, layer: LayerSpec) -> Hashable:
        """Layers with the same may be stacked."""
        return self.groups[layer.name][0], self.orthogonalizes(layer), layer.copies, layer.blocks
