"""The table printed at attach: what is preconditioned by whom, what is not and why, and what is wrong upstream."""

import deepspeed
import torch

from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.scan import Scan
from ds_kfac.schedule import Value


def attach_report(kfac: KFACOptimizer, scan: Scan) -> str:
    """Text of the report; the same on every rank but for nothing: it is all planned, nothing is measured."""
    engine, layout, config = kfac.layout.engine, kfac.layout, kfac.config
    ours = sum(layer.numel for layer in scan.layers)
    damping = config.damping
    kl_clip = config.preconditioner.chosen_kl_clip
    burn_in = kfac.schedule.burn_in
    lines = [
        f"ds_kfac: attached to {_mode(kfac)}",
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}, {layout.world} ranks, "
        f"load max/mean {kfac.assignment.imbalance:.2f}",
        f"  factors every {_interval(kfac.schedule.update)} (decay {config.factor.decay}), eigenbases every "
        f"{_interval(kfac.schedule.refresh)} by {config.eigenbasis.method}; {damping.kind} damping {damping.chosen}, "
        f"kl-clip {'off' if kl_clip == Value.constant(0) else f'{kl_clip} at the {kfac.clip_lr} lr'}",
        *([f"  burn-in: {burn_in}"] if burn_in else []),
        f"  relayout moves {kfac.exchange.gather_plan.total_numel:,} of {ours:,} gradient elements to owners, "
        f"{kfac.exchange.scatter_plan.total_numel:,} back; factor bucket {kfac.bucket.numel * 4:,} bytes",
        "",
    ]
    rows: list[tuple[str, ...]] = [("layer", "type", "G", "A", "bias", "owner")]
    for layer in scan.layers:
        sides = (str(layer.dim_G), str(layer.dim_A))
        owner = str(kfac.assignment.owners[layer.name])
        rows.append((layer.name or "(model)", layer.kind, *sides, "yes" if layer.bias else "no", owner))
    lines += _table(rows)
    if scan.skipped:
        rows = [("not preconditioned", "type", "parameters", "why")]
        rows += [(left.name or "(model)", left.kind, f"{left.numel:,}", left.reason) for left in scan.skipped]
        lines += ["", *_table(rows)]
    faults = list(layout.faults)
    if engine.torch_autocast_enabled() and layout.grad_scaler:
        faults.append("torch_autocast fp16 skips overflowed steps without telling the engine; we watch its scale")
    lines += [f"  known fault of this mode in DeepSpeed: {fault}" for fault in faults]
    return "\n".join(lines)


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


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line.rstrip()}" for line in lines]
