"""The K-FAC gradient (as in KAISA), for any optimizer to step with: rotate into the eigenbasis,
divide, rotate back; kl-clip.

    V = Q_G [(Q_G^T dW Q_A) / (e + lambda)] Q_A^T,   e = beta alpha^T, or EKFAC's second moment
    dW <- nu V,   nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>)))

Shape suffixes: O, I a layer's sides; nOI stands for [n, O, I], the matrices of the layers of a
group.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.direction import Direction, Outcome, StepContext
from ds_kfac.directions.kfac_gradient_facts import KFACGradientFacts
from ds_kfac.directions.step_tensors import RecordedTensors, StepTensors, recorded_step
from ds_kfac.metrics import Metrics
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.update.groups import LayerGroup
from ds_kfac.update.rotation import Rotation, is_large, norms, repeated
from ds_kfac.update.state import CorrectedEigenvalues, Moments
from ds_kfac.zero.exchange import GradientExchange, Gradients

DECAY = 0.95
"""Weight of the past in corrected eigenvalues, per step."""


class KFACGradient(Direction):
    """V = (F + damping)^-1 gradient, at the scale of kl-clip. Vectors are of this rank's layers in
    the order of ``layer_groups``.

    Attributes:
        peak_lr: parameter group -> largest learning rate so far, by which kl-clip goes.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: GradientExchange,
        moments: type[Moments] | None,
        metrics: Metrics,
    ) -> None:
        super().__init__(plan, exchange, moments)
        self.plan, self.metrics = plan, metrics
        self.peak_lr: dict[int, Tensor | float] = {}
        one = torch.ones((), dtype=torch.float32, device=exchange.device)
        inputs = {
            "damping": one.clone(),
            "terms": one.repeat(len(self.layers)),
            "factor_is_zero": one.clone(),
        }
        self.recorded = recorded_step(plan, self.layer_groups, exchange, inputs)

    def state(self) -> dict[str, Any]:
        return {"peak_lr": dict(self.peak_lr)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.peak_lr = dict(state.get("peak_lr", {}))

    def step(self, context: StepContext, gradients: Gradients) -> Outcome:
        # also on a rank without layers, which may write the checkpoint
        self.peak_lr = peak_rates(context.groups, self.peak_lr)
        if not self.layers:
            none = torch.zeros(0, device=self.exchange.device, dtype=torch.float32)
            return Outcome((none.sum(),), none)
        ready = [prepared for group in self.layer_groups for prepared in group.prepared]
        rates = [
            [self.peak_lr[group] for group in self.parameter_groups[name]] for name in self.names
        ]
        # where a weight's and its bias' rates differ the sum is made of their parts
        split = any(not same(rate, of_layer[0]) for of_layer in rates for rate in of_layer)
        inputs: dict[str, Any] = {"damping": self.config.damping.at(context.step)}
        if self.config.preconditioner.eigenvalues == "corrected":
            inputs["terms"] = torch.cat([group.terms for group in self.layer_groups])
        if context.factor_is_zero is not None:
            inputs["factor_is_zero"] = context.factor_is_zero
        compute = partial(self._directions, ready, split)
        if self.recorded is None:
            dots, outcome = compute(StepTensors(gradients, self.exchange), **inputs)
        else:
            dots, outcome = self.recorded.step(compute, gradients, inputs, (tuple(ready), split))
        entries = [rate for of_layer in rates for rate in (of_layer if split else of_layer[:1])]
        outcome.numbers = (weighted_by_rates(dots, entries),)
        yes, no = (
            torch.full((), value, device=dots.device, dtype=torch.float32) for value in (1.0, 0.0)
        )
        outcome.flags = torch.stack([yes if on else no for on in ready])
        return outcome

    def _directions(
        self,
        ready: Sequence[bool],
        split: bool,
        tensors: StepTensors | RecordedTensors,
        damping: float | Tensor,
        terms: Tensor | None = None,
        factor_is_zero: Tensor | None = None,
    ) -> tuple[Tensor, Outcome]:
        """Every group's results, each put where it belongs as soon as it is there. Returns <V,
        gradient> of each layer, or of each of its parameters, 0 of a layer that has no eigenbasis;
        and counts.

        Args:
            ready: which layers have an eigenbasis or inverses.
            split: whether <V, gradient> is of each parameter.
            terms: see :meth:`CorrectedEigenvalues.divide_`.
            factor_is_zero: see :class:`StepContext`.
        """
        if factor_is_zero is not None:
            factor_is_zero = factor_is_zero.bool()  # fp32 where the step is recorded
        dots: list[Tensor] = []
        outcome = Outcome()
        first = 0
        for group in self.layer_groups:
            own = slice(first, first := first + len(group.layers))
            gradient, _ = tensors.take(group)
            on = group.flags(ready[own], gradient.device)
            V, dot = gradient, gradient.new_zeros(group.n)
            if any(ready[own]):
                terms_n = None if terms is None else repeated(terms[own], group.maps)
                V, dot, limited = self._precondition(
                    group, gradient, on, damping, terms_n, factor_is_zero
                )
                outcome.limited = outcome.limited + group.any_map(limited).sum()
            # without a mask
            finite = torch.linalg.vector_norm(V.flatten(1), ord=torch.inf, dim=1).isfinite()
            replaced = group.any_map(~finite)
            if factor_is_zero is not None:
                replaced = replaced | factor_is_zero
            outcome.replaced = outcome.replaced + replaced.sum()
            still = repeated(replaced, group.maps)  # all maps of a layer or none
            zero = still[:, None, None]
            V = V.masked_fill(zero, 0.0) if V is gradient else V.masked_fill_(zero, 0.0)
            dot = dot.masked_fill(still, 0.0)
            dots.append(self._dots(group, ready[own], V, gradient, dot, split))
            tensors.put(group, V)
            del V, gradient  # before those of the next group are there
        return torch.cat(dots), outcome

    def _precondition(
        self,
        group: LayerGroup,
        gradient: Tensor,
        on: Tensor | None,
        damping: float | Tensor,
        terms_n: Tensor | None,
        factor_is_zero: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """V of a group's matrices, of those that are not ``on`` the gradient; <V, gradient> [n], 0
        of those; and whether gradients were scaled down for the second moments, bool [n].

        Args:
            on: bool [n]; None: all are.
        """
        damped: dict[str, Any] = {"damping": damping, "damping_kind": self.config.damping.kind}
        limited = torch.zeros(group.n, dtype=torch.bool, device=gradient.device)
        if group.rotation is None:  # of a layer that is alone
            (of_layer,) = group.by_layer(gradient)
            V, dot = group.preconditioner(0).precondition(
                of_layer, damping=damping, precision=self.precision
            )
            V, dot = V.view_as(gradient), dot.view(-1)
        elif terms_n is not None:
            norm = norms(gradient.flatten(-2)).float()
            # a norm of NaN leaves moments as they are
            if on is not None:
                norm = norm.masked_fill(~on, torch.nan)
            if factor_is_zero is not None:
                norm = norm.masked_fill(factor_is_zero, torch.nan)
            if group.maps > 1:
                norm = norm.masked_fill(
                    repeated(group.any_map(~norm.isfinite()), group.maps), torch.nan
                )
            V, dot, limited = precondition_corrected(
                gradient,
                group.rotation,
                group.moments,
                norm_n=norm,
                terms_n=terms_n,
                decay=DECAY,
                **damped,
            )
        else:
            V, dot = precondition(gradient, group.rotation, **damped)
        if on is None:
            return V, dot, limited
        return torch.where(on[:, None, None], V, gradient), dot.masked_fill(~on, 0.0), limited

    def _dots(
        self,
        group: LayerGroup,
        ready: Sequence[bool],
        V: Tensor,
        gradient: Tensor,
        dot: Tensor,
        split: bool,
    ) -> Tensor:
        """<V, gradient> of each of the group's layers, by that of each matrix; or of each of their
        parameters."""
        if split:
            pairs = zip(
                group.layers, ready, group.by_layer(V), group.by_layer(gradient), strict=True
            )
            sums = [
                [
                    part.sum()
                    for part in self.exchange.parts(layer, x * y if on else torch.zeros_like(x))
                ]
                for layer, on, x, y in pairs
            ]
            # NaN is 0 times what is not finite, of a layer that stands still; infinity more than
            # fp32 holds
            dot = torch.stack(list(chain.from_iterable(sums))).nan_to_num(
                0.0, posinf=math.inf, neginf=-math.inf
            )
        elif group.maps > 1:
            dot = dot.view(-1, group.maps).sum(dim=1)
        return dot / group.layers[0].copies

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        kl_clip = self.config.preconditioner.kl_clip_at(context.step)
        if not kl_clip:
            self.metrics.nu = self.metrics.kl = None
            return None
        self.metrics.nu = nu = kl_clip_scale(totals[0], kl_clip=kl_clip)
        self.metrics.kl = torch.where(nu == 0, nu, nu.square() * totals[0] / 2)
        assert flags is not None  # the rule asks for them wherever kl-clip is on
        scales = torch.where(flags, nu, torch.ones_like(nu))
        return dict(zip((layer.name for layer in self.plan.layers), scales.unbind(), strict=True))


def same(one: Any, other: Any) -> bool:
    """Whether two rates are equal as far as the host knows: tensors are not read."""
    return one is other or (
        not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
    )


def weighted_by_rates(dots: Tensor, rates: Sequence[Any]) -> Tensor:
    """The sum of rate^2 dot."""
    if all(same(rate, rates[0]) for rate in rates):
        return dots.sum() * rates[0] ** 2
    of_rate: dict[Any, list[Tensor]] = {}
    for rate, dot in zip(rates, dots.unbind(), strict=True):  # a tensor is hashed by its identity
        of_rate.setdefault(rate, []).append(dot)
    sums = torch.stack([torch.stack(some).sum() * rate**2 for rate, some in of_rate.items()])
    # a rate of 0 leaves nothing of an infinite product
    return sums.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf).sum()


def peak_rates(groups: Sequence[Mapping[str, Any]], before: Mapping[int, Any]) -> dict[int, Any]:
    """Parameter group -> largest learning rate so far. With the current one in kl-clip's bound, nu
    * lr would not depend on it where the clip binds, which would undo a schedule's decay."""
    peaks = {}
    for index, group in enumerate(groups):
        # its scheduler changes a tensor
        rate = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
        peak = before.get(index, rate)
        if isinstance(peak, Tensor) or isinstance(rate, Tensor):
            device = next(x.device for x in (rate, peak) if isinstance(x, Tensor))
            options: Any = {"dtype": torch.float32, "device": device}
            peaks[index] = torch.maximum(
                torch.as_tensor(rate, **options), torch.as_tensor(peak, **options)
            )
        else:
            peaks[index] = max(rate, peak)
    return peaks


def precondition(
    gradient_nOI: Tensor,
    rotation: Rotation,
    *,
    damping: float | Tensor,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor]:
    """(F + lambda)^-1 applied to a gradient, without forming an inverse; F = Q diag(e) Q^T, e =
    beta alpha^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda) ] Q_A^T

    Linear in the gradient, so a loss scale passes through. Cost: 4 O I (O + I) FLOPs. Source:
    Grosse & Martens 2016 (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020
    (2007.00784).

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
    del rotated_nOI  # before there are two more of its size
    return rotation.restore(scaled_nOI, overwrite=True), dot_n


def precondition_corrected(
    gradient_nOI: Tensor,
    rotation: Rotation,
    corrected: CorrectedEigenvalues,
    *,
    norm_n: Tensor,
    terms_n: Tensor | float,
    decay: float,
    damping: float | Tensor,
    damping_kind: str = "tikhonov",
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`precondition` with the running second moment of the rotated gradient, this one
    included, as e.

    Args:
        norm_n: of the gradient.
        terms_n: loss terms, which bring a squared gradient to the Fisher's units.
        decay: of the second moment.

    Returns V, <V, gradient> [n], and whether the gradient was scaled down for the second moment,
    bool [n].
    """
    scaled_nOI, dot_n, limited_n = corrected.divide_(
        _rotated(rotation, gradient_nOI),
        norm_n=norm_n,
        terms_n=terms_n,
        decay=decay,
        damping=damping,
        layer_mean=rotation.layer_mean if damping_kind == "relative" else None,
    )
    return rotation.restore(scaled_nOI, overwrite=True), dot_n, limited_n


def _rotated(rotation: Rotation, gradient_nOI: Tensor) -> Tensor:
    """A large one whose rows no basis mixes in one copy."""
    by_rows = is_large(gradient_nOI) and not rotation.G
    return rotation.rotate(gradient_nOI.clone() if by_rows else gradient_nOI, overwrite=by_rows)


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """nu = min(1, sqrt(kl_clip / quadratic)): bounds the step's KL divergence (Ba et al. 2017, sec.
    3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>; 0 gives 1, and so does
            NaN. More than fp32 holds gives 0: no step is too small for it.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isnan(quadratic), torch.ones_like(nu), nu)


class KFACGradientRule(UpdateRule):
    """The K-FAC gradient in place of the raw one (KAISA), for any optimizer to step with."""

    facts = KFACGradientFacts()
    needs_basis = False
    blocks = ("damping", "preconditioner")
    numbers = 1

    def claims(self, optimizer: Any) -> bool:
        return True

    def direction(
        self, plan: Plan, exchange: GradientExchange, optimizer: Any, metrics: Metrics
    ) -> Direction:
        return KFACGradient(plan, exchange, self.moments(plan.config), metrics)

    def flags(self, config: KFACConfig) -> bool:
        # nu is of preconditioned layers only
        return config.preconditioner.kl_clip != Value.constant(0)

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        return CorrectedEigenvalues if config.preconditioner.eigenvalues == "corrected" else None
