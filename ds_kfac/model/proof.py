"""The proof that a layer's captured rows are those of its gradient.

A layer's gradient is dW = sum over rows of g a^T. So for random u and v

    t = sum over rows of (u . g) (v . a)  =  u^T dW v

In a step that proves, the hooks add up t for each layer, and the step compares it with the layer's
gradient. If rows are of another operand or of a stale copy, or some uses of the weight are missed,
the numbers differ. t has all rows, also those that a mask leaves out of the factors, as they are in
the gradient.

Cost: a pass over a and g with :data:`PROBES` multiplications for each element.

**Tolerance.** dW is rounded when it is stored, n times if n gradients of micro-batches, calls and
ranks are added up. With R^2 the sum over rows of ((u . g) (v . a))^2, one rounding to relative
accuracy eps changes u^T dW v by about 0.2 eps R, n of them by at most 0.2 eps R sqrt(n), and fp32
sums over N rows and over sides of O and I by 0.2 eps_32 R sqrt(N + O + I). With few rows R may be
small by chance, as u . g may be, while roundings are not, so |dW| is added to R. :data:`SLACK`
times that is allowed, as in tests/spread.py.

Shape suffixes: n groups of a layer, O and I the sides of its matrix, D any of them, K probes, L
layers.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ds_kfac.model.calls import Call
from ds_kfac.model.convolutions import Convolution
from ds_kfac.model.layers import LayerSpec

PROBES = 4
"""Pairs (u, v) for each layer; one if rows of A are shorter than :data:`NARROW`, as in a depthwise
convolution. Layers that share an A use the same v, and so have equally many pairs."""
NARROW = 32
CHUNK = 1 << 22
"""Most elements converted to fp32 at a time."""
SLACK = 10 * 0.2
TF32 = 2.0**-10
"""Relative accuracy that fp32 products may have on a GPU, and convolutions everywhere: they add up
an image's pixels, which are alike, so that partial sums exceed R. Of a CPU's, 1.6 times what eps_32
allows was seen (a ResNet's stem)."""
NUMBERS = (
    *(f"t{probe}" for probe in range(PROBES)),
    "squares",
    *(f"others' t{probe}" for probe in range(PROBES)),
    "others' squares",
    "reached",
    "rows",
    "eps",
    "ranks",
    "hooked",
    "left out",
)
"""Numbers of a layer, summed over ranks.

    t, squares: t, and R^2.
    others: t and R^2 of other backward passes than the engine's own. The step's gradient has them,
        unless the user zeroed it.
    reached: calls that a gradient came to.
    rows: rows of these calls.
    eps, ranks: accuracy of the gradients' dtype, summed over the ranks that had any; number of
        these ranks.
    hooked: ranks on which a hook of the user's gets the layer's gradient and may change it.
    left out: ranks on which the layer is not to be judged.
"""
T, SQUARES, OTHERS = (NUMBERS.index(name) for name in ("t0", "squares", "others' t0"))
REACHED, ROWS, EPS, RANKS, HOOKED, LEFT_OUT = range(NUMBERS.index("reached"), len(NUMBERS))


@dataclass(frozen=True)
class RowCheck:
    """Result of a layer's proof, from the rows of all ranks.

    Attributes:
        reached, hooked, left_out: see :data:`NUMBERS`.
        is_zero: whether gradients came, and all are zero, as below a head that begins with zeros.
        ratio: distance between t and the layer's gradient, over the tolerance.
        uses: text that says where its weight is used.
    """

    reached: int
    hooked: int
    left_out: int
    is_zero: bool
    ratio: float
    uses: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the proof decides anything: with too large a loss scale gradients are not
        finite."""
        return isfinite(self.ratio)

    @property
    def fits(self) -> bool:
        return self.ratio <= 1 or self.left_out > 0

    def __str__(self) -> str:
        if not self.reached:
            text = (
                "no rows were seen: nothing calls it, or a fused kernel, torch.func or "
                "autograd.Function multiplies"
            )
        else:
            text = (
                f"its gradient is not that of the rows of {self.reached} calls: another use "
                f"was not seen"
            )
            if self.hooked:
                text += ", or a hook on its parameters changes the gradient"
        return text + self.uses


class Proof:
    """The proof of one step.

    Args:
        layers: all layers; those without a factor have nothing to prove.
        key: layer -> key of the factor to which its inputs go in this step.
        number: number of this proof, which seeds the random vectors: new ones each time, the same
            on every rank.

    Attributes:
        keys: layer name -> ``key(layer)``.
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec],
        key: Callable[[LayerSpec], str],
        number: int,
        device: torch.device,
    ) -> None:
        self.layers = [layer for layer in layers if layer.A.block or layer.G.block]
        self.keys = {layer.name: key(layer) for layer in self.layers}
        self._place = {layer.name: place for place, layer in enumerate(self.layers)}
        self._number = number
        self._device = device
        self._numbers = torch.zeros(
            len(self.layers), len(NUMBERS), dtype=torch.float64, device=device
        )
        # the part of the numbers that the host knows
        self._known = [[0.0] * len(NUMBERS) for _ in self.layers]
        self._probes: dict[str, Tensor] = {}

    def probes(self, key: str, layer: LayerSpec) -> Tensor:
        """A factor's random vectors, fp32 [n, D, K], standard normal."""
        if key not in self._probes:
            side = layer.A if key.endswith("/A") else layer.G
            narrow = layer.A.dim < NARROW * layer.groups
            shape = layer.groups, side.dim // layer.groups, 1 if narrow else PROBES
            generator = torch.Generator().manual_seed(crc32(f"{key} {self._number}".encode()))
            probes_nDK = torch.randn(
                shape, generator=generator, dtype=torch.float32, device="cpu"
            ).to(self._device)
            # column-major: a quarter of the time on CPUs
            self._probes[key] = probes_nDK.mT.contiguous().mT
        return self._probes[key]

    def mark(self, layer: LayerSpec, number: int) -> None:
        """Note on this rank that a layer is :data:`HOOKED` or :data:`LEFT_OUT`."""
        self._known[self._place[layer.name]][number] = 1

    @torch.no_grad()
    def see(self, call: Call, x: Tensor, gradient: Tensor, *, others: bool = False) -> None:
        """Add a call's rows to t, or with ``others`` to that of other backward passes.

        Args:
            x, gradient: rows of its input [.., I] and of its output's gradient [.., O], or images.
        """
        layer, kind = call.layer, call.kind
        if layer.name not in self._place:
            return
        u_nOK, v_nIK = self.probes(layer.keys[1], layer), self.probes(self.keys[layer.name], layer)
        probes = u_nOK.shape[-1]
        if kind.needs_gradients:  # a norm's matrix has one row
            rows = kind.gradient_rows(call.module, x, gradient)
            products = (times(rows, v_nIK[0]) * u_nOK[0]).reshape(-1, probes).double()
            # a row adds up an image's positions, which may cancel while their roundings do not; the
            # normalized input has unit variance, so the gradient alone gives the size
            squares = probes * gradient.double().square().sum()
        else:
            of_x, of_gradient = self._probed(call, x, gradient)
            products = (of_x.reshape(-1, probes) * of_gradient.reshape(-1, probes)).double()
            squares = products.square().sum()
        numbers, place = self._numbers[self._place[layer.name]], OTHERS if others else T
        numbers[place : place + probes] += products.sum(dim=0)
        numbers[place + PROBES] += squares
        if not others:
            known = self._known[self._place[layer.name]]
            known[REACHED] += 1
            known[ROWS] += len(products)
            known[RANKS] = 1
            known[EPS] = max(known[EPS], accuracy(gradient.dtype, self._device, kind.images))

    def _probed(self, call: Call, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """(v . a, u . g) of a call's rows, [.., n K]."""
        layer, kind = call.layer, call.kind
        u_nOK, v_nIK = self.probes(layer.keys[1], layer), self.probes(self.keys[layer.name], layer)
        weights_nIK = v_nIK if layer.bias is None else v_nIK[:, :-1]
        if isinstance(kind, Convolution):
            of_x = kind.input_patches(call.module, x).times(weights_nIK)
            of_gradient = kind.gradient_patches(call.module, gradient).times(u_nOK)
        else:
            rows = kind.gradient_rows(call.module, x, gradient)
            if layer.part[1] > 1 and rows.shape[-1] > layer.G.dim:  # of a large matrix that is cut
                rows = rows.narrow(-1, layer.part[0] * layer.G.dim, layer.G.dim)
            of_x, of_gradient = times(x, weights_nIK[0]), times(rows, u_nOK[0])
        bias = call.module._parameters.get("bias")
        # a frozen one has no gradient in dW
        if layer.bias is not None and (bias is None or bias.requires_grad):
            of_x = of_x + v_nIK[:, -1].flatten()
        return of_x, of_gradient

    # at the step

    def numbers(self) -> Tensor:
        """This rank's numbers, float64 [L, len(NUMBERS)]."""
        return self._numbers + torch.tensor(self._known, dtype=torch.float64, device=self._device)

    def ratios(
        self,
        total_LN: Tensor,
        gradients: Any,
        names: Collection[str] | None = None,
        *,
        divisor: float | Tensor,
        world: int,
        eps: float | Tensor,
        floor: float | Tensor,
    ) -> Tensor:
        """Distance between t and u^T dW v, over the tolerance; float64 [L], 0 for layers that are
        not in ``names``.

        Args:
            total_LN: the numbers, summed over all ranks.
            gradients: layer name -> dW, of the layer's shape: the sum over ranks divided by
                ``divisor``. A mapping; one is read at a time, as it may be a copy.
            names: of layers in it; None: all.
            world: number of ranks.
            eps: relative accuracy of the coarsest dtype that a gradient was rounded to; of all, or
                of each.
            floor: size below which values underflow in that dtype.
        """
        layers = [
            layer for layer in self.layers if layer.name in (gradients if names is None else names)
        ]
        ratios_L = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        if not layers:
            return ratios_L
        # probes that a layer has not got are zero on both sides
        expected_nK = torch.zeros(len(layers), PROBES, dtype=torch.float64, device=self._device)
        sizes: list[Tensor] = []
        for expected_K, layer in zip(expected_nK, layers, strict=True):
            u_nOK, v_nIK = (
                self.probes(layer.keys[1], layer),
                self.probes(self.keys[layer.name], layer),
            )
            gradient, K = gradients[layer.name], u_nOK.shape[-1]
            for matrix_OI, u_OK, v_IK in zip(
                gradient.reshape(-1, *layer.shape[-2:]), u_nOK, v_nIK, strict=True
            ):
                expected_K[:K] += (times(matrix_OI, v_IK).double() * u_OK).sum(dim=0)
            sizes.append(K**0.5 * torch.linalg.vector_norm(gradient, dtype=torch.float32))
            del gradient, matrix_OI  # before the next one
        places = torch.tensor([self._place[layer.name] for layer in layers], device=self._device)
        sides = [(sum(layer.shape[-2:]), layer.numel) for layer in layers]
        lengths, numels = torch.tensor(sides, dtype=torch.float64, device=self._device).unbind(
            dim=1
        )
        total, size = total_LN[places], torch.stack(sizes).double()
        ranks = total[:, RANKS].clamp(min=1)
        n = total[:, REACHED] / ranks + world
        sums = (total[:, ROWS] + lengths).sqrt()
        rounding = (total[:, EPS] / ranks).clamp(min=eps) * n.sqrt() + eps_of(torch.float32) * sums
        engines, others = total[:, T : T + PROBES + 1], total[:, OTHERS : OTHERS + PROBES + 1]
        # without and with gradients of other backward passes
        t = torch.stack([engines, engines + others])
        t_K, squares = t[..., :PROBES] / divisor, t[..., PROBES]
        scale = squares.sqrt() / divisor + t_K.norm(dim=-1) + size
        bound = SLACK * (rounding * scale + floor * (n * numels).sqrt())
        distance = (t_K - expected_nK).norm(dim=-1)
        ratio = torch.where(distance == 0, distance, (distance / bound).clamp(max=1e30))
        ratio = torch.where(distance.isfinite(), ratio, nan)
        return ratios_L.index_copy(0, places, ratio.amin(dim=0))


def row_checks(total: Tensor, ratios: Tensor, uses: Sequence[str]) -> list[RowCheck]:
    """A check for each layer, from the numbers and ratios of all ranks. ``uses``: of each weight.
    Synchronises."""
    columns = total[:, [REACHED, HOOKED, LEFT_OUT, SQUARES]].nan_to_num(1.0).tolist()
    checks = []
    for (reached, hooked, left_out, squares), ratio, used in zip(
        columns, ratios.tolist(), uses, strict=True
    ):
        is_zero = reached > 0 and squares == 0
        checks.append(RowCheck(int(reached), int(hooked), int(left_out), is_zero, ratio, used))
    return checks


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def accuracy(dtype: torch.dtype, device: torch.device, images: bool = False) -> float:
    """Relative accuracy of products. cuDNN's convolutions have :data:`TF32` by default; in autocast
    all round."""
    dtype = (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    )
    return max(eps_of(dtype), TF32 if images or device.type != "cpu" else 0.0)


def times(x: Tensor, w_DK: Tensor) -> Tensor:
    """Rows [.., D] times w, fp32 [.., K]."""
    rows = max(1, CHUNK // max(1, x.shape[-1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [part.float() @ w_DK for part in x.detach().reshape(-1, x.shape[-1]).split(rows)]
    return torch.cat(parts).reshape(*x.shape[:-1], w_DK.shape[-1])
