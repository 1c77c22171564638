"""The K-FAC gradient as an update rule, for any optimizer to step with."""

from typing import Any

from ds_kfac.config.kfac import KFACConfig
from ds_kfac.curvature.forms import FACTOR_FORMS
from ds_kfac.directions.base import Direction, DirectionSetup, UpdateRule
from ds_kfac.directions.kfac_gradient import KFACGradient
from ds_kfac.directions.quadratic import QuadraticGradient
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.intervals import Value
from ds_kfac.update.state import CorrectedEigenvalues, LastUpdate, Moments


class KFACGradientRule(UpdateRule):
    """The K-FAC gradient in place of the raw one (KAISA), for any optimizer to step with."""

    name = "K-FAC gradient"
    blocks = ("damping", "preconditioner")
    kinds = (CorrectedEigenvalues, LastUpdate)
    clips = reads_rates = True

    def steps(self, optimizer: Any) -> bool:
        return True

    def direction(self, setup: DirectionSetup) -> Direction:
        kind = QuadraticGradient if setup.plan.config.preconditioner.step == "quadratic" else KFACGradient
        return kind(setup.plan, setup.layout, setup.exchange, setup.metrics)

    def described(self, plan: Plan, optimizer: str) -> str:
        config, form = plan.config, plan.form
        options, damping = config.preconditioner, config.damping
        clip = "off" if options.kl_clip == Value.constant(0) else f"{options.kl_clip} at the {plan.clip_lr} lr"
        damped = f"{damping.kind} damping {damping.value}"
        how = f"{options.eigenvalues} eigenvalues, {damped}"
        if options.step == "quadratic":
            return f"{damped}, rate and momentum of the quadratic model; then {optimizer}"
        if not form.rotates:
            how = f"{form.words} of both factors, {damped} of the last refresh, split by pi"
        return f"{how}, graft {options.graft}, kl-clip {clip}; then {optimizer}"

    def check(self, config: KFACConfig) -> None:
        if FACTOR_FORMS[config.preconditioner.method].whitens:
            raise ValueError(
                f'kfac.preconditioner.method "{config.preconditioner.method}" is for the optimizer KFACAdamW; use '
                '"inverse" or "eigen"'
            )

    def by_rows(self, config: KFACConfig, layer: LayerSpec) -> bool:
        return False  # a graft is of a layer's norm

    def needs_norm(self, clips: bool) -> bool:
        return clips  # raw gradients are clipped: the norm of preconditioned ones says nothing of a spike

    def moments(self, config: KFACConfig) -> type[Moments] | None:
        if config.preconditioner.step == "quadratic":
            return LastUpdate
        return CorrectedEigenvalues if config.preconditioner.eigenvalues == "corrected" else None
