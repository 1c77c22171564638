"""FLOPs and predicted seconds of a plan's steps, stage by stage. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_kfac.assignment.costs import CostModel, capture_flops, decompose_flops, mean_width, precondition_flops
from ds_kfac.assignment.work import FactorSpec, rows_from
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.period import Happening, settled_period
from ds_kfac.estimate.trace import Trace
from ds_kfac.estimate.traffic import KINDS, PlannedTraffic, StepTraffic
from ds_kfac.model.convolutions import Convolution, grid_step
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import RowRule
from ds_kfac.plan.plan import Plan

STAGES = ("capture", "reduce", "refresh", "relayout", "precondition")
REDUCED = ("factors",)
MOVED = tuple(kind for kind in KINDS if kind not in REDUCED)

HIDDEN = 0.5
"""Of decompositions that have steps to be done in: assumed to run where the model leaves a GPU idle; none on a CPU."""

Stages = Mapping[str, float]
"""Stage -> seconds of its slowest rank, and under "hidden" what the model covers of them, negative. Stages follow each
other, with a collective between any two, so the sum is the step's."""


@dataclass(frozen=True)
class Workload:
    """What ranks compute.

    Attributes:
        rows: tokens (or images) of a rank in a step; None: not known, captures are left out.
        trace: what rows one token (or image) has.
        rule: how the optimizer steps.
    """

    plan: Plan
    config: KFACConfig
    machine: Machine
    rows: int | None
    trace: Trace
    rule: UpdateRule

    @property
    def costs(self) -> CostModel:
        return self.machine.costs

    @cached_property
    def capture_flops(self) -> Mapping[str, int]:
        """Factor key -> on each contributor, per capture."""
        layers = {layer.name: layer for layer in self.plan.layers}
        return {
            factor.key: self._capture(factor, layers[factor.layers[0]], len(rows_from(factor, layers)))
            for factor in self.plan.assignment.factors
        }

    @cached_property
    def captures(self) -> np.ndarray:
        """[W], FLOPs of capturing everything once."""
        return self._captured(self.capture_flops.keys())

    def _captured(self, keys: Collection[str]) -> np.ndarray:
        """[W], FLOPs of capturing some factors."""
        total = np.zeros(self.plan.assignment.world)
        for key in keys:
            total[self._contributors[key]] += self.capture_flops[key]
        return total

    @cached_property
    def decompose_flops(self) -> np.ndarray:
        """[W], refreshing everything."""
        total = np.zeros(self.plan.assignment.world)
        for factor in self.plan.assignment.factors:
            total[self.plan.assignment.decomposers[factor.key]] += decompose_flops(factor.side, self.plan.method)
        return total

    @cached_property
    def precondition_flops(self) -> np.ndarray:
        """[W], per step; with what the update rule adds."""
        total = np.zeros(self.plan.assignment.world)
        for layer in self.plan.layers:
            ranks = list(self.plan.assignment.workers[layer.name])
            total[ranks] += precondition_flops(layer, self.plan.method) + self.rule.flops(self.config, layer)
        return total

    def seconds(self, happening: Happening, traffic: PlannedTraffic) -> Stages:
        """Of one step, its decompositions done in it."""
        plan, costs = self.plan, self.costs
        step = traffic.step(happening.captured, happening.arriving)
        fold, refresh = (np.zeros(plan.assignment.world) for _ in range(2))
        for factor in self._in_order(happening.captured):
            fold[plan.assignment.decomposers[factor.key]] += costs.fold(factor.side)
        for factor in self._in_order(happening.decomposed):
            seconds = costs.decompose(factor.side, plan.method)
            refresh[plan.assignment.decomposers[factor.key]] += seconds
        reduce, relayout = (self._travel(step, kinds) for kinds in (REDUCED, MOVED))
        relayout = relayout + self._copies
        return {
            "capture": float(self._captured(happening.captured).max()) / costs.syrk_flops,
            "reduce": float((reduce + fold).max()),
            "refresh": float(refresh.max()),
            "relayout": float(relayout.max()),
            "precondition": float(self._precondition.max()),
            "hidden": 0.0,
        }

    def _travel(self, step: StepTraffic, kinds: Sequence[str]) -> np.ndarray:
        payload = np.sum([step.payload[kind] for kind in kinds], axis=0)
        return self.machine.travel(payload, sum(step.calls[kind] for kind in kinds))

    def _in_order(self, keys: Collection[str]) -> list[FactorSpec]:
        """Some factors, in the order of the plan: sums of seconds do not depend on that of a set."""
        return [self._factors[place] for place in sorted(self._places[key] for key in keys)]

    @cached_property
    def _factors(self) -> Sequence[FactorSpec]:
        return self.plan.assignment.factors

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {factor.key: place for place, factor in enumerate(self._factors)}

    @cached_property
    def _contributors(self) -> Mapping[str, list[int]]:
        """Factor key -> ranks that capture it; one update is like another."""
        who, decomposers = self.plan.contributors, self.plan.assignment.decomposers
        return {factor.key: list(who.of(factor.key, decomposers[factor.key], 0)) for factor in self._factors}

    def over_a_period(self, traffic: PlannedTraffic, offsets: Mapping[str, int]) -> Sequence[Stages]:
        """Of every step, with refreshes displaced so. Decompositions that take effect later are spread over the steps
        they may take."""
        steps = settled_period(replace(self.plan, offsets=offsets))
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
                stages["hidden"] -= HIDDEN * stages["refresh"] * self.costs.beside
        return found

    @cached_property
    def _precondition(self) -> np.ndarray:
        seconds = np.zeros(self.plan.assignment.world)
        for layer in self.plan.layers:
            precision, flops = self.config.preconditioner.precision, self.rule.flops(self.config, layer)
            more = self.machine.orthogonal(flops, mean_width(layer), precision)
            more += self.costs.precondition(layer, self.plan.method)
            more += self.costs.elementwise(4 * self.rule.passes * layer.numel)
            seconds[list(self.plan.assignment.workers[layer.name])] += more
        return seconds

    @cached_property
    def _copies(self) -> np.ndarray:
        """[W], seconds of taking gradients together and of putting results in their place, a copy each."""
        numel = np.zeros(self.plan.assignment.world)
        for layer in self.plan.layers:
            numel[list(self.plan.assignment.workers[layer.name])] += layer.numel
        return numel * (4 * 4 / self.costs.copy_bytes)

    def _capture(self, factor: FactorSpec, layer: LayerSpec, members: int) -> int:
        """``members``: layers of a stack whose rows these are."""
        rows = round((self.rows or 0) * self.trace.rows_of(layer) * members)
        if isinstance(LAYERS[layer.kind], Convolution):
            factor_config, dims = self.config.factor, int(layer.kind[-2])
            rule = RowRule(sample=factor_config.sample_rows, positions=factor_config.sample_positions)
            rows //= grid_step(rule, rows, dims, max(layer.shape[-2:])) ** dims
        elif self.config.factor.sample_rows is not None:
            rows = min(rows, self.config.factor.sample_rows)
        return capture_flops(factor.side, rows)
