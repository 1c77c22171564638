"""From config and model to a plan: what the config leaves open is answered by other keys or the update rule, or chosen
by predicted cost, each with its reason. What no key says is a constant or a function, so that a test can have it
otherwise."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import torch

from ds_kfac.assignment.assign import (
    ROWS_PER_COLUMN,
    Assignment,
    Contributors,
    assign,
    refresh_offsets,
    worker_counts,
    workers_for,
)
from ds_kfac.assignment.costs import CostModel, FactorSpec, Work, factor_specs, packed_bytes
from ds_kfac.comm.reduce import DTYPES
from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.methods import METHODS, Method
from ds_kfac.curvature.precision import choose
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.registry import MATRICES
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value

CPU = torch.device("cpu")
FITS = 4
"""Attempts at an assignment whose steps fit the budget, too."""
FIRST_BUCKETS = 4
"""Sums of the first captured batch take as much memory at most, in messages, or come from the eigen workers alone."""
COSTLY_TRAFFIC = 0.02
"""Part of K-FAC's seconds per step from which on its traffic is halved, in a model of 16 bits."""


class OverBudget(ValueError):
    """The memory of a plan."""


@dataclass(frozen=True)
class Setting:
    """What the engine gives.

    Attributes:
        world: ranks of the data-parallel group.
        held: layer name -> gradient elements on each rank; None where every rank holds every gradient.
        parameters, gradients: dtypes of the model and of the gradients where K-FAC reads them.
        moments: fp32 tensors of a gradient's shape that a gradient worker keeps.
        device: where layers are preconditioned.
        scheduled: whether DeepSpeed runs an lr scheduler.
    """

    world: int
    held: Mapping[str, Sequence[int]] | None
    parameters: torch.dtype
    gradients: torch.dtype
    moments: int
    device: torch.device = CPU
    scheduled: bool = False


def make_plan(
    layers: Sequence[LayerSpec],
    setting: Setting,
    config: KFACConfig,
    costs: CostModel,
    answers: tuple[str, ...] = (),
) -> Plan:
    """The plan of a run. Where its memory is over the budget with an A for each expert of a stack, one for all.

    Args:
        layers: as they are without a budget; the plan's may differ from them in ``shares``.
        config, answers: what :func:`ds_kfac.plan.make_plan.resolve` returns.

    Raises:
        ValueError: the fraction does not fit the world or the mode, or the memory budget is too small.
    """
    try:
        return _plan(layers, setting, config, costs, answers)
    except OverBudget:
        common = common_inputs(layers) if config.choice.shares else tuple(layers)
        if common == tuple(layers):
            raise
    plan = _plan(common, setting, config, costs, answers)
    apart = sum(a.shares != b.shares for a, b in zip(layers, common, strict=True))
    budget = config.assignment.memory_budget_gb
    reason = f"the experts of a stack have one A of what each makes, too: {apart:,} more are over {budget:g} GB"
    return replace(plan, reasons=(*plan.reasons, reason))


def _plan(
    layers: Sequence[LayerSpec], setting: Setting, config: KFACConfig, costs: CostModel, answers: tuple[str, ...]
) -> Plan:
    """Of these layers as they are."""
    schedule, reasons = config.schedule, list[str]()
    update, refresh = schedule.intervals(schedule.settled)
    method = METHODS[config.preconditioner.method]
    paired = method.paired(config.damping.chosen)
    work = Work(
        layers, factor_specs(layers), setting.world, setting.held, costs, update, refresh, setting.moments, method,
    )  # fmt: skip
    assignment = _assignment(work, config, paired, reasons)
    wire = _wire(assignment, setting, config, reasons)
    offsets, worst = _offsets(assignment, config, reasons)
    lag = config.eigenbasis.lag
    if lag is None:
        lag = min(update, refresh - 1) if costs.beside and worst > LONG_STEP else 0
        late = f"refreshes take effect {lag} steps later, beside the model until then: {worst * 1e3:.3g} ms in one step"
        reasons += [late] if lag else []
    if paired:
        reasons.append(
            "A and G of a layer are decomposed on one rank, and layers do not share A: with "
            f'"{config.damping.chosen}" a factor\'s damping depends on its partner; "relative" does not need it'
        )
    if wire is not torch.float32 and not any(part.halved for part in method.parts):
        reasons.append(f"{method.words} travel in fp32, only batch sums in {str(wire).removeprefix('torch.')}")
    contributors = _contributors(work, config, reasons)
    return Plan(
        layers=tuple(layers),
        schedule=schedule,
        assignment=assignment,
        offsets=offsets,
        lag=lag,
        adaptive=config.adaptive,
        contributors=contributors,
        bucket_bytes=BUCKET_BYTES,
        wire=wire,
        gradient_dtypes=gradient_dtypes(setting.parameters, setting.gradients),
        shares=config.choice.shares,
        config=config,
        precision=choose(config.preconditioner.precision, setting.device),
        stacks=stacks(setting.device, method),
        clip_lr=clip_lr(setting.scheduled),
        answers=answers,
        reasons=tuple(reasons),
        paired=paired,
    )


def _assignment(work: Work, config: KFACConfig, paired: bool, reasons: list[str]) -> Assignment:
    """The predicted-fastest one within the budget; ``paired``: A and G of a layer on one rank."""
    options, world = config.assignment, work.world
    fraction, budget = options.gradient_worker_fraction, options.memory_budget_gb
    counts = worker_counts(world) if fraction is None else (workers_for(fraction, world),)
    if work.held is not None:
        if fraction is not None and counts != (1,):
            raise ValueError(
                f"kfac.assignment.gradient_worker_fraction is {fraction}, but this ZeRO stage partitions gradients: "
                "several workers would each gather the whole gradient, and one would send the pieces back. Set it to "
                "null, or use ZeRO stage 0"
            )
        counts = (1,)
    found: dict[int, Assignment] = {}
    problems = []
    for workers in counts:
        try:
            found[workers] = _fitting(work, workers, paired, budget)
        except ValueError as problem:
            problems.append(str(problem))
    if not found:
        raise OverBudget(f"kfac.assignment.memory_budget_gb: {problems[0]}")
    best = min(found, key=lambda workers: (max(found[workers].loads), max(found[workers].memory)))
    if len(counts) > 1:
        tried = ", ".join(
            f"{workers}/{world}: {max(plan.loads) * 1e3:.3g} ms and {max(plan.memory):,} bytes"
            for workers, plan in found.items()
        )
        over = f"; {len(problems)} more over the budget of {budget} GB" if problems else ""
        reasons.append(f"{best} of {world} ranks precondition a layer: predicted per step and rank {tried}{over}")
    return found[best]


def _fitting(work: Work, workers: int, paired: bool, budget: float | None) -> Assignment:
    """Within the budget, in 10^9 bytes, with what a step takes beside the state.

    Raises:
        ValueError: none was found.
    """
    if budget is None:
        return assign(work, workers, paired=paired)
    cap, needed = budget * 1e9, 0
    for _ in range(FITS):
        try:
            made = assign(work, workers, paired=paired, memory_cap=cap)
        except ValueError:
            if not needed:
                raise
            break
        beside = work.beside(made.workers, made.eigen_workers)
        needed = max(map(add, made.memory, beside))
        if needed <= budget * 1e9:
            return made
        cap = max(made.memory) - (needed - budget * 1e9)
    raise ValueError(
        f"K-FAC: the memory cap is {budget * 1e9:.0f} bytes per rank, but state and what a step takes beside it needs "
        f"{needed} bytes; raise the cap, or take a smaller factor.dense_max or more ranks"
    )


def _contributors(work: Work, config: KFACConfig, reasons: list[str]) -> Contributors:
    """Of the first captured batch, before it is known how many rows a rank has: all ranks, unless that takes more
    memory than later steps may; then the eigen workers alone."""
    asked, counts = config.factor.rows, dict[str, int]()
    if asked != "all" and work.world > 1:
        if sum(packed_bytes(factor.side) for factor in work.factors) > FIRST_BUCKETS * BUCKET_BYTES:
            counts = {factor.key: 1 for factor in _alone(work)}
        need = f"{ROWS_PER_COLUMN} rows per column" if asked is None else f"{asked} rows"
        reasons.append(f"a factor's batch comes from as many ranks as have {need}; known from the first batch on")
    return Contributors(work.world, work.costs.node_size, counts)


def _alone(work: Work) -> list[FactorSpec]:
    """Factors of layers that no other tensor-parallel ranks have copies of: those ranks' plans may differ."""
    copied = {layer.name for layer in work.layers if layer.copies > 1}
    return [factor for factor in work.factors if factor.layers[0] not in copied]


def _wire(assignment: Assignment, setting: Setting, config: KFACConfig, reasons: list[str]) -> torch.dtype:
    """The dtype of batch sums and eigenvectors."""
    work = assignment.work
    if config.communication.dtype is not None:
        return DTYPES[config.communication.dtype]
    seconds = sum(work.costs.transfer(packed_bytes(factor.side)) for factor in work.factors) / work.update_interval
    part = seconds / (seconds + max(assignment.loads)) if setting.world > 1 else 0.0
    if setting.parameters is torch.float32 or part <= COSTLY_TRAFFIC:
        return torch.float32
    reasons.append(f"bf16 on the wire: batch sums are predicted to cost {part:.0%} of K-FAC's time in fp32")
    return torch.bfloat16


def _offsets(assignment: Assignment, config: KFACConfig, reasons: list[str]) -> tuple[Mapping[str, int], float]:
    """Spread over the interval if that is worth it; and seconds of the worst step's refreshes."""
    work, at_once = assignment.work, [0.0] * assignment.world
    for factor in work.factors:
        at_once[assignment.eigen_workers[factor.key]] += work.costs.decompose(factor.side, work.method)
    free = _alone(work)
    if max(at_once) <= LONG_REFRESH or work.refresh_interval == 1 or not free:
        return {}, max(at_once)
    alone = config.factor.rows != "all" and work.world > 1
    offsets, worst = refresh_offsets(free, assignment.eigen_workers, work, alone=alone)
    reasons.append(
        f"refreshes spread over {work.refresh_interval} steps: predicted {worst * 1e3:.3g} ms in the worst step "
        f"instead of {max(at_once) * 1e3:.3g} ms"
    )
    return offsets, worst


BUCKET_BYTES = 1 << 28
"""Most bytes of batch sums that a rank sends, or receives, in one message; two are on their way at a time."""
LONG_REFRESH = 0.05
"""Seconds of a refresh of everything at once from which on it is spread over steps."""
LONG_STEP = 0.05
"""Seconds of decompositions in a step from which on they are done beside the steps that follow."""


def stacks(device: torch.device, method: Method) -> bool:
    """Whether small layers of equal shape are preconditioned together: fewer and larger launches, for a second copy of
    their eigenvectors, at most 256 MiB a rank, which memory plans do not count. On a CPU a batched product is slower
    than its parts; only layers whose gradients are rotated are stacked."""
    return method.rotates and device.type != "cpu"


def common_inputs(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """With one A for the experts of a stack that have an A each."""
    stacks: dict[str, list[LayerSpec]] = {}
    for layer in layers:
        stacks.setdefault(layer.weight, []).append(layer)
    apart = {name: stack[0].name for name, stack in stacks.items() if not any(layer.shares for layer in stack)}
    return tuple(
        replace(layer, shares=apart[layer.weight]) if layer.name != apart.get(layer.weight, layer.name) else layer
        for layer in layers
    )


def gradient_dtypes(parameters: torch.dtype, gradients: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """In which gradients travel to their workers, as they are stored, and preconditioned ones back: in bf16 if the
    model is in 16 bits (fp16 would overflow, because they carry the loss scale)."""
    return gradients, torch.float32 if parameters is torch.float32 else torch.bfloat16


def clip_lr(scheduled: bool) -> str:
    """Which learning rate counts in kl-clip's bound: with the "current" one, nu * lr does not depend on it, which would
    undo a schedule; with the "peak", the schedule's largest, or the largest one seen, the step shrinks with it.

    Args:
        scheduled: whether DeepSpeed runs an lr scheduler.
    """
    return "peak" if scheduled else "current"


TYPES = list(MATRICES)
DENSE_MAX = 4096
REFRESH = 5
"""Factor updates to a refresh."""
DAMPING = {"tikhonov": 1e-3, "relative": 1.0, "adaptive": 100.0}
KL_CLIP = 1e-3


def resolve(
    config: KFACConfig, *, fisher: str, blocks: Collection[str] = (), adaptive: bool = False
) -> tuple[KFACConfig, tuple[str, ...]]:
    """The config of a run, in which no null means "choose for me", but for those that only a plan can answer: it needs
    the costs for them, see :func:`ds_kfac.plan.make_plan.make_plan`.

    Args:
        fisher: where the update rule takes G from.
        blocks: those of the config that only this update rule reads; of others no reason is given.
        adaptive: whether the optimizer divides by a running second moment, see :func:`adaptive`.

    Returns the config, and a text for each choice: key, value, reason.
    """
    options = config.preconditioner
    graft, step = options.graft, options.step
    corrects = adaptive and step == "fixed" and METHODS[options.method].rotates
    kind = config.damping.kind or ("adaptive" if step == "quadratic" else "relative")
    kl_clip = 0.0 if graft == "norm" or step == "quadratic" else KL_CLIP
    answers: tuple[tuple[str, str, Any, str], ...] = (
        ("factor", "fisher", fisher, "this optimizer's"),
        ("factor", "dense_max", DENSE_MAX, "longer sides in blocks"),
        ("eigenbasis", "refresh_interval", config.factor.update_interval.times(REFRESH), f"{REFRESH} factor updates"),
        ("damping", "kind", kind, f"step {step}"),
        ("damping", "value", Value.constant(DAMPING[kind]), f"of {kind} damping"),
        ("preconditioner", "eigenvalues", "corrected" if corrects else "kronecker", "by the optimizer"),
        ("preconditioner", "kl_clip", Value.constant(kl_clip), f"graft {graft}, step {step}"),
        ("layers", "types", TYPES, "others are asked for by name"),
    )
    reasons = []
    for block, key, value, why in answers:
        if getattr(getattr(config, block), key) is None:
            config = config.having(block, **{key: value})
            if block not in ("damping", "preconditioner", "adam") or block in blocks:
                shown = ", ".join(value) if isinstance(value, list) else value
                reasons.append(f"{block}.{key} {shown} ({why})")
    return config, tuple(reasons)


def adaptive(optimizer: str) -> bool:
    """Whether an optimizer of this class name, or type in a DeepSpeed config, divides by a running second moment (or
    takes the sign): it undoes the size of what it is given."""
    name = optimizer.lower()
    return any(word in name for word in ("adam", "lamb", "lion", "adagrad", "rmsprop", "adafactor"))
