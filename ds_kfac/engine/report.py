"""The report printed at attach: which ranks precondition which layers, what is left out and why, and known faults."""

from collections.abc import Sequence

import deepspeed
import torch

from ds_kfac.comm.bucket import payload
from ds_kfac.config.kfac import KFACConfig
from ds_kfac.curvature.eigenbasis import basis_numel
from ds_kfac.engine.layer_tables import layer_lines, skipped_lines
from ds_kfac.model.scan import Scan, numel, share
from ds_kfac.ops.backends import chosen
from ds_kfac.schedule.intervals import Value
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.stacking import stacked_bytes


def attach_report(kfac: KFACPreconditioner, scan: Scan, warnings: Sequence[str]) -> str:
    """Text of the report: what matters first. Its tables describe the plan, not measurements."""
    parameters = list(kfac.layout.engine.module.parameters())
    every, trained = (sum(map(numel, some)) for some in (parameters, [p for p in parameters if p.requires_grad]))
    lines = [f"ds_kfac: attached to {_mode(kfac)}", f"  {share(scan.layers, every, trained)}", *warnings]
    return "\n".join([*lines, *_choices(kfac, scan), "", *_tables(kfac, scan)])


def _choices(kfac: KFACPreconditioner, scan: Scan) -> list[str]:
    """What was configured or chosen."""
    layout, config, plan = kfac.layout, kfac.config, kfac.plan
    ours = sum(layer.numel for layer in scan.layers)
    burn_in = plan.schedule.burn_in
    return [
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}, {layout.world} ranks, "
        f"load max/mean {plan.assignment.imbalance:.2f}",
        f"  factors every {_interval(plan.schedule.update)} (decay {config.factor.decay}), {plan.form.words} every "
        f"{_interval(plan.schedule.refresh)} by {plan.form.solver}; {_statistics(config)}",
        f"  step: {kfac.rule.described(kfac.setup, kfac.layers)}",
        f"  products: {_products(kfac)}",
        f"  memory: {_memory(kfac)}",
        f"  ops: {chosen(kfac.curvature.device.type)}",
        *([f"  burn-in: {burn_in}"] if burn_in else []),
        f"  relayout moves {kfac.exchange.plan.gather.total_numel:,} of {ours:,} gradient elements to their workers, "
        f"{kfac.exchange.plan.scatter.total_numel:,} back; batch sums {_wire(kfac)}",
        *(["  chosen: " + ", ".join(plan.answers)] if plan.answers else []),
        *(f"  plan: {reason}" for reason in plan.reasons),
    ]


def _tables(kfac: KFACPreconditioner, scan: Scan) -> list[str]:
    config, plan = kfac.config, kfac.plan
    if config.report == "summary":
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
    if precision.half:  # at most: layers that share A share its copy
        half = 2 * sum(basis_numel(side) for layer in kfac.owned for side in (layer.G, layer.A))
        stacked += f", up to {half:,} bytes of them once more in bf16"
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
        f"{engine.gradient_accumulation_steps()} micro-batches a step{offload}"
    )
