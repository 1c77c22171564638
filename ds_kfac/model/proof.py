"""The proof that a layer's captured rows are those of its gradient.

A layer's gradient is dW = sum over rows of g a^T. So for random u and v

    t = sum over rows of (u . g) (v . a)  =  u^T dW v

In a step that proves, the hooks add up t of each layer, and the step compares it with the layer's gradient. Rows of
another operand, of a stale copy, of some uses only give another number. The sums of the factors are held to the same
rows: v^T (sum of a a^T) v = sum of (v . a)^2, and likewise of G. Rows that count without a gradient, or that are
scaled, show there.

All rows are in t, also those that a mask leaves out of the factors: they are in the gradient. So masks are not proven.
Two sizes speak of them instead: how many rows count whose gradient is zero to the last bit; and how large the gradients
are of rows that a padding mask leaves out, beside those of rows that count.

Cost: a pass over a and g with :data:`PROBES` multiplications for each element. From the forward to the backward pass it
keeps PROBES fp32 numbers a row, and nothing of the graph.

**What u^T dW v and t may differ by.** Their rows are the same. dW is rounded when it is stored, n times where n
gradients of micro-batches, calls and ranks were added up. With R^2 the sum over rows of ((u . g) (v . a))^2, a rounding
to the relative accuracy eps changes u^T dW v by about 0.2 eps R, n of them by 0.2 eps R sqrt(n) at most, and fp32 sums
over N rows and over sides of O and I by 0.2 eps_32 R sqrt(N + O + I). Of a few rows R may be small by chance, as u . g
is then; roundings are not, so |dW| is added to it. :data:`SLACK` times that is allowed, as in tests/spread.py.

Shape suffixes: R rows, n groups of a layer, O and I the sides of its matrix, D any of them, K probes, L layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log, nan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ds_kfac.curvature.factor import Side
from ds_kfac.model.convolutions import Convolution
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.rows import BatchSum, Call, gradient_rows, input_rows
from ds_kfac.ops.dispatch import symmetric_pack_into_

PROBES = 4
"""Pairs (u, v) for each layer; one where rows of A are shorter than :data:`NARROW`, as a depthwise convolution's.
Layers that share an A have equally many: its v is one for all of them."""
NARROW = 32
CHUNK = 1 << 22
"""Elements that are in fp32 at a time."""
SLACK = 10 * 0.2
TF32 = 2.0**-10
"""Accuracy that fp32 products may have on a GPU."""
NUMBERS = (
    *("t",) * PROBES, "squares", *("others",) * PROBES, "others' squares",
    "calls", "reached", "rows", "zero", "first", "eps", "ranks", "wrong", "hooked", "gave",
    *("left out", "out", "in", "out's", "in's"),
    *("later left out", "later out", "later in", "later out's", "later in's"),
)  # fmt: skip
"""Of a layer, which ranks add up. squares: R^2. others: t and R^2 of backwards that are not the engine's own, whose
gradients the step has, or not if the user made them zero. calls, reached: of the layer, and gradients that came to
them. rows, zero: that count, and those of them without a gradient; first: of these, those that are the first of a
sequence, as a causal attention's first query, whose softmax is of one key. eps: of the dtype of gradients, over the
ranks that had any. wrong: ranks whose sums of factors are not those of their rows. hooked: ranks that have a hook of
the user's on its gradient. gave: calls whose rows went to A. left out: rows, by a padding mask; out's, in's: of these
and of those that count by it, rows with a gradient; out, in: sums of the logarithms of its square, seen by probes.
later: the same of calls after a forward's first, as a layer may get the batch as it is, and then flipped."""
T, SQUARES, OTHERS = map(NUMBERS.index, ("t", "squares", "others"))
CALLS, REACHED, ROWS, ZERO, FIRST, EPS, RANKS, WRONG, HOOKED, GAVE, LEFT_OUT = range(len(NUMBERS))[-20:-9]
MASKED = 5
"""Numbers that speak of masks, of first calls and again of later ones."""
FOREIGN = 0.01
"""Square of the gradient of a row that a padding mask leaves out, over that of one that counts, in the geometric mean,
from which on the mask is not of these rows: padding has none, or what an auxiliary loss over all rows leaves. A plain
mean would be that of the few rows of a pooled token."""


@dataclass(frozen=True)
class RowCheck:
    """What all ranks saw of a layer.

    Attributes:
        uses: of its weight, in words.
        ratio: how far t is from the layer's gradient, of how far it may be.
        foreign: whether the masks that it has are of other rows, see :data:`FOREIGN`.
        others: see :data:`NUMBERS`.
    """

    calls: int
    reached: int
    rows: int
    zero: int
    wrong: int
    squares: float
    ratio: float
    hooked: int = 0
    first: int = 0
    gave: int = 0
    foreign: bool = False
    uses: str = ""

    @property
    def still(self) -> bool:
        """Whether all gradients that came are zero, as below a head that begins with zeros."""
        return self.reached > 0 and self.squares == 0

    @property
    def known(self) -> bool:
        """Whether it shows anything: where a loss scale was too large nothing is a number."""
        return isfinite(self.ratio)

    @property
    def fits(self) -> bool:
        return (self.ratio <= 1 or bool(self.hooked)) and not self.wrong and not self.without

    @property
    def without(self) -> bool:
        """Whether all rows that count are without a gradient, and others are not: a mask the other way round."""
        return 0 < self.rows == self.zero and self.squares > 0

    def __str__(self) -> str:
        if not self.calls and not self.reached:
            text = "no rows were seen: nothing calls it, or what multiplies is a fused kernel or an autograd.Function"
        elif self.calls > self.reached:
            text = f"rows of {self.calls} calls, gradients of {self.reached}"
        elif self.wrong:
            text = f"its factor has other rows than the {self.reached} calls that a gradient came to"
        elif self.without:
            text = f"no row that counts by the masks has a gradient ({self.rows} rows), and rows that do not count have"
        else:
            text = f"its gradient is not that of the rows of {self.reached} calls: another use was not seen"
        return text + self.uses


class Proof:
    """Of one step.

    Args:
        layers: all; those without a factor have nothing to prove.
        key: of the factor that a layer's inputs are for, in this step.
        number: of the proof: the random numbers are others each time, and the same on every rank.

    Attributes:
        keys: layer name -> ``key``.
    """

    def __init__(
        self, layers: Iterable[LayerSpec], key: Callable[[LayerSpec], str], number: int, device: torch.device
    ) -> None:
        self.layers = [layer for layer in layers if layer.A.block or layer.G.block]
        self._place = {layer.name: place for place, layer in enumerate(self.layers)}
        self.keys = {layer.name: key(layer) for layer in self.layers}
        self._number, self._device = number, device
        self._numbers = torch.zeros(len(self.layers), len(NUMBERS), dtype=torch.float64, device=device)
        self._eps = dict[str, float]()
        self._factors: dict[str, tuple[LayerSpec, Tensor]] = {}  # key -> sum of squares, count, rows
        self._probes: dict[str, Tensor] = {}
        self._sampled = set[str]()  # factors whose sums have a grid of positions

    def probes(self, key: str, layer: LayerSpec) -> Tensor:
        """Of a factor: fp32 [n, D, K] of standard normal numbers."""
        if key not in self._probes:
            side = layer.A if key.endswith("/A") else layer.G
            narrow = layer.A.dim < NARROW * layer.groups
            shape = layer.groups, side.dim // layer.groups, 1 if narrow else PROBES
            generator = torch.Generator().manual_seed(crc32(f"{key} {self._number}".encode()))
            probes_nDK = torch.randn(shape, generator=generator).to(self._device)
            self._probes[key] = probes_nDK.mT.contiguous().mT  # products on CPUs take a quarter of the time by columns
        return self._probes[key]

    def _row(self, layer: LayerSpec) -> Tensor:
        return self._numbers[self._place[layer.name]]

    def leave_out(self, layer: LayerSpec) -> None:
        """What the user's hooks make of its gradient is not that of its rows."""
        self._row(layer)[HOOKED] += 1

    # in the hooks

    def see_inputs(self, call: Call, x: Tensor) -> None:
        """v . a of a call's rows, which waits in the call for their gradient: [.., n K], without that of the bias."""
        layer, kind = call.layer, call.kind
        if layer.name not in self._place:
            return
        call.later = layer.name in call.forward.proven
        call.forward.proven.add(layer.name)
        if "G" in call.sides and not call.recomputed:
            self._row(layer)[CALLS] += 1
        if not kind.needs_gradients:
            v_nIK = self.probes(call.key_A, layer)
            v_nIK = v_nIK if layer.bias is None else v_nIK[:, :-1]
            if isinstance(kind, Convolution):
                call.probed = kind.input_patches(call.module, x).times(v_nIK)
            else:
                call.probed = times(x, v_nIK[0])

    def _of_bias(self, call: Call) -> Tensor | float:
        return 0.0 if call.layer.bias is None else self.probes(call.key_A, call.layer)[:, -1].flatten()

    def see_gradient(self, call: Call, gradient: Tensor, *, others: bool = False) -> Tensor | None:
        """u . g of a call's rows [.., n K]; adds to t if the call is to, or to that of ``others``. ``gradient``: of
        :attr:`Call.shape`."""
        layer, kind, made_of_gradients = call.layer, call.kind, call.kind.needs_gradients
        if layer.name not in self._place or (call.probed is None and not made_of_gradients):
            return None
        u_nOK = self.probes(layer.keys[1], layer)
        row, K = self._row(layer), u_nOK.shape[-1]
        if isinstance(kind, Convolution):
            probed = kind.gradient_patches(call.module, gradient).times(u_nOK)
        else:
            rows = kind.gradient_rows(call.module, call.x, gradient)
            if layer.part[1] > 1 and rows.shape[-1] > layer.G.dim:  # of a large matrix that is cut
                rows = rows.narrow(-1, layer.part[0] * layer.G.dim, layer.G.dim)
            probed = times(rows, self.probes(call.key_A, layer)[0] if made_of_gradients else u_nOK[0])
        if not call.proves:
            return probed
        if call.probed is None:
            products = probed * u_nOK[0]
        else:
            bias = call.module._parameters.get("bias")
            of_bias = 0.0 if bias is not None and not bias.requires_grad else self._of_bias(call)  # frozen: no gradient
            products = (call.probed + of_bias).reshape(-1, K) * probed.reshape(-1, K)
        products = products.reshape(-1, K).double()
        # positions of an image that a norm's row adds up cancel there, their rounding does not; xhat has unit variance
        squares = K * gradient.double().square().sum() if made_of_gradients else products.square().sum()
        place = OTHERS if others else T
        row[place : place + K] += products.sum(dim=0)
        row[place + PROBES] += squares
        if others:
            return None
        row[REACHED] += 1
        self._eps[layer.name] = max(self._eps.get(layer.name, 0.0), accuracy(gradient.dtype, self._device))
        if kind.images or made_of_gradients:
            row[ROWS] += len(products)
        else:
            zero, mask = (probed == 0).all(dim=-1), call.rows.mask  # cheaper than of its gradient
            zero = zero if mask is None else zero.reshape(mask.shape)
            counts = torch.ones_like(zero) if mask is None else mask
            nth = counts.cumsum(dim=0 if call.rows.examples == 1 else -1)
            row[ROWS] += counts.sum()
            row[ZERO] += (counts & zero).sum()
            row[FIRST] += (counts & zero & (nth == 1)).sum()
            if mask is not None and layer.part[1] == 1 and (padding := _padding(call, mask)) is not None:
                logarithm = probed.double().square().sum(dim=-1).reshape(mask.shape).log()
                out, within = padding & ~zero, mask & ~zero
                sums = [torch.where(rows, logarithm, 0.0).sum() for rows in (out, within)]
                place = LEFT_OUT + MASKED * call.later
                row[place : place + MASKED] += torch.stack([padding.sum(), *sums, out.sum(), within.sum()])
        return probed

    def counted_input(self, call: Call, weight_sharing: str, alive: Tensor | None) -> None:
        """The rows of a call went to A, if ``alive``; of a grid of positions nothing is known."""
        if not call.whole_grid:
            self._sampled.add(call.key_A)
        elif call.probed is not None:
            mask, examples = call.rows.mask, call.rows.examples
            rows, counts_R1, count = input_rows(call.probed, mask, weight_sharing, examples=examples)
            rows, kept = rows + counts_R1 * self._of_bias(call), 1 if alive is None else alive
            self._count(call.key_A, call.layer, rows * kept, count * kept)
            self._row(call.layer)[GAVE] += 1

    def counted_gradient(self, call: Call, key: str, gain: Any, weight_sharing: str) -> None:
        """The rows of a call went, times ``gain``, to G, or to the A that is made of them."""
        if not call.whole_grid:
            self._sampled.add(key)
        elif call.probed_G is not None:
            mask, examples = call.rows.mask, call.rows.examples
            rows, _ = gradient_rows(call.probed_G, mask, weight_sharing, examples=examples)
            self._count(key, call.layer, rows * gain)

    def _count(self, key: str, layer: LayerSpec, rows: Tensor, count: Any = 0) -> None:
        numbers = self._factors.setdefault(key, (layer, self._numbers.new_zeros(3)))[1]
        numbers[0] += rows.double().square().sum()
        numbers[1] += count
        numbers[2] += rows.numel() // max(1, rows.shape[-1])

    # at the step

    def numbers(self, sums: Mapping[str, BatchSum]) -> Tensor:
        """Of this rank, float64 [L, len(NUMBERS)]. ``sums``: of its factors."""
        for name, eps in self._eps.items():
            row = self._numbers[self._place[name]]
            row[EPS] += eps
            row[RANKS] += 1
        for key, (layer, (squares, count, rows)) in self._factors.items():
            side, sum_ = layer.A if key.endswith("/A") else layer.G, sums.get(key)
            if sum_ is None or key in self._sampled:
                continue
            wrong = (count > 0) & ((sum_.count - count).abs() > 1e-6 * count)
            if side.block == side.dim // layer.groups:  # narrower blocks lack what is between them
                products = max(self._eps.get(layer.name, 0.0), accuracy(torch.float32, self._device))
                slack = SLACK * (products + eps_of(torch.float32) * (rows + side.block).sqrt())
                probes = self.probes(key, layer)
                found, spread = second_moment(side, sum_.sum_P, probes)
                floor = torch.finfo(torch.float32).tiny * probes.double().abs().sum() ** 2
                wrong = wrong | ((found - squares).abs() > slack * (squares + spread) + floor)
            self._row(layer)[WRONG] += wrong
        return self._numbers

    def ratio(self, layer: LayerSpec, total: Tensor, gradient: Tensor, *, divisor: float, world: int, eps: float,
              floor: float) -> Tensor:  # fmt: skip
        """How far t is from u^T dW v, of how far it may be; float64 scalar.

        Args:
            total: the layer's numbers, over all ranks.
            gradient: dW, of the layer's shape: the sum over ranks divided by ``divisor``.
            world: ranks.
            eps: accuracy of the coarsest dtype that a gradient was rounded to, and ``floor``, what underflows there.
        """
        u_nOK, v_nIK = self.probes(layer.keys[1], layer), self.probes(self.keys[layer.name], layer)
        matrix_nOI, K = gradient.reshape(-1, *layer.shape[-2:]), u_nOK.shape[-1]
        found = torch.zeros(K, dtype=torch.float64, device=self._device)
        for matrix_OI, u_OK, v_IK in zip(matrix_nOI, u_nOK, v_nIK, strict=True):
            found += (times(matrix_OI, v_IK).double() * u_OK).sum(dim=0)
        ranks = total[RANKS].clamp(min=1)
        n = total[REACHED] / ranks + world
        sums = (total[ROWS] + sum(layer.shape[-2:])).sqrt()
        rounding = (total[EPS] / ranks).clamp(min=eps) * n.sqrt() + eps_of(torch.float32) * sums
        size = K**0.5 * torch.linalg.vector_norm(gradient, dtype=torch.float32).double()
        own, others = total[T : T + PROBES + 1], total[OTHERS : OTHERS + PROBES + 1]
        ratios = []
        for *t, squares in (own, own + others):
            t_K = torch.stack(t[:K]) / divisor
            scale = squares.sqrt() / divisor + t_K.norm() + size
            bound = SLACK * (rounding * scale + floor * (n * layer.numel).sqrt())
            distance = (t_K - found).norm()
            ratio = torch.where(distance == 0, distance, (distance / bound).clamp(max=1e30))
            ratios.append(torch.where(distance.isfinite(), ratio, nan))
        return torch.stack(ratios).amin()


def _padding(call: Call, mask: Tensor) -> Tensor | None:
    """Which rows of a call are padding, of the shape of its mask; None: that is not known."""
    info = call.info
    if info.places:
        return None
    if info.padding:
        return ~mask
    if info.attended is None or info.rows is None or mask.numel() != info.attended.numel():
        return None
    if mask.untyped_storage().data_ptr() != info.rows.untyped_storage().data_ptr():  # another one, of a source
        return None
    return ~(info.attended.T if call.rows.examples == 1 else info.attended).reshape(mask.shape)


def row_checks(total: Tensor, ratios: Tensor, uses: Sequence[str]) -> list[RowCheck]:
    """Of each layer, with what is known of the uses of its weight. Waits for the device."""
    columns = total[:, [CALLS, REACHED, ROWS, ZERO, WRONG, HOOKED, FIRST, GAVE, SQUARES]].nan_to_num(1.0).tolist()
    left_out, out, within, outs, ins = total[:, LEFT_OUT:].unflatten(1, (2, MASKED)).unbind(dim=2)
    most = 2 * outs > left_out  # the last pad before a text predicts its first token
    foreign = (most & (out / outs > within / ins + log(FOREIGN))).any(dim=1).tolist()  # false with nothing to compare
    found = []
    for (*counts, squares), ratio, other, used in zip(columns, ratios.tolist(), foreign, uses, strict=True):
        calls, reached, rows, zero, wrong, hooked, first, gave = map(int, counts)
        found.append(RowCheck(calls, reached, rows, zero, wrong, squares, ratio, hooked, first, gave, other, used))
    return found


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def accuracy(dtype: torch.dtype, device: torch.device) -> float:
    """Of products. Those of fp32 may be in TF32 on a GPU; cuDNN's convolutions are, unless told otherwise."""
    return max(eps_of(dtype), 0.0 if device.type == "cpu" else TF32)


def times(x: Tensor, w_DK: Tensor) -> Tensor:
    """Rows [.., D] times w, fp32 [.., K]."""
    rows = max(1, CHUNK // max(1, x.shape[-1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [part.float() @ w_DK for part in x.detach().reshape(-1, x.shape[-1]).split(rows)]
    return torch.cat(parts).reshape(*x.shape[:-1], w_DK.shape[-1])


def second_moment(side: Side, sum_P: Tensor, w_nDK: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over groups and probes of w^T S w, of a side whose blocks are the groups, and what it changes by if every
    element of S changes by its own size, at random; float64 scalars."""
    products_nDD = (w_nDK @ w_nDK.mT).mul_(2.0)  # of an element and of its mirror image, which is not kept
    products_nDD.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    products_P = products_nDD.flatten()
    if products_nDD.shape[-1] > 1:
        products_P = torch.empty_like(sum_P)
        symmetric_pack_into_(products_P, range(0, len(sum_P), len(sum_P) // len(products_nDD)), list(products_nDD))
    found = products_P.mul_(sum_P).sum(dtype=torch.float64)
    return found, (2 * w_nDK.shape[-1]) ** 0.5 * torch.linalg.vector_norm(sum_P, dtype=torch.float64)
