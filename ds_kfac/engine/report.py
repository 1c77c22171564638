"""The report at attach: a summary that ``check`` prints too, and what was chosen for which layer."""

import sys
from collections.abc import Sequence

import deepspeed
import torch
from torch import nn

from ds_kfac.comm.bucket import payload
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.directions.base import UpdateRule
from ds_kfac.engine.layer_tables import layer_lines, skipped_lines
from ds_kfac.engine.warnings import attach_warnings
from ds_kfac.model.scan import Scan
from ds_kfac.model.share import share_of
from ds_kfac.ops.backends import chosen
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.intervals import Value
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.text import number
from ds_kfac.update.stacking import stacked_bytes

LINES = 12
"""Of a summary, at most."""
LOW_SHARE = 0.8
"""Of the trained matrix parameters: where K-FAC steps less of them, the summary says what is left out."""


def report(kfacs: Sequence[KFACPreconditioner], scans: Sequence[Scan], given: KFACConfig) -> str:
    """The text of ``engine.kfac.report``, of all domains of this rank. The first rank of the job prints as much of it
    as ``kfac.report`` says, and so does the first one of each pipeline stage. To standard error itself: DeepSpeed's
    logger stands at WARNING, and frameworks mute others.

    Args:
        given: the config as it was given.
    """
    first, layout = kfacs[0], kfacs[0].layout
    warnings = list(dict.fromkeys(text for kfac in kfacs for text in attach_warnings(kfac, given)))
    found = Scan(tuple(layer for part in scans for layer in part.layers), scans[0].skipped)
    where = f", {first.target.domain.name}" if first.target.domain.name else ""
    mode, plans, optimizer = f"{_mode(first)}{where}", [kfac.plan for kfac in kfacs], type(first.target.inner).__name__
    brief = summary(layout.engine.module, found, plans, first.rule, optimizer, mode, warnings)
    details = [line for kfac, part in zip(kfacs, scans, strict=True) for line in _details(kfac, part)]
    # of a summary that is too long, the rest of its warnings
    text = "\n".join([*brief, *(line for line in warnings if line not in brief), *details])
    if given.report != "none" and first.rank == 0 and first.target.domain.shard[0] == 0:
        print(text if given.report == "full" else "\n".join(brief), file=sys.stderr, flush=True)
    return text


def summary(
    model: nn.Module,
    scan: Scan,
    plans: Sequence[Plan],
    rule: UpdateRule,
    optimizer: str,
    mode: str,
    warnings: Sequence[str],
) -> list[str]:
    """What a run does, in :data:`LINES` lines at most; it describes plans, not measurements.

    Args:
        scan: what was found in the model.
        plans: of each domain here.
        optimizer: class or type of the innermost one.
        mode: of the engine, in words.
        warnings: lines.
    """
    plan, share = plans[0], share_of(model, scan)
    left = share.matrices - share.stepped
    ours = "AdamW at adam_lr" + (f", {left:,} of them in matrices at lr" if left else "")
    rest = ours if rule.optimizer_type else f"{optimizer}, along their own gradients"
    state = sum(max(plan.assignment.memory) for plan in plans)
    lines = [
        f"ds_kfac steps {share}",
        f"  all other trained parameters ({share.others:,}): {rest}",
        f"  step: {rule.described(plan, optimizer)}",
        f"  factors every {_interval(plan.schedule.update)}, {plan.form.words} every "
        f"{_interval(plan.schedule.refresh)}",
        f"  memory: K-FAC state at most {number(state, 'B')} on a rank (factors, {plan.form.words}, moments)",
        f"  {mode}",
    ]
    if share.fraction < LOW_SHARE:
        low = f"  WARNING: below {LOW_SHARE:.0%} of the matrix parameters; left out: {share.exceptions()}"
        warnings = [low, *warnings]
    if len(lines) + len(warnings) > LINES:
        kept = LINES - len(lines) - 1
        warnings = [
            *warnings[:kept],
            f'  WARNING: {len(warnings) - kept} more: see engine.kfac.report, or "report": "full"',
        ]
    return [*lines, *warnings]


def _details(kfac: KFACPreconditioner, scan: Scan) -> list[str]:
    """What was configured or chosen, and the tables of a domain."""
    config, plan = kfac.config, kfac.plan
    ours = sum(layer.numel for layer in scan.layers)
    burn_in = plan.schedule.burn_in
    return [
        *(["", f"{kfac.target.domain.name}:"] if kfac.target.domain.name else []),
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"load max/mean {plan.assignment.imbalance:.2f}",
        f"  factors: decay {config.factor.decay}, {_statistics(config)}; {plan.form.words} by {plan.form.solver}",
        f"  products: {_products(kfac)}",
        f"  memory: {_memory(kfac)}",
        f"  ops: {chosen(kfac.curvature.device.type)}",
        *([f"  burn-in: {burn_in}"] if burn_in else []),
        f"  relayout moves {kfac.exchange.plan.gather.total_numel:,} of {ours:,} gradient elements to their workers, "
        f"{kfac.exchange.plan.scatter.total_numel:,} back; batch sums {_wire(kfac)}",
        *(["  chosen: " + ", ".join(plan.answers)] if plan.answers else []),
        *(f"  plan: {reason}" for reason in plan.reasons),
        "",
        *_tables(kfac, scan),
    ]


def _tables(kfac: KFACPreconditioner, scan: Scan) -> list[str]:
    config, plan = kfac.config, kfac.plan
    if config.report != "full":
        return [*layer_lines(scan, config, kfac.rule), *skipped_lines(scan)]
    where: dict[str, tuple[str, ...]] = {}
    for layer in scan.layers:
        own = kfac.curvature.of_layer.get(layer.name, {})
        decomposers = ", ".join(f"{side} {plan.assignment.decomposers[spec.key]}" for side, spec in own.items())
        where[layer.name] = (", ".join(map(str, plan.assignment.workers[layer.name])), decomposers)
    return [*layer_lines(scan, config, kfac.rule, where), *skipped_lines(scan, whole=True)]


def _statistics(config: KFACConfig) -> str:
    factor = config.factor
    sample = f", {factor.sample_rows} rows per call" if factor.sample_rows else ""
    return f"{factor.fisher} Fisher, {factor.weight_sharing}{sample}, {config.padding.count} rows count"


def _products(kfac: KFACPreconditioner) -> str:
    """In which precision, and what is done together."""
    several = [layers for layers in kfac.direction.stacks if len(layers) > 1]
    stacked = (
        f"{sum(map(len, several))} of this rank's {len(kfac.owned)} layers in {len(several)} stacks, "
        f"{sum(map(stacked_bytes, several)):,} bytes of eigenvectors copied"
        if several
        else "layer by layer"
    )
    precision = kfac.direction.rotations.precision
    return f"{precision}; {stacked}"


def _memory(kfac: KFACPreconditioner) -> str:
    """Of this rank once everything is there."""
    nbytes, kinds = kfac.plan.assignment.memory[kfac.rank], f"factors, {kfac.plan.form.words}, moments"
    text = f"K-FAC state {nbytes:,} bytes on this rank ({kinds})"
    if kfac.rule.optimizer_type is not None:
        rest, world = kfac.target.rest, kfac.layout.world
        held = rest.shards.held(range(len(rest.params)))[kfac.rank]
        # where gradients are replicated under ZeRO, a rank steps its slice only
        others = 8 * held // (world if rest.replicated and kfac.layout.engine.zero_optimization() else 1)
        text += f"; moments {kfac.moments_nbytes:,} in eigenbases and {others:,} in the optimizer"
    return text


def _wire(kfac: KFACPreconditioner) -> str:
    """How a step's batch sums travel, all factors due."""
    plan, reducer = kfac.plan, kfac.curvature.reducer
    buckets = reducer.layout.buckets(frozenset(kfac.curvature.specs), 0)
    sent = sum(sum(payload(bucket, plan.wire.itemsize).values()) for bucket in buckets) // kfac.channel.world
    return f"{sent:,} bytes a rank in {str(plan.wire).removeprefix('torch.')}, {len(buckets)} messages"


def _interval(value: Value) -> str:
    return f"{value} steps" if value.kind == "constant" else f"N steps, N = {value}"


def _mode(kfac: KFACPreconditioner) -> str:
    engine = kfac.layout.engine
    dtype = str(next(iter(kfac.layout.params)).dtype).removeprefix("torch.")
    wrapper = type(engine.optimizer).__name__
    offload = ", optimizer offloaded to CPU" if engine.zero_optimization() and engine.zero_cpu_offload() else ""
    return (
        f"ZeRO stage {int(engine.zero_optimization_stage())}, {dtype} parameters, gradients in "
        f"{str(kfac.layout.dtype).removeprefix('torch.')}, {wrapper}, "
        f"{engine.gradient_accumulation_steps()} micro-batches a step{offload}, {kfac.layout.world} ranks"
    )
