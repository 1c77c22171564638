"""An estimate of every strategy that a run could choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_kfac.config import KFACConfig
from ds_kfac.costs import CostModel
from ds_kfac.estimate.memory import memory_of, state_bytes
from ds_kfac.estimate.mode import Mode
from ds_kfac.estimate.period import settled_period
from ds_kfac.estimate.seconds import Stages, Workload
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.traffic import PlannedTraffic, StepTraffic, mean_traffic
from ds_kfac.grid import worker_counts
from ds_kfac.planning import Plan
from ds_kfac.strategy import Setting, make_plan
from ds_kfac.zero.exchange import parameter_names
from ds_kfac.zero.shard_plan import planned_shards
from ds_kfac.zero.shards import ShardMap

MOMENTS: Mapping[str | None, int] = {"adam": 2, "corrected": 1, None: 0}
"""fp32 tensors of a gradient's shape that a gradient worker keeps, by kind."""


@dataclass(frozen=True)
class Timing:
    """Seconds of K-FAC's work over a period; ``stages`` of its mean step."""

    stages: Stages
    worst: float

    @property
    def mean(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class Estimate:
    """Of one strategy.

    Attributes:
        memory: kind -> bytes [W].
        plain, update, refresh: a step that only preconditions, one that also captures every factor, and one that also
            has every eigenbasis anew.
        mean: over a period of the settled intervals, as planned.
        work: FLOPs.
        at_once, spread: without and with refreshes spread over their interval.
        model: seconds of the model's forward and backward; None if the tokens of a rank are not known.
    """

    name: str
    plan: Plan
    memory: Mapping[str, np.ndarray]
    plain: StepTraffic
    update: StepTraffic
    refresh: StepTraffic
    mean: StepTraffic
    work: Workload
    at_once: Timing
    spread: Timing
    model: float | None

    @property
    def state(self) -> np.ndarray:
        """Bytes [W] that are kept between steps."""
        return state_bytes(self.memory)

    @property
    def timing(self) -> Timing:
        """As planned."""
        return self.spread if self.plan.offsets else self.at_once

    @property
    def overhead(self) -> float | None:
        """K-FAC's mean seconds over the model's."""
        return self.timing.mean / self.model if self.model else None


def shards_of(subject: Subject, mode: Mode, world: int) -> ShardMap:
    """Where the gradients of a subject's layers will be."""
    return planned_shards(
        parameter_names(subject.layers),
        subject.groups,
        world=world,
        stage=mode.stage,
        replicated=mode.replicated,
        round_robin=mode.round_robin,
    )


def planned(subject: Subject, mode: Mode, config: KFACConfig, *, world: int, costs: CostModel) -> Plan:
    """The plan that a run would make, once it has found the layers that share their inputs.

    Raises:
        ValueError: the fraction does not fit the world or the mode, or the memory budget is too small.
    """
    held = None
    if not mode.replicated:
        shards, index = shards_of(subject, mode, world), 0
        held = {}
        for layer in subject.layers:
            held[layer.name] = shards.held(range(index, index + len(layer.parameters)))
            index += len(layer.parameters)
    setting = Setting(world, held, mode.parameters, mode.gradients, MOMENTS[moments_kind(mode, config)])
    plan = make_plan(subject.layers, setting, config, costs)
    return plan.sharing(subject.shared) if plan.shares and subject.shared else plan


def moments_kind(mode: Mode, config: KFACConfig) -> str | None:
    """Kind of moments that gradient workers keep."""
    if mode.adam:
        return "adam"
    return "corrected" if config.preconditioner.eigenvalues == "corrected" else None


def planned_traffic(subject: Subject, mode: Mode, config: KFACConfig, plan: Plan) -> PlannedTraffic:
    return PlannedTraffic(
        plan,
        shards_of(subject, mode, plan.assignment.world),
        numbers=2 if mode.adam else 1,
        norm=mode.adam and mode.clips and not mode.replicated,
        terms=config.preconditioner.eigenvalues == "corrected",
        overlap=config.communication.overlap,
    )


def estimate(
    subject: Subject,
    mode: Mode,
    config: KFACConfig,
    *,
    world: int,
    costs: CostModel,
    rows: int | None = None,
    name: str = "",
) -> Estimate:
    """Of the plan that a run would make.

    Args:
        rows: tokens (or images) of a rank in a step.

    Raises:
        ValueError: there is no such plan.
    """
    plan = planned(subject, mode, config, world=world, costs=costs)
    traffic = planned_traffic(subject, mode, config, plan)
    work = Workload(plan, config, costs, rows, subject.trace.rows, mode.adam)
    counted: dict[tuple, int] = {}
    for step in settled_period(plan):
        counted[step.captured, step.arriving] = counted.get((step.captured, step.arriving), 0) + 1
    spread = planned(subject, mode, _staggered(config), world=world, costs=costs).offsets
    every, none = traffic.every, frozenset[str]()
    return Estimate(
        name=name or strategy_name(plan, mode),
        plan=plan,
        memory=memory_of(traffic, config, moments=MOMENTS[moments_kind(mode, config)]),
        plain=traffic.step(none, none),
        update=traffic.step(every, none),
        refresh=traffic.step(every, every),
        mean=mean_traffic([(traffic.step(*what), times) for what, times in counted.items()]),
        work=work,
        at_once=_timing(replace(work, plan=replace(plan, offsets={})), traffic),
        spread=_timing(replace(work, plan=replace(plan, offsets=spread)), traffic),
        model=6.0 * subject.forward * rows / costs.gemm_flops if rows else None,
    )


def estimates(
    subject: Subject, mode: Mode, config: KFACConfig, *, world: int, costs: CostModel, rows: int | None = None
) -> list[Estimate]:
    """Of every strategy: all gradient-worker fractions where gradients are replicated, else the owner scheme. Memory
    budgets are left to the reader."""
    found = []
    for workers in worker_counts(world) if mode.replicated else (1,):
        pinned = {"gradient_worker_fraction": workers / world, "memory_budget_gb": None}
        forced = config.model_copy(update={"assignment": config.assignment.model_copy(update=pinned)})
        found.append(estimate(subject, mode, forced, world=world, costs=costs, rows=rows))
    return found


def strategy_name(plan: Plan, mode: Mode) -> str:
    """KAISA's names."""
    workers, world = plan.workers, plan.assignment.world
    if not mode.replicated:
        return f"ZeRO-{mode.stage} owners"
    if world == 1:
        return "one rank"
    return {1: "MEM-OPT", world: "COMM-OPT"}.get(workers, f"HYBRID-OPT {workers}/{world}")


def _staggered(config: KFACConfig) -> KFACConfig:
    return config.model_copy(update={"eigenbasis": config.eigenbasis.model_copy(update={"stagger": True})})


def _timing(work: Workload, traffic: PlannedTraffic) -> Timing:
    steps: Sequence[Stages] = work.over_a_period(traffic)
    stages = {stage: sum(step[stage] for step in steps) / len(steps) for stage in steps[0]}
    return Timing(stages, max(sum(step.values()) for step in steps))
