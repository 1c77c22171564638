"""Descriptions and costs of the K-FAC gradient, for the report and the estimate."""

from collections.abc import Sequence

from ds_kfac.directions.facts import RuleFacts, stepped_by_rows
from ds_kfac.directions.step_tensors import kept_bytes
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.update.groups import in_order


class KFACGradientFacts(RuleFacts):
    def described(self, plan: Plan, optimizer: str, ratio: float = 1.0) -> str:
        method = plan.method
        options = plan.config.preconditioner
        damping = plan.config.damping
        clip = f"{options.kl_clip} at the largest lr so far"
        if options.kl_clip == Value.constant(0):
            clip = "off"
        damped = f"{damping.kind} damping {damping.value}"
        how = f"{options.eigenvalues} eigenvalues, {damped}"
        if not method.rotates:
            how = f"{method.words} of both factors, {damped} of the last refresh, split by pi"
        return f"{how}, kl-clip {clip}; then {optimizer}"

    def kept(self, plan: Plan, layers: Sequence[LayerSpec], device: str) -> int:
        return kept_bytes(plan, layers, device)

    def workspace(
        self, plan: Plan, groups: Sequence[Sequence[LayerSpec]]
    ) -> list[tuple[Sequence[LayerSpec], int]]:
        corrected = _corrected(plan)

        def copies(group: Sequence[LayerSpec]) -> int:
            """Return the number of fp32 tensors of the gradient's size that are in memory at the
            same time."""
            if corrected and stepped_by_rows(group):
                return 2  # the gradient, and its copy that is rotated in place
            if corrected:
                return 5  # gradient, rotated gradient, quotient, second moment, its increment
            return 4  # gradient, gradient with one side rotated, rotated gradient, eigenvalues

        return [
            (group, 4 * copies(group) * sum(layer.numel for layer in group))
            for group in in_order(groups)
        ]


def _corrected(plan: Plan) -> bool:
    return plan.config.preconditioner.eigenvalues == "corrected"
