"""The table printed at attach: what is preconditioned by whom, what is not and why, and what is wrong upstream."""

import deepspeed
import torch

from ds_kfac.adam_choice import excepted, keeps_direction
from ds_kfac.columns import columns
from ds_kfac.config import KFACConfig
from ds_kfac.eigenbasis import basis_numel
from ds_kfac.ops.backends import chosen
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.planning import Plan
from ds_kfac.scan import Scan
from ds_kfac.schedule import Value
from ds_kfac.stacking import stacked_bytes
from ds_kfac.wire import segment_bytes


def attach_report(kfac: KFACOptimizer, scan: Scan) -> str:
    """Text of the report; the same on every rank but for nothing: it is all planned, nothing is measured."""
    engine, layout, config = kfac.layout.engine, kfac.layout, kfac.config
    ours = sum(layer.numel for layer in scan.layers)
    plan = kfac.plan
    burn_in = plan.schedule.burn_in
    lines = [
        f"ds_kfac: attached to {_mode(kfac)}",
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}, {layout.world} ranks, "
        f"load max/mean {plan.assignment.imbalance:.2f}",
        f"  factors every {_interval(plan.schedule.update)} (decay {config.factor.decay}), {_kept(plan)} every "
        f"{_interval(plan.schedule.refresh)} by {_by(kfac)}; {_statistics(config)}",
        f"  step: {_direction(kfac)}",
        f"  products: {_products(kfac)}",
        f"  memory: {_memory(kfac)}",
        f"  ops: {chosen(kfac.curvature.device.type)}",
        *([f"  burn-in: {burn_in}"] if burn_in else []),
        f"  relayout moves {kfac.exchange.plan.gather.total_numel:,} of {ours:,} gradient elements to their workers, "
        f"{kfac.exchange.plan.scatter.total_numel:,} back; batch sums {_wire(kfac)}",
        *(f"  plan: {reason}" for reason in plan.reasons),
        "",
    ]
    workers, decomposers = plan.assignment.workers, kfac.curvature.of_layer
    adam = kfac.direction.moments == "adam"
    head = ("layer", "type", "G", "A", "bias", "workers", "decomposed on", *(["step"] if adam else []))
    rows: list[tuple[str, ...]] = [head]
    for layer in scan.layers:
        sides = tuple(f"{side.dim}{'' if side.kind == 'dense' else f' ({side.kind})'}" for side in (layer.G, layer.A))
        own = decomposers.get(layer.name, {})
        where = ", ".join(f"{side} {plan.assignment.decomposers[spec.key]}" for side, spec in own.items())
        workers_here = ", ".join(map(str, workers[layer.name]))
        kind = layer.kind if len(layer.uses) == 1 else f"Tied to {layer.uses[0].module}"
        step = [_step(keeps_direction(config.adam, layer))] if adam else []
        name, bias = layer.name or "(model)", "yes" if layer.bias else "no"
        rows.append((name, kind, *sides, bias, workers_here, where, *step))
    lines += columns(rows)
    if scan.skipped:
        rows = [("not preconditioned", "type", "parameters", "why")]
        rows += [(left.name or "(model)", left.kind, f"{left.numel:,}", left.reason) for left in scan.skipped]
        lines += ["", *columns(rows)]
    lines += _without_effect(kfac)
    faults = list(layout.faults)
    if engine.torch_autocast_enabled() and layout.grad_scaler:
        faults.append("torch_autocast fp16 skips overflowed steps without telling the engine; we watch its scale")
    lines += [f"  known fault of this mode in DeepSpeed: {fault}" for fault in faults]
    return "\n".join(lines)


def _kept(plan: Plan) -> str:
    return {"eigen": "eigenbases", "inverse": "inverses"}[plan.method]


def _by(kfac: KFACOptimizer) -> str:
    return {"eigen": kfac.config.eigenbasis.method, "inverse": "Cholesky"}[kfac.plan.method]


def _statistics(config: KFACConfig) -> str:
    factor = config.factor
    sample = f", {factor.sample_rows} rows a call" if factor.sample_rows else ""
    return f"{factor.fisher} Fisher, {factor.weight_sharing}{sample}, {config.padding.count} rows count"


def _direction(kfac: KFACOptimizer) -> str:
    """What the K-FAC part of a step is."""
    config = kfac.config
    if kfac.direction.moments == "adam":
        layers = kfac.layers
        kept = sum(keeps_direction(config.adam, layer) is not None for layer in layers)
        return (
            f"Adam in the eigenbasis (KFACAdamW), {len(layers) - kept} layers orthogonalized, {kept} along Adam's "
            "direction; all other parameters by AdamW"
        )
    options, damping = config.preconditioner, config.damping
    kl_clip = options.chosen_kl_clip
    clip = "off" if kl_clip == Value.constant(0) else f"{kl_clip} at the {kfac.clip_lr} lr"
    how = f"{options.eigenvalues} eigenvalues, {damping.kind} damping {damping.chosen}, exponent {options.exponent:g}"
    if kfac.plan.method == "inverse":
        how = f"inverses of both factors, {damping.kind} damping {damping.chosen} of the last refresh, split by pi"
    return f"{how}, graft {options.graft}, kl-clip {clip}; then {type(kfac.target.inner).__name__}"


def _step(reason: str | None) -> str:
    """In words, whether a layer is orthogonalized."""
    return "orthogonalized" if reason is None else f"Adam's direction: {reason}"


def _products(kfac: KFACOptimizer) -> str:
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


def _without_effect(kfac: KFACOptimizer) -> list[str]:
    """Keys that were given but belong to the other kind of optimizer."""
    adam = kfac.direction.moments == "adam"
    blocks = ("damping", "preconditioner") if adam else ("adam",)
    given = [(b, key) for b in blocks for key in sorted(getattr(kfac.config, b).model_fields_set)]
    keys = [f"kfac.{b}.{key}" for b, key in given if key not in ("precision", "stack_layers")]
    if adam and "except_layers" in kfac.config.adam.model_fields_set:
        names = [layer.uses[0].module for layer in kfac.layers]
        idle = [p for p in kfac.config.adam.except_layers if not any(excepted(p, name) for name in names)]
        keys += [f"kfac.adam.except_layers {p!r}, which no layer's name ends with" for p in idle]
    if kfac.plan.method == "inverse" and "method" in kfac.config.eigenbasis.model_fields_set:
        keys.append('kfac.eigenbasis.method (with preconditioner.method "inverse")')
    name = "KFACAdamW" if adam else type(kfac.target.inner).__name__
    return [f"  WARNING: of no effect with {name}: {', '.join(keys)}"] if keys else []


def _memory(kfac: KFACOptimizer) -> str:
    """Of this rank once everything is there."""
    nbytes, kinds = kfac.plan.assignment.memory[kfac.rank], f"factors, {_kept(kfac.plan)}, moments"
    text = f"K-FAC state {nbytes:,} bytes on this rank ({kinds})"
    if kfac.direction.moments == "adam":
        rest, world = kfac.target.rest, kfac.layout.world
        held = rest.shards.held(range(len(rest.params)))[kfac.rank]
        # where gradients are replicated under ZeRO, a rank steps its slice only
        others = 8 * held // (world if rest.replicated and kfac.layout.engine.zero_optimization() else 1)
        text += f"; Adam's moments {kfac.adam_nbytes:,} in eigenbases and {others:,} in the optimizer"
    return text


def _wire(kfac: KFACOptimizer) -> str:
    """How a step's batch sums travel, all factors due."""
    plan, reducer = kfac.plan, kfac.curvature.reducer
    buckets = reducer.buckets(frozenset(kfac.curvature.specs))
    total = sum(segment_bytes(segment, plan.wire) for bucket in buckets for segment in bucket.segments)
    return f"{total:,} bytes a rank in {str(plan.wire).removeprefix('torch.')}, {len(buckets)} messages"


def _interval(value: Value) -> str:
    return f"{value} steps" if value.kind == "constant" else f"so many steps: {value}"


def _mode(kfac: KFACOptimizer) -> str:
    engine = kfac.layout.engine
    dtype = str(next(iter(kfac.layout.params)).dtype).removeprefix("torch.")
    wrapper = type(engine.optimizer).__name__
    offload = ", optimizer offloaded to CPU" if engine.zero_optimization() and engine.zero_cpu_offload() else ""
    return (
        f"ZeRO stage {int(engine.zero_optimization_stage())}, {dtype} parameters, gradients in "
        f"{str(kfac.layout.dtype).removeprefix('torch.')}, {wrapper}, "
        f"{engine.gradient_accumulation_steps()} micro-batches a step{offload}"
    )
