"""From gathered gradients to what is scattered: the K-FAC gradient (KAISA's way), for any optimizer to step with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.config import KFACConfig
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.metrics import Metrics
from ds_kfac.preconditioner import finite_or, grafted, kl_clip_scale, precondition
from ds_kfac.zero.exchange import GradientExchange
from ds_kfac.zero.layout import ShardLayout


@dataclass
class Local:
    """What a rank found for its own layers.

    Attributes:
        results: layer name -> fp32 [O, I].
        states: layer name -> state after this step.
        numbers: scalars that are summed over all ranks before :meth:`Direction.finish`.
        replaced: scalar, layers whose result was not finite.
        unprepared: layers that passed through because they have no eigenbasis or inverse.
    """

    results: dict[str, Tensor]
    states: dict[str, LayerState]
    numbers: list[Tensor]
    replaced: Tensor
    unprepared: int


@dataclass(frozen=True)
class Now:
    """What holds at this step.

    Attributes:
        step: applied steps so far.
        norm: global norm of all gradients as stored, a device scalar; None unless the direction asks for it.
        peak_lr: parameter group -> largest learning rate so far.
    """

    step: int
    norm: Tensor | None
    peak_lr: Mapping[int, Any]


class Direction(Protocol):
    """One way of turning gradients into steps; between its two halves there is one small all-reduce."""

    @property
    def moments(self) -> str | None:
        """Kind of moments a :class:`LayerState` needs for it: "adam", "corrected" or None."""

    @property
    def needs_norm(self) -> bool:
        """Whether it needs the global gradient norm."""

    def local(self, now: Now, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState]) -> Local:
        """``gradients`` carry the loss scale."""

    def finish(
        self, now: Now, local: Local, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What results of layers, also those of other ranks, are multiplied by; layers that are missing by 1.

        Args:
            totals: ``Local.numbers``, summed over ranks.
            prepared: layer name -> bool scalar, whether it has eigenbases.
        """


class KFACGradient:
    """V = (F + damping)^-exponent gradient, at the scale of kl-clip or of the gradient (grafting).

    Args:
        clip_lr: the learning rate in kl-clip's bound, "current" or "peak".
    """

    needs_norm = False
    moments: str | None

    def __init__(
        self, config: KFACConfig, layout: ShardLayout, exchange: GradientExchange, metrics: Metrics, *, clip_lr: str
    ) -> None:
        self.config, self.layout, self.exchange, self.metrics = config, layout, exchange, metrics
        self.clip_lr = clip_lr
        self.moments = "corrected" if config.preconditioner.eigenvalues == "corrected" else None

    def local(self, now: Now, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState]) -> Local:
        options, damping = self.config.preconditioner, self.config.damping
        local = Local(dict(gradients), dict(states), [], torch.zeros((), device=self.exchange.device), 0)
        quadratic = torch.zeros_like(local.replaced)
        for layer in self.exchange.owned:
            state, gradient = states[layer.name], gradients[layer.name]
            if not state.prepared:
                local.unprepared += 1
                continue
            eigenvalues = None
            if state.corrected is not None:
                state = self._corrected(state, gradient)
                assert state.corrected is not None
                eigenvalues = state.corrected.second_OI
                local.states[layer.name] = state
            if state.inverse is not None:
                V = state.inverse.precondition(gradient, damping=damping.at(now.step))
            else:
                assert state.basis is not None
                V = precondition(
                    gradient,
                    state.basis,
                    damping=damping.at(now.step),
                    damping_kind=damping.kind,
                    exponent=options.exponent,
                    eigenvalues_OI=eigenvalues,
                )
            V, finite = finite_or(V, gradient)
            if options.graft == "norm":
                V = grafted(V, gradient)
            local.replaced += ~finite
            local.results[layer.name] = V
            quadratic += self._quadratic(now, layer, V, gradient) / layer.copies
        local.numbers = [quadratic]
        return local

    def finish(
        self, now: Now, local: Local, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        kl_clip = self.config.preconditioner.kl_clip_at(now.step)
        if not kl_clip:
            self.metrics.nu = None
            return {}
        self.metrics.nu = nu = kl_clip_scale(totals[0], kl_clip=kl_clip)
        one = torch.ones_like(nu)
        return {name: torch.where(ready, nu, one) for name, ready in prepared.items()}

    def _corrected(self, state: LayerState, gradient: Tensor) -> LayerState:
        """With this gradient in the corrected eigenvalues, in the Fisher's units: a mean over M terms, times root M."""
        assert state.basis is not None and state.corrected is not None
        rotated = state.basis.rotate(gradient) * (state.terms.sqrt() / self.layout.grad_scale())
        decay = self.config.preconditioner.second_moment_decay
        usable = torch.isfinite(rotated).all()
        return replace(state, corrected=state.corrected.folded(rotated, decay=decay, usable=usable))

    def _quadratic(self, now: Now, layer: LayerSpec, V_OI: Tensor, gradient_OI: Tensor) -> Tensor:
        """lr^2 <V, gradient> of the unscaled gradient; weight and bias may have different rates."""
        products, total = V_OI * gradient_OI, torch.zeros((), device=V_OI.device)
        for part, group in zip(self.exchange.parts(layer, products), self.exchange.group_indices(layer), strict=True):
            total = total + part.sum() * self._lr_in_clip(now, group) ** 2
        return total / self.layout.grad_scale() ** 2

    def _lr_in_clip(self, now: Now, group: int) -> Tensor | float:
        return now.peak_lr[group] if self.clip_lr == "peak" else self.layout.optimizer.param_groups[group]["lr"]


def peak_rates(groups: Sequence[Mapping[str, Any]], before: Mapping[int, Any]) -> dict[int, Any]:
    """Parameter group -> largest learning rate so far."""
    return {index: _larger(group["lr"], before.get(index)) for index, group in enumerate(groups)}


def _larger(a: Tensor | float, b: Tensor | float | None) -> Tensor | float:
    if b is None:  # a copy: a tensor lr is changed in place by its scheduler
        return a.clone() if isinstance(a, Tensor) else a
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)
