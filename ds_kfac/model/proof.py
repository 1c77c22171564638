"""The proof that a layer's captured rows are those of its gradient.

A layer's gradient is dW = sum over rows of g a^T. So for random u and v

    t = sum over rows of (u . g) (v . a)  =  u^T dW v

In a step that proves, the hooks add up t for each layer, and the step compares it with the layer's gradient. If rows
are of another operand or of a stale copy, or some uses of the weight are missed, the numbers differ. The factors' sums
are checked against the same rows: v^T (sum of a a^T) v = sum of (v . a)^2, and likewise for G. This shows rows that
count without a gradient, or with a wrong scale.

t has all rows, also those that a mask leaves out of the factors, as they are in the gradient. So masks are not proven.
Two measures judge them instead: the number of rows that count although their gradient is zero to the last bit; and the
size of the gradients of rows that a padding mask leaves out, compared with those of rows that count.

Cost: a pass over a and g with :data:`PROBES` multiplications for each element. Between forward and backward it keeps
PROBES fp32 numbers a row, and nothing of the graph.

**Tolerance.** dW is rounded when it is stored, n times if n gradients of micro-batches, calls and ranks are added up.
With R^2 the sum over rows of ((u . g) (v . a))^2, one rounding to relative accuracy eps changes u^T dW v by about
0.2 eps R, n of them by at most 0.2 eps R sqrt(n), and fp32 sums over N rows and over sides of O and I by
0.2 eps_32 R sqrt(N + O + I). With few rows R may be small by chance, as u . g may be, while roundings are not, so |dW|
is added to R. :data:`SLACK` times that is allowed, as in tests/spread.py.

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
"""Pairs (u, v) for each layer; one if rows of A are shorter than :data:`NARROW`, as in a depthwise convolution. Layers
that share an A use the same v, and so have equally many pairs."""
NARROW = 32
CHUNK = 1 << 22
"""Most elements converted to fp32 at a time."""
SLACK = 10 * 0.2
TF32 = 2.0**-10
"""Relative accuracy that fp32 products may have on a GPU, and convolutions everywhere: they add up an image's pixels,
which are alike, so that partial sums exceed R. Of a CPU's, 1.6 times what eps_32 allows was seen (a ResNet's stem)."""
NUMBERS = (
    *("t",) * PROBES, "squares", *("others",) * PROBES, "others' squares",
    "calls", "reached", "rows", "zero", "first", "eps", "ranks", "wrong", "hooked", "gave",
    *("left out", "several", "empty", "out", "in", "out's", "in's"),
    *("later left out", "later several", "later empty", "later out", "later in", "later out's", "later in's"),
)  # fmt: skip
"""Numbers of a layer, summed over ranks.

    t, squares: t, and R^2.
    others: t and R^2 of other backwards than the engine's own; the step's gradient has them, unless the user zeroed it.
    calls, reached: calls of the layer; calls that a gradient came to.
    rows, zero, first: rows that count; those of them without a gradient; those of these that are the first of a
        sequence, such as a causal attention's first query, whose softmax is over one key.
    eps, ranks: accuracy of the gradients' dtype, summed over the ranks that had any; number of these ranks.
    wrong: ranks on which a factor's sum is not that of the rows.
    hooked: ranks on which a user's hook may change the layer's gradient.
    gave: calls whose rows went to A.
    left out, empty: rows that a padding mask leaves out; those without a gradient among the others.
    out's, in's: rows with a gradient among those left out, and among those that count.
    several: of an example's rows that are left out, those beyond the first with a gradient of size :data:`FOREIGN`. One
        may have it rightly: with padding on the left the last pad predicts a text's first token.
    out, in: sums over these of the logarithm of the gradient's square, as the probes measure it.
    later ..: the same for a forward's later calls: a layer may get the batch as it is, and then reversed.
"""
T, SQUARES, OTHERS = map(NUMBERS.index, ("t", "squares", "others"))
CALLS, REACHED, ROWS, ZERO, FIRST, EPS, RANKS, WRONG, HOOKED, GAVE, LEFT_OUT = range(len(NUMBERS))[-24:-13]
MASKED = 7
"""Count of the numbers about masks, for first calls and again for later ones."""
FOREIGN = 0.01
"""Squared gradient of a row that a padding mask leaves out, over that of a row that counts, geometric means: from here
on, with two such rows in an example, the mask belongs to other rows. Real padding has no gradient, or a small one
from an auxiliary loss over all rows. An arithmetic mean would be dominated by the few rows of a pooled token."""


@dataclass(frozen=True)
class RowCheck:
    """Result of a layer's proof, from the rows of all ranks.

    Attributes:
        uses: text that says where its weight is used.
        ratio: distance between t and the layer's gradient, over the tolerance.
        foreign: whether its masks belong to other rows, see :data:`FOREIGN`.
        calls, ..: see :data:`NUMBERS`.
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
    def all_zero(self) -> bool:
        """Whether gradients came, and all are zero, as below a head that begins with zeros."""
        return self.reached > 0 and self.squares == 0

    @property
    def is_finite(self) -> bool:
        """Whether the proof decides anything: with too large a loss scale gradients are not finite."""
        return isfinite(self.ratio)

    @property
    def fits(self) -> bool:
        return (self.ratio <= 1 or bool(self.hooked)) and not self.wrong and not self.without

    @property
    def without(self) -> bool:
        """Whether only rows that do not count have gradients: the mask is inverted."""
        return 0 < self.rows == self.zero and self.squares > 0

    def __str__(self) -> str:
        if not self.calls and not self.reached:
            text = "no rows were seen: nothing calls it, or a fused kernel, torch.func or autograd.Function multiplies"
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
    """The proof of one step.

    Args:
        layers: all layers; those without a factor have nothing to prove.
        key: layer -> key of the factor to which its inputs go in this step.
        number: number of this proof, which seeds the random vectors: new ones each time, the same on every rank.

    Attributes:
        keys: layer name -> ``key(layer)``.
        counted: key of a factor -> its layer; what went into its sum: sum of squares, count, rows.
    """

    def __init__(
        self, layers: Iterable[LayerSpec], key: Callable[[LayerSpec], str], number: int, device: torch.device
    ) -> None:
        self.layers = [layer for layer in layers if layer.A.block or layer.G.block]
        self._place = {layer.name: place for place, layer in enumerate(self.layers)}
        self.keys = {layer.name: key(layer) for layer in self.layers}
        self._number, self._device = number, device
        self._numbers = torch.zeros(len(self.layers), len(NUMBERS), dtype=torch.float64, device=device)
        self._known = [[0.0] * len(NUMBERS) for _ in self.layers]  # the part of the numbers that the host knows
        self.counted: dict[str, tuple[LayerSpec, Tensor]] = {}
        self._probes: dict[str, Tensor] = {}
        self._sampled = set[str]()  # factors whose sums have a grid of positions

    def probes(self, key: str, layer: LayerSpec) -> Tensor:
        """A factor's random vectors, fp32 [n, D, K], standard normal."""
        if key not in self._probes:
            side = layer.A if key.endswith("/A") else layer.G
            narrow = layer.A.dim < NARROW * layer.groups
            shape = layer.groups, side.dim // layer.groups, 1 if narrow else PROBES
            generator = torch.Generator().manual_seed(crc32(f"{key} {self._number}".encode()))
            probes_nDK = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(self._device)
            self._probes[key] = probes_nDK.mT.contiguous().mT  # column-major: a quarter of the time on CPUs
        return self._probes[key]

    def _known_of(self, layer: LayerSpec) -> list[float]:
        return self._known[self._place[layer.name]]

    def leave_out(self, layer: LayerSpec) -> None:
        """Do not judge a layer, as its gradient may not be that of its rows: a user's hook may change it."""
        self._known_of(layer)[HOOKED] += 1

    # in the hooks

    def see_inputs(self, call: Call, x: Tensor) -> None:
        """Store v . a of a call's rows, [.., n K] without the bias's part, in the call until their gradient comes."""
        layer, kind = call.layer, call.kind
        if layer.name not in self._place:
            return
        call.later = layer.name in call.forward.proven
        call.forward.proven.add(layer.name)
        if "G" in call.sides and not call.recomputed:
            self._known_of(layer)[CALLS] += 1
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
        """u . g of a call's rows, [.., n K]. Adds to t, or with ``others`` to that of other backwards, if
        ``call.proves``. ``gradient``: of shape :attr:`Call.shape`."""
        layer, kind, made_of_gradients = call.layer, call.kind, call.kind.needs_gradients
        if layer.name not in self._place or (call.probed is None and not made_of_gradients):
            return None
        u_nOK = self.probes(layer.keys[1], layer)
        row, known, K = self._numbers[self._place[layer.name]], self._known_of(layer), u_nOK.shape[-1]
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
            # a frozen bias has no gradient in dW
            of_bias = 0.0 if bias is not None and not bias.requires_grad else self._of_bias(call)
            products = (call.probed + of_bias).reshape(-1, K) * probed.reshape(-1, K)
        products = products.reshape(-1, K).double()
        # a norm's row adds up an image's positions, which may cancel while their roundings do not; xhat has unit
        # variance, so g alone gives the size
        squares = K * gradient.double().square().sum() if made_of_gradients else products.square().sum()
        place = OTHERS if others else T
        row[place : place + K] += products.sum(dim=0)
        row[place + PROBES] += squares
        if others:
            return None
        known[REACHED] += 1
        known[RANKS], known[EPS] = 1, max(known[EPS], accuracy(gradient.dtype, self._device, kind.images))
        if kind.images or made_of_gradients:
            known[ROWS] += len(products)
        else:
            zero, mask = (probed == 0).all(dim=-1), call.rows.mask  # u . g == 0 is cheaper to see than g == 0
            along = 0 if call.rows.examples == 1 else -1
            if mask is None:
                known[ROWS] += zero.numel()
                first = zero.narrow(along, 0, min(1, zero.shape[along])) if zero.ndim else zero  # a single row
            else:
                zero = zero.reshape(mask.shape)
                row[ROWS] += mask.sum()
                first = mask & zero & (mask.cumsum(dim=along) == 1)
            row[ZERO : FIRST + 1] += torch.stack([(zero if mask is None else mask & zero).sum(), first.sum()])
            if mask is not None and layer.part[1] == 1 and (padding := call.padding(mask)) is not None:
                logarithm = probed.double().square().sum(dim=-1).reshape(mask.shape).log()
                out, within = padding & ~zero, mask & ~zero
                sums = [torch.where(rows, logarithm, 0.0).sum() for rows in (out, within)]
                large = out & (logarithm > sums[1] / within.sum() + log(FOREIGN))  # 0 / 0 compares as false
                numbers = [x.sum() for x in (padding, (large.sum(dim=along) - 1).clamp(min=0), mask & zero)]
                place = LEFT_OUT + MASKED * call.later
                row[place : place + MASKED] += torch.stack([*numbers, *sums, out.sum(), within.sum()])
        return probed

    def counted_input(self, call: Call, weight_sharing: str, alive: Tensor | None) -> None:
        """The rows of a call went to A, if ``alive``. Sums over a grid of an image's positions are not checked."""
        if not call.whole_grid:
            self._sampled.add(call.key_A)
        elif call.probed is not None:
            mask, examples, taken = call.rows.mask, call.rows.examples, call.taken[0]
            rows, counts_R1, count = input_rows(call.probed, mask, weight_sharing, examples=examples, taken=taken)
            rows, kept = rows + counts_R1 * self._of_bias(call), 1 if alive is None else alive
            self._count(call.key_A, call.layer, rows * kept, taken.stride * call.share, count * kept * call.share)
            self._known_of(call.layer)[GAVE] += 1

    def counted_gradient(self, call: Call, gain: Any, weight_sharing: str) -> None:
        """The rows of a call went, times ``gain``, to G, or to an A that is made of gradients."""
        key = call.key_A if call.kind.needs_gradients else call.layer.keys[1]
        if not call.whole_grid:
            self._sampled.add(key)
        elif call.probed_G is not None:
            mask, examples, taken = call.rows.mask, call.rows.examples, call.taken[1]
            rows, _ = gradient_rows(call.probed_G, mask, weight_sharing, examples=examples, taken=taken)
            self._count(key, call.layer, rows * gain, taken.stride)

    def _count(self, key: str, layer: LayerSpec, rows: Tensor, stands_for: float, count: Any = 0) -> None:
        numbers = self.counted.setdefault(key, (layer, self._numbers.new_zeros(3)))[1]
        numbers[0] += stands_for * rows.double().square().sum()
        numbers[1] += count
        numbers[2] += rows.numel() // max(1, rows.shape[-1])

    # at the step

    def numbers(self, sums: Mapping[str, BatchSum]) -> Tensor:
        """This rank's numbers, float64 [L, len(NUMBERS)]. ``sums``: key -> its batch sums."""
        self._numbers += torch.tensor(self._known, dtype=torch.float64, device=self._device)
        for key, (layer, (squares, count, rows)) in self.counted.items():
            side, sum_ = layer.A if key.endswith("/A") else layer.G, sums.get(key)
            if sum_ is None or key in self._sampled:
                continue
            wrong = (count > 0) & ((sum_.count - count).abs() > 1e-6 * count)
            if side.block == side.dim // layer.groups:  # narrower blocks lack the products between them
                products = max(self._known_of(layer)[EPS], accuracy(torch.float32, self._device))
                slack = SLACK * (products + eps_of(torch.float32) * (rows + side.block).sqrt())
                probes = self.probes(key, layer)
                moment, spread = second_moment(side, sum_.sum_P, probes)
                floor = torch.finfo(torch.float32).tiny * probes.double().abs().sum() ** 2
                wrong = wrong | ((moment - squares).abs() > slack * (squares + spread) + floor)
            self._numbers[self._place[layer.name], WRONG] += wrong
        return self._numbers

    def ratios(self, total_LN: Tensor, gradients: Mapping[str, Tensor], *, divisor: float, world: int,
               eps: float | Tensor, floor: float) -> Tensor:  # fmt: skip
        """Distance between t and u^T dW v, over the tolerance; float64 [L], 0 for layers that are not in ``gradients``.

        Args:
            total_LN: the numbers, summed over all ranks.
            gradients: layer name -> dW, of the layer's shape: the sum over ranks divided by ``divisor``.
            world: number of ranks.
            eps: relative accuracy of the coarsest dtype that a gradient was rounded to; of all, or of each.
            floor: size below which values underflow in that dtype.
        """
        layers = [layer for layer in self.layers if layer.name in gradients]
        ratios_L = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        if not layers:
            return ratios_L
        # probes that a layer has not got are zero on both sides
        expected_nK = torch.zeros(len(layers), PROBES, dtype=torch.float64, device=self._device)
        sizes = list[Tensor]()
        for expected_K, layer in zip(expected_nK, layers, strict=True):
            u_nOK, v_nIK = self.probes(layer.keys[1], layer), self.probes(self.keys[layer.name], layer)
            gradient, K = gradients[layer.name], u_nOK.shape[-1]
            for matrix_OI, u_OK, v_IK in zip(gradient.reshape(-1, *layer.shape[-2:]), u_nOK, v_nIK, strict=True):
                expected_K[:K] += (times(matrix_OI, v_IK).double() * u_OK).sum(dim=0)
            sizes.append(K**0.5 * torch.linalg.vector_norm(gradient, dtype=torch.float32))
        places = torch.tensor([self._place[layer.name] for layer in layers], device=self._device)
        sides = [(sum(layer.shape[-2:]), layer.numel) for layer in layers]
        lengths, numels = torch.tensor(sides, dtype=torch.float64, device=self._device).unbind(dim=1)
        total, size = total_LN[places], torch.stack(sizes).double()
        ranks = total[:, RANKS].clamp(min=1)
        n = total[:, REACHED] / ranks + world
        sums = (total[:, ROWS] + lengths).sqrt()
        rounding = (total[:, EPS] / ranks).clamp(min=eps) * n.sqrt() + eps_of(torch.float32) * sums
        engines, others = total[:, T : T + PROBES + 1], total[:, OTHERS : OTHERS + PROBES + 1]
        t = torch.stack([engines, engines + others])  # without and with gradients of other backwards
        t_K, squares = t[..., :PROBES] / divisor, t[..., PROBES]
        scale = squares.sqrt() / divisor + t_K.norm(dim=-1) + size
        bound = SLACK * (rounding * scale + floor * (n * numels).sqrt())
        distance = (t_K - expected_nK).norm(dim=-1)
        ratio = torch.where(distance == 0, distance, (distance / bound).clamp(max=1e30))
        ratio = torch.where(distance.isfinite(), ratio, nan)
        return ratios_L.index_copy(0, places, ratio.amin(dim=0))


def row_checks(total: Tensor, ratios: Tensor, uses: Sequence[str]) -> list[RowCheck]:
    """A check for each layer, from the numbers and ratios of all ranks. ``uses``: of each weight. Synchronises."""
    columns = total[:, [CALLS, REACHED, ROWS, ZERO, WRONG, HOOKED, FIRST, GAVE, SQUARES]].nan_to_num(1.0).tolist()
    left_out, several, empty, out, within, outs, ins = total[:, LEFT_OUT:].unflatten(1, (2, MASKED)).unbind(dim=2)
    # of another order of the examples as many rows are wrong among those that count; a convolution's reach has none
    wrong = (several > 0) & ((2 * outs > left_out) | (empty >= outs))
    foreign = (wrong & (out / outs > within / ins + log(FOREIGN))).any(dim=1).tolist()  # 0 / 0 compares as false
    checks = []
    for (*counts, squares), ratio, other, used in zip(columns, ratios.tolist(), foreign, uses, strict=True):
        calls, reached, rows, zero, wrong, hooked, first, gave = map(int, counts)
        checks.append(RowCheck(calls, reached, rows, zero, wrong, squares, ratio, hooked, first, gave, other, used))
    return checks


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def accuracy(dtype: torch.dtype, device: torch.device, images: bool = False) -> float:
    """Relative accuracy of products. cuDNN's convolutions have :data:`TF32` by default; in autocast all round."""
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    return max(eps_of(dtype), TF32 if images or device.type != "cpu" else 0.0)


def times(x: Tensor, w_DK: Tensor) -> Tensor:
    """Rows [.., D] times w, fp32 [.., K]."""
    rows = max(1, CHUNK // max(1, x.shape[-1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [part.float() @ w_DK for part in x.detach().reshape(-1, x.shape[-1]).split(rows)]
    return torch.cat(parts).reshape(*x.shape[:-1], w_DK.shape[-1])


def second_moment(side: Side, sum_P: Tensor, w_nDK: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over groups and probes of w^T S w, for a side whose blocks are the groups; and how much it changes if every
    element of S changes by its own size with a random sign. float64 scalars."""
    products_nDD = (w_nDK @ w_nDK.mT).mul_(2.0)  # an element stands for its mirror image, which is not stored
    products_nDD.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    products_P = products_nDD.flatten()
    if products_nDD.shape[-1] > 1:
        products_P = torch.empty_like(sum_P)
        symmetric_pack_into_(products_P, range(0, len(sum_P), len(sum_P) // len(products_nDD)), list(products_nDD))
    moment = products_P.mul_(sum_P).sum(dtype=torch.float64)
    return moment, (2 * w_nDK.shape[-1]) ** 0.5 * torch.linalg.vector_norm(sum_P, dtype=torch.float64)
