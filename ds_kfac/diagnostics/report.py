"""The report at attach: a summary that ``check`` prints too, and what was chosen for which
layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_kfac.comm.reduce import payloads
from ds_kfac.config.keys import KFACConfig
from ds_kfac.diagnostics.recipes import far_from_recipes
from ds_kfac.diagnostics.share import share_of
from ds_kfac.diagnostics.text import columns, fitted, folded, number
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.facts import RuleFacts
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.log import say
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import Scan
from ds_kfac.ops.dispatch import chosen
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Value
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.groups import basis_bytes
from ds_kfac.zero import deepspeed_versions

LINES = 12
"""Of a summary, at most."""
LOW_SHARE = 0.8
"""Of the trained matrix parameters: where K-FAC steps less of them, the summary says what is left
out."""


def report(kfacs: Sequence[KFACPreconditioner], found: Scan, given: KFACConfig) -> str:
    """The text of ``engine.kfac.report``, of all domains of this rank. The first rank of the job
    says as much of it as ``kfac.report`` wants, and so does the first one of each pipeline stage.
    ``given``: the config as it was given."""
    first, layout = kfacs[0], kfacs[0].layout
    warnings = list(dict.fromkeys(text for kfac in kfacs for text in attach_warnings(kfac, given)))
    where = f", {first.engine_view.domain.name}" if first.engine_view.domain.name else ""
    mode, plans, inner = (
        f"{_mode(first)}{where}",
        [kfac.plan for kfac in kfacs],
        first.engine_view.inner,
    )
    optimizer, ratio = type(inner).__name__, getattr(inner, "adam_ratio", 1.0)
    brief = summary(
        layout.engine.module, found, plans, first.rule.facts, optimizer, mode, warnings, ratio
    )
    skipped = skipped_lines(found, whole=first.config.report == "full")
    details = [
        line for kfac in kfacs for line in (*_details(kfac), *(skipped if kfac is first else []))
    ]
    # of a summary that is too long, the rest of its warnings
    text = "\n".join([*brief, *(line for line in warnings if line not in brief), *details])
    if given.report != "none" and first.rank == 0 and first.engine_view.domain.shard[0] == 0:
        say(fitted(text if given.report == "full" else "\n".join(brief)), here=True)
    return text


def summary(
    model: nn.Module,
    scan: Scan,
    plans: Sequence[Plan],
    facts: RuleFacts,
    optimizer: str,
    mode: str,
    warnings: Sequence[str],
    ratio: float,
) -> list[str]:
    """What a run does, in :data:`LINES` lines at most; it describes plans, not measurements.

    Args:
        plans: of each domain here.
        optimizer: class or type of the innermost one.
        mode: of the engine, in words.
        ratio: rate of what is in no layer, over the optimizer's lr.
    """
    plan, share = plans[0], share_of(model, scan)
    rest = facts.others(optimizer, ratio, share.matrices - share.stepped)
    state = sum(max(plan.assignment.memory) for plan in plans)
    lines = [
        f"ds_kfac steps {share}",
        *([f"  all other trained parameters ({share.others:,}): {rest}"] if share.others else []),
        f"  step: {facts.described(plan, optimizer, ratio)}",
        f"  factors every {_interval(plan.schedule.update)}, {plan.method.words} every "
        f"{_interval(plan.schedule.refresh)}",
        f"  memory: K-FAC state at most {number(state, 'B')} on a rank (factors, "
        f"{plan.method.words}, moments)",
        f"  {mode}",
    ]
    if share.fraction < LOW_SHARE:
        low = (
            f"  WARNING: below {LOW_SHARE:.0%} of the matrix parameters; left out: "
            f"{share.exceptions()}"
        )
        warnings = [low, *warnings]
    if len(lines) + len(warnings) > LINES:
        kept = LINES - len(lines) - 1
        more = (
            f'  WARNING: {len(warnings) - kept} more: see engine.kfac.report, or "report": "full"'
        )
        warnings = [*warnings[:kept], more]
    return [*lines, *warnings]


def _details(kfac: KFACPreconditioner) -> list[str]:
    """What was configured or chosen, and the tables of a domain."""
    config, plan, whole = kfac.config, kfac.plan, kfac.config.report == "full"
    ours, precision = sum(layer.numel for layer in kfac.layers), kfac.direction.precision
    _, buckets = kfac.curvature.reducer.layout.of(frozenset(kfac.curvature.specs), 0)
    nbytes = (
        sum(part.values()) for bucket in buckets for part in payloads(bucket, plan.wire.itemsize)
    )
    sent = sum(nbytes) // kfac.channel.world
    several, batched = (
        [x.layers for x in kfac.direction.layer_groups if len(x.layers) > 1],
        "layer by layer",
    )
    if several:
        batched = (
            f"{sum(map(len, several))} of this rank's {len(kfac.owned)} layers in {len(several)} "
            f"groups of one shape, "
            f"{sum(map(basis_bytes, several)):,} bytes of eigenvectors in them"
        )
    where: dict[str, tuple[str, ...]] = {}
    for layer in kfac.layers if whole else ():
        own = kfac.curvature.of_layer.get(layer.name, {})
        eigen_workers = ", ".join(
            f"{side} {plan.assignment.eigen_workers[spec.key]}" for side, spec in own.items()
        )
        where[layer.name] = (
            ", ".join(map(str, plan.assignment.workers[layer.name])),
            eigen_workers,
        )
    return [
        *(["", f"{kfac.engine_view.domain.name}:"] if kfac.engine_view.domain.name else []),
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"load max/mean {plan.assignment.imbalance:.2f}",
        f"  factors: decay {config.factor.decay}, {config.factor.fisher} Fisher, "
        f"{config.factor.weight_sharing}, "
        f"{plan.method.words} by {plan.method.solver}",
        f"  products: {precision}; {batched}",
        f"  memory: {_memory(kfac)}",
        f"  ops: {chosen(kfac.curvature.device.type)}",
        *([f"  burn-in: {plan.schedule.burn_in}"] if plan.schedule.burn_in else []),
        f"  relayout moves {kfac.exchange.plan.gather.total_numel:,} of {ours:,} gradient "
        f"elements to their workers, "
        f"{kfac.exchange.plan.scatter.total_numel:,} back; batch sums {sent:,} bytes a rank in "
        # of a step with all factors due
        f"{str(plan.wire).removeprefix('torch.')}, {len(buckets)} messages",
        *(["  chosen: " + ", ".join(plan.answers)] if plan.answers else []),
        *(f"  plan: {reason}" for reason in plan.reasons),
        "",
        *layer_lines(kfac.layers, config, kfac.rule.facts, where),
    ]


def _memory(kfac: KFACPreconditioner) -> str:
    """Of this rank once everything is there."""
    nbytes, kinds = (
        kfac.plan.assignment.memory[kfac.rank],
        f"factors, {kfac.plan.method.words}, moments",
    )
    text = f"K-FAC state {nbytes:,} bytes on this rank ({kinds})"
    if kfac.rule.optimizer_type is not None:
        rest = kfac.engine_view.other_params
        held = rest.shards.held(range(len(rest.params)))[kfac.rank]
        others = 8 * held
        moments = sum(
            state.moments.nbytes for state in kfac.state.values() if state.moments is not None
        )
        text += f"; moments {moments:,} in eigenbases and {others:,} in the optimizer"
    device = kfac.device.type
    if kept := kfac.rule.facts.kept(kfac.plan, kfac.owned, device):
        text += f"; {kept:,} for steps as one CUDA graph, and what a step takes stays reserved"
    return text


def _interval(value: Value) -> str:
    return f"{value} steps" if value.kind == "constant" else f"N steps, N = {value}"


def _mode(kfac: KFACPreconditioner) -> str:
    engine = kfac.layout.engine
    dtype = str(next(iter(kfac.layout.params)).dtype).removeprefix("torch.")
    offload = (
        ", optimizer offloaded to CPU"
        if engine.zero_optimization() and engine.zero_cpu_offload()
        else ""
    )
    return (
        f"ZeRO stage {int(engine.zero_optimization_stage())}, {dtype} parameters, gradients in "
        f"{str(kfac.layout.dtype).removeprefix('torch.')}, {type(engine.optimizer).__name__}, "
        f"gradient accumulation {engine.gradient_accumulation_steps()}{offload}, world size "
        f"{kfac.layout.world}"
    )


def layer_lines(
    layers: Sequence[LayerSpec],
    config: KFACConfig,
    facts: RuleFacts,
    where: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """The preconditioned layers. ``where``: layer name -> gradient workers and eigen workers, for a
    row for each layer; None: equal layers in a row."""
    choices = [facts.choice(config, layer) for layer in layers]
    step = any(choice is not None for choice in choices)
    rows = []
    for layer, choice in zip(layers, choices, strict=True):
        ranks = where[layer.name] if where else ()
        sides = (
            f"{side.dim}{'' if side.kind == 'dense' else f' ({side.kind})'}"
            for side in (layer.G, layer.A)
        )
        own = layer.name or "(model)", layer.kind, *sides, "yes" if layer.bias else "no"
        rows.append((*own, *ranks, *([choice or ""] if step else [])))
    ranks = ("workers", "decomposed on") if where else ()
    head = ("layer", "type", "G", "A", "bias", *ranks, *(["step"] if step else []))
    return columns([head, *(rows if where else folded(rows))])


def skipped_lines(scan: Scan, *, whole: bool = False) -> list[str]:
    """What is not preconditioned, and why; nothing if all is. ``whole``: a row for each module."""
    if not scan.skipped:
        return []
    rows = [
        (left.name or "(model)", left.kind, f"{left.numel:,}", left.reason) for left in scan.skipped
    ]
    return [
        "",
        *columns(
            [
                ("not preconditioned", "type", "parameters", "why"),
                *(rows if whole else folded(rows)),
            ]
        ),
    ]


BATCH_NORM: Any = nn.modules.batchnorm._BatchNorm
SHARE = 0.1
"""Of a device's free memory: K-FAC that needs more is worth a line."""


def attach_warnings(kfac: KFACPreconditioner, given: KFACConfig) -> list[str]:
    """Lines of the report."""
    engine, world = kfac.layout.engine, kfac.layout.world
    modules: dict[str, Any] = dict(engine.module.named_modules())
    texts = without_effect(kfac.rule, given, kfac.layers, type(kfac.engine_view.inner).__name__)
    if (
        isinstance(engine, PipelineEngine)
        and engine.num_stages > 1
        and "damping" in kfac.rule.blocks
    ):
        texts.append(  # G's scale counts
            "each pipeline stage takes the scale of G from the rows of its own last layer: if the "
            "last stage's layers "
            "have fewer (a pooled head), G of the others is larger by that factor "
            "(docs/reference/supported.md)"
        )
    # knows no absolute size
    relative = "damping" in kfac.rule.blocks and kfac.config.damping.kind == "relative"
    norms = {
        name: m.weight
        for name, m in modules.items()
        if relative and isinstance(m, BATCH_NORM | nn.GroupNorm)
    }
    # at ZeRO-3 a weight may not be there
    if zero := [
        name for name, w in norms.items() if w is not None and w.numel() and not w.detach().any()
    ]:
        texts.append(
            f"{len(zero)} norms begin with a weight of zero ({zero[0]}, ..): the layers below get "
            f"hardly any "
            "gradient at first, and relative damping makes full steps of it. If training stands "
            "still use "
            'kfac.damping {"kind": "tikhonov"}, KFACAdamW, or let them begin at one '
            "(docs/howto/tune.md)"
        )
    texts += far_from_recipes(kfac)
    texts += _of_memory(kfac)
    faults = list(kfac.layout.faults)
    batch_norms = [
        m for m in modules.values() if isinstance(m, BATCH_NORM) and m.running_mean is not None
    ]
    if world > 1 and any(not isinstance(m, nn.SyncBatchNorm) for m in batch_norms):
        faults.append(
            "BatchNorm's running statistics stay each rank's own, and a checkpoint has those of "
            "rank 0; average them "
            "before evaluation and saving (examples/job.py does)"
        )
    mixed = [
        m for m in batch_norms if m.weight is not None and m.weight.dtype != m.running_mean.dtype
    ]
    if mixed and kfac.device.type == "cpu":
        faults.append(
            "BatchNorm does not run on a CPU with 16-bit weights and fp32 statistics; set "
            '"data_types": '
            '{"buffer_dtype": ...} to the weights\' dtype'
        )
    if kfac.layout.grad_scaler:
        faults.append(
            "torch_autocast fp16 skips overflowed steps without notice; ds_kfac watches its scale"
        )
    known = (f"  known fault of this mode in DeepSpeed: {fault}" for fault in faults)
    newer = deepspeed_versions.untested()
    return [*(f"  WARNING: {text}" for text in texts), *known, *([f"  {newer}"] if newer else [])]


def without_effect(
    rule: UpdateRule, config: KFACConfig, layers: Sequence[LayerSpec], optimizer: str
) -> list[str]:
    """Keys that were given but belong to another update rule than the optimizer's, or touch no
    layer."""
    others = {block for other in DIRECTIONS for block in other.blocks} - set(rule.blocks)
    given = [
        (b, key) for b in sorted(others) for key in sorted(getattr(config, b).model_fields_set)
    ]
    keys = [f"kfac.{b}.{key}" for b, key in given if key not in ("precision", "method")]
    keys += rule.facts.idle(config, layers)
    return (
        [f"without effect with {rule.optimizer_type or optimizer}: {', '.join(keys)}"]
        if keys
        else []
    )


def _of_memory(kfac: KFACPreconditioner) -> list[str]:
    """Of this rank, against what its device has left."""
    plan, reducer = kfac.plan, kfac.curvature.reducer
    slots, _ = reducer.layout.of(frozenset(kfac.curvature.specs), 0)
    sums = sum(4 * slot.numel for slot in slots if kfac.rank in {slot.owner, *slot.contributors})
    state, free = int(plan.assignment.memory[kfac.rank]), get_accelerator().available_memory()
    if state + sums <= SHARE * free:
        return []
    return [
        f"K-FAC needs {state / 1e9:.1f} GB on this rank and {sums / 1e9:.1f} GB more in a step "
        f"that updates all "
        f"factors, {(state + sums) / free:.0%} of the {free / 1e9:.1f} GB that are free: see "
        "kfac.factor.dense_max, kfac.layers.exclude, kfac.offload, or assignment.memory_budget_gb "
        "at ZeRO stage 0"
    ]
