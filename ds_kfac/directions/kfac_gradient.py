"""The K-FAC gradient (as in KAISA), for any optimizer to step with; and SP-NGD's learning rate for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import Direction, StepContext, UpdateRule
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.update.kfac import finite_or, graft_scale, kl_clip_scale, precondition, precondition_corrected
from ds_kfac.update.rotation import norms
from ds_kfac.update.state import CorrectedEigenvalues, Group, LayerState, Moments
from ds_kfac.zero.exchange import GradientExchange, LocalResult
from ds_kfac.zero.layout import ShardLayout

DECAY = 0.95
"""Weight of the past in corrected eigenvalues, per step."""


class KFACGradient(Direction):
    """V = (F + damping)^-1 gradient, at the scale of kl-clip or of the gradient (grafting)."""

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, metrics: Metrics) -> None:
        super().__init__(plan, layout, exchange)
        self.clip_lr, self.metrics = plan.clip_lr, metrics

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        local = LocalResult(states, self.exchange)
        if context.norm is not None:  # one that is no number is left to DeepSpeed's own check
            factor = self.layout.clip_factor(context.norm).float()
            local.clip = torch.where(torch.isfinite(context.norm.float()), factor, torch.ones_like(factor))
        quadratic = torch.zeros_like(local.replaced)
        for group in self.together.of(states):
            layers = group.layers
            own = {layer.name: gradients.pop(layer.name).float() for layer in layers}
            if context.norm is not None:
                own = {name: gradient * local.clip for name, gradient in own.items()}
            if all(states[layer.name].preconditioner is not None for layer in layers):
                quadratic += self._precondition(context, group, own, local)
            else:
                local.unprepared += len(layers)
                local.results |= own
            local.outbox.add(layers, [local.results.pop(layer.name) for layer in layers])
        local.numbers = [quadratic]
        return local

    def _precondition(
        self, context: StepContext, group: Group, gradients: Mapping[str, Tensor], local: LocalResult
    ) -> Tensor:
        """Layers of equal shape; their part of kl-clip's sum."""
        options, states, rotation = self.config.preconditioner, group.take(local.states), group.rotation
        gradient = group.together([gradients[name] for name in group.names])
        norm = norms(gradient.flatten(-2)).float()
        damping: dict[str, Any] = {
            "damping": self.config.damping.at(context.step),
            "damping_kind": self.config.damping.kind,
        }
        if rotation is None:
            only = states[0].preconditioner
            V, dot = only.precondition(gradient, damping=damping["damping"], precision=self.precision)
        elif isinstance(group.moments, CorrectedEigenvalues):
            terms = group.together([state.terms for state in states])
            V, dot, corrected, limited = precondition_corrected(
                gradient,
                rotation,
                group.moments,
                norm=norm,
                terms=terms / (self.layout.grad_scale() * local.clip) ** 2,  # of raw gradients, as factors are
                decay=DECAY,
                **damping,
            )
            local.limited = local.limited + group.any(limited).sum()
            group.keep(local.states, corrected)
        else:
            V, dot = precondition(gradient, rotation, **damping)
        V, finite = finite_or(V, gradient)
        dot = torch.where(finite, dot, norm.square())
        if options.graft == "norm":
            scale = graft_scale(V, norm)
            V, dot = V * scale[..., None, None], dot * scale
        local.replaced = local.replaced + group.any(~finite).sum()
        local.results.update(zip(group.names, group.apart(V), strict=True))
        return self._quadratic(context, group.layers, dot, local.results, gradients) / group.layers[0].copies

    def finish(
        self, context: StepContext, local: LocalResult, totals: Sequence[Tensor], prepared: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        kl_clip = self.config.preconditioner.kl_clip_at(context.step)
        if not kl_clip:
            self.metrics.nu = self.metrics.kl = None
            return {}
        self.metrics.nu = nu = kl_clip_scale(totals[0], kl_clip=kl_clip)
        self.metrics.kl = nu.square() * totals[0] / 2
        if not prepared:
            return {}
        scales = torch.where(torch.stack([*prepared.values()]), nu, torch.ones_like(nu))
        return dict(zip(prepared, scales.unbind(), strict=True))

    def _quadratic(
        self,
        context: StepContext,
        layers: Sequence[LayerSpec],
        dot: Tensor,
        results: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Tensor:
        """lr^2 <V, gradient> of the unscaled gradients, summed; weight and bias may have different rates.

        Args:
            dot: <V, gradient> of each layer, all that is needed where all rates are one.
        """
        groups, scale = self.layout.optimizer.param_groups, self.layout.grad_scale()
        of_group = context.peak_lr if self.clip_lr == "peak" else {index: own["lr"] for index, own in enumerate(groups)}
        rates = [[of_group[group] for group in self.groups[layer.name]] for layer in layers]
        first = rates[0][0]
        numbers = not any(isinstance(rate, Tensor) for own in rates for rate in own)
        if all(rate is first or (numbers and rate == first) for own in rates for rate in own):  # no need to ask
            return dot.sum() * first**2 / scale**2
        total = torch.zeros((), device=dot.device)
        for layer, own in zip(layers, rates, strict=True):
            parts = self.exchange.parts(layer, results[layer.name] * gradients[layer.name])
            for part, rate in zip(parts, own, strict=True):
                total = total + part.sum() * rate**2
        return total / scale**2


def peak_rates(groups: Sequence[Mapping[str, Any]], before: Mapping[int, Any], scheduler: Any = None) -> dict[int, Any]:
    """Parameter group -> largest learning rate so far, or to come where the scheduler tells. During a warmup that
    matters: a momentum keeps what the first steps let through, and multiplies it by the rates of later ones."""
    peaks = {}
    for index, group in enumerate(groups):
        found = [before[index]] if index in before else []
        if scheduler is not None:  # of DeepSpeed or torch, as far as it says
            lists = (getattr(scheduler, name, None) for name in ("max_lrs", "org_lrs", "base_lrs"))
            planned = [rates[index] for rates in lists if isinstance(rates, Sequence) and index < len(rates)]
            found += map(float, [*planned, *(group[key] for key in ("initial_lr", "max_lr") if key in group)])
        peak = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]  # its scheduler changes a tensor
        for rate in found:
            tensors = isinstance(peak, Tensor) or isinstance(rate, Tensor)
            peak = torch.maximum(torch.as_tensor(peak), torch.as_tensor(rate)) if tensors else max(peak, rate)
        peaks[index] = peak
    return peaks


class KFACGradientRule(UpdateRule):
    """The K-FAC gradient in place of the raw one (KAISA), for any optimizer to step with."""

    blocks = ("damping", "preconditioner")

    def steps(self, optimizer: Any) -> bool:
        return True

    def direction(
        self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        return KFACGradient(plan, layout, exchange, metrics)

    def asks_prepared(self, config: KFACConfig) -> bool:
        return config.preconditioner.kl_clip != Value.constant(0)  # nu is of preconditioned layers only

    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        config, method = plan.config, plan.method
        options, damping = config.preconditioner, config.damping
        clip = "off" if options.kl_clip == Value.constant(0) else f"{options.kl_clip} at the {plan.clip_lr} lr"
        damped = f"{damping.kind} damping {damping.value}"
        how = f"{options.eigenvalues} eigenvalues, {damped}"
        if not method.rotates:
            how = f"{method.words} of both factors, {damped} of the last refresh, split by pi"
        return f"{how}, graft {options.graft}, kl-clip {clip}; then {optimizer}"

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        return False  # a graft is of a layer's norm

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        return CorrectedEigenvalues if config.preconditioner.eigenvalues == "corrected" else None


class PolynomialDecay:
    """SP-NGD's learning rate (Osawa et al. 2020, arXiv:2002.06015; Osawa et al. 2019, arXiv:1811.12019):
    ``"scheduler": {"type": "PolynomialDecay", "params": {"start": 100, "end": 3000, "power": 3.5}}``.

        rate(t) = rate_0 (1 - (t - start) / (end - start))^power   from start to end, constant before and after
        momentum(t) = momentum_0 rate(t) / rate_0                  if "ties_momentum"

    The papers' velocity holds the rate, v <- m (rate / last rate) v - rate g, W <- W + v. torch's does not,
    W <- W - rate b with b <- m b + g, which is the same.

    Args:
        optimizer: torch's, or DeepSpeed's wrapper of one.
        start, end: steps between which the rate falls. Training may end before ``end``.
        power: 1 is linear.
        ties_momentum: whether the momentum of groups that have one falls with the rate.

    Raises ValueError if the steps or the power cannot be.
    """

    def __init__(
        self, optimizer: Any, *, end: float, start: float = 0, power: float = 1.0, ties_momentum: bool = False
    ) -> None:
        if not 0 <= start < end or power < 0:
            raise ValueError(
                f"PolynomialDecay: needs 0 <= start < end and power >= 0, got start {start}, end {end}, power {power}"
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        self.optimizer, self.start, self.end, self.power = inner, start, end, power
        self.ties_momentum, self.steps = ties_momentum, 0
        self.first = [(float(group["lr"]), group.get("momentum")) for group in inner.param_groups]
        self._set()

    @property
    def part(self) -> float:
        """Of the first rate."""
        done = (self.steps - self.start) / (self.end - self.start)
        return (1 - min(max(done, 0.0), 1.0)) ** self.power

    def step(self, last_batch_iteration: int | None = None) -> None:
        """After an optimizer step, or to a given one."""
        self.steps = self.steps + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_lr(self) -> list[float]:
        """Of every group."""
        return [rate * self.part for rate, _ in self.first]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.first = state["steps"], [tuple(pair) for pair in state["first"]]
        self._set()

    def _set(self) -> None:
        for group, (rate, momentum) in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * self.part
            if self.ties_momentum and momentum is not None:
                group["momentum"] = momentum * self.part
