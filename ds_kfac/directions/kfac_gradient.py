"""The K-FAC gradient (as in KAISA), for any optimizer to step with: rotate into the eigenbasis, divide, rotate back;
kl-clip and grafting.

    V = Q_G [(Q_G^T dW Q_A) / (e + lambda)] Q_A^T        e = beta alpha^T, or EKFAC's running second moment
    dW <- nu V                                           nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>)))

Shape suffixes: O, I a layer's sides. Formulas take one matrix [O, I] or n of equal shape [n, O, I]; what is a scalar of
one is [n] of several.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import Direction, StepContext, UpdateRule
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import LayerSpec
from ds_kfac.ops.dispatch import eigen_scale_dot
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.update.groups import Group
from ds_kfac.update.rotation import Rotation, is_large, norms
from ds_kfac.update.state import CorrectedEigenvalues, LayerState, Moments
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
                own, part = self._precondition(context, group, own, local)
                quadratic += part
            else:
                local.unprepared += len(layers)
            local.outbox.add(layers, [own.pop(layer.name) for layer in layers])
        local.numbers = [quadratic]
        return local

    def _precondition(
        self, context: StepContext, group: Group, gradients: Mapping[str, Tensor], local: LocalResult
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Results of layers of equal shape, and their part of kl-clip's sum."""
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
        results = dict(zip(group.names, group.apart(V), strict=True))
        return results, self._quadratic(context, group.layers, dot, results, gradients) / group.layers[0].copies

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


def precondition(
    gradient_OI: Tensor,
    rotation: Rotation,
    *,
    damping: float,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor]:
    """(F + lambda)^-1 applied to a gradient, without forming an inverse; F = Q diag(e) Q^T, e = beta alpha^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda) ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs.
    Source: Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_OI: fp32 [O, I], the bias gradient as last column where the layer has one.
        damping_kind: "tikhonov", in units of the Fisher; "relative" to the layer's mean eigenvalue.

    Returns V and <V, gradient>, which is that of the rotated ones.
    """
    *several, rows, columns = gradient_OI.shape
    beta_O, alpha_I = rotation.values_G.view(*several, rows), rotation.values_A.view(*several, columns)
    # of a layer in groups, whose values are flat, one for all of them
    mean_G, mean_A = rotation.values_G.mean(-1), rotation.values_A.mean(-1)
    lambda_ = damping if damping_kind == "tikhonov" else damping * mean_G * mean_A
    rotated_OI = _rotated(rotation, gradient_OI)
    scaled_OI, dot = eigen_scale_dot(rotated_OI, beta_O, alpha_I, lambda_)
    return rotation.restore(scaled_OI, given_up=True), dot


def precondition_corrected(
    gradient_OI: Tensor,
    rotation: Rotation,
    corrected: CorrectedEigenvalues,
    *,
    norm: Tensor,
    terms: Tensor | float,
    decay: float,
    damping: float,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor, CorrectedEigenvalues, Tensor]:
    """:func:`precondition` with the running second moment of the rotated gradient, this one included, as e.

    Args:
        norm: of the gradient.
        terms: brings a squared gradient to the Fisher's units: loss terms over the squared loss scale.
        decay: of the second moment.

    Returns V, <V, gradient>, the new second moment, and whether the gradient was scaled down for it.
    """
    in_groups = rotation.values_G.ndim < gradient_OI.ndim - 1

    def damp(mean: Callable[[], Tensor]) -> Tensor | float:
        if damping_kind == "tikhonov":
            return damping
        return damping * (mean().mean() if in_groups else mean())

    scaled_OI, dot, corrected, limited = corrected.divide(
        _rotated(rotation, gradient_OI), norm=norm, terms=terms, decay=decay, damping=damp
    )
    return rotation.restore(scaled_OI, given_up=True), dot, corrected, limited


def _rotated(rotation: Rotation, gradient_OI: Tensor) -> Tensor:
    """A large one whose rows stay apart in one copy."""
    by_rows = is_large(gradient_OI) and not rotation.G
    return rotation.rotate(gradient_OI.clone() if by_rows else gradient_OI, given_up=by_rows)


def finite_or(preconditioned_OI: Tensor, otherwise_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``preconditioned``, which is given up, where all of a matrix is finite, else ``otherwise``, fp32; and whether it
    was, a bool scalar.

    ZeRO-1/2 in bf16 would apply a NaN of ours, and an overflowed gradient must reach DeepSpeed's check as it is.
    """
    found_OI = preconditioned_OI.float()
    finite = torch.isfinite(torch.linalg.vector_norm(found_OI, ord=torch.inf, dim=(-2, -1)))  # without a mask
    return torch.where(finite[..., None, None], found_OI, otherwise_OI, out=found_OI), finite


def graft_scale(preconditioned_OI: Tensor, norm: Tensor) -> Tensor:
    """What gives a direction a norm, such as the gradient's (Anil et al. 2020, arXiv:2002.09018, per layer)."""
    own = norms(preconditioned_OI.flatten(-2)).to(norm.dtype)
    return torch.where(own > 0, norm / own, torch.ones_like(own))


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / quadratic)): bounds the step's KL divergence (Ba et al. 2017, sec. 3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>; 0 gives 1, and so does what is no number,
            which DeepSpeed's overflow check has to find. More than fp32 holds gives 0: no step is too small for it.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isnan(quadratic), torch.ones_like(nu), nu)


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
