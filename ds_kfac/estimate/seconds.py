"""FLOPs and predicted seconds of a plan's steps, stage by stage. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_kfac.adam_choice import keeps_direction
from ds_kfac.config import KFACConfig
from ds_kfac.costs import CostModel, capture_flops, decompose_flops, precondition_flops
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.period import Happening, settled_period
from ds_kfac.estimate.traffic import PlannedTraffic, StepTraffic
from ds_kfac.factor_spec import FactorSpec
from ds_kfac.layers.base import LayerSpec
from ds_kfac.planning import Plan

STAGES = ("capture", "reduce", "refresh", "relayout", "precondition")
NEWTON_SCHULZ_STEPS = 5
REDUCED = ("factors",)
MOVED = ("gradients", "eigenvectors", "eigenvalues", "inverses", "results", "numbers")

Stages = Mapping[str, float]
"""Stage -> seconds of its slowest rank. Stages follow each other, with a collective between any two, so the sum is the
step's."""


def orthogonalize_flops(layer: LayerSpec) -> int:
    """Newton-Schulz, see ``orthogonal.py``."""
    short, long = sorted((layer.dim_G, layer.dim_A))
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


@dataclass(frozen=True)
class Workload:
    """What ranks compute.

    Attributes:
        rows: tokens (or images) of a rank in a step; None: not known, captures are left out.
        unit_rows: module name -> rows of one token (or image), 1 for those that are not in it.
        adam: whether directions are KFACAdamW's.
    """

    plan: Plan
    config: KFACConfig
    machine: Machine
    rows: int | None
    unit_rows: Mapping[str, float]
    adam: bool

    @property
    def costs(self) -> CostModel:
        return self.machine.costs

    @cached_property
    def capture_flops(self) -> Mapping[str, int]:
        """Factor key -> on every rank alike, per capture."""
        leaders = {layer.name: layer for layer in self.plan.layers}
        return {factor.key: self._capture(factor, leaders[factor.layers[0]]) for factor in self.plan.assignment.factors}

    @cached_property
    def decompose_flops(self) -> np.ndarray:
        """[W], refreshing everything."""
        total = np.zeros(self.plan.assignment.world)
        for factor in self.plan.assignment.factors:
            total[self.plan.assignment.decomposers[factor.key]] += decompose_flops(factor.side, self.plan.method)
        return total

    @cached_property
    def precondition_flops(self) -> np.ndarray:
        """[W], per step; with Newton-Schulz where directions are orthogonalized."""
        total = np.zeros(self.plan.assignment.world)
        for layer in self.plan.layers:
            ranks = list(self.plan.assignment.workers[layer.name])
            total[ranks] += precondition_flops(layer, self.plan.method) + self._orthogonalize(layer)
        return total

    def seconds(self, happening: Happening, traffic: PlannedTraffic) -> Stages:
        """Of one step, its decompositions done in it."""
        plan, costs = self.plan, self.costs
        step = traffic.step(happening.captured, happening.arriving)
        fold, refresh = (np.zeros(plan.assignment.world) for _ in range(2))
        for factor in plan.assignment.factors:
            home = plan.assignment.decomposers[factor.key]
            fold[home] += costs.fold(factor.side) if factor.key in happening.captured else 0.0
            if factor.key in happening.decomposed:
                refresh[home] += costs.decompose(factor.side, plan.method, exact=happening.exact)
        reduce, relayout = (self._travel(step, kinds) for kinds in (REDUCED, MOVED))
        return {
            "capture": sum(self.capture_flops[key] for key in happening.captured) / costs.syrk_flops,
            "reduce": float((reduce + fold).max()),
            "refresh": float(refresh.max()),
            "relayout": float(relayout.max()),
            "precondition": float(self._precondition.max()),
        }

    def _travel(self, step: StepTraffic, kinds: Sequence[str]) -> np.ndarray:
        payload = np.sum([step.payload[kind] for kind in kinds], axis=0)
        return self.machine.travel(payload, sum(step.calls[kind] for kind in kinds))

    def over_a_period(self, traffic: PlannedTraffic) -> Sequence[Stages]:
        """Of every step. Decompositions that take effect later are spread over the steps they may take."""
        steps = settled_period(self.plan)
        known: dict[Happening, Stages] = {}
        for step in steps:
            if step not in known:
                known[step] = self.seconds(step, traffic)
        found = [dict(known[step]) for step in steps]
        lag = min(self.plan.lag, len(steps) - 1)
        if lag > 1:
            refresh = [stages["refresh"] for stages in found]
            for index, stages in enumerate(found):
                stages["refresh"] = sum(refresh[index - back] for back in range(lag)) / lag
        return found

    @cached_property
    def _precondition(self) -> np.ndarray:
        seconds = np.zeros(self.plan.assignment.world)
        for layer in self.plan.layers:
            more = self.costs.precondition(layer, self.plan.method) + self.costs.gemm(self._orthogonalize(layer))
            seconds[list(self.plan.assignment.workers[layer.name])] += more
        return seconds

    def _orthogonalize(self, layer: LayerSpec) -> int:
        return orthogonalize_flops(layer) if self.adam and keeps_direction(self.config.adam, layer) is None else 0

    def _capture(self, factor: FactorSpec, layer: LayerSpec) -> int:
        total = 0
        for use in layer.uses:
            if use.kind == "Embedding" and factor.is_A:  # counts, no products
                continue
            rows = round((self.rows or 0) * self.unit_rows.get(use.module, 1))
            if self.config.factor.sample_rows is not None:
                rows = min(rows, self.config.factor.sample_rows)
            total += capture_flops(use.A if factor.is_A else use.G, rows)
        return total
