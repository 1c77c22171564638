"""Prove that the rows captured by the hooks are the rows from which a layer's gradient was
computed.

A layer's gradient is dW = sum over rows of g a^T. So for any vectors u and v

    t = sum over rows of (u . g) (v . a)  =  u^T dW v

In a step with a proof, the hooks add up t for random pairs (u, v). The step then compares t with
u^T dW v, which is computed from the layer's gradient. The two numbers differ if the captured rows
belong to another operand or to a stale copy of the weight, or if the hooks missed a use of the
weight. Rows that a mask leaves out of the factors are part of t, because they are part of the
gradient.

The cost is one pass over a and g, with :data:`PROBES` multiplications for each element.

Note: Tolerance. dW is rounded whenever it is stored. If it is the sum of n gradients (of
    micro-batches, calls and ranks), it is rounded n times. Let R^2 be the sum over rows of ((u . g)
    (v . a))^2. One rounding with relative accuracy eps changes u^T dW v by about 0.2 eps R. n
    roundings change it by at most 0.2 eps R sqrt(n). Sums in fp32 over N rows and over the sides O
    and I add 0.2 eps_32 R sqrt(N + O + I). If there are few rows, u . g may be small by chance. R
    is then small, but the rounding errors are not. Therefore |dW| is added to R. The proof allows
    ten times these errors: :data:`SLACK` is 10 * 0.2.

Shape suffixes: n groups of a layer, O and I the sides of the layer's matrix, D one of these sides,
K pairs (u, v) of a layer, P = PROBES, L layers, M layers that are compared with their gradients, C
columns.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from math import isfinite, nan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ds_kfac.model.calls import Call
from ds_kfac.model.convolutions import Convolution
from ds_kfac.model.layers import LayerSpec

PROBES = 4
"""Number of pairs (u, v) of a layer. A layer has only one pair if its rows of A are shorter than
:data:`NARROW`, as in a depthwise convolution. Layers that share an A use the same v, and so have
the same number of pairs."""
NARROW = 32
CHUNK = 1 << 22
"""Largest number of elements that are converted to fp32 at a time."""
SLACK = 10 * 0.2
TF32 = 2.0**-10
"""Relative accuracy that is assumed for fp32 products on a GPU, and for convolutions on any device.
A convolution adds up an image's pixels, which are similar, so its partial sums exceed R. For the
first convolution of a ResNet on a CPU, the measured error was 1.6 times what eps_32 allows."""


@dataclass(frozen=True)
class Numbers:
    """The numbers that the proof compares with the gradients of L layers. All are float64.

    Each rank has its own numbers. Their sums over ranks describe the whole step.

    Attributes:
        t: [L, P], the sum t for each pair (u, v), over the engine's own backward passes. Zero for
            pairs that a layer does not have.
        squares: [L], R^2 over the rows of the same backward passes, summed over the pairs.
        others_t: [L, P], the sum t over other engines' backward passes through this model. The
            step's gradient includes these passes unless the user has zeroed the gradient after
            them.
        others_squares: [L], R^2 over the rows of other engines' backward passes, summed over the
            pairs.
        calls: [L], number of calls whose output got a gradient.
        rows: [L], number of rows of the calls whose output got a gradient.
        eps: [L], relative accuracy of the gradients' dtype, summed over the ranks that had calls.
        ranks: [L], number of ranks that had calls.
        hooked: [L], number of ranks on which a user's hook may change the layer's gradient.
        left_out: [L], number of ranks that have called :meth:`Proof.leave_out` for the layer.
    """

    t: Tensor
    squares: Tensor
    others_t: Tensor
    others_squares: Tensor
    calls: Tensor
    rows: Tensor
    eps: Tensor
    ranks: Tensor
    hooked: Tensor
    left_out: Tensor

    def packed(self) -> Tensor:
        """Return all numbers in one tensor, float64 [L, C], to be summed over ranks."""
        columns = [getattr(self, field.name).reshape(len(self.t), -1) for field in fields(self)]
        return torch.cat(columns, dim=1)

    @classmethod
    def unpacked(cls, packed_LC: Tensor) -> "Numbers":
        """Return the numbers that :meth:`packed` has packed."""
        names = [field.name for field in fields(cls)]
        of_pairs = ("t", "others_t")
        widths = [PROBES if name in of_pairs else 1 for name in names]
        numbers = {}
        for name, columns in zip(names, packed_LC.split(widths, dim=1), strict=True):
            numbers[name] = columns if name in of_pairs else columns[:, 0]
        return cls(**numbers)


class _ProbeSums:
    """``t`` and ``squares`` of :class:`Numbers`, which are added up on the device."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.t_LP = torch.zeros(layers, PROBES, dtype=torch.float64, device=device)
        self.squares_L = torch.zeros(layers, dtype=torch.float64, device=device)


@dataclass
class _HostNumbers:
    """The entries of :class:`Numbers` that the host counts, for one layer on this rank."""

    calls: float = 0.0
    rows: float = 0.0
    eps: float = 0.0
    ranks: float = 0.0
    hooked: float = 0.0
    left_out: float = 0.0


@dataclass(frozen=True)
class RowCheck:
    """Result of the proof for one layer, over the rows of all ranks.

    Attributes:
        calls, hooked, left_out: see :class:`Numbers`.
        is_zero: whether gradients arrived and all of them are zero, as below a head whose weights
            start at zero.
        ratio: distance between t and u^T dW v, divided by the tolerance. At most 1 if the proof
            succeeds.
        uses: text on where the layer's weight is used.
    """

    calls: int
    hooked: int
    left_out: int
    is_zero: bool
    ratio: float
    uses: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether the proof has a result. It has no result if gradients are not finite, for example
        because the loss scale is too large."""
        return isfinite(self.ratio)

    @property
    def fits(self) -> bool:
        """Whether the captured rows make up the gradient. It is also True if a rank has called
        :meth:`Proof.leave_out`, because the layer is then not judged."""
        return self.ratio <= 1 or self.left_out > 0

    def __str__(self) -> str:
        if not self.calls:
            text = (
                "no rows were seen: nothing calls the layer, or a fused kernel, torch.func or an "
                "autograd.Function computes its products"
            )
        else:
            text = (
                f"its gradient is not the sum over the rows of the {self.calls} calls that were "
                "seen: another use was not seen"
            )
            if self.hooked:
                text += ", or a hook on its parameters changes the gradient"
        return text + self.uses


class Proof:
    """One run of the proof. It adds up sums during a step, and compares them with the gradients.

    Args:
        layers: all layers. Layers without a factor are skipped, because they have nothing to prove.
        key: function that returns the key of the factor A to which a layer's inputs are added in
            this step.
        number: number of earlier proofs in the run. It seeds the random vectors. So every proof
            uses new vectors, and all ranks use the same vectors.
        device: device of the sums.

    Attributes:
        layers: the layers that have something to prove.
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
        self._index = {layer.name: index for index, layer in enumerate(self.layers)}
        self._number = number
        self._device = device
        self._engines = _ProbeSums(len(self.layers), device)
        self._others = _ProbeSums(len(self.layers), device)
        self._on_host = {layer.name: _HostNumbers() for layer in self.layers}
        self._probes: dict[str, Tensor] = {}

    def probes(self, key: str, layer: LayerSpec) -> Tensor:
        """Return the random vectors for a factor, fp32 [n, D, K]: v for an A, and u for a G. Their
        entries are standard normal."""
        if key not in self._probes:
            side = layer.A if key.endswith("/A") else layer.G
            narrow = layer.A.dim < NARROW * layer.groups
            shape = layer.groups, side.dim // layer.groups, 1 if narrow else PROBES
            generator = torch.Generator().manual_seed(crc32(f"{key} {self._number}".encode()))
            probes_nDK = torch.randn(
                shape, generator=generator, dtype=torch.float32, device="cpu"
            ).to(self._device)
            # column-major, because products with it then take a quarter of the time on a CPU
            self._probes[key] = probes_nDK.mT.contiguous().mT
        return self._probes[key]

    def _pairs(self, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        """Return a layer's vectors u [n, O, K] and v [n, I, K]."""
        _, key_of_G = layer.keys
        return self.probes(key_of_G, layer), self.probes(self.keys[layer.name], layer)

    def leave_out(self, layer: LayerSpec) -> None:
        """Do not judge a layer in this step: it passes the proof, whatever its rows are."""
        self._on_host[layer.name].left_out = 1.0

    def note_hook(self, layer: LayerSpec) -> None:
        """Record that a user's hook may change a layer's gradient on this rank."""
        self._on_host[layer.name].hooked = 1.0

    @torch.no_grad()
    def see(self, call: Call, x: Tensor, gradient: Tensor, *, others: bool = False) -> None:
        """Add a call's rows to the sums of the proof.

        Args:
            x: the call's inputs [.., I], or images.
            gradient: the gradient of the call's output [.., O], or images.
            others: whether the gradient comes from another engine's backward pass.
        """
        layer = call.layer
        layer_type = call.kind
        if layer.name not in self._index:
            return
        u_nOK, v_nIK = self._pairs(layer)
        K = u_nOK.shape[-1]
        if layer_type.needs_gradients:  # a norm, whose matrix has one row
            rows = layer_type.gradient_rows(call.module, x, gradient)
            products = (times(rows, v_nIK[0]) * u_nOK[0]).reshape(-1, K).double()
            # In a norm of images a row is a sum over positions. Its terms may cancel each other,
            # but their rounding errors do not. The normalized input has unit variance, so the
            # gradient alone gives the size of the terms
            squares = K * gradient.double().square().sum()
        else:
            of_x, of_gradient = self._projected(call, x, gradient)
            products = (of_x.reshape(-1, K) * of_gradient.reshape(-1, K)).double()
            squares = products.square().sum()
        sums = self._others if others else self._engines
        index = self._index[layer.name]
        sums.t_LP[index, :K] += products.sum(dim=0)
        sums.squares_L[index] += squares
        if not others:
            counts = self._on_host[layer.name]
            counts.calls += 1
            counts.rows += len(products)
            counts.ranks = 1
            eps = accuracy(gradient.dtype, self._device, layer_type.images)
            counts.eps = max(counts.eps, eps)

    def _projected(self, call: Call, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return v . a and u . g for a call's rows, each fp32 [.., n K]."""
        layer = call.layer
        layer_type = call.kind
        u_nOK, v_nIK = self._pairs(layer)
        # without the last entry, which multiplies the 1 of the bias
        weights_nIK = v_nIK if layer.bias is None else v_nIK[:, :-1]
        if isinstance(layer_type, Convolution):
            of_x = layer_type.input_patches(call.module, x).times(weights_nIK)
            of_gradient = layer_type.gradient_patches(call.module, gradient).times(u_nOK)
        else:
            rows = layer_type.gradient_rows(call.module, x, gradient)
            index, count = layer.part
            if count > 1 and rows.shape[-1] > layer.G.dim:
                # a part of a large matrix has only its own outputs
                rows = rows.narrow(-1, index * layer.G.dim, layer.G.dim)
            of_x = times(x, weights_nIK[0])
            of_gradient = times(rows, u_nOK[0])
        bias = call.module._parameters.get("bias")
        # the gradient of a frozen bias is not in dW
        if layer.bias is not None and (bias is None or bias.requires_grad):
            of_x = of_x + v_nIK[:, -1].flatten()
        return of_x, of_gradient

    # at the step

    def numbers(self) -> Tensor:
        """Return this rank's :class:`Numbers`, packed: float64 [L, C]."""
        rows = [astuple(self._on_host[layer.name]) for layer in self.layers]
        # one copy to the device for all layers
        host_LC = torch.tensor(rows, dtype=torch.float64, device=self._device)
        host_LC = host_LC.reshape(len(rows), len(fields(_HostNumbers)))
        columns = zip(fields(_HostNumbers), host_LC.unbind(dim=1), strict=True)
        return Numbers(
            t=self._engines.t_LP,
            squares=self._engines.squares_L,
            others_t=self._others.t_LP,
            others_squares=self._others.squares_L,
            **{field.name: column for field, column in columns},
        ).packed()

    def ratios(
        self,
        total_LC: Tensor,
        gradients: Any,
        names: Collection[str] | None = None,
        *,
        divisor: float | Tensor,
        world: int,
        eps: float | Tensor,
        floor: float | Tensor,
    ) -> Tensor:
        """Return the distance between t and u^T dW v, divided by the tolerance.

        The result is float64 [L]. It is 0 for layers that are not in ``names``, and nan where the
        distance is not finite.

        Args:
            total_LC: the packed :class:`Numbers`, summed over all ranks.
            gradients: layer name -> dW, of ``LayerSpec.shape``. dW is the sum of all ranks'
                gradients, divided by ``divisor``. Each gradient is read once, and only one is held
                at a time, because it may be a copy.
            names: names of the layers to compare; None: all layers in ``gradients``.
            divisor: number by which DeepSpeed has divided the sum of all ranks' gradients.
            world: number of ranks.
            eps: relative accuracy of the coarsest dtype that a gradient was rounded to: a number
                for all compared layers, or a tensor [M] with one number per layer.
            floor: size below which values underflow in the dtype that ``eps`` describes.
        """
        names = gradients if names is None else names
        layers = [layer for layer in self.layers if layer.name in names]
        ratios_L = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        if not layers:
            return ratios_L
        # entries for pairs that a layer does not have stay zero, as in t
        expected_MP = torch.zeros(len(layers), PROBES, dtype=torch.float64, device=self._device)
        sizes: list[Tensor] = []
        for expected_P, layer in zip(expected_MP, layers, strict=True):
            # no variable holds the gradient, so that it is freed before the next one is read
            sizes.append(self._add_expected(expected_P, layer, gradients[layer.name]))
        size_M = torch.stack(sizes).double()

        indices_M = torch.tensor([self._index[layer.name] for layer in layers], device=self._device)
        total = Numbers.unpacked(total_LC[indices_M])
        sides_M = self._per_layer([sum(layer.shape[-2:]) for layer in layers])
        numels_M = self._per_layer([layer.numel for layer in layers])
        ranks_M = total.ranks.clamp(min=1)
        roundings_M = total.calls / ranks_M + world
        rounding_M = (total.eps / ranks_M).clamp(min=eps) * roundings_M.sqrt()
        rounding_M = rounding_M + eps_of(torch.float32) * (total.rows + sides_M).sqrt()
        underflow_M = floor * (roundings_M * numels_M).sqrt()

        # It is unknown whether the user has zeroed the gradients of other engines' backward passes.
        # So compare without and with these passes, and take the better result
        t_2MP = torch.stack([total.t, total.t + total.others_t]) / divisor
        squares_2M = torch.stack([total.squares, total.squares + total.others_squares])
        scale_2M = squares_2M.sqrt() / divisor + t_2MP.norm(dim=-1) + size_M
        bound_2M = SLACK * (rounding_M * scale_2M + underflow_M)
        distance_2M = (t_2MP - expected_MP).norm(dim=-1)
        # a distance of 0 passes even if the bound is 0
        ratio_2M = torch.where(
            distance_2M == 0, distance_2M, (distance_2M / bound_2M).clamp(max=1e30)
        )
        ratio_2M = torch.where(distance_2M.isfinite(), ratio_2M, nan)
        return ratios_L.index_copy(0, indices_M, ratio_2M.amin(dim=0))

    def _add_expected(self, expected_P: Tensor, layer: LayerSpec, gradient: Tensor) -> Tensor:
        """Add u^T dW v to ``expected_P``, in place, for each of the K pairs of a layer. Returns a
        scalar, the typical norm of these K numbers: |dW| sqrt(K)."""
        u_nOK, v_nIK = self._pairs(layer)
        K = u_nOK.shape[-1]
        matrices = gradient.reshape(-1, *layer.shape[-2:])
        for matrix_OI, u_OK, v_IK in zip(matrices, u_nOK, v_nIK, strict=True):
            expected_P[:K] += (times(matrix_OI, v_IK).double() * u_OK).sum(dim=0)
        return K**0.5 * torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def _per_layer(self, values: Sequence[int]) -> Tensor:
        """Return a tensor, float64 [M], with one number for each layer."""
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def row_checks(total_LC: Tensor, ratios_L: Tensor, uses: Sequence[str]) -> list[RowCheck]:
    """Return the check of each layer. Waits for the device.

    Args:
        total_LC: the packed :class:`Numbers`, summed over all ranks.
        ratios_L: the result of :meth:`Proof.ratios`, summed over all ranks.
        uses: for each layer, text on where its weight is used.
    """
    total = Numbers.unpacked(total_LC)
    columns = torch.stack([total.calls, total.hooked, total.left_out, total.squares], dim=1)
    rows = zip(columns.nan_to_num(1.0).tolist(), ratios_L.tolist(), uses, strict=True)
    return [
        RowCheck(
            calls=int(calls),
            hooked=int(hooked),
            left_out=int(left_out),
            is_zero=calls > 0 and squares == 0,
            ratio=ratio,
            uses=text,
        )
        for (calls, hooked, left_out, squares), ratio, text in rows
    ]


def eps_of(dtype: torch.dtype) -> float:
    """Return the relative accuracy of a dtype."""
    return torch.finfo(dtype).eps


def accuracy(dtype: torch.dtype, device: torch.device, images: bool = False) -> float:
    """Return the relative accuracy of a layer's products.

    Args:
        dtype: dtype of the gradient. Under autocast, autocast's dtype is used instead.
        device: device of the products.
        images: whether the layer is a convolution, or a norm of images. cuDNN computes fp32
            convolutions in :data:`TF32` by default.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return max(eps_of(dtype), TF32 if images or device.type != "cpu" else 0.0)


def times(x: Tensor, w_DK: Tensor) -> Tensor:
    """Return the products of rows [.., D] with w, fp32 [.., K]. Only some rows are converted to
    fp32 at a time."""
    rows = max(1, CHUNK // max(1, x.shape[-1]))
    with torch.autocast(x.device.type, enabled=False):
        parts = [part.float() @ w_DK for part in x.detach().reshape(-1, x.shape[-1]).split(rows)]
    return torch.cat(parts).reshape(*x.shape[:-1], w_DK.shape[-1])
