"""The plan of a run: who does what, when, and how it travels. Pure, the same on every rank, made
before training.

What the config leaves open is chosen by predicted cost, each with its reason. What no key says is a
constant or a function, so that a test can have it otherwise.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ds_kfac.assignment import assign as roles
from ds_kfac.assignment.costs import CostModel, FactorSpec, Work, factor_specs, packed_bytes
from ds_kfac.comm.reduce import DTYPES
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.eigen import Precision, choose
from ds_kfac.curvature.methods import EIGEN, ITERATED, METHODS, Method
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.common import common_inputs, own_inputs, rows_from, sharing_candidates
from ds_kfac.schedule.timetable import Schedule, Timetable

CPU = torch.device("cpu")
FIRST_BUCKETS = 4
"""Sums of the first captured batch take as much memory at most, in messages, or come from the eigen
workers alone."""
COSTLY_TRAFFIC = 0.02
"""Part of K-FAC's seconds per step from which on its traffic is halved, in a model of 16 bits."""
BUCKET_BYTES = 1 << 28
"""Most bytes of batch sums that a rank sends, or receives, in one message; two are on their way at
a time."""
LONG_REFRESH = 0.05
"""Seconds of a refresh of everything at once from which on it is spread over steps."""


@dataclass(frozen=True)
class Observations:
    """What the first captured batch shows, None: not yet. Groups of layers that share their input;
    layer name -> rows of a rank in a step, in the mean, of a stack's layer those that it takes
    itself; fewer after :meth:`Plan.seeking`.
    """

    groups: tuple[tuple[str, ...], ...] | None = None
    rows: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Plan:
    """See the module's docstring.

    Attributes:
        offsets: factor key -> steps by which its refreshes are displaced, also of factors that
            layers would have if they did not share one; empty: all at once.
        adaptive: two values of a factor are similar if |P - Q|_F / |Q|_F is below it; None: the
            rule is off.
        contributors: which ranks capture a factor's batch, and which of their rows.
        bucket_bytes: most that a rank sends or receives in one message of batch sums.
        wire: dtype of batch sums and eigenvectors on the wire.
        gradient_dtypes: of gradients to their workers and of results back.
        config: with its nulls answered.
        precision: of the products of a step.
        batched: whether layers of one shape are stepped in one batch.
        answers, reasons: what was chosen, and why; for the report.
        first: which ranks captured a factor's batch before rows were known; None: they are not
            known.
    """

    layers: tuple[LayerSpec, ...]
    schedule: Schedule
    assignment: roles.Assignment
    offsets: Mapping[str, int]
    adaptive: float | None
    contributors: roles.Contributors
    bucket_bytes: int
    wire: torch.dtype
    gradient_dtypes: tuple[torch.dtype, torch.dtype]
    config: KFACConfig
    precision: Precision
    batched: bool
    answers: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    first: roles.Contributors | None = None

    @cached_property
    def method(self) -> Method:
        return self.assignment.work.method

    @cached_property
    def workers(self) -> int:
        """Gradient workers of a layer."""
        return max(len(ranks) for ranks in self.assignment.workers.values())

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that get each other's results: together they are gradient workers of every layer
        once."""
        world, width = self.assignment.world, self.assignment.world // self.workers
        return tuple(tuple(range(start, start + width)) for start in range(0, world, width))

    @property
    def sharing_candidates(self) -> Mapping[str, Hashable]:
        """See :func:`sharing_candidates`; none if layers are not to share."""
        return sharing_candidates(self.layers, self.method) if self.config.choice.shares else {}

    def timetable(self) -> Timetable:
        keys = tuple(factor.key for factor in self.assignment.factors)
        offsets = {key: self.offsets[key] for key in keys if key in self.offsets}
        return Timetable(self.schedule, keys, offsets=offsets, adaptive=self.adaptive is not None)

    @property
    def counts_terms(self) -> bool:
        """Whether layers need their number of loss terms: corrected eigenvalues are in units of
        these."""
        return self.config.preconditioner.eigenvalues == "corrected"

    @cached_property
    def measures(self) -> bool:
        """Whether contributors, and which of their rows count, depend on how many rows a rank
        has."""
        return self.config.factor.rows != "all"

    def with_observations(self, observations: Observations) -> "Plan":
        """The plan of a run that knows this."""
        plan = self.sharing(observations.groups or ())
        wanted = self.config.factor.rows
        if not self.measures or observations.rows is None or isinstance(wanted, str):
            return plan
        alone = alone_here(self.layers, factor_specs(self.layers))
        layers = {layer.name: layer for layer in self.layers}
        rows = {
            f.key: sum(observations.rows.get(name, 0.0) for name in rows_from(f, layers))
            for f in alone
        }
        counts = roles.counted(alone, rows, self.assignment.world, wanted=wanted)
        strides = roles.strides(alone, rows, wanted=wanted, together=self.contributors.sequence)
        known_rows = replace(self.contributors, counts=counts, strides=strides)
        return replace(plan, contributors=known_rows, first=self.first or self.contributors)

    def seeking(self, observations: Observations, keys: Collection[str]) -> Observations:
        """After updates of these factors for which no contributor had a row, though other ranks
        have used their layers: as if a rank had so few that twice as many contribute."""
        layers, wanted = {layer.name: layer for layer in self.layers}, self.config.factor.rows
        rows = dict(observations.rows or {})
        for factor in self.assignment.factors:
            count = self.contributors.counts.get(factor.key)
            if factor.key in keys and count is not None and not isinstance(wanted, str):
                names = rows_from(factor, layers)
                here, few = (
                    sum(rows.get(name, 0.0) for name in names),
                    roles.needed(factor, wanted) / (2 * count),
                )
                rows |= {name: rows.get(name, 0.0) * min(1.0, few / here) for name in names}
        return replace(observations, rows=rows)

    def sharing(self, groups: Sequence[Sequence[str]]) -> "Plan":
        """With one A for each of these groups of layers alone; its eigen worker is that of the
        group's first layer."""
        work = replace(self.assignment.work, factors=factor_specs(self.layers, groups))
        return replace(self, assignment=replace(self.assignment, work=work))


def alone_here(layers: Sequence[LayerSpec], factors: Sequence[FactorSpec]) -> list[FactorSpec]:
    """Factors of layers that no other tensor-parallel ranks have copies of: those ranks' plans may
    differ."""
    copied = {layer.name for layer in layers if layer.copies > 1}
    return [factor for factor in factors if factor.layers[0] not in copied]


class OverBudget(ValueError):
    """The memory of a plan."""


@dataclass(frozen=True)
class EngineFacts:
    """What the engine gives.

    Attributes:
        world: ranks of the data-parallel group.
        held: layer name -> gradient elements on each rank; None where every rank holds every
            gradient.
        parameters, gradients: dtypes of the model and of the gradients where K-FAC reads them.
        moments: fp32 tensors of a gradient's shape that a gradient worker keeps.
        device: where layers are preconditioned.
        sequence: ranks that have the parts of one sequence, consecutive ones.
        rotates: whether those moments are kept in the eigenbasis, and go with it.
    """

    world: int
    held: Mapping[str, Sequence[int]] | None
    parameters: torch.dtype
    gradients: torch.dtype
    moments: int
    device: torch.device = CPU
    sequence: int = 1
    rotates: bool = False


def make_plan(
    layers: Sequence[LayerSpec],
    facts: EngineFacts,
    config: KFACConfig,
    costs: CostModel,
    answers: tuple[str, ...] = (),
) -> Plan:
    """Make the plan of a run.

    The plan's layers may differ from the given ones in ``shares``: the experts of a stack have one
    A each, or one A for all (:mod:`ds_kfac.plan.common`). If the plan with more As exceeds the
    memory budget, a plan with fewer is made.

    Args:
        config: resolved by :func:`ds_kfac.config.resolve.resolve`.
        answers: how the config was resolved, in words.

    Raises:
        ValueError: the gradient worker fraction does not fit the number of ranks or the ZeRO stage,
            or the memory budget is too small.
    """
    method = METHODS[config.preconditioner.method]
    if method is EIGEN and facts.rotates and costs.ieee_flops:
        method = ITERATED  # on a GPU an eighth of eigh's time
    variants = [tuple(layers)]
    reasons: Sequence[str] = ()
    if config.choice.shares:
        if facts.rotates:
            apart, reasons = own_inputs(layers, method, moments=facts.moments, world=facts.world)
            variants.insert(0, apart)
        variants.append(common_inputs(layers))
    variants = list(dict.fromkeys(variants))  # each once, those with most As first
    most_factors = len(factor_specs(variants[0]))
    while True:
        variant = variants.pop(0)
        try:
            return _plan_of(variant, method, facts, config, costs, answers, reasons)
        except OverBudget:
            if not variants:
                raise
        fewer = most_factors - len(factor_specs(variants[0]))
        reasons = (
            f"one A for all experts of a stack: {fewer:,} more are over "
            f"{config.assignment.memory_budget_gb:g} GB",
        )


def _plan_of(
    layers: Sequence[LayerSpec],
    method: Method,
    facts: EngineFacts,
    config: KFACConfig,
    costs: CostModel,
    answers: tuple[str, ...],
    reasons_for_layers: Sequence[str],
) -> Plan:
    """Make the plan of layers for which it is settled which of them have a common A.

    Args:
        reasons_for_layers: why these As are common, in words.
    """
    reasons = list(reasons_for_layers)
    schedule = config.schedule
    update, refresh = schedule.intervals(schedule.settled)
    paired = method.paired(config.damping.kind)
    factors = factor_specs(layers)
    work = Work(
        layers, factors, facts.world, facts.held, costs, update, refresh, facts.moments, method
    )
    assignment = _assignment(work, config, paired, reasons)
    wire = _wire(assignment, facts, config, reasons)
    offsets = _offsets(assignment, config, reasons)
    if paired:
        reasons.append(
            "A and G of a layer are decomposed on one rank, and layers do not share A: with "
            f'"{config.damping.kind}" a factor\'s damping depends on its partner; "relative" does '
            f"not need it"
        )
    if wire is not torch.float32 and not any(part.halved for part in method.parts):
        reasons.append(
            f"{method.words} travel in fp32, only batch sums in {str(wire).removeprefix('torch.')}"
        )
    contributors = _contributors(work, facts, config, reasons)
    return Plan(
        layers=tuple(layers),
        schedule=schedule,
        assignment=assignment,
        offsets=offsets,
        adaptive=config.adaptive,
        contributors=contributors,
        bucket_bytes=BUCKET_BYTES,
        wire=wire,
        gradient_dtypes=gradient_dtypes(facts.parameters, facts.gradients),
        config=config,
        precision=choose(config.preconditioner.precision, facts.device),
        batched=batched(facts.device, method),
        answers=answers,
        reasons=tuple(reasons),
    )


def _assignment(
    work: Work, config: KFACConfig, paired: bool, reasons: list[str]
) -> roles.Assignment:
    """Return the assignment within the memory budget that is predicted to be fastest.

    Args:
        paired: whether A and G of a layer must be on one rank.
        reasons: the reason for the choice is appended, in words.
    """
    world = work.world
    fraction = config.assignment.gradient_worker_fraction
    budget = config.assignment.memory_budget_gb
    counts: tuple[int, ...]
    if fraction is None:
        counts = roles.worker_counts(world)
    else:
        counts = (roles.workers_for(fraction, world),)
    if work.held is not None:
        if fraction is not None and counts != (1,):
            raise ValueError(
                f"kfac.assignment.gradient_worker_fraction is {fraction}, but this ZeRO stage "
                f"partitions gradients: several workers would each gather the whole gradient, and "
                f"one would send the pieces back. Set it to null, or use ZeRO stage 0"
            )
        counts = (1,)
    assignments: dict[int, roles.Assignment] = {}
    problems: list[str] = []
    for workers in counts:
        try:
            assignments[workers] = roles.assign(
                work, workers, paired=paired, memory_cap=budget and budget * 1e9
            )
        except ValueError as problem:
            problems.append(str(problem))
    if not assignments:
        raise OverBudget(f"kfac.assignment.memory_budget_gb: {problems[0]}")
    largest = {
        workers: (max(assignment.loads), max(assignment.memory))
        for workers, assignment in assignments.items()
    }
    best = min(largest, key=largest.__getitem__)
    if len(counts) > 1:
        tried = ", ".join(
            f"{workers}/{world}: {load * 1e3:.3g} ms and {size:,} bytes"
            for workers, (load, size) in largest.items()
        )
        if problems:
            tried += f"; {len(problems)} more over the budget of {budget} GB"
        reasons.append(
            f"{best} of {world} ranks precondition a layer: predicted per step and rank {tried}"
        )
    return assignments[best]


def _contributors(
    work: Work, facts: EngineFacts, config: KFACConfig, reasons: list[str]
) -> roles.Contributors:
    """Return which ranks capture the first batch, when nobody knows yet how many rows a rank has.

    All ranks do, unless that would take more memory than later steps. Then only the eigen workers
    do.
    """
    wanted = config.factor.rows
    counts: dict[str, int] = {}
    if wanted != "all":
        sums_bytes = sum(packed_bytes(factor.side) for factor in work.factors)
        if work.world > 1 and sums_bytes > FIRST_BUCKETS * BUCKET_BYTES:
            counts = {factor.key: 1 for factor in alone_here(work.layers, work.factors)}
        need = f"{roles.ROWS_PER_COLUMN} rows per column" if wanted is None else f"{wanted} rows"
        reasons.append(
            f"in a factor update {need} count (factor.rows), of as few ranks as have them in the "
            f"first one"
        )
    return roles.Contributors(work.world, work.costs.node_size, counts, facts.sequence)


def _wire(
    assignment: roles.Assignment, facts: EngineFacts, config: KFACConfig, reasons: list[str]
) -> torch.dtype:
    """Return the dtype in which batch sums and eigenvectors travel."""
    work = assignment.work
    if config.communication.dtype is not None:
        return DTYPES[config.communication.dtype]
    seconds_of_update = sum(
        work.costs.transfer(packed_bytes(factor.side)) for factor in work.factors
    )
    seconds = seconds_of_update / work.update_interval
    part = seconds / (seconds + max(assignment.loads)) if facts.world > 1 else 0.0
    if facts.parameters.itemsize > 2 or part <= COSTLY_TRAFFIC:
        return torch.float32
    reasons.append(
        f"bf16 on the wire: batch sums are predicted to cost {part:.0%} of K-FAC's time in fp32"
    )
    return torch.bfloat16


def _offsets(
    assignment: roles.Assignment, config: KFACConfig, reasons: list[str]
) -> Mapping[str, int]:
    """Return factor key -> offset of its schedule, if a refresh of all factors in one step takes
    long; else {}."""
    work = assignment.work
    # with orthogonal iteration one refresh of ten is by eigh, which takes longest
    slowest_method = EIGEN if work.method is ITERATED else work.method
    at_once = [0.0] * assignment.world
    for factor in work.factors:
        seconds = work.costs.decompose(factor.side, slowest_method)
        at_once[assignment.eigen_workers[factor.key]] += seconds
    movable = alone_here(work.layers, work.factors)
    if max(at_once) <= LONG_REFRESH or work.refresh_interval == 1 or not movable:
        return {}
    offsets, worst = roles.refresh_offsets(
        movable, assignment.eigen_workers, work, alone=config.factor.rows != "all"
    )
    reasons.append(
        f"refreshes spread over {len({*offsets.values()})} of {work.refresh_interval} steps: "
        f"predicted {worst * 1e3:.3g} ms in the worst step instead of {max(at_once) * 1e3:.3g} ms"
    )
    return offsets


def batched(device: torch.device, method: Method) -> bool:
    """Whether layers of one shape are stepped in one batch, which takes fewer and larger launches.

    This is only possible if gradients are rotated. On a CPU a batched product is slower than its
    parts. The price is memory that plans do not count: stacked eigenvectors, at most 256 MiB a
    rank, and the same again in a step that refreshes them. Layers with a common A have a copy of
    its eigenvectors each.
    """
    return method.rotates and device.type != "cpu"


def gradient_dtypes(
    parameters: torch.dtype, gradients: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which gradients travel to their workers and results travel back.

    Gradients travel as they are stored. Results travel in bf16 if the model is in 16 bits, because
    fp16 lacks the range.
    """
    back = torch.bfloat16 if parameters.itemsize == 2 else torch.float32
    return gradients, back
