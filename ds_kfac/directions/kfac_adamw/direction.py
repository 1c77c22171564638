"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    _adam            R = Q_G^T dW Q_A                  the gradient, rotated
                     m <- b1 m + (1 - b1) R
                     v <- b2 v + (1 - b2) R^2
                     U = m^ / (sqrt(v / (1 - b2^k)) + eps), with Nesterov's m^;
                         0 in the null spaces of A and G
    _orthogonalize   X = (the orthogonal factor of U S) S,  S = diag(alpha / mean alpha + c)^-p
    _finish          U <- size sqrt(max(O, I)) X / |X|, and back: Q_G U Q_A^T
    optimizer.py     W <- W - lr (Q_G U Q_A^T + weight_decay W)

with p ``adam.whiten`` and c 0.01. Layers of one shape take these steps in one batch, as many groups
at a time as may be in memory together.

The second moment is that of SOAP (Vyas et al. 2024, arXiv:2409.11321); the eigenbasis is K-FAC's
instead of Shampoo's. The orthogonal factor is Muon's (Jordan et al. 2024), there of plain momentum.
S makes it the steepest descent step under the norm |U A^p|, which bounds the response to each input
direction in place of the weight's: as in Mousse (arXiv:2603.09697), there on both sides, of
momentum.

A layer stands still, with neither step nor decay, and moments as they were,

- whose averaged gradient is exactly zero: it was not used. torch's AdamW does so where a gradient
  is None. Each tensor-parallel shard is checked on its own;
- whose parameters are frozen, or whose rate is 0;
- whose gradient is not finite, or so large that moments could not hold its square: it is counted
  and warned of.

Singular values of an orthogonalized step are, on average, SIZE sqrt(longer side / shorter side):
what it changes in an output is then the same at every width (Yang et al. 2023, arXiv:2310.17813,
who have sqrt(O / I), which is too little for O < I, as is Muon's sqrt(max(1, O / I)):
docs/notes/kfacadamw.md). What keeps Adam's direction, norms and heads, has the rate adam_lr. A head
has the part BASE / I of it, but at least lr: Adam's direction grows with the width, too.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.directions.direction import Direction, Outcome, StepContext
from ds_kfac.directions.kfac_adamw.group_step import (
    GroupStep,
    adam_factor,
    keeps_direction,
    row_blocks,
    same_sides,
)
from ds_kfac.directions.step_tensors import RecordedTensors, StepTensors, recorded_step
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import adam_step_, finish_direction_
from ds_kfac.ops.functional import scale_to
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import chunks
from ds_kfac.update.newton_schulz import orthogonal_factors
from ds_kfac.update.rotation import repeated
from ds_kfac.update.state import AdamMoments
from ds_kfac.zero.exchange import GradientExchange, Gradients

LARGEST = 1e15
"""Largest entry of a gradient that goes into moments: far from where its square leaves fp32."""
INFINITY = float("inf")


class AdamDirection(Direction):
    """See the module's docstring. Vectors are of this rank's layers in the order of
    ``layer_groups``, unless they are of a group's maps.

    Args:
        optimizer: the engine's innermost optimizer, one of ``optimizer.py``.
    """

    def __init__(self, plan: Plan, exchange: GradientExchange, optimizer: Any) -> None:
        super().__init__(plan, exchange, AdamMoments)
        self.optimizer, self.batches = optimizer, plan.batched
        layers, options, vector = (
            self.layers,
            self.config.adam,
            partial(torch.tensor, device=exchange.device),
        )
        self.steps, first = list[GroupStep](), 0
        for group in self.layer_groups:
            own = slice(first, first := first + len(group.layers))
            self.steps.append(GroupStep(group, own, options, optimizer.adam_ratio, exchange.device))
        each = iter(self.steps)  # chunks are of groups in the same order
        taken = chunks([group.layers for group in self.layer_groups], batched=plan.batched)
        self.chunks = [[next(each) for _ in chunk] for chunk in taken]
        self.moves = vector(
            [adam_factor(options, layer, optimizer.adam_ratio) > 0 for layer in layers],
            dtype=torch.bool,
        )
        self.copies = vector([layer.copies for layer in layers], dtype=torch.float32)
        self.groups_in_use = sorted({indices[0] for indices in self.parameter_groups.values()})
        is_zero = torch.zeros((), dtype=torch.float32, device=exchange.device)
        self.recorded = recorded_step(
            plan, self.layer_groups, exchange, {"factor_is_zero": is_zero}
        )
        # the optimizer's layers are those of all domains, each domain's in the plan's order
        self.first = len(optimizer.used)
        self.places = {layer.name: self.first + index for index, layer in enumerate(plan.layers)}
        optimizer.slices = optimizer.slices or {}
        optimizer.used = torch.zeros(
            self.first + len(self.places), dtype=torch.float32, device=exchange.device
        )
        self._announce()

    def _announce(self) -> None:
        """Tell the optimizer which slices of what it steps are which layer's. Parameters that are
        frozen now have none: they do not decay."""
        exchange, optimizer = self.exchange, self.optimizer
        own = range(self.first, self.first + len(self.places))
        slices = {
            key: [part for part in parts if part[2] not in own]
            for key, parts in optimizer.slices.items()
        }
        for name, pieces in exchange.plan.of_layer.items():
            for piece, parameter in zip(pieces, exchange.params[name], strict=True):
                for shard in exchange.shards.get(piece, ()) if parameter.requires_grad else ():
                    part = shard.offset, shard.numel, self.places[name]
                    slices.setdefault(id(exchange.layout.master(shard)), []).append(part)
        optimizer.slices = slices
        self.frozen = self._frozen()

    def _frozen(self) -> list[bool]:
        return [
            not parameter.requires_grad
            for of_layer in self.exchange.params.values()
            for parameter in of_layer
        ]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        orthogonal = keeps_direction(self.config.adam, layer) is None
        return self.parameter_groups[layer.name][0], orthogonal, layer.copies, layer.blocks

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        self.optimizer.check_parts(here=self.exchange.layout.rank == 0, groups=context.groups)
        if not self.names:
            none = torch.zeros((), device=self.exchange.device, dtype=torch.float32)
            return Outcome((none,), self.moves.float())
        if taken_away := self.optimizer.taken_away():
            self._begin_anew(taken_away, context.groups)
        options = [context.groups[index] for index in self.groups_in_use]
        self.betas_and_eps = {
            index: (tuple(own["betas"]), own["eps"])
            for index, own in zip(self.groups_in_use, options, strict=True)
        }
        inputs: dict[str, Tensor] = {}
        if context.factor_is_zero is not None:
            inputs["factor_is_zero"] = context.factor_is_zero
        if self.recorded is None:
            return self._directions(StepTensors(gradients, self.exchange), **inputs)
        values = [*self.betas_and_eps.values()]
        return self.recorded.step(self._directions, gradients, inputs, values)

    def _directions(
        self, tensors: StepTensors | RecordedTensors, factor_is_zero: Tensor | None = None
    ) -> Outcome:
        """Every group's steps, each put where it belongs as soon as it is there. The host decides
        on nothing here.

        Args:
            factor_is_zero: see :class:`StepContext`. Gradients are 0 then, by which layers stand
                still, and here they are counted.
        """
        for chunk in self.chunks:
            for step in chunk:
                self._adam(step, tensors)
            self._orthogonalize([step for step in chunk if step.orthogonal])
            for step in chunk:
                memory = tensors.memory(step.group)
                self._finish(step, memory)
                if memory is None:
                    tensors.put(step.group, step.x_nOI)
                del step.x_nOI
        largest = torch.cat([step.largest for step in self.steps])
        used = torch.cat([step.used for step in self.steps])
        squared = torch.cat([step.squared for step in self.steps])
        if factor_is_zero is not None:
            # as gradients are that are not finite (the flag is fp32 where the step is recorded)
            largest = largest.masked_fill(factor_is_zero.bool(), torch.nan)
        finite = largest < INFINITY
        left_out = finite & (largest >= LARGEST)
        unused = largest == 0
        stands_still = ~finite | (self.moves & ~(used | left_out | unused))
        return Outcome(
            ((squared / self.copies).sum(),),
            used.float(),
            replaced=stands_still.sum().float(),
            unused=unused.sum().float(),
            left_out=left_out.float(),
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        # what DeepSpeed has loaded in place of states was not taken away by a program
        self.optimizer.marked = frozenset()

    def _begin_anew(self, taken_away: frozenset[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """Let the moments of some layers begin at zero, as Adam's would: of those for whose weight
        a program took away what ``optimizer.state`` has, or, where DeepSpeed steps flat parameters
        in place of the model's, of all.

        Args:
            taken_away: ids of the parameters of which it did.
            groups: the optimizer's parameter groups.
        """
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        for group in self.layer_groups:
            for index, name in enumerate(group.names):
                weight = id(self.exchange.params[name][0])
                if weight in taken_away or weight not in stepped:
                    torch._foreach_zero_([*vars(group.state(index).moments).values()])

    def _adam(self, step: GroupStep, tensors: StepTensors | RecordedTensors) -> None:
        """R, the moments with R in them, and U. Before the first refresh nothing is rotated: plain
        Adam."""
        group = step.group
        betas, eps = self.betas_and_eps[self.parameter_groups[group.names[0]][0]]
        x, is_ours = tensors.take(group)  # [n, O, I]
        # flags follow from the largest entry: no pass looks for what is not finite
        largest = (
            torch.linalg.vector_norm(x.flatten(1), ord=INFINITY, dim=1)
            .view(len(group.layers), -1)
            .amax(dim=1)
        )
        step.largest = largest
        step.used = (largest > 0) & (largest < LARGEST) & self.moves[step.own]
        rotation = group.rotation
        rotated = x if rotation is None else rotation.rotate(x, overwrite=is_ours)
        # a basis in blocks may leave it transposed, which moments are not
        rotated = rotated.contiguous()
        is_ours = is_ours or rotated.data_ptr() != x.data_ptr()
        moments = group.moments
        direction = rotated if is_ours else torch.empty_like(rotated)
        adam_step_(
            direction,
            rotated,
            moments.first_OI,
            moments.second_OI,
            moments.updates,
            repeated(step.used, group.maps),
            betas=betas,
            eps=eps,
        )
        if rotation is not None:
            # before rows leave the eigenbasis; whitening leaves out columns of what is
            # orthogonalized
            rotation.mask_null_space_(direction, columns=not step.orthogonal)
        step.x_nOI = direction

    def _orthogonalize(self, steps: Sequence[GroupStep]) -> None:
        """X from U, in its place; nothing else of the directions is kept. Maps whose sides are the
        same, as they are or transposed, are iterated together, whatever layers they are of."""
        maps: list[Any] = []  # tensors
        owners: list[GroupStep] = []
        for step in steps:
            if step.rows_first and step.group.rotation is not None:
                step.x_nOI = step.group.rotation.restore(step.x_nOI, columns=False)
            if step.blocks:
                # [layers, rows, I]
                parts = [rows.flatten(-3, -2) for rows in row_blocks(step.x_nOI, step.blocks)]
            else:
                parts = [step.x_nOI.view(len(step.target), -1, step.x_nOI.shape[-1])]
            maps += parts
            owners += [step] * len(parts)
            del parts
        sizes: dict[int, Tensor] = {}
        for indices in (
            same_sides(maps) if self.batches else [[index] for index in range(len(maps))]
        ):
            whitenings: list[Tensor | None] = [None] * len(indices)
            if self.config.adam.rotate:  # S is the same whether rows are rotated or not
                whitenings = [
                    rotation.whitening(
                        self.config.adam.whiten, repeats=owners[index].maps // rotation.maps
                    )
                    if (rotation := owners[index].group.rotation) is not None
                    else None
                    for index in indices
                ]
            found = orthogonal_factors(
                [maps[index] for index in indices], whitenings, precision=self.precision
            )
            sizes |= zip(indices, found, strict=True)
        for step in steps:
            mine = [index for index, owner in enumerate(owners) if owner is step]
            if step.blocks:
                for rows, index in zip(row_blocks(step.x_nOI, step.blocks), mine, strict=True):
                    # where its rows lie apart the map is a copy
                    if rows.data_ptr() != maps[index].data_ptr():
                        rows.copy_(maps[index].view(rows.shape))
            for index in mine:
                # frees the copy of rows that lie apart: the next step's are still there
                maps[index] = None
            step.sizes = [sizes[index] for index in mine]

    def _finish(self, step: GroupStep, memory: Tensor | None) -> None:
        """Q_G X Q_A^T at its size, in ``memory`` if given, else in X's; 0 for a layer that stands
        still."""
        if (rotation := step.group.rotation) is not None:
            rows = not step.rows_first
            step.x_nOI = rotation.restore(step.x_nOI, rows=rows, overwrite=True).contiguous()
        if step.blocks:
            self._scale_blocks(step)
        x = step.x_nOI.view(len(step.target), -1, step.x_nOI.shape[-1])
        norm = torch.linalg.vector_norm(x.flatten(1), dim=1)
        # a direction gone wrong must not reach the weights: all maps of a layer or none
        step.used = step.used & (norm.view(-1, step.maps).sum(dim=1) < INFINITY)
        size = step.sizes[0] if step.normalized else None
        used = repeated(step.used, step.maps)
        finish_direction_(
            x if memory is None else memory, x, norm, size, step.target, step.full, used
        )
        length = (
            norm * step.target if size is None else step.target * (size / step.full).clamp_(max=1)
        )
        step.squared = length.square_().masked_fill_(~used, 0.0).view(-1, step.maps).sum(dim=1)

    def _scale_blocks(self, step: GroupStep) -> None:
        """Each block of the rows to its own size."""
        blocks = row_blocks(step.x_nOI, step.blocks)
        # [blocks, layers]
        norm = torch.stack([torch.linalg.vector_norm(rows, dim=(-3, -2, -1)) for rows in blocks])
        scale = scale_to(
            step.block_target, size=torch.stack(step.sizes), norm=norm, full=step.block_full
        )
        for rows, times in zip(blocks, scale, strict=True):
            rows.mul_(times[:, None, None, None])

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        assert flags is not None
        if self._frozen() != self.frozen:
            self._announce()
        self.last = totals[0], context.groups[0]["lr"]
        used = self.optimizer.used
        used[self.first : self.first + len(flags)].copy_(flags)
        self.optimizer.used = used
        return None
