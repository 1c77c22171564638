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

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.metrics import HostCopy
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS

MOST_LAYERS = 24
"""That are measured, evenly over the model: their inputs are kept from the forward to the backward pass. A bit each in
an fp32 number."""
CHUNK = 1 << 24
"""Elements of rows, and of products, at a time (64 MB), or those of one sample."""
SUMS = ("squared norms of samples", "samples", "squared norm", "layers")
"""Q, B, P, and a bit for each layer."""
DECAY = 0.8
"""Of the averages, per measurement."""


def squared_norms(x_NTI: Tensor, g_NTO: Tensor, *, bias: bool) -> Tensor:
    """Sum over samples of the squared norms of their gradients, of the weight and maybe the bias; an fp32 scalar."""
    (N, T, I), O = x_NTI.shape, g_NTO.shape[-1]  # noqa: E741
    grams = T * (I + O) < I * O
    total = torch.zeros((), device=x_NTI.device)
    for at in range(0, N, samples := max(1, CHUNK // (T * (I + O)))):
        x, g = x_NTI[at : at + samples].float(), g_NTO[at : at + samples].float()
        if bias:
            total += g.sum(dim=1).square().sum()
        if grams:
            total += ((x @ x.mT) * (g @ g.mT)).sum()
            continue
        for part in g.split(max(1, CHUNK // (len(x) * I)), dim=-1):  # of the outputs
            total += (part.mT @ x).square().sum()
    return total


class NoiseScale:
    """The running noise scale of some of a model's layers.

    Args:
        layers: of the model; those that are measured are matrices whose rows have samples.
        samples: of a step on this rank, as the config has it.
        world: ranks over which gradients are averaged.

    Attributes:
        average: fp32 [3]: running tr Sigma and |G|^2 of the measured layers, and how many measurements are in them.
        measurements: so far, those that showed nothing included.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], samples: Callable[[], int], world: int, device: torch.device
    ) -> None:
        fit = [x.name for x in layers if not (LAYERS[x.kind].images or LAYERS[x.kind].needs_gradients or x.part[1] > 1)]
        stride = -(-len(fit) // MOST_LAYERS)
        self.place = {name: place for place, name in enumerate(fit[:: stride or 1])}
        self.samples, self.world, self.device = samples, world, device
        self.average, self.measurements = torch.zeros(3, device=device), 0
        self._told = self._copy = HostCopy(torch.zeros(3))  # of the last measurement but one, and of the last
        self.active = False  # from the beginning of a step on
        self._sums: dict[str, Tensor] = {}  # Q
        self._seen: Counter[str] = Counter()  # B

    def begin(self, *, active: bool) -> None:
        """Forget the samples of the last step. ``active``: this one is measured."""
        self.active, self._sums, self._seen = active, {}, Counter()

    @torch.no_grad()
    def add(self, layer: LayerSpec, x: Tensor, gradient: Tensor, examples: int) -> None:
        """Samples of one call, x [N, T, I], or [T, N, I] where ``examples`` is 1, or [N, I]."""
        if not x.numel() or not gradient.numel():
            return
        if x.ndim < 3:
            x, gradient = x.reshape(-1, 1, x.shape[-1]), gradient.reshape(-1, 1, gradient.shape[-1])
        elif examples == 1:
            x, gradient = x.transpose(0, 1), gradient.transpose(0, 1)
        x, gradient = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, gradient))
        norms = squared_norms(x, gradient, bias=layer.bias is not None)
        self._sums[layer.name] = norms + self._sums.get(layer.name, 0.0)
        self._seen[layer.name] += len(x)

    @property
    def counted(self) -> list[str]:
        """Layers that saw each of this step's samples once: not those whose rows are tokens in any order, or that are
        called more often."""
        return [name for name in self._sums if self._seen[name] == self.samples()]

    def sums(self, squared_norm: Tensor, scale: Tensor | float) -> Tensor:
        """Of this rank, [4] as :data:`SUMS`. ``squared_norm``: its part of that of the gradients of :attr:`counted`,
        which carry ``scale``."""
        counted, zero = self.counted, torch.zeros((), device=self.device)
        Q = torch.stack([self._sums[name] for name in counted]).sum() / self.world**2 if counted else zero
        B = torch.full_like(zero, self.samples() if counted else 0)
        mask = torch.full_like(zero, sum(1 << self.place[name] for name in counted))
        divisor = torch.as_tensor(scale, device=self.device, dtype=torch.float32) ** 2
        return torch.stack([Q / divisor, B, squared_norm / divisor, mask])

    def record(self, sums: Tensor) -> None:
        """[4, ranks], of a step that was applied. It shows nothing where ranks measured other layers."""
        Q, B, P = sums[:3].double().sum(dim=1)
        part = torch.where(B > 1, B / (B - 1).clamp(min=1), 0.0)
        found = torch.stack([part * (B * Q - P), part * (P - Q)]).float()
        known = found.isfinite().all() & (B > 1) & (sums[3] == sums[3, 0]).all()
        kept = torch.where(self.average[2] > 0, DECAY, 0.0)
        mixed = torch.cat([kept * self.average[:2] + (1 - kept) * found, self.average[2:] + 1])
        self.average = torch.where(known, mixed, self.average)
        self.measurements += 1
        self._told, self._copy = self._copy, HostCopy(self.average)

    @property
    def told(self) -> list[float]:
        """:attr:`average` on the host, as of the last measurement but one, so that whoever asks does not wait."""
        return self._told.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.tolist(), "told": self.told, "measurements": self.measurements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = torch.tensor(state["average"], device=self.device)
        self.measurements = state["measurements"]
        self._told, self._copy = HostCopy(torch.tensor(state["told"])), HostCopy(self.average)

    @property
    def value(self) -> float:
        """In samples; infinite where no signal is seen, nan before the first measurement. Waits for the device."""
        noise, signal, known = self.average.tolist()
        return (noise / signal if signal > 0 else math.inf) if known else math.nan
