"""Adam in the K-FAC eigenbasis: the directions that KFACAdamW steps along.

    R = Q_G^T dW Q_A             the clipped, unscaled gradient, rotated
    m <- b1 m + (1 - b1) R       v <- b2 v + (1 - b2) R^2
    U = m^ / (sqrt(v / (1 - b2^k)) + eps),  0 where alpha or beta is rounding   (Rotation.only_seen; m^ Nesterov's)
    X = (the orthogonal factor of U S) S,  S = diag(alpha / mean alpha + c)^-p        (``adam.whiten`` p, c 0.01)
    U <- size sqrt(max(O, I)) X / |X|
    W <- W - lr (Q_G U Q_A^T + weight_decay W)                                        (in optimizer.py)

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

Singular values of an orthogonalized step are, on average, SIZE sqrt(longer side / shorter side): what it changes in
an output is then the same at every width (Yang et al. 2023, arXiv:2310.17813, who have sqrt(O / I), which is too
little for O < I, as is Muon's sqrt(max(1, O / I)): docs/notes/kfacadamw.md). What keeps Adam's direction, norms and
heads, has the rate adam_lr. Of that a head's is the part BASE / I, but at least lr: Adam's direction grows with the
width, too.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import AdamConfig
from ds_kfac.directions.base import Direction, StepContext
from ds_kfac.directions.kfac_adamw.optimizer import IN_USE
from ds_kfac.model.blocks import named
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import scale_shift_
from ds_kfac.plan.plan import Plan
from ds_kfac.update.groups import Group, rounds
from ds_kfac.update.newton_schulz import FULL, orthogonal_factors, scale_to
from ds_kfac.update.rotation import in_memory, lengths
from ds_kfac.update.state import LayerState, MomentUpdate
from ds_kfac.zero.exchange import GradientExchange, LocalResult
from ds_kfac.zero.layout import ShardLayout

SIZE = 27.0
"""Measured with gpt_small (benchmarks/convergence), of width 128, at AdamW's best rate."""
BASE = 128
"""That width."""
ADAM_RATIO = 8.0
"""adam_lr / lr where adam_lr is left out."""


def keeps_direction(options: AdamConfig, layer: LayerSpec) -> str | None:
    """Why a layer keeps Adam's direction; None if it is orthogonalized: of a tensor-parallel layer every shard by
    itself, of one in groups every group, so that a step has the same size per entry as that of a whole layer."""
    if layer.keeps_direction is not None:
        return layer.keeps_direction
    module = layer.module
    pattern = next((pattern for pattern in options.except_layers if named(pattern, module)), None)
    return pattern and f"kfac.adam.except_layers {pattern!r}"


def step_norm(layer: LayerSpec, rows: int | None = None) -> float:
    """Frobenius norm, in SIZE, of an orthogonalized step of a layer's matrix, of that of one of its groups, or of a
    block of so many ``rows`` of it. Of a tensor-parallel shard it is the shard's part of the whole layer's."""
    O, I = layer.whole_shape[-2:]  # noqa: E741
    O = O if rows is None else rows * layer.cut[0]  # noqa: E741
    return (max(O, I) / math.prod(layer.cut)) ** 0.5


def adam_factor(options: AdamConfig, layer: LayerSpec, ratio: float) -> float:
    """What multiplies the direction of a layer that keeps Adam's.

    Args:
        ratio: adam_lr / lr.
    """
    if keeps_direction(options, layer) is None:
        return 1.0
    head = layer.keeps_direction is None  # it makes the model's outputs
    return max(ratio * BASE / layer.whole_shape[-1], 1.0) if head else ratio


LARGEST = 1e15
"""Norm of a gradient that moments take: far from where its square leaves fp32."""
RANGES = (2.0**-130, 2.0**60)
"""A squared norm travels in fp32, multiplied by each: one of the two holds it, whatever finite norm it is of."""


@dataclass
class Stack:
    """A group of layers on its way through a step.

    Attributes:
        places: of its layers among all of the step.
        orthogonal: whether their directions are orthogonalized.
        x_OI: fp32 [O, I] or [n, O, I], the direction as far as it has come.
        rows_are_back: whether the rotation is undone in two halves: blocks are rows of the weight, not of R.
        sizes: norms of what was orthogonalized, a scalar or [n] of each block; None if nothing was, or is scaled.
    """

    group: Group
    places: slice
    orthogonal: bool
    x_OI: Tensor = field(init=False)
    rows_are_back: bool = False
    sizes: list[Tensor] | None = None


class AdamDirection(Direction):
    """See the module's docstring.

    Args:
        optimizer: the engine's innermost optimizer, one of ``optimizer.py``.
    """

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any) -> None:
        kept = {layer.name: keeps_direction(plan.config.adam, layer) for layer in exchange.owned}
        self.orthogonalizes = {name: reason is None for name, reason in kept.items()}
        super().__init__(plan, layout, exchange)
        self.layers = tuple(layer.name for layer in plan.layers)
        self.optimizer, self.of_one_shape, self.waits, self.size = optimizer, plan.stacks, plan.waits, SIZE
        self._rounds: dict[tuple[int, ...], list[list[int]]] = {}
        of_all = partial(torch.tensor, device=exchange.device)  # of every layer, in the order of the stacks
        layers = [layer for stack in self.stacks for layer in stack]
        self.root = of_all([layer.numel**0.5 for layer in layers], dtype=torch.float32)
        self.full = FULL * self.root
        self._maps: dict[str, Tensor] = {}
        self.target = of_all([self.size * step_norm(layer) for layer in layers], dtype=torch.float32)
        ratios = [adam_factor(self.config.adam, layer, optimizer.adam_ratio) for layer in layers]
        self.ratio = of_all(ratios, dtype=torch.float32)
        self.bound = of_all([math.inf if ratio > 0 else 0.0 for ratio in ratios], dtype=torch.float32)
        self.none, self.in_use = torch.zeros_like(self.ratio), torch.full_like(self.ratio, IN_USE)
        self.ranges = of_all(RANGES, dtype=torch.float64)[:, None]
        self.copies = of_all([layer.copies for layer in layers], dtype=torch.float64)

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        local = LocalResult(states, self.exchange)
        local.unprepared = sum(state.preconditioner is None for state in states.values())
        # no gradient of the step is of use if their norm is no number that DeepSpeed could clip by
        void, clip = torch.zeros((), dtype=torch.bool, device=self.exchange.device), None
        if context.norm is not None:
            void, clip = ~(context.norm.float() < math.inf), self.layout.clip_factor(context.norm)
            local.clip = clip.masked_fill(void, 0.0)
        parts: list[list[Stack]] = []  # of what is in memory at a time
        names: list[str] = []
        groups = tuple(self.together.of(states))
        shape = tuple(len(group.names) for group in groups)
        if shape not in self._rounds:
            limit = in_memory(stacked=self.of_one_shape)
            self._rounds[shape] = rounds(range(len(groups)), lambda index: groups[index].layers, limit=limit)
        for taken in self._rounds[shape]:
            parts.append([])
            for group in (groups[index] for index in taken):
                places = slice(len(names), len(names) + len(group.names))
                parts[-1].append(Stack(group, places, self.orthogonalizes[group.names[0]]))
                names += group.names
        if not names:
            local.numbers = list(torch.zeros(3, device=self.exchange.device).unbind())
            return local
        # All flags are of every layer, in this order, and follow from norms: no pass looks for what is not finite.
        unscale, length = local.clip / self.layout.grad_scale(), lengths([gradients[name] for name in names])
        finite = (length < math.inf) & ~void
        fits = length * unscale < LARGEST
        usable = finite & fits & (length > 0)
        # A direction gone wrong must not reach the weights. An overflowed gradient must reach DeepSpeed's check, so
        # what is in its place has its norm. At adam_lr 0 layers stand still, without decay.
        overflowed = ~finite & (length != 0)
        bound = self.bound.masked_fill(~usable, 0.0)  # of the norms of directions that are stepped along
        strays = (length / self.root).masked_fill_(~overflowed, 0.0).float()
        found: list[tuple[Tensor, Tensor]] = []
        for some in parts:
            for stack in some:
                local.moment_updates.append(self._step(stack, states, gradients, unscale, usable[stack.places]))
            self._orthogonalize([stack for stack in some if stack.orthogonal])
            for stack in some:
                norm, scale = self._restore(stack)
                at, good = stack.places, norm < bound[stack.places]
                times, plus = torch.where(good, scale, self.none[at]), torch.where(good, self.in_use[at], strays[at])
                scale_shift_(stack.x_OI.view(len(norm), -1, stack.x_OI.shape[-1]), times, plus)
                local.outbox.add(stack.group.layers, stack.x_OI.unbind() if len(norm) > 1 else [stack.x_OI])
                del stack.x_OI
                found.append((norm, scale))
        norm, scale = (torch.cat(part) for part in zip(*found, strict=True))
        good = usable & (norm < math.inf)
        squared = (norm * scale).square().masked_fill_(~good, 0.0)
        squared = torch.where(overflowed, length.square(), squared)
        local.replaced = local.replaced + (usable & ~good | ~finite).sum()
        local.unused = local.unused + (length == 0).sum()
        local.left_out = dict(zip(names, (finite & ~fits).unbind(), strict=True))
        squares = torch.cat([squared[None], length.square() * self.ranges])
        local.numbers = list((squares / self.copies).sum(dim=1).float().unbind())
        return local

    def finish(
        self, context: StepContext, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self.last = totals[0], self.layout.optimizer.param_groups[0]["lr"]
        low, high = (torch.stack(list(totals[1:])) / self.ranges[:, 0]).unbind()
        square = torch.where(high < math.inf, high, low)
        scale = torch.sqrt(square / totals[0].double()).float().nan_to_num_(nan=1.0, posinf=1.0)
        scale = scale.masked_fill_(scale == 0, 1.0)
        undo = self.layout.grad_scale() / (scale * local.clip)
        self.optimizer.direction_scale = undo.nan_to_num_(nan=0.0, posinf=0.0)
        return dict.fromkeys(self.layers, scale)

    def _step(
        self,
        stack: Stack,
        states: dict[str, LayerState],
        gradients: dict[str, Tensor],
        unscale: Tensor | float,
        usable: Tensor,
    ) -> MomentUpdate:
        """Adam in the eigenbasis, the gradients in the moments that are ``usable``. Before the first refresh nothing is
        rotated: plain Adam."""
        group = stack.group
        own, options = group.take(states), self.layout.optimizer.param_groups[self.groups[group.names[0]][0]]
        given = [gradients.pop(name) for name in group.names]  # as it is stored, which may be DeepSpeed's own
        whole = given[0] if len(given) == 1 else torch.stack(given)
        x = whole.float()
        owned = x is not whole or len(own) > 1
        del whole, given
        if (rotation := group.rotation) is not None:
            stack.rows_are_back = bool(stack.group.layers[0].blocks and rotation.G) and stack.orthogonal
            rotated = rotation.rotate(x, given_up=owned)
            owned, x = owned or rotated.data_ptr() != x.data_ptr(), rotated
            del rotated
        stack.x_OI, update = group.moments.divide(
            x if owned else x.clone(), betas=tuple(options["betas"]), eps=options["eps"], usable=usable, scale=unscale,
            waits=self.waits,
        )  # fmt: skip
        if rotation is not None:
            # before rows leave the eigenbasis; whitening leaves out columns of what is orthogonalized
            rotation.only_seen(stack.x_OI, columns=not stack.orthogonal)
        return update

    def _restore(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Adam's directions, or their orthogonal factors, out of the eigenbases, in their place. Returns the norm of
        each, and what it is still to be multiplied by."""
        if (rotation := stack.group.rotation) is not None:
            stack.x_OI = rotation.restore(stack.x_OI, rows=not stack.rows_are_back, given_up=True).contiguous()
        if stack.sizes is not None and (stack.group.layers[0].blocks or stack.group.layers[0].groups > 1):
            self._scale_maps(stack)
        norm = torch.linalg.vector_norm(stack.x_OI.view(len(stack.group.names), -1), dim=1)
        if stack.sizes is None:
            return norm, self.ratio[stack.places]
        target, full = self.target[stack.places], self.full[stack.places]
        return norm, scale_to(target, size=stack.sizes[0].view(-1), norm=norm, full=full)

    def _orthogonalize(self, some: Sequence[Stack]) -> None:
        """Directions become their orthogonal factors, in their place; nothing else of them is kept."""
        owners: list[Stack] = []
        maps: list[Tensor] = []
        for stack in some:
            blocks = stack.group.layers[0].blocks
            if stack.rows_are_back:
                assert stack.group.rotation is not None
                stack.x_OI = stack.group.rotation.restore(stack.x_OI, columns=False)
            own = [rows.flatten(-3, -2) for rows in row_blocks(stack.x_OI, blocks)] if blocks else [stack.x_OI]
            maps += own
            owners += [stack] * len(own)
            del own
        sizes = [torch.empty(0)] * len(maps)  # that they had
        for group in of_one_shape(maps) if self.of_one_shape else [[index] for index in range(len(maps))]:
            # rotated or not, the factor is the same
            whitenings = [
                owner.group.rotation.whitening(self.config.adam.whiten, groups=owner.group.layers[0].groups)
                if owner.group.rotation is not None and self.config.adam.rotate
                else None
                for owner in (owners[index] for index in group)
            ]
            found = orthogonal_factors([maps[i] for i in group], whitenings, precision=self.precision)
            for index, size in zip(group, [size for _, size in found], strict=True):
                sizes[index] = size
            found.clear()
        for stack in some:
            mine = [index for index, owner in enumerate(owners) if owner is stack]
            if stack.group.layers[0].blocks:
                for part, index in zip(row_blocks(stack.x_OI, stack.group.layers[0].blocks), mine, strict=True):
                    if part.data_ptr() != maps[index].data_ptr():  # where its rows lie apart it is a copy
                        part.copy_(maps[index].view(part.shape))
            for index in mine:
                maps[index] = sizes[index]  # its memory
            stack.sizes = [sizes[index] for index in mine]

    def _scale_maps(self, stack: Stack) -> None:
        """Each group of a layer, or each block of its rows, to its own size."""
        assert stack.sizes is not None
        layer = stack.group.layers[0]
        maps = row_blocks(stack.x_OI, layer.blocks)
        if layer.name not in self._maps:
            targets = [self.size * step_norm(layer, rows.shape[-3] * rows.shape[-2]) for rows in maps]
            full = [FULL * rows.shape[-3:].numel() ** 0.5 for rows in maps]
            self._maps[layer.name] = torch.tensor([targets, full], device=stack.x_OI.device)[..., None]
        target, whole = self._maps[layer.name].unbind()  # [maps, 1]
        norm = torch.stack([torch.linalg.vector_norm(rows, dim=(-3, -2, -1)) for rows in maps]).view(len(maps), -1)
        scale = scale_to(target, size=torch.stack(stack.sizes).view(norm.shape), norm=norm, full=whole)
        for rows, own in zip(maps, scale, strict=True):
            rows.mul_(own.view(*rows.shape[:-3], 1, 1, 1))
        stack.sizes = None

    def alike(self, layer: LayerSpec) -> Hashable:
        return self.groups[layer.name][0], self.orthogonalizes[layer.name], layer.copies, layer.blocks


def row_blocks(x_OI: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views [.., repeats, size, I] of a matrix's rows, see :attr:`LayerSpec.blocks`; of all of them without sizes."""
    sizes = list(sizes) or [x_OI.shape[-2]]
    return list(x_OI.unflatten(-2, (-1, sum(sizes))).split(sizes, dim=-2))


def of_one_shape(maps: Sequence[Tensor]) -> list[list[int]]:
    """Indices of those with the same sides, as they are or transposed, at most
    :data:`ds_kfac.update.rotation.STACKED` elements unless one alone has more."""
    limit = in_memory(stacked=True)
    groups: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for index, x in enumerate(maps):
        sides = tuple(sorted(x.shape[-2:]))
        group = groups.setdefault(sides, [])
        if group and sum(maps[other].numel() for other in group) + x.numel() > limit:
            full.append(group)
            groups[sides] = group = []
        group.append(index)
    return [*full, *groups.values()]
