"""Compute the directions along which KFACAdamW steps: Adam in the K-FAC eigenbasis, orthogonalized.

    _adam            R = Q_G^T dW Q_A                  the gradient, rotated
                     m <- b1 m + (1 - b1) R
                     v <- b2 v + (1 - b2) R^2
                     U = m^ / (sqrt(v / (1 - b2^k)) + eps), with Nesterov's m^ and step number k;
                         U is set to 0 in the null spaces of A and G
    _orthogonalize   X = (the orthogonal factor of U S) S,  S = diag(alpha / mean alpha + c)^-p
    _finish          U <- SIZE sqrt(max(O, I)) X / |X|, rotated back: Q_G U Q_A^T
    optimizer.py     W <- W - lr (Q_G U Q_A^T + weight_decay W)

where alpha are the eigenvalues of A, p = ``adam.whiten`` and c = 0.01. Layers of the same shape
form a group and are processed in one batch. As many groups are processed together as fit into
memory, see :func:`chunks`.

Sources: the second moment is SOAP's (Vyas et al. 2024, arXiv:2409.11321), but the eigenbasis is
K-FAC's instead of Shampoo's. The idea of the orthogonal factor comes from Muon (Jordan et al.
2024), which replaces plain momentum by its orthogonal factor. With S, the step is the steepest
descent step under the norm |U A^p|. This norm bounds how much the output responds to each input
direction, while Muon's norm bounds the change of the weight. Mousse (arXiv:2603.09697) whitens
momentum on both sides.

Note: Layers that stand still. The following layers take no step, do not decay, and keep their
moments:

- A layer whose averaged gradient is exactly zero, because the step did not use the layer. In the
  same way, torch's AdamW skips a parameter whose gradient is None. Each shard of a tensor-parallel
  layer is checked separately.
- A layer whose parameters are frozen, or whose learning rate is 0.
- A layer whose gradient is not finite, or so large that the moments could not hold its square.
  These layers are counted, and a warning names them.

Note: The size of a step. The singular values of an orthogonalized step are on average SIZE
sqrt(longer side) / sqrt(shorter side), so that a step changes an output by the same amount at every
width (Yang et al. 2023, arXiv:2310.17813). If O is below I, the factor sqrt(O / I) of Yang et al.
is too small, and so is Muon's factor sqrt(max(1, O / I)); docs/notes/kfacadamw.md has measurements.
Normalization layers and heads keep Adam's direction. Normalization layers have the learning rate
adam_lr. A head has the learning rate adam_lr times BASE / I, because Adam's direction changes
outputs more at larger widths. The learning rate of a head is at least lr.
"""

from collections.abc import Hashable, Mapping, Sequence
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
from ds_kfac.directions.kfac_adamw.optimizer import LayerSlice
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
"""Gradients with an entry of at least this size do not enter the moments. The square of any smaller
entry is far below the largest fp32 number."""
INFINITY = float("inf")


class AdamDirection(Direction):
    """Computes the directions of this rank's layers, as the module's docstring describes.

    Vectors have one entry for each layer, in the order of ``layers``, or one entry for each map of
    a group (see "Maps" in ``group_step.py``).

    Args:
        optimizer: the engine's innermost optimizer, of a class in ``optimizer.py``.

    Attributes:
        steps: for each of ``layer_groups``, an object with the group's constants and intermediate
            results.
        chunks: ``steps``, split into lists. All groups of one list are processed together, so their
            directions are in memory at the same time.
        moves: bool [layers], whether the layer has a learning rate above 0.
        copies: fp32 [layers], number of tensor-parallel ranks that have a copy of the layer.
        used_slice: slice of ``optimizer.used`` that belongs to the layers of this domain (see
            ``ds_kfac/zero/registry.py``).
    """

    def __init__(self, plan: Plan, exchange: GradientExchange, optimizer: Any) -> None:
        super().__init__(plan, exchange, AdamMoments)
        self.optimizer = optimizer
        self.batches = plan.batched
        device = exchange.device
        options = self.config.adam
        adam_ratio = optimizer.adam_ratio
        self.steps: list[GroupStep] = []
        first = 0
        for group in self.layer_groups:
            layers = slice(first, first + len(group.layers))
            self.steps.append(GroupStep(group, layers, options, adam_ratio, device))
            first = layers.stop
        remaining = iter(self.steps)  # chunks() keeps the order of the groups
        layers_of_chunks = chunks(
            [group.layers for group in self.layer_groups], batched=plan.batched
        )
        self.chunks = [[next(remaining) for _ in chunk] for chunk in layers_of_chunks]
        factors = [adam_factor(options, layer, adam_ratio) for layer in self.layers]
        copies = [layer.copies for layer in self.layers]
        self.moves = torch.tensor([x > 0 for x in factors], dtype=torch.bool, device=device)
        self.copies = torch.tensor(copies, dtype=torch.float32, device=device)
        self.groups_in_use = sorted({indices[0] for indices in self.parameter_groups.values()})
        is_zero = torch.zeros((), dtype=torch.float32, device=device)
        self.recorded = recorded_step(
            plan, self.layer_groups, exchange, {"factor_is_zero": is_zero}
        )
        # The optimizer knows the layers of all domains: first the layers of the domains before this
        # one, then the layers of this domain in the plan's order.
        self.names_in_plan = [layer.name for layer in plan.layers]
        layers_before = len(optimizer.used)
        self.used_slice = slice(layers_before, layers_before + len(plan.layers))
        optimizer.slices = optimizer.slices or {}
        optimizer.used = torch.zeros(self.used_slice.stop, dtype=torch.float32, device=device)
        self._announce()

    def _announce(self) -> None:
        """Tell the optimizer to which layer each slice of its parameters belongs. Parameters that
        are frozen at this call get no slices, so that they do not decay."""
        exchange = self.exchange
        # dict from layer name to the layer's index in optimizer.used
        indices = range(self.used_slice.start, self.used_slice.stop)
        index_of = dict(zip(self.names_in_plan, indices, strict=True))
        slices: dict[Tensor, list[LayerSlice]] = {}
        for master, parts in self.optimizer.slices.items():
            of_other_domains = [part for part in parts if part.layer not in indices]
            if of_other_domains:
                slices[master] = of_other_domains
        for name, pieces in exchange.plan.of_layer.items():
            for piece, parameter in zip(pieces, exchange.params[name], strict=True):
                if not parameter.requires_grad:
                    continue
                for shard in exchange.shards.get(piece, ()):
                    part = LayerSlice(shard.offset, shard.numel, index_of[name])
                    slices.setdefault(exchange.layout.master(shard), []).append(part)
        self.optimizer.slices = slices
        self.frozen = self._frozen()

    def _frozen(self) -> list[bool]:
        """Return, for each parameter of the layers, whether the parameter is frozen at this
        call."""
        return [
            not parameter.requires_grad
            for of_layer in self.exchange.params.values()
            for parameter in of_layer
        ]

    def batch_key(self, layer: LayerSpec) -> Hashable:
        orthogonalized = keeps_direction(self.config.adam, layer) is None
        return self.parameter_groups[layer.name][0], orthogonalized, layer.copies, layer.blocks

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        self.optimizer.check_parts(here=self.exchange.layout.rank == 0, groups=context.groups)
        if not self.names:
            zero = torch.zeros((), device=self.exchange.device, dtype=torch.float32)
            return Outcome((zero,), self.moves.float())
        taken_away = self.optimizer.taken_away()
        if taken_away:
            self._begin_anew(taken_away, context.groups)
        self.betas_and_eps: dict[int, tuple[tuple[Any, ...], Any]] = {}
        for index in self.groups_in_use:
            group = context.groups[index]
            self.betas_and_eps[index] = tuple(group["betas"]), group["eps"]
        inputs = {"factor_is_zero": context.factor_is_zero}
        if self.recorded is None:
            return self._directions(StepTensors(gradients, self.exchange), **inputs)
        values = [*self.betas_and_eps.values()]
        return self.recorded.step(self._directions, gradients, inputs, values)

    def _directions(
        self, tensors: StepTensors | RecordedTensors, factor_is_zero: Tensor | None = None
    ) -> Outcome:
        """Compute the results of every group, and pass them to the exchange group by group. The
        host decides nothing here, because a recording does not run the host's code.

        Args:
            factor_is_zero: see :class:`StepContext`. If it is True, the gradients are 0, so that
                all layers stand still. This method counts them as replaced.
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
            # Count this step like a step whose gradients are not finite. In a recorded step the
            # flag is fp32.
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
        # Loading has replaced the states. Without this line it would look as if a program had
        # removed them.
        self.optimizer.marked = frozenset()

    def _begin_anew(
        self, taken_away: frozenset[Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """After a program has removed states from ``optimizer.state``, set moments to zero, as
        torch's Adam would do.

        If the state of a layer's weight was removed, the layer's moments are set to zero. If the
        optimizer has DeepSpeed's flat parameters in place of the model's parameters, no state
        belongs to a single layer, so the moments of all layers are set to zero.

        Args:
            taken_away: parameters whose state was removed.
            groups: the optimizer's parameter groups.
        """
        stepped = {parameter for group in groups for parameter in group["params"]}
        for group in self.layer_groups:
            for index, name in enumerate(group.names):
                weight = self.exchange.params[name][0]
                if weight in taken_away or weight not in stepped:
                    torch._foreach_zero_([*vars(group.state(index).moments).values()])

    def _adam(self, step: GroupStep, tensors: StepTensors | RecordedTensors) -> None:
        """Rotate a group's gradients, update its moments, and store U in ``step.x_nOI``. Before the
        first refresh nothing is rotated, so U is plain Adam's direction."""
        group = step.group
        betas, eps = self.betas_and_eps[self.parameter_groups[group.names[0]][0]]
        gradient_nOI, may_overwrite = tensors.take(group)
        # The largest entry shows whether a layer was unused, and whether its gradient is not finite
        # or too large, so one pass over the gradient is enough.
        largest_n = torch.linalg.vector_norm(gradient_nOI.flatten(1), ord=INFINITY, dim=1)
        largest = largest_n.view(len(group.layers), -1).amax(dim=1)
        step.largest = largest
        step.used = (largest > 0) & (largest < LARGEST) & self.moves[step.layer_slice]
        rotation = group.rotation
        rotated = gradient_nOI
        if rotation is not None:
            rotated = rotation.rotate(gradient_nOI, overwrite=may_overwrite)
        # a rotation in blocks may return a transposed matrix, but moments are not transposed
        rotated = rotated.contiguous()
        may_overwrite = may_overwrite or rotated.data_ptr() != gradient_nOI.data_ptr()
        moments = group.moments
        direction = rotated if may_overwrite else torch.empty_like(rotated)
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
            # Null directions of G must be set to 0 while the rows are in the eigenbasis. If the
            # direction is orthogonalized, the whitening sets the null directions of A to 0.
            if rotation.G:
                direction.mul_(rotation.rows_with_gradients(moments.second_OI)[:, :, None])
            step.columns = rotation.columns_with_gradients(moments.second_OI)
            if rotation.A and not step.orthogonal:
                direction.mul_(step.columns[:, None, :])
        step.x_nOI = direction

    def _orthogonalize(self, steps: Sequence[GroupStep]) -> None:
        """Replace the direction U in ``x_nOI`` of each step by the orthogonalized direction X.

        Maps with the same two sides, in either order, go through the Newton-Schulz iteration in one
        batch, even if they belong to different layers. The copies that are made for one batch are
        freed before the next batch.
        """
        maps: list[Any] = []  # tensors [.., rows, I]; None once a map is no longer needed
        owners: list[GroupStep] = []  # owner of each map
        for step in steps:
            if step.rows_first and step.group.rotation is not None:
                step.x_nOI = step.group.rotation.restore(step.x_nOI, columns=False)
            step_maps = step.maps_to_orthogonalize()
            maps += step_maps
            owners += [step] * len(step_maps)
            del step_maps
        batches = same_sides(maps) if self.batches else [[index] for index in range(len(maps))]
        norms: dict[int, Tensor] = {}
        for indices in batches:
            norms_of_batch = orthogonal_factors(
                [maps[index] for index in indices],
                [self._whitening(owners[index]) for index in indices],
                precision=self.precision,
            )
            norms |= zip(indices, norms_of_batch, strict=True)
        for step in steps:
            indices = [index for index, owner in enumerate(owners) if owner is step]
            if step.blocks:
                for rows, index in zip(row_blocks(step.x_nOI, step.blocks), indices, strict=True):
                    # If the rows of a block are not contiguous, the map is a copy, so copy the
                    # result back.
                    if rows.data_ptr() != maps[index].data_ptr():
                        rows.copy_(maps[index].view(rows.shape))
            for index in indices:
                maps[index] = None  # frees the copy of a block before later steps are processed
            step.sizes = [norms[index] for index in indices]

    def _whitening(self, step: GroupStep) -> Tensor | None:
        """Return the whitening S of a group's maps. S is the same whether or not rows are rotated.
        Return None if the group has no eigenbases, or if gradients are not rotated."""
        rotation = step.group.rotation
        if rotation is None or not self.config.adam.rotate:
            return None
        repeats = step.maps // rotation.maps
        return rotation.whitening(self.config.adam.whiten, step.columns, repeats=repeats)

    def _finish(self, step: GroupStep, memory: Tensor | None) -> None:
        """Rotate X back to Q_G X Q_A^T, and scale it to the size of a step. The result of a layer
        that stands still is 0.

        Args:
            memory: tensor to which the result is written; None: it overwrites X.
        """
        rotation = step.group.rotation
        if rotation is not None:
            rows = not step.rows_first
            step.x_nOI = rotation.restore(step.x_nOI, rows=rows, overwrite=True).contiguous()
        if step.blocks:
            self._scale_blocks(step)
        x = step.x_nOI.view(len(step.target), -1, step.x_nOI.shape[-1])
        norm = torch.linalg.vector_norm(x.flatten(1), dim=1)
        # A direction that is not finite must not reach the weights. If one map of a layer is not
        # finite, the whole layer stands still.
        step.used = step.used & (norm.view(-1, step.maps).sum(dim=1) < INFINITY)
        size = step.sizes[0] if step.normalized else None
        used = repeated(step.used, step.maps)
        result = x if memory is None else memory
        finish_direction_(result, x, norm, size, step.target, step.full, used)
        if size is None:
            length = norm * step.target
        else:
            length = step.target * (size / step.full).clamp_(max=1)
        step.squared = length.square_().masked_fill_(~used, 0.0).view(-1, step.maps).sum(dim=1)

    def _scale_blocks(self, step: GroupStep) -> None:
        """Scale each block of rows of a fused weight to the norm that the step of this block must
        have."""
        blocks = row_blocks(step.x_nOI, step.blocks)
        # [blocks, layers]
        norm = torch.stack([torch.linalg.vector_norm(rows, dim=(-3, -2, -1)) for rows in blocks])
        scale = scale_to(
            step.block_target, size=torch.stack(step.sizes), norm=norm, full=step.block_full
        )
        for rows, factor in zip(blocks, scale, strict=True):
            rows.mul_(factor[:, None, None, None])

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        assert flags is not None
        if self._frozen() != self.frozen:
            self._announce()
        self.last = totals[0], context.groups[0]["lr"]
        used = self.optimizer.used
        used[self.used_slice].copy_(flags)
        self.optimizer.used = used  # the setter drops copies on other devices
        return None
