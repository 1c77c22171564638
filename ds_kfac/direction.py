"""From gathered gradients to what is scattered: the K-FAC gradient (KAISA's way), for any optimizer to step with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_kfac.config import KFACConfig
from ds_kfac.layer_state import LayerState
from ds_kfac.layers.base import LayerSpec
from ds_kfac.metrics import Metrics
from ds_kfac.moments import stacked, unstacked
from ds_kfac.ops.reference import each
from ds_kfac.precision import choose
from ds_kfac.preconditioner import finite_or, graft_scale, kl_clip_scale, norms, precondition, precondition_corrected
from ds_kfac.rotation import Rotations
from ds_kfac.stacking import apart, batches, stacks, together
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
        unused: scalar, layers whose gradient was exactly zero, where the direction asks.
        left_out: layer name -> bool scalar, whether its gradient was too large for its moments.
    """

    results: dict[str, Tensor]
    states: dict[str, LayerState]
    numbers: list[Tensor]
    replaced: Tensor
    unprepared: int
    unused: Tensor
    left_out: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState], device: torch.device) -> "Local":
        """Every layer as it is."""
        zero = torch.zeros((), device=device)
        return cls(dict(gradients), dict(states), [], zero, 0, zero)

    def counts(self, failed: int, limited: Tensor | None) -> list[Tensor]:
        """What is summed over all layers in the order of :data:`ds_kfac.metrics.SUMMARY`.

        Args:
            failed: refreshes that failed here.
            limited: scalar, batches of factors that were scaled down here; None: none.
        """
        unprepared, failures = (self.replaced.new_full((), n) for n in (self.unprepared, failed))
        left_out = torch.zeros_like(self.replaced)
        if self.left_out:
            left_out = torch.stack(list(self.left_out.values())).sum(dtype=left_out.dtype)
        limited = torch.zeros_like(self.replaced) if limited is None else limited.to(self.replaced.dtype)
        return [self.replaced, unprepared, failures, self.unused, left_out, limited]


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
    """One way of turning gradients into steps; between its two halves there is one small all-reduce.

    Attributes:
        stacks: own layers, those together that are done at once.
        rotations: their eigenvectors as products take them, and in which precision.
    """

    stacks: tuple[tuple[LayerSpec, ...], ...]
    rotations: Rotations

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
        self.groups = {layer.name: exchange.group_indices(layer) for layer in exchange.owned}
        self.rotations = Rotations(choose(config.preconditioner.precision, exchange.device))
        alike = (lambda layer: layer.copies) if config.preconditioner.stacks(exchange.device) else None
        self.stacks = stacks(exchange.owned, alike=alike)

    def local(self, now: Now, gradients: Mapping[str, Tensor], states: Mapping[str, LayerState]) -> Local:
        local = Local.empty(gradients, states, self.exchange.device)
        quadratic = torch.zeros_like(local.replaced)
        for layers in batches(self.stacks, states):
            if not all(states[layer.name].prepared for layer in layers):
                local.unprepared += len(layers)
                continue
            quadratic += self._precondition(now, layers, gradients, local)
        local.numbers = [quadratic]
        return local

    def _precondition(
        self, now: Now, layers: Sequence[LayerSpec], gradients: Mapping[str, Tensor], local: Local
    ) -> Tensor:
        """Layers of equal shape; their part of kl-clip's sum."""
        options, names = self.config.preconditioner, tuple(layer.name for layer in layers)
        states = [local.states[name] for name in names]
        gradient = together([gradients[name] for name in names])
        norm = norms(gradient.flatten(-2)).float()
        damping: dict[str, Any] = {
            "damping": self.config.damping.at(now.step),
            "damping_kind": self.config.damping.kind,
            "exponent": options.exponent,
        }
        inverse, bases = states[0].inverse, [basis for state in states if (basis := state.basis)]
        moments = [state.corrected for state in states if state.corrected is not None]
        if inverse is not None:
            V, dot = inverse.precondition(gradient, damping=damping["damping"], precision=self.rotations.precision)
        elif moments:
            terms = together([state.terms for state in states])
            V, dot, corrected = precondition_corrected(
                gradient,
                self.rotations.of(names, bases),
                stacked(moments),
                norm=norm,
                terms=terms / self.layout.grad_scale() ** 2,
                decay=options.second_moment_decay,
                **damping,
            )
            for name, state, new in zip(names, states, unstacked(corrected, len(names)), strict=True):
                local.states[name] = replace(state, corrected=new)
        else:
            V, dot = precondition(gradient, self.rotations.of(names, bases), **damping)
        V, finite = finite_or(V, gradient)
        dot = torch.where(finite, dot, norm.square())
        if options.graft == "norm":
            scale = graft_scale(V, norm)
            V, dot = V * each(scale), dot * scale
        local.replaced = local.replaced + (~finite).sum()
        local.results.update(zip(names, apart(V, len(names)), strict=True))
        return self._quadratic(now, layers, dot, local.results, gradients) / layers[0].copies

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

    def _quadratic(
        self,
        now: Now,
        layers: Sequence[LayerSpec],
        dot: Tensor,
        results: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Tensor:
        """lr^2 <V, gradient> of the unscaled gradients, summed; weight and bias may have different rates.

        Args:
            dot: <V, gradient> of each layer, all that is needed where all rates are one.
        """
        rates = [[self._lr_in_clip(now, group) for group in self.groups[layer.name]] for layer in layers]
        first, scale = rates[0][0], self.layout.grad_scale()
        if all(_same(rate, first) for own in rates for rate in own):
            return dot.sum() * first**2 / scale**2
        total = torch.zeros((), device=dot.device)
        for layer, own in zip(layers, rates, strict=True):
            parts = self.exchange.parts(layer, results[layer.name] * gradients[layer.name])
            for part, rate in zip(parts, own, strict=True):
                total = total + part.sum() * rate**2
        return total / scale**2

    def _lr_in_clip(self, now: Now, group: int) -> Tensor | float:
        return now.peak_lr[group] if self.clip_lr == "peak" else self.layout.optimizer.param_groups[group]["lr"]


def _same(a: Tensor | float, b: Tensor | float) -> bool:
    """Whether two rates are known to be equal without asking the device."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def peak_rates(groups: Sequence[Mapping[str, Any]], before: Mapping[int, Any]) -> dict[int, Any]:
    """Parameter group -> largest learning rate so far."""
    return {index: _larger(group["lr"], before.get(index)) for index, group in enumerate(groups)}


def _larger(a: Tensor | float, b: Tensor | float | None) -> Tensor | float:
    if b is None:  # a copy: a tensor lr is changed in place by its scheduler
        return a.clone() if isinstance(a, Tensor) else a
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)
