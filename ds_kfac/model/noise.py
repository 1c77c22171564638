"""How much of a gradient is noise: the batch at which as much of it is noise as signal, in samples.

A step's gradient is a mean of its samples' own. With Q the sum of the squared norms of what each of B samples adds to
it, and P its squared norm, the variance of a sample's gradient tr(Sigma) and the squared norm of the true gradient are
estimated without bias as

    tr Sigma = (B Q - P) B / (B - 1)        |G|^2 = (P - Q) B / (B - 1)        noise scale = tr Sigma / |G|^2

Moments show nothing of it: gradients of successive steps differ for other reasons than noise. A sample's part of a
layer's gradient is g^T x over its positions; its norm takes that product or, where positions are few, the two Gram
matrices of rows, whichever costs less. Captured backward passes have all of it at hand.

Sources: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1; norms without gradients: Goodfellow 2015
(arXiv:1510.01799), Li et al. 2022 (arXiv:2110.05679).

Shape suffixes: N samples, T positions, I and O the sides of a layer's matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.metrics import HostCopy
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS

MOST_LAYERS = 24
"""That are measured, evenly over the model: their inputs are kept from the forward to the backward pass."""
CHUNK = 1 << 24
"""Elements of products at a time (64 MB)."""
SUMS = ("squared norms of samples", "samples", "squared norm")
"""Q, B and P."""
DECAY = 0.8
"""Of the averages, per measurement."""


def squared_norms(x_NTI: Tensor, g_NTO: Tensor, *, bias: bool) -> Tensor:
    """Sum over samples of the squared norms of their gradients, of the weight and maybe the bias; an fp32 scalar."""
    x_NTI, g_NTO = x_NTI.float(), g_NTO.float()
    (_, T, I), O = x_NTI.shape, g_NTO.shape[-1]  # noqa: E741
    grams = T * (I + O) < I * O
    total = torch.zeros((), device=x_NTI.device)
    samples = max(1, CHUNK // (2 * T * T if grams else I * O))
    for x, g in zip(x_NTI.split(samples), g_NTO.split(samples), strict=True):
        total += ((x @ x.mT) * (g @ g.mT)).sum() if grams else (g.mT @ x).square().sum()
    return total + g_NTO.sum(dim=1).square().sum() if bias else total


class NoiseScale:
    """The running noise scale of some of a model's layers.

    Args:
        layers: of the model; those that are measured are matrices whose rows have samples.
        world: ranks over which gradients are averaged.

    Attributes:
        average: fp32 [2], running tr Sigma and |G|^2 of the measured layers; both zero before the first measurement.
        told: the same on the host as of the last measurement but one, so that nobody waits; None before.
        measurements: so far.
    """

    def __init__(self, layers: Sequence[LayerSpec], world: int, device: torch.device) -> None:
        fit = [x.name for x in layers if not (LAYERS[x.kind].images or LAYERS[x.kind].needs_gradients or x.part[1] > 1)]
        stride = -(-len(fit) // MOST_LAYERS)
        self.place = {name: place for place, name in enumerate(fit[:: stride or 1])}
        self.world, self.device = world, device
        self.average, self.measurements = torch.zeros(2, device=device), 0
        self.told: list[float] | None = None
        self._copy: HostCopy | None = None
        self.begin()

    def begin(self) -> None:
        """The samples to come are those of another step."""
        self._sums = torch.zeros(len(self.place), device=self.device)  # Q
        self._samples = [0] * len(self.place)  # B

    def wants(self, layer: str) -> bool:
        return layer in self.place

    @torch.no_grad()
    def add(self, layer: LayerSpec, x: Tensor, gradient: Tensor, examples: int) -> None:
        """Samples of one call, x [N, T, I], or [T, N, I] where ``examples`` is 1, or [N, I]."""
        if x.ndim < 3:
            x, gradient = x.unsqueeze(-2), gradient.unsqueeze(-2)
        elif examples == 1:
            x, gradient = x.transpose(0, 1), gradient.transpose(0, 1)
        x, gradient = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, gradient))
        place = self.place[layer.name]
        self._sums[place] += squared_norms(x, gradient, bias=layer.bias is not None)
        self._samples[place] += len(x)

    @property
    def counted(self) -> list[str]:
        """Layers that saw this step's samples here; others saw more, such as tokens in any order, or none."""
        least = min(filter(None, self._samples), default=0)
        return [name for name, place in self.place.items() if least and self._samples[place] == least]

    def sums(self, squared_norm: Tensor, scale: Tensor | float) -> Tensor:
        """Of this rank, [3] as :data:`SUMS`. ``squared_norm``: its part of that of the gradients of :attr:`counted`,
        which carry ``scale``."""
        counted = self.counted
        places = [self.place[name] for name in counted]
        Q = self._sums[places].sum() / self.world**2
        B = torch.full_like(Q, self._samples[places[0]] if places else 0)
        divisor = torch.as_tensor(scale, device=self.device, dtype=torch.float32) ** 2
        return torch.stack([Q / divisor, B, squared_norm / divisor])

    def record(self, sums: Tensor) -> None:
        """Of all ranks, of a step that was applied."""
        Q, B, P = sums.double()
        part = torch.where(B > 1, B / (B - 1).clamp(min=1), 0.0)
        found = torch.stack([part * (B * Q - P), part * (P - Q)]).float()
        known = found.isfinite().all() & (B > 1)
        kept = DECAY if self.measurements else 0.0
        self.average = torch.where(known, kept * self.average + (1 - kept) * found, self.average)
        self.measurements += 1
        self.told = None if self._copy is None else self._copy.tolist()
        self._copy = HostCopy(self.average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.tolist(), "told": self.told, "measurements": self.measurements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = torch.tensor(state["average"], device=self.device)
        self.told, self.measurements = state["told"], state["measurements"]
        self._copy = HostCopy(self.average) if self.measurements else None

    @property
    def value(self) -> float:
        """In samples; infinite where no signal is seen. Waits for the device."""
        return ratio(*self.average.tolist())


def ratio(noise: float, signal: float) -> float:
    return noise / signal if signal > 0 else float("inf")
