"""A layer's tensors -> the rows whose second moment is taken: weight sharing, padding, sub-sampling; and their sums.

Shape suffixes: N examples, T positions that share the weight, D a side's width, R rows, P a packed triangle.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ds_kfac.log import logger
from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.convolutions import Convolution, Grid, Patches, phase
from ds_kfac.model.layers import LayerSpec, LayerType
from ds_kfac.model.loss import LEVELS, Forward
from ds_kfac.model.slices import Fit, counted


@dataclass(frozen=True)
class Taken:
    """One row in ``stride`` of a call's, from ``offset`` on, each of which stands for so many."""

    stride: int = 1
    offset: int = 0

    def of(self, rows_RD: Tensor) -> Tensor:
        """A view."""
        return rows_RD if self.stride == 1 else rows_RD[self.offset :: self.stride]


EACH = Taken()


@dataclass(eq=False)
class BatchSum:
    """A sum over rows, added to in place.

    Attributes:
        sum_P: fp32, packed sum of outer products.
        count: fp32 scalar: of A its rows (uses of the layer times loss terms), of G loss terms.
        ranks: from how many ranks the rows are.
    """

    sum_P: Tensor
    count: Tensor
    ranks: int = 1

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> "BatchSum":
        return cls(
            torch.zeros(numel, device=device, dtype=torch.float32), torch.zeros((), device=device, dtype=torch.float32)
        )


@dataclass(eq=False)
class Call:
    """One call of a module whose output gradient is still to come.

    A hook on a node of the graph holds its call as long as the graph lives. So a call must never hold the node: that
    cycle runs through C++, where no garbage collector sees it, and would never free the graph and its activations.

    Attributes:
        info: of the micro-batch, as it is for this module.
        rows: which of its rows count.
        shape: of the gradient of its rows, with examples and positions.
        sides: whose rows it has, of "AG".
        key_A: of the factor that its inputs are for.
        x: its input; kept only where it is needed with the gradient, so that checkpointing can free it.
        recomputed: whether it is a recomputation, whose A is added with the gradient.
        waiting: sum of its inputs, until a gradient comes to it.
        late: whether its inputs, which it keeps, are added with the gradient instead.
        arrived: whether a gradient came to it.
        many: how many of its rows count, until one came; a scalar on the device where there is a mask. None: it is not
            asked.
        proves: whether its gradient is part of the weight's: not one of a sampled loss, nor that of all of a stack.
        later: whether the layer was called before in the forward, if that is to be known.
        whole_grid: whether its sums have every position of a convolution.
        taken: which of its rows its sums of A and of G have.
        proof, probed, probed_G: of the step's :class:`ds_kfac.model.proof.Proof`, if it has one: its rows times probes,
            fp32 [.., K].
        select: which rows of the output are the call's, of a product of several layers; None: all.
        columns, to_rows: as in :class:`ds_kfac.model.products.Product`.
        edge: where the gradient of its output arrives, maybe flattened, if autograd is to be asked for it; no node may
            hold such a call.
    """

    layer: LayerSpec
    kind: LayerType
    module: nn.Module
    info: BatchInfo
    rows: Fit
    shape: torch.Size
    sides: str
    key_A: str
    forward: Forward
    x: Tensor | None
    recomputed: bool
    select: slice | Tensor | None = None
    columns: slice | None = None
    to_rows: Callable[[Tensor], Tensor] | None = None
    edge: GradientEdge | None = None
    waiting: BatchSum | None = None
    late: bool = False
    proves: bool = True
    later: bool = False
    whole_grid: bool = True
    taken: tuple[Taken, Taken] = EACH, EACH
    arrived: bool = False
    many: Tensor | int | None = None
    proof: Any = None
    probed: Tensor | None = None
    probed_G: Tensor | None = None

    @property
    def share(self) -> float:
        """Part of the layer's outputs that it made. Its inputs count so much in A: cross attention has other rows for
        keys and values than for queries, by one product for both or, as under ZeRO-3, by one each."""
        return 1.0 if self.columns is None else (self.columns.stop - self.columns.start) / self.shape[-1]

    @property
    def whole(self) -> bool:
        """Whether its rows may be those of the batch: not an expert's, nor a slice."""
        return self.select is None and self.rows.piece is None

    def padding(self, mask: Tensor) -> Tensor | None:
        """Which rows of a call are padding, bool of its mask's shape; None if that is not known."""
        info = self.info
        if info.places:
            return None
        if info.padding:
            return ~mask
        if info.attended is None or info.rows is None or mask.numel() != info.attended.numel():
            return None
        if mask.untyped_storage().data_ptr() != info.rows.untyped_storage().data_ptr():  # e.g. an encoder's mask
            return None
        return ~(info.attended.T if self.rows.examples == 1 else info.attended).reshape(mask.shape)

    def gradient_of(self, gradient: Tensor) -> Tensor:
        """Its part of the gradient of an output, of :attr:`shape`; zero in columns that it does not have."""
        gradient = gradient.detach() if self.to_rows is None else self.to_rows(gradient.detach())
        if self.select is not None:
            gradient = gradient.reshape(-1, self.shape[-1])[self.select]
        elif self.columns is not None:
            part = gradient.reshape(*self.shape[:-1], self.columns.stop - self.columns.start)
            gradient = F.pad(part, (self.columns.start, self.shape[-1] - self.columns.stop))
        return gradient.reshape(self.shape)


def _positions(x: Tensor, mask: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """[.., D] -> [N, T, D], and the mask [N, T, 1]; without positions T = 1. ``transposed``: from [T, N, ..]."""
    batch = x.shape[:-1] or (1,)
    if mask is not None and len(batch) == 1:  # a model that flattens [N, T]
        batch = mask.shape
    sides = batch[0], prod(batch[1:])
    x = x.reshape(*sides, x.shape[-1])
    mask = None if mask is None else mask.reshape(*sides, 1)
    if transposed:
        return x.transpose(0, 1), None if mask is None else mask.transpose(0, 1)
    return x, mask


def input_rows(
    x: Tensor, mask: Tensor | None, weight_sharing: str, *, examples: int = 0, taken: Taken = EACH
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Rows of A, [R, D], zero where one does not count; fp32 [R, 1], 1 where it does, else 0: the input of a bias; and
    for how many those that count stand, a number or a scalar on the device.

    Args:
        x: inputs [.., D].
        mask: bool, which of them count: of the leading shape of ``x``, or [N, T] where that is flattened.
        weight_sharing: "expand": every position is a row (a loss per token). "reduce": every example is one, the mean
            of its inputs and the sum of its output gradients (a loss per sequence or image). Eschenhagen et al. 2023
            (arXiv:2311.00636).
        examples: dimension of the examples, 1 where sequences come first.
        taken: with "expand", of which positions.
    """
    reduced = weight_sharing == "reduce"
    x_NTD, mask = _positions(x.detach(), mask, examples == 1 and reduced)  # else each row is by itself, in any order
    if reduced and mask is None:
        rows, counts = x_NTD.float().mean(dim=1), torch.ones(len(x_NTD), 1, device=x.device, dtype=torch.float32)
    elif reduced and mask is not None:
        positions = mask.sum(dim=1)
        rows = (x_NTD.float() * mask).sum(dim=1) / positions.clamp(min=1)
        counts = (positions > 0).float()
    else:
        rows = taken.of(x_NTD.flatten(0, 1))
        if mask is not None:
            mask = taken.of(mask.reshape(-1, 1))
            rows = rows * mask
        counts = torch.ones(len(rows), 1, device=x.device, dtype=torch.float32) if mask is None else mask.float()
    return rows, counts, (len(rows) if mask is None else counts.sum()) * taken.stride


def gradient_rows(
    gradient: Tensor, mask: Tensor | None, weight_sharing: str, *, examples: int = 0, taken: Taken = EACH
) -> tuple[Tensor, Tensor | int]:
    """Rows of output gradients [R, D], and how many loss terms the whole call has if nothing else shows it; see
    :func:`input_rows`. bf16 and fp16 rows are as they were; sums over positions and others are fp32."""
    reduced = weight_sharing == "reduce"
    g_NTD, mask = _positions(gradient.detach(), mask, examples == 1 and reduced)
    own = len(g_NTD) * (1 if reduced else g_NTD.shape[1]) if mask is None else counted(mask, weight_sharing)
    if not reduced:
        g_NTD, mask = taken.of(g_NTD.flatten(0, 1)), None if mask is None else taken.of(mask.reshape(-1, 1))
    if g_NTD.dtype not in (torch.bfloat16, torch.float16):
        g_NTD = g_NTD.float()
    if mask is not None:
        g_NTD = g_NTD * mask.to(g_NTD.dtype)  # of 0 and 1, exact in any dtype
    return g_NTD.sum(dim=1, dtype=torch.float32) if reduced else g_NTD, own


class RowSums:
    """Adds the rows of layer calls to the sums of the step.

    Args:
        weight_sharing: see :func:`input_rows`.
        positions: whether convolutions take a sub-sample of positions, see ``convolutions.py``.
        stage: context in which rows are added, for timings.
        divided: whether the loss may be divided by something else than its terms, according to the micro-batch.

    Attributes:
        turn: the step.
        counted: whether a layer's loss terms of a forward are, in the step; maybe a bool scalar on the device.
        experts: name of an expert -> that of its siblings, whose loss terms count together (``Siblings``).
    """

    def __init__(
        self,
        weight_sharing: str = "expand",
        positions: bool = True,
        stage: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        divided: bool = True,
    ) -> None:
        self.weight_sharing, self.positions, self.turn = weight_sharing, positions, 0
        self._stage, self._divided = stage, divided
        self.counted: dict[tuple[object, str], Tensor | bool] = {}  # by a forward's mark
        self.experts: Mapping[str, str] = {}
        self._warned, self._told = False, set[bool]()

    @torch.no_grad()
    def add_input(self, call: Call, x: Tensor, sum_A: BatchSum) -> None:
        """A call's inputs to a sum of A."""
        layer, kind, bias = call.layer, call.kind, call.layer.bias is not None
        with self._stage():
            if isinstance(kind, Convolution):
                patches = kind.input_patches(call.module, x)
                if self.weight_sharing == "expand":
                    patches.add_to_(sum_A.sum_P, layer.A, self._grid(patches, call), bias=bias)
                    sum_A.count.add_(patches.count)
                    return
                x = patches.sums() * (len(patches.image) / max(1, patches.count))  # the mean of each example
            mask, examples, taken = call.rows.mask, call.rows.examples, call.taken[0]
            rows, counts_R1, count = input_rows(x, mask, self.weight_sharing, examples=examples, taken=taken)
            scale = taken.stride * call.share
            kept = None if mask is None else counts_R1.flatten().bool()
            layer.A.accumulate_(sum_A.sum_P, rows, kept=kept, bias=bias, scale=scale)
            sum_A.count.add_(count * call.share)

    @torch.no_grad()
    def add_gradient(
        self, call: Call, gradient: Tensor, sum_: BatchSum, seed: Tensor | float, alive: Tensor | None = None
    ) -> None:
        """Rows of M g-hat / seed: the gradient of each loss term, M of them averaged in the loss; or of items g-hat /
        seed, where the loss that the model returned divides by items, and seed is what reached it. To G, or to A where
        that is made of them.

        fp32 rows are unscaled before the product: the square of a gradient scaled by 2^16 may overflow. Rows in 16
        bits go as they are, the square of M / seed comes after: fp16 squares stay below 2^32, bf16 is not scaled.

        ``alive``: bool scalar, whether the gradient is not zero to the last bit. None: it counts.
        """
        layer, kind = call.layer, call.kind
        with self._stage():
            if self.weight_sharing == "expand" and isinstance(kind, Convolution):
                patches = kind.gradient_patches(call.module, gradient)
                gain = self._gain(call, len(patches.image), seed, sum_, alive)
                patches.add_to_(sum_.sum_P, layer.G, self._grid(patches, call), gain=gain)
            else:
                tensor = kind.gradient_rows(call.module, call.x, gradient)
                mask, examples, taken = call.rows.mask, call.rows.examples, call.taken[1]
                rows, own = gradient_rows(tensor, mask, self.weight_sharing, examples=examples, taken=taken)
                gain, scale = self._gain(call, own, seed, sum_, alive), float(taken.stride)
                if isinstance(gain, Tensor) and gain.ndim:  # of each rank whose tokens these are
                    of_row = gain.repeat_interleave(tensor.shape[:-1].numel() // len(gain))[:, None]
                    rows, gain = rows.float(), taken.of(of_row)
                if rows.dtype == torch.float32:
                    rows = rows * gain
                else:
                    scale = gain**2 * scale
                side = layer.A if kind.needs_gradients else layer.G
                side.accumulate_(sum_.sum_P, rows, scale=scale)
            if call.proof is not None:
                call.proof.counted_gradient(call, gain, self.weight_sharing)

    @torch.no_grad()
    def add_terms(
        self, call: Call, rows: Tensor, sum_: BatchSum, seed: Tensor | float, alive: Tensor | None = None
    ) -> None:
        """A call's loss terms alone. ``rows``: its gradient's."""
        mask = call.rows.mask
        own = rows.shape[:-1].numel() if mask is None else counted(mask, self.weight_sharing, call.rows.examples)
        self._gain(call, own, seed, sum_, alive)

    @torch.no_grad()
    def pairs(self, call: Call, gradient: Tensor, seed: Tensor | float) -> tuple[Tensor, Tensor]:
        """A call's inputs [N, T, I], each with the 1 of a bias, and the gradients of its loss terms [N, T, O], fp32,
        zero where a row does not count, whatever the weight sharing; of a convolution its patches. Where rows have no
        examples, as those of an expert, or of a model that flattens and has no mask, T is 1. See
        :meth:`add_gradient`."""
        kind, mask, x = call.kind, call.rows.mask, call.x
        assert x is not None, "the call's input was not kept"
        if isinstance(kind, Convolution):
            x = kind.input_patches(call.module, x).all_rows()
            gradient = kind.gradient_patches(call.module, gradient).all_rows()
        else:
            gradient = kind.gradient_rows(call.module, x, gradient)
        transposed = call.rows.examples == 1
        (x_NTI, own), (g_NTO, _) = (_positions(rows, mask, transposed) for rows in (x.detach(), gradient.detach()))
        x_NTI, g_NTO = x_NTI.float(), g_NTO.float()
        if own is not None:
            g_NTO = g_NTO * own
        if call.layer.bias is not None:
            x_NTI = torch.cat([x_NTI, torch.ones_like(x_NTI[..., :1])], dim=-1)
        rows = x_NTI.shape[:2].numel() if own is None else own.sum().float()
        images = isinstance(kind, Convolution) and self.weight_sharing == "expand"
        own_terms = len(x_NTI) if images else rows
        gain = self._gain(call, own_terms, seed, BatchSum.empty(0, x.device))
        return x_NTI, g_NTO * (gain.view(-1, 1, 1) if isinstance(gain, Tensor) and gain.ndim else gain)

    def taken(self, stride: int, call: Call) -> Taken:
        """Which rows of a call count for a factor that takes one in ``stride``: from a place that moves with the step,
        which every row is as likely to be met from as any other. All of them where rows are examples ("reduce"), are
        pixels, which have a grid, or cost no product, as a norm's."""
        stride = min(stride, call.shape[:-1].numel())
        if stride <= 1 or call.kind.images or call.kind.needs_gradients or self.weight_sharing == "reduce":
            return EACH
        return Taken(stride, phase(self.turn, stride))

    def _grid(self, patches: Patches, call: Call) -> Grid:
        """The same for both sides."""
        grid = patches.grid(self.turn if self.positions else None, max(call.layer.shape[-2:]))
        call.whole_grid = grid.step == 1
        return grid

    def _gain(
        self, call: Call, own: Tensor | int, seed: Tensor | float, sum_: BatchSum, alive: Tensor | None = None
    ) -> Any:
        """What output gradients are multiplied by, of an expert's by source rank [ranks]: 1 over the weight of a term
        (docs/math.md). Counts the call's loss terms in ``sum_``, unless they are: a second use of a layer in a forward
        adds rows, not terms; nor does a gradient of zeros alone, where ``alive`` says so. ``own``: how many of the
        call's rows count."""
        forward, info, divisor = call.forward, call.info, call.info.divisor
        told = None if info.peers is None else info.peers.terms
        # M, the same for all layers
        if forward.doubt and divisor is None and self._divided and (forward.doubt is LEVELS) not in self._told:
            self._told.add(forward.doubt is LEVELS)
            logger.warning(
                f"ds_kfac: {forward.doubt}, set engine.kfac.read_batch to return BatchInfo(labelled=..), an entry for "
                "each term (docs/capture.md)"
            )
        if (terms := forward.terms) is None:
            own = own if info.tokens is None else info.tokens
            whole = call.whole or info.tokens is not None
            terms = forward.guessed_by(own, whole=whole, weight_sharing=self.weight_sharing)
            if call.whole and not self._warned:  # a part of the rows says nothing of it
                # numbers on the device are not looked at
                known = isinstance(own, int) and isinstance(terms, int)
                self._warned = bool(own != terms) if known else type(own) is not type(terms)
                if self._warned:
                    logger.warning(
                        f"ds_kfac: {call.layer.name or '(model)'} has other rows than the layer nearest to the loss. "
                        "The number of loss terms is taken from that layer, because neither labels nor an output of "
                        "the model show it. Set engine.kfac.read_batch to return the labels (docs/tuning.md)"
                    )
        # counted once: A's and G's rows are the same terms, and one of both is made
        key = forward.mark, self.experts.get(call.layer.name, call.layer.name)
        before, now = self.counted.get(key, False), True if alive is None else alive
        if before is not True:
            new = terms * info.ranks if told is None else told[:, 0].sum()
            sum_.count.add_(new * (now > before))
            self.counted[key] = before | now
        # a term's weight: measured at the sum of terms, else at the returned loss, else at the backward's
        items = None if forward.info.items is None else info.items  # the model may have ignored them
        returned = items is not None or divisor is None  # it is of the loss that the model returned
        if forward.seed is not None and self._divided and returned:
            seed, divisor = forward.seed, items
        if isinstance(seed, Tensor):  # of a loss times 0, whose gradients of zeros would be no numbers
            seed = torch.where(seed == 0, torch.inf, seed)
        if told is not None:
            return told[:, 1] / seed
        gain = (divisor if self._divided and divisor is not None else terms) / seed
        if (weight := forward.term_weight) is None or not (self._divided and returned):
            return gain
        return torch.where(weight.sure & (weight.value != 0), 1 / weight.value, gain)
