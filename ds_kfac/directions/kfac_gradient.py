"""The K-FAC gradient (as in KAISA), for any optimizer to step with: rotate into the eigenbasis, divide, rotate back;
kl-clip.

    V = Q_G [(Q_G^T dW Q_A) / (e + lambda)] Q_A^T        e = beta alpha^T, or EKFAC's running second moment
    dW <- nu V                                           nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>)))

Shape suffixes: O, I a layer's sides; nOI stands for [n, O, I], the matrices of the layers of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import Direction, StepContext, UpdateRule
from ds_kfac.metrics import Metrics
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.rotation import Rotation, is_large, norms, repeated
from ds_kfac.update.state import CorrectedEigenvalues, LayerState, Moments
from ds_kfac.zero.exchange import GradientExchange, LocalResult
from ds_kfac.zero.layout import ShardLayout

DECAY = 0.95
"""Weight of the past in corrected eigenvalues, per step."""


class KFACGradient(Direction):
    """V = (F + damping)^-1 gradient, at the scale of kl-clip."""

    def __init__(self, plan: Plan, layout: ShardLayout, exchange: GradientExchange, metrics: Metrics) -> None:
        super().__init__(plan, layout, exchange)
        self.clip_lr, self.metrics = plan.clip_lr, metrics

    def local(self, context: StepContext, gradients: dict[str, Tensor], states: dict[str, LayerState]) -> LocalResult:
        local = LocalResult(states, self.exchange)
        self.set_clip(context, local)
        quadratic = torch.zeros_like(local.replaced)
        for group in self.layer_groups:
            whole = {name: gradients.pop(name).float() for name in group.names}
            if context.norm is not None:
                whole = {name: gradient * local.clip for name, gradient in whole.items()}
            ready = [state.preconditioner is not None for state in group.load(local.states)]
            results: Sequence[Tensor] = [whole[name] for name in group.names]
            if any(ready):
                results, part = self._precondition(context, group, whole, ready, local)
                quadratic += part
            local.outbox.add(group.layers, results)
        local.numbers = [quadratic]
        return local

    def _precondition(
        self,
        context: StepContext,
        group: LayerGroup,
        gradients: Mapping[str, Tensor],
        ready: Sequence[bool],
        local: LocalResult,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Results of a group's layers, and their part of kl-clip's sum. A layer that is not ``ready`` keeps its
        gradient and its moments, and is not in the sum."""
        gradient, rotation = group.matrices([gradients[name] for name in group.names]), group.rotation
        norm = norms(gradient.flatten(-2)).float()
        on = None
        if not all(ready):
            yes, no = norm.new_ones((), dtype=torch.bool), norm.new_zeros((), dtype=torch.bool)
            on = repeated(torch.stack([yes if of_layer else no for of_layer in ready]), group.maps)
            norm = norm.masked_fill(~on, torch.nan)  # which leaves moments as they are
        damping: dict[str, Any] = {
            "damping": self.config.damping.at(context.step),
            "damping_kind": self.config.damping.kind,
        }
        if rotation is None:  # damped inverses, of layers that are alone
            inverses = local.states[group.names[0]].preconditioner
            V, dot = inverses.precondition(
                gradients[group.names[0]], damping=damping["damping"], precision=self.precision
            )
            V, dot = V.view_as(gradient), dot.view(-1)
        elif isinstance(group.moments, CorrectedEigenvalues):
            terms = repeated(torch.stack([local.states[name].terms for name in group.names]), group.maps)
            V, dot, corrected, limited = precondition_corrected(
                gradient,
                rotation,
                group.moments,
                norm_n=norm,
                terms_n=terms / (self.layout.grad_scale() * local.clip) ** 2,  # of raw gradients, as factors are
                decay=DECAY,
                **damping,
            )
            local.limited = local.limited + group.any_map(limited).sum()
            group.keep(local.states, corrected)
        else:
            V, dot = precondition(gradient, rotation, **damping)
        V, finite = finite_or(V, gradient, on)
        dot = torch.where(finite, dot, norm.square())
        if on is None:
            replaced = group.any_map(~finite)
        else:
            replaced, dot = group.any_map(~finite & on), dot.masked_fill(~on, 0.0)
        local.replaced = local.replaced + replaced.sum()
        results = group.by_layer(V)
        products = [
            (layer, result, gradients[layer.name])
            for layer, result, of_layer in zip(group.layers, results, ready, strict=True)
            if of_layer
        ]
        return results, self._quadratic(context, products, dot) / group.layers[0].copies

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
        self, context: StepContext, layers: Sequence[tuple[LayerSpec, Tensor, Tensor]], dot: Tensor
    ) -> Tensor:
        """lr^2 <V, gradient> of the unscaled gradients, summed; weight and bias may have different rates.

        Args:
            layers: with V and the gradient of each.
            dot: <V, gradient> of each matrix, all that is needed where all rates are one.
        """
        groups, scale = self.layout.optimizer.param_groups, self.layout.grad_scale()
        of_group = context.peak_lr if self.clip_lr == "peak" else {index: own["lr"] for index, own in enumerate(groups)}
        rates = [[of_group[group] for group in self.parameter_groups[layer.name]] for layer, *_ in layers]
        first = rates[0][0]
        numbers = not any(isinstance(rate, Tensor) for of_layer in rates for rate in of_layer)
        if all(rate is first or (numbers and rate == first) for of_layer in rates for rate in of_layer):
            return dot.sum() * first**2 / scale**2
        total = torch.zeros((), device=dot.device, dtype=torch.float32)
        for (layer, V, gradient), of_layer in zip(layers, rates, strict=True):
            for part, rate in zip(self.exchange.parts(layer, V * gradient), of_layer, strict=True):
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
            if isinstance(peak, Tensor) or isinstance(rate, Tensor):
                device = next(x.device for x in (peak, rate) if isinstance(x, Tensor))
                options: Any = {"dtype": torch.float32, "device": device}
                peak = torch.maximum(*(torch.as_tensor(x, **options) for x in (peak, rate)))
            else:
                peak = max(peak, rate)
        peaks[index] = peak
    return peaks


def precondition(
    gradient_nOI: Tensor,
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
        gradient_nOI: fp32 [n, O, I], the bias gradient as last column where the layer has one.
        damping_kind: "tikhonov", in units of the Fisher; "relative" to the layer's mean eigenvalue.

    Returns V, and <V, gradient> [n], which is that of the rotated ones.
    """
    beta_nO, alpha_nI = rotation.values_G, rotation.values_A
    e_nOI = beta_nO[:, :, None] * alpha_nI[:, None, :]
    if damping_kind == "tikhonov":
        e_nOI += damping
    else:
        mean_n = rotation.layer_mean(beta_nO.mean(-1)) * rotation.layer_mean(alpha_nI.mean(-1))
        e_nOI += damping * mean_n[:, None, None]
    rotated_nOI = _rotated(rotation, gradient_nOI)
    scaled_nOI = torch.div(rotated_nOI, e_nOI, out=e_nOI)
    dot_n = (rotated_nOI * scaled_nOI).sum(dim=(-2, -1))
    return rotation.restore(scaled_nOI, overwrite=True), dot_n


def precondition_corrected(
    gradient_nOI: Tensor,
    rotation: Rotation,
    corrected: CorrectedEigenvalues,
    *,
    norm_n: Tensor,
    terms_n: Tensor | float,
    decay: float,
    damping: float,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor, CorrectedEigenvalues, Tensor]:
    """:func:`precondition` with the running second moment of the rotated gradient, this one included, as e.

    Args:
        norm_n: of the gradient.
        terms_n: brings a squared gradient to the Fisher's units: loss terms over the squared loss scale.
        decay: of the second moment.

    Returns V, <V, gradient> [n], the new second moment, and whether the gradient was scaled down for it, bool [n].
    """

    def damp(mean: Callable[[], Tensor]) -> Tensor | float:
        return damping if damping_kind == "tikhonov" else damping * rotation.layer_mean(mean())

    scaled_nOI, dot_n, corrected, limited_n = corrected.divide(
        _rotated(rotation, gradient_nOI), norm_n=norm_n, terms_n=terms_n, decay=decay, damping=damp
    )
    return rotation.restore(scaled_nOI, overwrite=True), dot_n, corrected, limited_n


def _rotated(rotation: Rotation, gradient_nOI: Tensor) -> Tensor:
    """A large one whose rows no basis mixes in one copy."""
    by_rows = is_large(gradient_nOI) and not rotation.G
    return rotation.rotate(gradient_nOI.clone() if by_rows else gradient_nOI, overwrite=by_rows)


def finite_or(
    preconditioned_nOI: Tensor, otherwise_nOI: Tensor, wanted_n: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``preconditioned``, which is overwritten, where all of a matrix is finite and ``wanted``, else ``otherwise``; and
    where it was, bool [n].

    ZeRO-1/2 in bf16 would apply a NaN of ours, and an overflowed gradient must reach DeepSpeed's check as it is.
    """
    result = preconditioned_nOI.float()
    finite = torch.isfinite(torch.linalg.vector_norm(result, ord=torch.inf, dim=(-2, -1)))  # without a mask
    if wanted_n is not None:
        finite = finite & wanted_n
    return torch.where(finite[:, None, None], result, otherwise_nOI, out=result), finite


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
    numbers = 1

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
        return f"{how}, kl-clip {clip}; then {optimizer}"

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        return CorrectedEigenvalues if config.preconditioner.eigenvalues == "corrected" else None
