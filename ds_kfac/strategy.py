"""From config and model to a plan: what the config leaves open is chosen by prediction, and the reason kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_kfac.adaptive import AdaptiveRule
from ds_kfac.assignment import Assignment, assign
from ds_kfac.config import KFACConfig
from ds_kfac.costs import CostModel
from ds_kfac.factor_spec import factor_specs, tied_factors
from ds_kfac.grid import worker_counts, workers_for
from ds_kfac.layers.base import LayerSpec
from ds_kfac.layers.row_blocks import CUT
from ds_kfac.planning import Plan
from ds_kfac.stagger import refresh_offsets
from ds_kfac.warm_start import WarmStart
from ds_kfac.wire import DTYPES
from ds_kfac.work import Work, packed_bytes

LONG_REFRESH = 0.05
"""Seconds of a refresh of everything at once from which on it is spread over steps."""
UNEVEN = 1.5
"""Largest over mean load from which on a reason is looked for."""
DEAR_TRAFFIC = 0.02
"""Part of K-FAC's seconds per step from which on its traffic is halved, in a model of 16 bits."""


@dataclass(frozen=True)
class Setting:
    """What the engine gives.

    Attributes:
        world: ranks of the data-parallel group.
        held: layer name -> gradient elements on each rank; None where every rank holds every gradient.
        parameters, gradients: dtypes of the model and of the gradients where K-FAC reads them.
        moments: fp32 tensors of a gradient's shape that a gradient worker keeps.
    """

    world: int
    held: Mapping[str, Sequence[int]] | None
    parameters: torch.dtype
    gradients: torch.dtype
    moments: int


def make_plan(layers: Sequence[LayerSpec], setting: Setting, config: KFACConfig, costs: CostModel) -> Plan:
    """The plan of a run.

    Raises:
        ValueError: the fraction does not fit the world or the mode, or the memory budget is too small.
    """
    schedule, reasons = config.schedule, []
    update, refresh = schedule.intervals(schedule.settled)
    exact_every, method = config.eigenbasis.chosen_exact_every, config.preconditioner.method
    paired = method == "inverse" and config.damping.kind == "tikhonov"
    work = Work(
        layers, factor_specs(layers), setting.world, setting.held, costs, update, refresh, setting.moments, exact_every,
        method,
    )  # fmt: skip
    assignment, why = _assignment(work, config, paired)
    reasons += why
    wire, gradient, why = _dtypes(assignment, setting, config, costs, update, refresh)
    reasons += why
    offsets, why = _offsets(layers, assignment, config, costs, update, refresh)
    reasons += why
    reasons += _too_large_to_share(assignment, work) + _qr_steps(assignment, work)
    reasons += _by_inverses(config, wire) if method == "inverse" else []
    options = config.eigenbasis
    warm = WarmStart(options.keep_below, options.values_below, options.qr_below, exact_every)
    return Plan(
        layers=tuple(layers),
        schedule=schedule,
        assignment=assignment,
        work=work,
        offsets=offsets,
        lag=options.lag,
        adaptive=AdaptiveRule(config.adaptive.tolerance, config.adaptive.max_interval)
        if config.adaptive.enabled
        else None,
        warm_start=warm if warm != WarmStart() else None,
        wire=wire,
        gradient_dtypes=gradient,
        shares=config.layers.share_inputs and not paired,
        reasons=tuple(reasons),
        paired=paired,
    )


def _assignment(work: Work, config: KFACConfig, paired: bool) -> tuple[Assignment, list[str]]:
    """The predicted-fastest one within the budget; ``paired``: A and G of a layer on one rank."""
    options, world = config.assignment, work.world
    fraction, budget = options.gradient_worker_fraction, options.memory_budget_gb
    if fraction is not None:
        counts: tuple[int, ...] = (_workers(fraction, world),)
        if work.held is not None and counts != (1,):
            raise ValueError(
                f"kfac.assignment.gradient_worker_fraction is {fraction}, but this ZeRO stage partitions gradients: "
                "several workers would each have to gather a whole gradient, of which one sends on the pieces. Set "
                "it to null, or use ZeRO stage 0"
            )
    else:
        counts = (1,) if work.held is not None else worker_counts(world)
    found: dict[int, Assignment] = {}
    problems = []
    for workers in counts:
        split = options.split_factors
        if split is None:
            split = workers > 1 and not paired
        try:
            found[workers] = assign(
                work.layers,
                work.factors,
                world=world,
                workers=workers,
                held=work.held,
                costs=work.costs,
                update_interval=work.update_interval,
                refresh_interval=work.refresh_interval,
                load_tolerance=options.load_tolerance,
                split_factors=split,
                memory_cap=None if budget is None else budget * 1e9,
                moments=work.moments,
                exact_every=work.exact_every,
                method=work.method,
            )
        except ValueError as problem:
            problems.append(str(problem))
    if not found:
        raise ValueError(f"kfac.assignment.memory_budget_gb: {problems[0]}")
    best = min(found, key=lambda workers: (max(found[workers].loads), max(found[workers].memory)))
    reasons = []
    if len(counts) > 1:
        tried = ", ".join(
            f"{workers}/{world}: {max(plan.loads) * 1e3:.3g} ms and {max(plan.memory):,} bytes"
            for workers, plan in found.items()
        )
        over = f"; {len(problems)} more over the budget of {budget} GB" if problems else ""
        reasons.append(f"{best} of {world} ranks precondition a layer: predicted per step and rank {tried}{over}")
    return found[best], reasons


def _by_inverses(config: KFACConfig, wire: torch.dtype) -> list[str]:
    """What inverses do otherwise than the config would have eigenbases do."""
    reasons = []
    if config.damping.kind == "tikhonov":
        what = "A and G of a layer are inverted on one rank"
        what += ", and layers do not share A (layers.share_inputs)" if config.layers.share_inputs else ""
        reasons.append(
            f'{what}: with "tikhonov" a factor\'s damping depends on its partner; "relative" does not need it'
        )
    if wire is not torch.float32:
        reasons.append(f"inverses travel in fp32, only batch sums in {str(wire).removeprefix('torch.')}")
    return reasons


def _too_large_to_share(assignment: Assignment, work: Work) -> list[str]:
    """What to do about a layer that keeps the busiest rank busy by itself."""
    rank = max(range(assignment.world), key=lambda rank: assignment.loads[rank])
    if assignment.imbalance < UNEVEN:
        return []
    seconds = {
        layer.name: (work.precondition[layer.name] if rank in assignment.workers[layer.name] else 0.0)
        + sum(work.factor[f.key] for f in work.used[layer.name] if assignment.decomposers[f.key] == rank)
        for layer in work.layers
    }
    largest = max(work.layers, key=lambda layer: seconds[layer.name])
    if seconds[largest.name] < assignment.loads[rank] / 2 or largest.kind not in CUT or largest.dim_G < 2:
        return []
    return [
        f"rank {rank} has {assignment.imbalance:.1f} times the mean load, most of it for {largest.name} alone; "
        f"layers.max_outputs {-(-largest.dim_G // 2)} or less would let ranks share it"
    ]


def _qr_steps(assignment: Assignment, work: Work) -> list[str]:
    """What steps between exact refreshes are predicted to save, or not."""
    if work.exact_every == 1:
        return []
    seconds = [0.0, 0.0]
    for factor in assignment.factors:
        for index, exact in enumerate((True, False)):
            seconds[index] += work.costs.decompose(factor.side, exact=exact)
    return [
        f"one refresh in {work.exact_every} is exact, the others are QR steps: predicted {seconds[1] * 1e3:.3g} ms "
        f"instead of {seconds[0] * 1e3:.3g} ms for all factors"
    ]


def _workers(fraction: float, world: int) -> int:
    try:
        return workers_for(fraction, world)
    except ValueError as problem:
        raise ValueError(f"kfac.assignment.gradient_worker_fraction: {problem}") from None


def _dtypes(
    assignment: Assignment, setting: Setting, config: KFACConfig, costs: CostModel, update: int, refresh: int
) -> tuple[torch.dtype, tuple[torch.dtype, torch.dtype], list[str]]:
    options, reasons = config.communication, []
    if options.dtype is not None:
        wire = DTYPES[options.dtype]
    else:
        wire, half = torch.float32, setting.parameters in (torch.bfloat16, torch.float16)
        seconds = sum(costs.transfer(packed_bytes(factor.side)) for factor in assignment.factors) / update
        part = seconds / (seconds + max(assignment.loads)) if setting.world > 1 else 0.0
        if half and part > DEAR_TRAFFIC:
            wire = torch.bfloat16
            reasons.append(f"bf16 on the wire: batch sums are predicted to cost {part:.0%} of K-FAC's time in fp32")
    if options.gradient_dtype is None:
        return wire, (setting.gradients, torch.float32), reasons
    dtype = DTYPES[options.gradient_dtype]
    gather = dtype if dtype.itemsize < setting.gradients.itemsize else setting.gradients
    return wire, (gather, dtype), reasons


def _offsets(
    layers: Sequence[LayerSpec],
    assignment: Assignment,
    config: KFACConfig,
    costs: CostModel,
    update: int,
    refresh: int,
) -> tuple[Mapping[str, int], list[str]]:
    """Spread over the interval if that is asked for, or worth it."""
    if config.eigenbasis.stagger is False or refresh == 1:
        return {}, []
    at_once = [0.0] * assignment.world
    for factor in assignment.factors:
        at_once[assignment.decomposers[factor.key]] += costs.decompose(factor.side, config.preconditioner.method)
    if config.eigenbasis.stagger is None and max(at_once) <= LONG_REFRESH:
        return {}, []
    spread = refresh_offsets(
        assignment.factors,
        assignment.decomposers,
        costs,
        update_interval=update,
        refresh_interval=refresh,
        together=tied_factors(layers, assignment.factors),
        method=config.preconditioner.method,
    )
    return spread.offsets, [
        f"refreshes spread over {refresh} steps: predicted {spread.worst * 1e3:.3g} ms in the worst step instead of "
        f"{max(at_once) * 1e3:.3g} ms"
    ]
