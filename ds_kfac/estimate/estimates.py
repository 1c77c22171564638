"""An estimate of every strategy that a run could choose."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ds_kfac.assignment.assign import worker_counts
from ds_kfac.assignment.costs import CostModel
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.curvature.precision import Precision
from ds_kfac.estimate.machine import Machine
from ds_kfac.estimate.memory import memory_of, state_bytes
from ds_kfac.estimate.mode import Mode
from ds_kfac.estimate.period import settled_period
from ds_kfac.estimate.seconds import Stages, Workload
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.traffic import PlannedTraffic, StepTraffic, mean_traffic
from ds_kfac.plan import choices
from ds_kfac.plan.make_plan import Setting, make_plan
from ds_kfac.plan.plan import Known, Plan
from ds_kfac.zero.shard_plan import planned_shards
from ds_kfac.zero.shards import ShardMap, held_by_layer, parameter_names, pieces_of


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
            refreshes every eigenbasis.
        mean: over a period of the settled intervals, as planned.
        work: FLOPs and seconds.
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


@dataclass(frozen=True)
class Refused:
    """A strategy that such a run cannot have, and why."""

    name: str
    reason: str


def shards_of(subject: Subject, mode: Mode, world: int) -> ShardMap:
    """Where the gradients of a subject's layers will be."""
    whole = planned_shards(
        parameter_names(subject.layers),
        subject.groups,
        world=world,
        stage=mode.stage,
        replicated=mode.replicated,
        round_robin=mode.round_robin,
    )
    return whole.cut(pieces_of(subject.layers))


def planned(
    subject: Subject,
    mode: Mode,
    config: KFACConfig,
    *,
    world: int,
    costs: CostModel,
    rows: int | None = None,
    shards: ShardMap | None = None,
) -> Plan:
    """The plan that a run would make, once it knows the layers that share their inputs, and the rows of a rank.

    Args:
        rows: tokens (or images) of a rank in a step; None: not known.
        shards: of :func:`shards_of`, if they are known.

    Raises:
        ValueError: the fraction does not fit the world or the mode, or the memory budget is too small.
    """
    held = None if mode.replicated else held_by_layer(subject.layers, shards or shards_of(subject, mode, world))
    moments = mode.rule.moments_count(config)
    setting = Setting(world, held, mode.parameters, mode.gradients, moments, scheduled=mode.scheduled)
    plan = make_plan(subject.layers, setting, config, costs)
    groups = subject.shared if plan.shares else ()
    unit = {layer.name: subject.trace.rows_of(layer) for layer in subject.layers}
    return plan.knowing(Known(groups, None if rows is None else {name: rows * each for name, each in unit.items()}))


def _on_device(plan: Plan, costs: CostModel) -> Plan:
    """With what a GPU with TF32 would choose, if the costs are a GPU's."""
    if not costs.beside:
        return plan
    precision = plan.precision if plan.config.preconditioner.precision == "highest" else Precision("tf32", "tf32")
    return replace(plan, precision=precision, stacks=choices.stacks(torch.device("cuda"), plan.method))


def planned_traffic(
    subject: Subject, mode: Mode, config: KFACConfig, plan: Plan, shards: ShardMap | None = None
) -> PlannedTraffic:
    return PlannedTraffic(
        plan,
        shards or shards_of(subject, mode, plan.assignment.world),
        numbers=mode.rule.numbers,
        norm=mode.rule.needs_norm(mode.clips) and not mode.replicated,
        terms=config.preconditioner.eigenvalues == "corrected",
        in_place=mode.in_place,
    )


def estimate(
    subject: Subject,
    mode: Mode,
    config: KFACConfig,
    *,
    world: int,
    machine: Machine,
    rows: int | None = None,
    shards: ShardMap | None = None,
) -> Estimate:
    """Of the plan that a run would make.

    Args:
        rows: tokens (or images) of a rank in a step; None: not known.
        shards: of :func:`shards_of`, if they are known.

    Raises:
        ValueError: there is no such plan.
    """
    shards = shards or shards_of(subject, mode, world)
    plan = planned(subject, mode, config, world=world, costs=machine.costs, rows=rows, shards=shards)
    traffic = planned_traffic(subject, mode, config, plan, shards)
    work = Workload(plan, config, machine, rows, subject.trace, mode.rule)
    counted = Counter((step.captured, step.arriving) for step in settled_period(plan))
    spread = plan.offsets
    if not spread:
        staggered = config.having("eigenbasis", stagger=True)
        spread = planned(subject, mode, staggered, world=world, costs=machine.costs, rows=rows, shards=shards).offsets
    on_device = _on_device(plan, machine.costs)
    every, none = traffic.every, frozenset[str]()
    return Estimate(
        name=strategy_name(plan.workers, world, mode),
        plan=plan,
        memory=memory_of(planned_traffic(subject, mode, config, on_device, shards), config, mode.rule),
        plain=traffic.step(none, none),
        update=traffic.step(every, none),
        refresh=traffic.step(every, every),
        mean=mean_traffic([(traffic.step(*what), times) for what, times in counted.items()]),
        work=work,
        at_once=_timing(work, {}, traffic),
        spread=_timing(work, spread, traffic),
        model=machine.model_seconds(subject.forward * rows) if rows and subject.forward else None,
    )


def estimates(
    subject: Subject,
    mode: Mode,
    config: KFACConfig,
    *,
    world: int,
    machine: Machine,
    rows: int | None = None,
    known: Estimate | None = None,
    shards: ShardMap | None = None,
) -> tuple[Estimate | Refused, ...]:
    """Of every strategy: all gradient-worker fractions, and the owner scheme of ZeRO; refused ones with the reason.

    Args:
        known: of the config's own, which is not made again.
        shards: of :func:`shards_of`, if they are known.
    """
    shards = shards or shards_of(subject, mode, world)
    found: list[Estimate | Refused] = []
    counts = worker_counts(world)
    if not mode.replicated:  # all that lies between is refused alike
        counts = tuple(sorted({*counts[:2], world}))
    for workers in counts:
        if known is not None and known.plan.workers == workers:
            found.append(known)
            continue
        forced = config.having("assignment", gradient_worker_fraction=workers / world)
        try:
            found.append(estimate(subject, mode, forced, world=world, machine=machine, rows=rows, shards=shards))
        except ValueError as problem:
            found.append(Refused(strategy_name(workers, world, replace(mode, replicated=True)), str(problem)))
    if mode.replicated:
        found.append(Refused("ZeRO owners", f"every rank has every gradient in this mode ({mode})"))
    return tuple(found)


def strategy_name(workers: int, world: int, mode: Mode) -> str:
    """KAISA's names; ZeRO's owners are its MEM-OPT."""
    if not mode.replicated:
        return f"ZeRO-{mode.stage} owners"
    if world == 1:
        return "one rank"
    return {1: "MEM-OPT", world: "COMM-OPT"}.get(workers, f"HYBRID-OPT {workers}/{world}")


def _timing(work: Workload, offsets: Mapping[str, int], traffic: PlannedTraffic) -> Timing:
    steps: Sequence[Stages] = work.over_a_period(traffic, offsets)
    stages = {stage: sum(step[stage] for step in steps) / len(steps) for stage in steps[0]}
    return Timing(stages, max(sum(step.values()) for step in steps))
