"""The update rule that replaces gradients by K-FAC gradients, as in KAISA. Any optimizer can use
them.

Each gradient is rotated into the eigenbasis, divided by the damped eigenvalues, rotated back, and
scaled by kl-clip:

    V = Q_G [(Q_G^T dW Q_A) / (e + lambda)] Q_A^T,   e = beta alpha^T, or EKFAC's second moment
    dW <- nu V,   nu = min(1, sqrt(kl_clip / (lr^2 sum <V, dW>)))

Here beta and alpha are the eigenvalues of G and A, and lambda is the damping.

Shape suffixes: O and I are a layer's sides. nOI stands for [n, O, I], the matrices of the layers of
a group.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
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
"""Largest weight that the old average has in an update of the corrected eigenvalues."""


class KFACGradient(Direction):
    """Computes V = (F + damping)^-1 gradient, scaled by kl-clip.

    Vectors with one entry for each layer are in the order of ``layers``.

    Attributes:
        peak_lr: dict from the index of a parameter group to the group's largest learning rate so
            far, which kl-clip uses.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: GradientExchange,
        moments: type[Moments] | None,
        metrics: Metrics,
    ) -> None:
        super().__init__(plan, exchange, moments)
        self.plan = plan
        self.metrics = metrics
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
        # Update peak_lr even if this rank has no layers, because it may write the checkpoint.
        self.peak_lr = peak_rates(context.groups, self.peak_lr)
        if not self.layers:
            none = torch.zeros(0, device=self.exchange.device, dtype=torch.float32)
            return Outcome((none.sum(),), none)
        ready = [prepared for group in self.layer_groups for prepared in group.prepared]
        rates = [
            [self.peak_lr[group] for group in self.parameter_groups[name]] for name in self.names
        ]
        # kl-clip multiplies <V, gradient> by the squared learning rate. If a weight and its bias
        # have different learning rates, each needs a product of its own.
        split = any(not same(rate, of_layer[0]) for of_layer in rates for rate in of_layer)
        inputs: dict[str, Any] = {"damping": self.config.damping.at(context.step)}
        if self.config.preconditioner.eigenvalues == "corrected":
            inputs["terms"] = torch.cat([group.terms for group in self.layer_groups])
        inputs["factor_is_zero"] = context.factor_is_zero
        compute = partial(self._directions, ready, split)
        if self.recorded is None:
            dots, outcome = compute(StepTensors(gradients, self.exchange), **inputs)
        else:
            dots, outcome = self.recorded.step(compute, gradients, inputs, (tuple(ready), split))
        rates_of_dots = [
            rate for of_layer in rates for rate in (of_layer if split else of_layer[:1])
        ]
        outcome.numbers = (weighted_by_rates(dots, rates_of_dots),)
        # stacked from scalars on the device, because copying a list from the host would wait for
        # the device
        yes = torch.full((), 1.0, device=dots.device, dtype=torch.float32)
        no = torch.full((), 0.0, device=dots.device, dtype=torch.float32)
        outcome.flags = torch.stack([yes if is_ready else no for is_ready in ready])
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
        """Compute the results of every group, and pass them to the exchange group by group.

        Args:
            ready: for each layer of this rank, whether it has an eigenbasis or inverses.
            split: whether to return <V, gradient> for each parameter instead of each layer.
            damping: damping of the step.
            terms: fp32 [layers], see :meth:`CorrectedEigenvalues.divide_`; None without corrected
                eigenvalues.
            factor_is_zero: see :class:`StepContext`.

        Returns two values: <V, gradient>, fp32 [layers] or [parameters], which is 0 for a layer
        that is not ready; and an :class:`Outcome` with the counts.
        """
        if factor_is_zero is not None:
            factor_is_zero = factor_is_zero.bool()  # in a recorded step the flag is fp32
        dots: list[Tensor] = []
        outcome = Outcome()
        first = 0
        for group in self.layer_groups:
            layers = slice(first, first + len(group.layers))
            first = layers.stop
            gradient, _ = tensors.take(group)
            ready_n = group.flags(ready[layers], gradient.device)
            V = gradient
            dot = gradient.new_zeros(group.n)
            if any(ready[layers]):
                terms_n = None if terms is None else repeated(terms[layers], group.maps)
                V, dot, limited = self._precondition(
                    group, gradient, ready_n, damping, terms_n, factor_is_zero
                )
                outcome.limited = outcome.limited + group.any_map(limited).sum()
            # the largest entry is tested, because isfinite() would need a mask of the matrix's size
            finite = torch.linalg.vector_norm(V.flatten(1), ord=torch.inf, dim=1).isfinite()
            replaced = group.any_map(~finite)
            if factor_is_zero is not None:
                replaced = replaced | factor_is_zero
            outcome.replaced = outcome.replaced + replaced.sum()
            # if one map of a layer is not finite, all maps of this layer stand still
            still_n = repeated(replaced, group.maps)
            still_n11 = still_n[:, None, None]
            # the gradient may be DeepSpeed's own memory, which must not change
            V = V.masked_fill(still_n11, 0.0) if V is gradient else V.masked_fill_(still_n11, 0.0)
            dot = dot.masked_fill(still_n, 0.0)
            dots.append(self._dots(group, ready[layers], V, gradient, dot, split))
            tensors.put(group, V)
            del V, gradient  # frees their memory before the next group needs it
        return torch.cat(dots), outcome

    def _precondition(
        self,
        group: LayerGroup,
        gradient: Tensor,
        ready_n: Tensor | None,
        damping: float | Tensor,
        terms_n: Tensor | None,
        factor_is_zero: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Precondition the gradients of a group's matrices.

        Args:
            gradient: fp32 [n, O, I].
            ready_n: bool [n], True for each matrix with an eigenbasis or inverses. The V of any
                other matrix is its gradient. None: all matrices have an eigenbasis or inverses.
            terms_n: fp32 [n], number of loss terms of each matrix's layer; None without corrected
                eigenvalues.

        Returns three values: V [n, O, I]; <V, gradient> [n], which is 0 for a matrix that is not
        ready; and bool [n], whether a gradient was scaled down before it entered the second
        moments.
        """
        damped: dict[str, Any] = {"damping": damping, "damping_kind": self.config.damping.kind}
        limited = torch.zeros(group.n, dtype=torch.bool, device=gradient.device)
        if group.rotation is None:  # the group is a single layer with inverses
            (of_layer,) = group.by_layer(gradient)
            V, dot = group.preconditioner(0).precondition(
                of_layer, damping=damping, precision=self.precision
            )
            V = V.view_as(gradient)
            dot = dot.view(-1)
        elif terms_n is not None:
            norm = norms(gradient.flatten(-2)).float()
            # a norm of NaN leaves the second moments as they are
            if ready_n is not None:
                norm = norm.masked_fill(~ready_n, torch.nan)
            if factor_is_zero is not None:
                norm = norm.masked_fill(factor_is_zero, torch.nan)
            if group.maps > 1:
                unusable = group.any_map(~norm.isfinite())
                norm = norm.masked_fill(repeated(unusable, group.maps), torch.nan)
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
        if ready_n is None:
            return V, dot, limited
        V = torch.where(ready_n[:, None, None], V, gradient)
        return V, dot.masked_fill(~ready_n, 0.0), limited

    def _dots(
        self,
        group: LayerGroup,
        ready: Sequence[bool],
        V: Tensor,
        gradient: Tensor,
        dot: Tensor,
        split: bool,
    ) -> Tensor:
        """Return <V, gradient> for each of the group's layers, or for each parameter of these
        layers.

        Args:
            ready: for each of the group's layers, whether it has an eigenbasis or inverses.
            V, gradient: fp32 [n, O, I].
            dot: fp32 [n], <V, gradient> of each matrix.
            split: whether to return a product for each parameter.
        """
        if split:
            sums: list[Tensor] = []
            of_layers = zip(
                group.layers, ready, group.by_layer(V), group.by_layer(gradient), strict=True
            )
            for layer, is_ready, x, y in of_layers:
                product = x * y if is_ready else torch.zeros_like(x)
                sums += [part.sum() for part in self.exchange.parts(layer, product)]
            # If a layer's result was replaced by 0, its product may be 0 times infinity. This is
            # NaN, which counts as 0. A sum that fp32 cannot hold is infinite, and stays infinite.
            dot = torch.stack(sums).nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
        elif group.maps > 1:
            dot = dot.view(-1, group.maps).sum(dim=1)
        # Every rank that has a copy of the layer adds its number. Because of this division the sum
        # over ranks counts the layer once.
        return dot / group.layers[0].copies

    def finish(
        self, context: StepContext, outcome: Outcome, totals: Sequence[Tensor], flags: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        kl_clip = self.config.preconditioner.kl_clip_at(context.step)
        if not kl_clip:
            self.metrics.nu = self.metrics.kl = None
            return None
        nu = kl_clip_scale(totals[0], kl_clip=kl_clip)
        self.metrics.nu = nu
        self.metrics.kl = torch.where(nu == 0, nu, nu.square() * totals[0] / 2)
        assert flags is not None  # the rule asks for flags if kl-clip is on
        scales = torch.where(flags, nu, torch.ones_like(nu))
        names = [layer.name for layer in self.plan.layers]
        return dict(zip(names, scales.unbind(), strict=True))


def same(one: Any, other: Any) -> bool:
    """Whether two learning rates are certainly equal. Two different tensors count as unequal,
    because comparing their values would wait for the device."""
    if one is other:
        return True
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def weighted_by_rates(dots: Tensor, rates: Sequence[Any]) -> Tensor:
    """Return the sum of rate^2 dot, an fp32 scalar.

    Args:
        dots: fp32, products <V, gradient>.
        rates: learning rate of each product, a number or a tensor.
    """
    if all(same(rate, rates[0]) for rate in rates):
        return dots.sum() * rates[0] ** 2
    dots_by_rate: dict[Any, list[Tensor]] = {}
    for rate, dot in zip(rates, dots.unbind(), strict=True):  # tensors are hashed by identity
        dots_by_rate.setdefault(rate, []).append(dot)
    sums = torch.stack(
        [torch.stack(with_rate).sum() * rate**2 for rate, with_rate in dots_by_rate.items()]
    )
    # a learning rate of 0 times an infinite product is NaN, which counts as 0
    return sums.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf).sum()


def peak_rates(groups: Sequence[Mapping[str, Any]], before: Mapping[int, Any]) -> dict[int, Any]:
    """Return a dict from the index of a parameter group to the group's largest learning rate so
    far.

    kl-clip uses these largest learning rates instead of the current ones. With the current learning
    rates, nu * lr would not depend on lr as long as nu is below 1. This would undo a schedule's
    decay.

    Args:
        groups: the optimizer's parameter groups.
        before: result of this function in the previous step.
    """
    peaks: dict[int, Any] = {}
    for index, group in enumerate(groups):
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate = rate.clone()  # a scheduler changes the tensor in place
        peak = before.get(index, rate)
        tensors = [x for x in (rate, peak) if isinstance(x, Tensor)]
        if tensors:
            options: Any = {"dtype": torch.float32, "device": tensors[0].device}
            rate = torch.as_tensor(rate, **options)
            peak = torch.as_tensor(peak, **options)
            peaks[index] = torch.maximum(rate, peak)
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
    """Apply (F + lambda)^-1 to gradients, where F = Q diag(e) Q^T and e = beta alpha^T.

        V = Q_G [ (Q_G^T gradient Q_A) / (e + lambda) ] Q_A^T

    No inverse is computed. The result is linear in the gradient: if the gradients are multiplied by
    a loss scale, so is the result. Cost: 4 O I (O + I) FLOPs. Source: Grosse & Martens 2016
    (arXiv:1602.01407) app. A; inverse-free as in Pauloski et al. 2020 (2007.00784).

    Args:
        gradient_nOI: fp32 [n, O, I]. If the layer has a bias, the last column is the bias's
            gradient.
        rotation: the eigenbases of the n matrices.
        damping_kind: "tikhonov": ``damping`` is lambda, in units of the Fisher. "relative": lambda
            is ``damping`` times the layer's mean eigenvalue.

    Returns V [n, O, I], and <V, gradient> [n]. The inner product is computed in the eigenbasis,
    where it has the same value.
    """
    beta_nO = rotation.values_G
    alpha_nI = rotation.values_A
    e_nOI = beta_nO[:, :, None] * alpha_nI[:, None, :]
    if damping_kind == "tikhonov":
        e_nOI += damping
    else:
        mean_n = rotation.layer_mean(beta_nO.mean(-1)) * rotation.layer_mean(alpha_nI.mean(-1))
        e_nOI += damping * mean_n[:, None, None]
    rotated_nOI = _rotated(rotation, gradient_nOI)
    scaled_nOI = torch.div(rotated_nOI, e_nOI, out=e_nOI)
    dot_n = (rotated_nOI * scaled_nOI).sum(dim=(-2, -1))
    del rotated_nOI  # rotating back needs two more matrices of its size
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
    """Precondition gradients as in :func:`precondition`, but e is the running second moment of the
    rotated gradient. Before it is used, this moment is updated with the new gradient.

    Args:
        norm_n: fp32 [n], norms of the gradients.
        terms_n: number of loss terms, one number or fp32 [n]. A squared gradient times this number
            is in units of the Fisher.
        decay: largest weight that the old average has in an update of the second moment.

    Returns three values: V [n, O, I]; <V, gradient> [n]; and bool [n], whether a gradient was
    scaled down before it entered the second moment.
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
    """Return the rotated gradient in new memory. If rotation does not mix the rows of a large
    matrix, the matrix is copied once and rotated in place, because rotating it out of place would
    need two more matrices of its size."""
    by_rows = is_large(gradient_nOI) and not rotation.G
    return rotation.rotate(gradient_nOI.clone() if by_rows else gradient_nOI, overwrite=by_rows)


def kl_clip_scale(quadratic: Tensor, *, kl_clip: float) -> Tensor:
    """Return kl-clip's factor nu = min(1, sqrt(kl_clip / quadratic)), which bounds the step's KL
    divergence (Ba et al. 2017, sec. 3).

    Args:
        quadratic: fp32 scalar, the sum over layers of lr^2 <V, gradient>. If it is 0 or NaN, nu is
            1. If fp32 cannot hold the sum, it is infinite, and nu is 0.
    """
    nu = torch.sqrt(kl_clip / quadratic.abs()).clamp(max=1.0)
    return torch.where(torch.isnan(quadratic), torch.ones_like(nu), nu)


class KFACGradientRule(UpdateRule):
    """Replaces gradients by K-FAC gradients (KAISA), which any optimizer can use."""

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
        # nu scales only preconditioned layers, so every rank must know which layers are
        # preconditioned
        return config.preconditioner.kl_clip != Value.constant(0)

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        return CorrectedEigenvalues if config.preconditioner.eigenvalues == "corrected" else None
