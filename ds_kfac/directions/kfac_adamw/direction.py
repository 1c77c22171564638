"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    R = Q_G^T dW Q_A             the clipped, unscaled gradient, rotated                          (_adam)
    m <- b1 m + (1 - b1) R       v <- b2 v + (1 - b2) R^2                                     (PendingMoments.commit)
    U = m^ / (sqrt(v / (1 - b2^k)) + eps), 0 in the null spaces of A and G; m^ is Nesterov's      (adam_direction)
    X = (the orthogonal factor of U S) S,  S = diag(alpha / mean alpha + c)^-p                    (_orthogonalize)
    U <- size sqrt(max(O, I)) X / |X|, and back: Q_G U Q_A^T                                      (_finish)
    W <- W - lr (Q_G U Q_A^T + weight_decay W)                                                    (optimizer.py)

with p ``adam.whiten`` and c 0.01. Layers of one shape take these steps in one batch, as many groups at a time as may be
in memory together.

The second moment is that of SOAP (Vyas et al. 2024, arXiv:2409.11321); the eigenbasis is K-FAC's instead of Shampoo's.
The orthogonal factor is Muon's (Jordan et al. 2024), there of plain momentum. S makes it the steepest descent step
under the norm |U A^p|, which bounds the response to each input direction in place of the weight's: as in Mousse
(arXiv:2603.09697), there on both sides, of momentum.

No step, no decay, and moments as they were has a layer

- whose averaged gradient is exactly zero: it was not used. torch's AdamW does so where a gradient is None. Each
  tensor-parallel shard is checked on its own;
- whose parameters are frozen;
- whose gradient is so large that moments could not hold its square: it is left out, counted and warned of.

U is written over the gradient, scaled to the norm of the original gradients, so that DeepSpeed's clipping, its overflow
check and the norm that it reports see what they would with AdamW; the optimizer undoes the factor. Norms are float64:
the square of a finite gradient may not be finite in fp32.

Singular values of an orthogonalized step are, on average, SIZE sqrt(longer side / shorter side): what it changes in an
output is then the same at every width (Yang et al. 2023, arXiv:2310.17813, who have sqrt(O / I), which is too little
for O < I, as is Muon's sqrt(max(1, O / I)): docs/notes/kfacadamw.md). What keeps Adam's direction, norms and heads, has
the rate adam_lr. A head has the part BASE / I of it, but at least lr: Adam's direction grows with the width, too.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.directions.base import Direction, LocalResult, StepContext
from ds_kfac.directions.kfac_adamw.group_step import (
    GroupStep,
    adam_factor,
    keeps_direction,
    row_blocks,
    same_sides,
)
from ds_kfac.directions.kfac_adamw.optimizer import IN_USE, NoStates
from ds_kfac.directions.step_tensors import RecordedTensors, StepTensors, recorded_step
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import adam_scale_, finish_direction_
from ds_kfac.ops.functional import scale_to
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import chunks
from ds_kfac.update.newton_schulz import orthogonal_factors
from ds_kfac.update.rotation import lengths, repeated
from ds_kfac.update.state import AdamMoments, LayerState, PendingMoments
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout

LARGEST = 1e15
"""Largest norm of a gradient that goes into moments: far from where its square leaves fp32."""
RANGES = (2.0**-130, 2.0**60)
"""A squared norm travels in fp32, multiplied by each: one of the two holds it, of a norm of 1e-28 and more.
A smaller one loses digits, and is 0 below about 3e-32."""


class AdamDirection(Direction):
    """See the module's docstring. Vectors are of this rank's layers in the order of ``layer_groups``, unless they are
    of a group's maps.

    Args:
        optimizer: the engine's innermost optimizer, one of ``optimizer.py``.
    """

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any) -> None:
        super().__init__(plan, layout, exchange)
        self.optimizer, self.batches, self.pending_dtype = optimizer, plan.batched, plan.pending_dtype
        self.all_layers = tuple(layer.name for layer in plan.layers)
        layers, options, vector = self.layers, self.config.adam, partial(torch.tensor, device=exchange.device)
        self.steps, first = list[GroupStep](), 0
        for group in self.layer_groups:
            own = slice(first, first := first + len(group.layers))
            self.steps.append(GroupStep(group, own, options, optimizer.adam_ratio, exchange.device))
        each = iter(self.steps)  # chunks are of groups in the same order
        taken = chunks([group.layers for group in self.layer_groups], batched=plan.batched)
        self.chunks = [[next(each) for _ in chunk] for chunk in taken]
        self.root = vector([layer.numel**0.5 for layer in layers], dtype=torch.float32)
        still = [adam_factor(options, layer, optimizer.adam_ratio) <= 0 for layer in layers]
        self.bound = torch.full_like(self.root, math.inf).masked_fill_(vector(still, dtype=torch.bool), 0.0)
        self.ranges = vector(RANGES, dtype=torch.float64)[:, None]
        self.copies = vector([layer.copies for layer in layers], dtype=torch.float64)
        if layers:
            self.target = torch.cat([x.target for x in self.steps])
            self.full = torch.cat([x.full for x in self.steps])
            self.normalized = vector([x.normalized for x in self.steps for _ in x.target], dtype=torch.bool)
        self.groups_in_use = sorted({indices[0] for indices in self.parameter_groups.values()})
        inputs = {"unscale": vector(1.0, dtype=torch.float64), "void": vector(False)}
        self.recorded = recorded_step(plan, self.layer_groups, exchange, inputs)

    def batch_key(self, layer: LayerSpec) -> Hashable:
        orthogonal = keeps_direction(self.config.adam, layer) is None
        return self.parameter_groups[layer.name][0], orthogonal, layer.copies, layer.blocks

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        outbox = self.exchange.outbox()
        self.optimizer.check_parts(here=self.layout.rank == 0)
        # no gradient of the step is of use if their norm is no number that DeepSpeed could clip by
        void = torch.zeros((), dtype=torch.bool, device=self.exchange.device)
        clip: Tensor | float = 1.0
        if context.norm is not None:
            void = ~(context.norm.float() < math.inf)
            clip = self.layout.clip_factor(context.norm).masked_fill(void, 0.0)
        if not self.names:
            zeros = torch.zeros(3, device=self.exchange.device, dtype=torch.float32)
            return LocalResult(outbox, states, zeros.unbind(), norm=context.norm)
        if (marked := [*map(type, self.optimizer.state.values())].count(NoStates)) < self.optimizer.marked:
            self._begin_anew(states)
        self.optimizer.marked = marked
        for step in self.steps:
            step.group.load(states, fresh=context.fresh)
        inputs: dict[str, Any] = {"unscale": clip / self.layout.grad_scale(), "void": void}
        if self.recorded is None:
            found = self._directions(StepTensors(gradients, outbox), **inputs)
        else:
            groups = self.layout.optimizer.param_groups
            options = [(*groups[index]["betas"], groups[index]["eps"]) for index in self.groups_in_use]
            found = self.recorded.step(self._directions, gradients, outbox, inputs, options)
        return LocalResult(outbox, states, norm=context.norm, **found)

    def _directions(
        self, tensors: StepTensors | RecordedTensors, unscale: Tensor | float, void: Tensor
    ) -> dict[str, Any]:
        """Every group's steps, each put where it belongs as soon as it is there. The host decides on nothing here, and
        moments stay as they are. Returns more of :class:`LocalResult`.

        Args:
            unscale: brings gradients to their size, clipped.
            void: bool, whether no gradient is of use.
        """
        length = lengths([tensors.gradients[name] for name in self.names])
        # Flags follow from norms: no pass looks for what is not finite.
        finite = (length < math.inf) & ~void
        fits = length * unscale < LARGEST
        usable = finite & fits & (length > 0)
        # A direction gone wrong must not reach the weights: its norm is to be below this, infinity where it may be used
        # and else 0. At adam_lr 0 layers stand still, without decay. An overflowed gradient must reach DeepSpeed's
        # check: what is in its place has its norm.
        bound = self.bound.masked_fill(~usable, 0.0)
        overflowed = ~finite & (length != 0)
        replacement = (length / self.root).masked_fill_(~overflowed, 0.0).float()

        pending: list[PendingMoments] = []
        norms: list[Tensor] = []
        sizes: list[Tensor] = []
        for chunk in self.chunks:
            for step in chunk:
                pending.append(self._adam(step, tensors, unscale, usable[step.own]))
            self._orthogonalize([step for step in chunk if step.orthogonal])
            for step in chunk:
                memory = tensors.claim(step.group)
                norms.append(self._finish(step, memory, bound[step.own], replacement[step.own]))
                sizes.append(step.sizes[0] if step.normalized else step.full)
                if memory is None:
                    tensors.put(step.group, step.x_nOI)
                del step.x_nOI

        norm, size = torch.cat(norms), torch.cat(sizes)
        scale = torch.where(self.normalized, scale_to(self.target, size=size, norm=norm, full=self.full), self.target)
        squared = (norm * scale).square()
        if len(squared) > len(self.names):  # of maps: of layers their sums
            parts = zip(self.steps, squared.split([len(step.target) for step in self.steps]), strict=True)
            squared = torch.cat(
                [part.view(-1, step.maps).sum(dim=1) if step.maps > 1 else part for step, part in parts]
            )
        good = usable & (squared < math.inf)
        squared = torch.where(overflowed, length.square(), squared.masked_fill(~good, 0.0))
        squares = torch.cat([squared[None], length.square() * self.ranges])
        return {
            "pending": pending,
            "numbers": (squares / self.copies).sum(dim=1).float().unbind(),
            "replaced": (usable & ~good | ~finite).sum().float(),
            "unused": (length == 0).sum().float(),
            "left_out": (finite & ~fits).float(),
        }

    def _begin_anew(self, states: Mapping[str, LayerState]) -> None:
        """A program took away what ``optimizer.state`` has for a layer's weight, or, where DeepSpeed's parameters are
        flat, for any: as Adam's would, its moments begin at zero."""
        kept = {id(p) for p, state in self.optimizer.state.items() if type(state) is NoStates}
        for name in self.names:
            if id(self.exchange.params[name][0]) not in kept:
                torch._foreach_zero_([*vars(states[name].moments).values()])

    def _adam(
        self, step: GroupStep, tensors: StepTensors | RecordedTensors, unscale: Tensor | float, usable: Tensor
    ) -> PendingMoments:
        """R, and U from the moments with R in them. Before the first refresh nothing is rotated: plain Adam."""
        group = step.group
        options = self.layout.optimizer.param_groups[self.parameter_groups[group.names[0]][0]]
        x, theirs = tensors.take(group)  # [n, O, I]
        x = x.float()
        if (rotation := group.rotation) is not None:
            x = rotation.rotate(x, overwrite=x.data_ptr() != theirs)
        step.x_nOI, pending = adam_direction(
            group.moments,
            x.clone() if x.data_ptr() == theirs else x,
            betas=tuple(options["betas"]),
            eps=options["eps"],
            usable_n=repeated(usable, group.maps),
            scale=unscale,
            pending_dtype=self.pending_dtype,
        )
        if rotation is not None:
            # before rows leave the eigenbasis; whitening leaves out columns of what is orthogonalized
            rotation.mask_null_space_(step.x_nOI, columns=not step.orthogonal)
        return pending

    def _orthogonalize(self, steps: Sequence[GroupStep]) -> None:
        """X from U, in its place; nothing else of the directions is kept. Maps whose sides are the same, as they are or
        transposed, are iterated together, whatever layers they are of."""
        maps: list[Any] = []  # tensors
        owners: list[GroupStep] = []
        for step in steps:
            if step.rows_first and step.group.rotation is not None:
                step.x_nOI = step.group.rotation.restore(step.x_nOI, columns=False)
            if step.blocks:
                parts = [rows.flatten(-3, -2) for rows in row_blocks(step.x_nOI, step.blocks)]  # [layers, rows, I]
            else:
                parts = [step.x_nOI.view(len(step.target), -1, step.x_nOI.shape[-1])]
            maps += parts
            owners += [step] * len(parts)
            del parts
        sizes: dict[int, Tensor] = {}
        for indices in same_sides(maps) if self.batches else [[index] for index in range(len(maps))]:
            whitenings: list[Tensor | None] = [None] * len(indices)
            if self.config.adam.rotate:  # S is the same whether rows are rotated or not
                whitenings = [
                    rotation.whitening(self.config.adam.whiten, repeats=owners[index].maps // rotation.maps)
                    if (rotation := owners[index].group.rotation) is not None
                    else None
                    for index in indices
                ]
            found = orthogonal_factors([maps[index] for index in indices], whitenings, precision=self.precision)
            sizes |= zip(indices, found, strict=True)
        for step in steps:
            mine = [index for index, owner in enumerate(owners) if owner is step]
            if step.blocks:
                for rows, index in zip(row_blocks(step.x_nOI, step.blocks), mine, strict=True):
                    if rows.data_ptr() != maps[index].data_ptr():  # where its rows lie apart the map is a copy
                        rows.copy_(maps[index].view(rows.shape))
            for index in mine:
                maps[index] = None  # frees the copy of rows that lie apart: the next step's are still there
            step.sizes = [sizes[index] for index in mine]

    def _finish(self, step: GroupStep, memory: Tensor | None, bound: Tensor, replacement: Tensor) -> Tensor:
        """Q_G X Q_A^T at its size, in ``memory`` if given, else in X's; or the ``replacement`` in all entries of
        a layer whose norm is not below its ``bound``. Returns the norms [layers x maps] that X had."""
        if (rotation := step.group.rotation) is not None:
            rows = not step.rows_first
            step.x_nOI = rotation.restore(step.x_nOI, rows=rows, overwrite=True).contiguous()
        if step.blocks:
            self._scale_blocks(step)
        x = step.x_nOI.view(len(step.target), -1, step.x_nOI.shape[-1])
        norm = torch.linalg.vector_norm(x.flatten(1), dim=1)
        if step.maps > 1:  # all maps of a layer or none
            all_finite = norm.view(-1, step.maps).sum(dim=1) < math.inf
            bound, replacement = (
                repeated(part, step.maps) for part in (torch.where(all_finite, bound, 0.0), replacement)
            )
        size = step.sizes[0] if step.normalized else None
        out = x if memory is None else memory
        finish_direction_(out, x, norm, size, step.target, step.full, bound, replacement, IN_USE)
        return norm

    def _scale_blocks(self, step: GroupStep) -> None:
        """Each block of the rows to its own size."""
        blocks = row_blocks(step.x_nOI, step.blocks)
        norm = torch.stack([torch.linalg.vector_norm(rows, dim=(-3, -2, -1)) for rows in blocks])  # [blocks, layers]
        scale = scale_to(step.block_target, size=torch.stack(step.sizes), norm=norm, full=step.block_full)
        for rows, times in zip(blocks, scale, strict=True):
            rows.mul_(times[:, None, None, None])

    def finish(
        self, step: int, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self.last = totals[0], self.layout.optimizer.param_groups[0]["lr"]
        low, high = (torch.stack(list(totals[1:])) / self.ranges[:, 0]).unbind()
        square = torch.where(high < math.inf, high, low)
        scale = torch.sqrt(square / totals[0].double()).float().nan_to_num_(nan=1.0, posinf=1.0)
        scale = scale.masked_fill_(scale == 0, 1.0)
        self.optimizer.direction_scale = partial(self._undone, scale, local.norm)
        return dict.fromkeys(self.all_layers, scale)

    def _undone(self, scale: Tensor, norm: Tensor | None) -> Tensor:
        """What undoes ``scale``, and by what DeepSpeed has divided and clipped: to be called in the optimizer's step,
        as with fp16 DeepSpeed changes its loss scale before it divides by it."""
        clip = 1.0 if norm is None else self.layout.clip_factor(norm)
        return (self.layout.grad_scale() / (scale * clip)).nan_to_num_(nan=0.0, posinf=0.0)


def adam_direction(
    moments: AdamMoments,
    rotated_nOI: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    usable_n: Tensor,
    scale: Tensor | float = 1.0,
    pending_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, PendingMoments]:
    """Adam's step with this gradient already included in both moments, U above; they take it in at the commit.

    Args:
        moments: of n matrices.
        rotated_nOI: fp32, overwritten: the result or the pending gradient has its memory.
        usable_n: bool. Where it is false the moments stay as they are, and the direction is zero.
        scale: of the gradient.
        pending_dtype: in which the gradient is held until the commit.
    """
    x = rotated_nOI.contiguous()  # a basis in blocks may leave it transposed, which moments are not
    other = torch.empty_like(x, dtype=pending_dtype)
    direction, pending = (other, x) if pending_dtype is torch.float32 else (x, other)
    first, second, updates = moments.first_OI, moments.second_OI, moments.updates
    adam_scale_(direction, pending, x, first, second, updates, usable_n, scale, betas=betas, eps=eps)
    return direction, PendingMoments(moments, pending, usable_n, betas)
