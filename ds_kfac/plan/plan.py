"""The plan of a run: which rank does what in which step, and in which dtypes and messages data
travels. The plan is made before training by pure functions, so it is the same on every rank.

Settings that the config leaves open are chosen by predicted cost, and each choice is recorded with
its reason. Settings without a config key are constants or functions of this module, so that tests
can change them.
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
"""If the batch sums of the first captured batch would take more memory than this many messages of
:data:`BUCKET_BYTES` each, only the owners capture that batch."""
COSTLY_TRAFFIC = 0.02
"""In a 16-bit model, batch sums and eigenvectors travel in bf16 if sending batch sums in fp32 would
take more than this fraction of K-FAC's seconds per step."""
BUCKET_BYTES = 1 << 28
"""Limit on the bytes of batch sums that a rank sends in one message, and on the bytes that it
receives. Two messages are in flight at a time."""
LONG_REFRESH = 0.05
"""If refreshing all factors in one step takes more than this number of seconds, the refreshes are
spread over several steps."""


@dataclass(frozen=True)
class Observations:
    """What captured batches have shown: which layers share inputs, and how many rows each layer
    has.

    Attributes:
        groups: groups of layers that share their input; None: not known yet.
        rows: layer name -> number of rows per step, averaged over ranks; None: not known yet. If
            the layer is one matrix of a stack, only the rows that this matrix multiplies count.
            :meth:`Plan.seeking` lowers these numbers.
    """

    groups: tuple[tuple[str, ...], ...] | None = None
    rows: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Plan:
    """Which rank does each task in which step, and every setting that was chosen for the run.
    See the module's docstring.

    Attributes:
        offsets: factor key -> number of steps by which the factor's schedule is displaced. Some
            keys may be of factors that no longer exist because a shared factor has replaced
            them. Empty: all refreshes are in the same steps.
        adaptive: tolerance of the adaptive rule. Two values P and Q of a factor are similar if the
            Frobenius norm of P - Q is below this number times the norm of Q. None: the adaptive
            rule is off.
        contributors: ranks that capture each factor, and which of their rows count.
        bucket_bytes: limit on the bytes that a rank sends in one message of batch sums, and on
            the bytes that it receives.
        wire: dtype of batch sums and eigenvectors in messages.
        gradient_dtypes: dtype of gradients in messages to their workers, and dtype of results in
            messages from the workers.
        config: the config, in which each null was replaced by a value.
        precision: precision of the matrix products in a step.
        batched: whether layers of the same shape are processed together, in batched matrix
            products.
        answers: texts for the report that say which value replaced each null in the config.
        reasons: texts for the report that say why this plan was chosen.
        first: the contributors to the first captured batch. None: this plan was made before the
            numbers of rows were known, or all ranks contribute whatever these numbers are.
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
        """Number of gradient workers of a layer."""
        return max(len(ranks) for ranks in self.assignment.workers.values())

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of the KAISA grid: groups of ranks that exchange their results. Each row contains
        exactly one gradient worker of every layer."""
        world = self.assignment.world
        width = self.assignment.world // self.workers
        return tuple(tuple(range(start, start + width)) for start in range(0, world, width))

    @property
    def sharing_candidates(self) -> Mapping[str, Hashable]:
        """The layers that may share an A, see :func:`sharing_candidates`. Empty if the config does
        not let layers share."""
        return sharing_candidates(self.layers, self.method) if self.config.choice.shares else {}

    def timetable(self) -> Timetable:
        keys = tuple(factor.key for factor in self.assignment.factors)
        offsets = {key: self.offsets[key] for key in keys if key in self.offsets}
        return Timetable(self.schedule, keys, offsets=offsets, adaptive=self.adaptive is not None)

    @property
    def counts_terms(self) -> bool:
        """Whether the number of loss terms of each layer is needed, because corrected eigenvalues
        are in units of one loss term."""
        return self.config.preconditioner.eigenvalues == "corrected"

    @cached_property
    def measures(self) -> bool:
        """Whether the contributors, and which of their rows count, depend on the numbers of rows
        that were observed."""
        return self.config.factor.rows != "all"

    def with_observations(self, observations: Observations) -> "Plan":
        """Return this plan, adapted to the observations."""
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
        """Return observations with which twice as many ranks contribute to the factors in ``keys``.

        Call this after an update in which no contributor to these factors had a row, although other
        ranks used the factors' layers. The numbers of rows in the observations are lowered so far
        that twice as many ranks are needed.
        """
        layers = {layer.name: layer for layer in self.layers}
        wanted = self.config.factor.rows
        rows = dict(observations.rows or {})
        for factor in self.assignment.factors:
            count = self.contributors.counts.get(factor.key)
            if factor.key in keys and count is not None and not isinstance(wanted, str):
                names = rows_from(factor, layers)
                here = sum(rows.get(name, 0.0) for name in names)
                few = roles.needed(factor, wanted) / (2 * count)
                rows |= {name: rows.get(name, 0.0) * min(1.0, few / here) for name in names}
        return replace(observations, rows=rows)

    def sharing(self, groups: Sequence[Sequence[str]]) -> "Plan":
        """Return this plan with one shared A for each of these groups of layers. Groups that were
        passed earlier no longer share an A. The owner of a shared A is the rank that was
        the owner of the first layer's A."""
        work = replace(self.assignment.work, factors=factor_specs(self.layers, groups))
        return replace(self, assignment=replace(self.assignment, work=work))


def alone_here(layers: Sequence[LayerSpec], factors: Sequence[FactorSpec]) -> list[FactorSpec]:
    """Return the factors whose layers exist on no other tensor-parallel rank. Copied layers are
    left out because the ranks that have a copy may make different plans."""
    copied = {layer.name for layer in layers if layer.copies > 1}
    return [factor for factor in factors if factor.layers[0] not in copied]


class OverBudget(ValueError):
    """Error for a plan that does not fit into the memory budget."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the engine that the plan depends on.

    Attributes:
        world: number of ranks in the data-parallel group.
        held: layer name -> number of gradient elements on each rank; None: every rank holds every
            gradient.
        parameters: dtype of the model.
        gradients: dtype in which DeepSpeed stores the gradients that K-FAC reads.
        moments: number of fp32 tensors of a gradient's shape that a gradient worker keeps for each
            of its layers.
        device: device on which layers are preconditioned.
        sequence: number of consecutive ranks that hold the parts of one sequence.
        rotates: whether moments are kept in the eigenbasis and rotated into each new eigenbasis.
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

    The plan's layers may differ from ``layers`` in ``shares``, because the plan decides whether the
    experts of a stack have one A each or a common A (:mod:`ds_kfac.plan.common`). If a plan exceeds
    the memory budget, a plan in which more experts share an A is tried.

    Args:
        config: the config, resolved by :func:`ds_kfac.config.resolve.resolve`.
        answers: texts that say how the config was resolved.

    Raises:
        ValueError: the gradient worker fraction does not fit the number of ranks or the ZeRO stage,
            or the memory budget is too small.
    """
    method = METHODS[config.preconditioner.method]
    if method is EIGEN and facts.rotates and costs.ieee_flops:
        method = ITERATED  # on a GPU a step of iteration takes an eighth of eigh's time
    variants = [tuple(layers)]
    reasons: Sequence[str] = ()
    if config.choice.shares:
        if facts.rotates:
            apart, reasons = own_inputs(layers, method, moments=facts.moments, world=facts.world)
            variants.insert(0, apart)
        variants.append(common_inputs(layers))
    variants = list(dict.fromkeys(variants))  # each variant once; the first has the most factors
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
            f"experts share one A: {fewer:,} more As would exceed the budget of "
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
    """Make the plan of layers whose ``shares`` is final.

    Args:
        reasons_for_layers: texts that say why the experts of a stack share one A, or have one A
            each.
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
            "A and G of a layer are decomposed on one rank, and layers do not share A, because "
            f'with "{config.damping.kind}" a factor\'s damping depends on the other factor; with '
            f'"relative" it does not'
        )
    if wire is not torch.float32 and not any(part.halved for part in method.parts):
        reasons.append(
            f"{method.words} travel in fp32, and only batch sums travel in "
            f"{str(wire).removeprefix('torch.')}"
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
    """Return the assignment that is predicted to be fastest among those within the memory budget.

    Args:
        paired: whether A and G of a layer must be on one rank.
        reasons: list of texts to which the reason for the choice is appended.
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
                "partitions gradients: several workers would each gather the whole gradient, and "
                "one would send the pieces back. Set the key to null, or use ZeRO stage 0"
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
            f"{workers}/{world}: {load * 1e3:.3g} ms per step and {size:,} bytes of state"
            for workers, (load, size) in largest.items()
        )
        if problems:
            tried += f"; fractions over the budget of {budget} GB: {len(problems)}"
        reasons.append(
            f"{best} of {world} ranks precondition a layer; predicted maximum per rank: {tried}"
        )
    return assignments[best]


def _contributors(
    work: Work, facts: EngineFacts, config: KFACConfig, reasons: list[str]
) -> roles.Contributors:
    """Return the ranks that capture the first batch. The number of rows on a rank is not known yet.

    All ranks capture it, unless the batch sums would take more memory than :data:`FIRST_BUCKETS`
    full messages. In that case only the owners capture it.
    """
    wanted = config.factor.rows
    counts: dict[str, int] = {}
    if wanted != "all":
        sums_bytes = sum(packed_bytes(factor.side) for factor in work.factors)
        if work.world > 1 and sums_bytes > FIRST_BUCKETS * BUCKET_BYTES:
            counts = {factor.key: 1 for factor in alone_here(work.layers, work.factors)}
        need = f"{roles.ROWS_PER_COLUMN} rows per column" if wanted is None else f"{wanted} rows"
        reasons.append(
            f"a factor update uses {need} (factor.rows); they come from as few ranks as together "
            "had enough rows in the first update"
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
        "batch sums travel in bf16, because sending them in fp32 is predicted to take "
        f"{part:.0%} of K-FAC's time"
    )
    return torch.bfloat16


def _offsets(
    assignment: roles.Assignment, config: KFACConfig, reasons: list[str]
) -> Mapping[str, int]:
    """Return a dict from factor key to the offset of the factor's schedule. Return {} if refreshing
    all factors in one step is fast enough."""
    work = assignment.work
    # with orthogonal iteration, one in ten refreshes uses eigh, which takes longest
    slowest_method = EIGEN if work.method is ITERATED else work.method
    at_once = [0.0] * assignment.world
    for factor in work.factors:
        seconds = work.costs.decompose(factor.side, slowest_method)
        at_once[assignment.owners[factor.key]] += seconds
    movable = alone_here(work.layers, work.factors)
    if max(at_once) <= LONG_REFRESH or work.refresh_interval == 1 or not movable:
        return {}
    offsets, worst = roles.refresh_offsets(
        movable, assignment.owners, work, alone=config.factor.rows != "all"
    )
    reasons.append(
        f"refreshes spread over {len({*offsets.values()})} of {work.refresh_interval} steps: "
        f"predicted {worst * 1e3:.3g} ms in the worst step instead of {max(at_once) * 1e3:.3g} ms"
    )
    return offsets


def batched(device: torch.device, method: Method) -> bool:
    """Whether layers of the same shape are processed together in batched matrix products, which
    launches fewer and larger kernels.

    This is possible only if gradients are rotated. It is off on CPUs, because there a batched
    product is slower than separate products. Batching takes memory that plans do not count: stacked
    eigenvectors of at most 256 MiB per rank, and as much again in a step that refreshes them. Each
    layer in a batch has its own copy of the eigenvectors of a shared A.
    """
    return method.rotates and device.type != "cpu"


def gradient_dtypes(
    parameters: torch.dtype, gradients: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which gradients travel to their workers, and the dtype in which results
    travel back.

    Gradients travel in the dtype in which they are stored. Results of a 16-bit model travel in
    bf16, because the range of fp16 is too small.
    """
    back = torch.bfloat16 if parameters.itemsize == 2 else torch.float32
    return gradients, back
