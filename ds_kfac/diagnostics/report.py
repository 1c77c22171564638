"""The attach report. It has a summary, which the command ``check`` also prints, and shows what was
chosen for each layer."""

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
from ds_kfac.diagnostics.share import named, share_of
from ds_kfac.diagnostics.text import columns, fitted, folded, number
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.facts import RuleFacts
from ds_kfac.directions.table import DIRECTIONS
from ds_kfac.log import say
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import Scan
from ds_kfac.ops.dispatch import chosen
from ds_kfac.plan.plan import Plan
from ds_kfac.schedule.timetable import Schedule, Value
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.update.groups import basis_bytes
from ds_kfac.zero import deepspeed_versions
from ds_kfac.zero.faults import faults
from ds_kfac.zero.registry import shard_layout

LINES = 12
"""A summary has at most this many lines."""
LOW_SHARE = 0.8
"""If K-FAC updates less than this fraction of the trained matrix parameters, the summary names what
is left out."""
MEMORY_SHARE = 0.1
"""If K-FAC needs more than this fraction of a device's free memory, the report has a warning."""
BATCH_NORM: Any = nn.modules.batchnorm._BatchNorm

PIPELINE_SCALES = (
    "each pipeline stage takes the scale of G from the number of rows of its own last layer. If "
    "layers of the last stage have fewer rows than other layers, for example a pooled head, G of "
    "the other stages is larger by the ratio of the numbers of rows (docs/reference/supported.md)"
)
ZERO_NORMS = (
    "{count} norms begin with a weight of zero ({first}, ..), so the layers before them get hardly "
    "any gradient at first, but relative damping gives them full steps. If the loss does not fall, "
    'use kfac.damping {{"kind": "tikhonov"}}, use KFACAdamW, or begin with weights of one '
    "(docs/howto/tune.md)"
)
LOCAL_STATISTICS = (
    "BatchNorm's running statistics differ between ranks, and a checkpoint has only rank 0's; "
    "average them over ranks before you evaluate or save, as examples/job.py does"
)
MIXED_BATCH_NORM = (
    "BatchNorm does not run on a CPU with 16-bit weights and fp32 statistics; set "
    '"data_types": {"buffer_dtype": ...} to the weights\' dtype'
)
SILENT_SKIPS = (
    "with torch_autocast in fp16, steps that overflow are skipped without notice; ds_kfac "
    "recognizes these steps by the loss scale"
)


def report(kfacs: Sequence[KFACPreconditioner], scan: Scan, given: KFACConfig) -> str:
    """Return the text of ``engine.kfac.report``. Print all of it, the summary, or nothing, as the
    config key ``report`` says.

    The first rank of the job prints, and so does the first rank of each pipeline stage.

    Args:
        kfacs: this rank's preconditioners. There is one for the dense layers. If experts are
            distributed over another group of ranks, there is a second one for them.
        scan: result of scanning the model.
        given: the config as the user gave it.
    """
    first = kfacs[0]
    domain = first.engine_view.domain
    inner = first.engine_view.inner
    texts = [text for kfac in kfacs for text in attach_warnings(kfac, given)]
    warnings = list(dict.fromkeys(texts))  # several preconditioners may have the same warnings
    brief = summary(
        first.layout.engine.module,
        scan,
        [kfac.plan for kfac in kfacs],
        first.rule.facts,
        optimizer=type(inner).__name__,
        mode=f"{_mode(first)}, {domain.name}" if domain.name else _mode(first),
        warnings=warnings,
        ratio=getattr(inner, "adam_ratio", 1.0),
    )
    details: list[str] = []
    for kfac in kfacs:
        details += _details(kfac)
        if kfac is first:
            details += skipped_lines(scan, every_module=first.config.report == "full")
    # the full text also has the warnings that did not fit into the summary
    left_out = [line for line in warnings if line not in brief]
    text = "\n".join([*brief, *left_out, *details])
    if given.report != "none" and first.rank == 0 and domain.shard[0] == 0:
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
    """Describe a run in at most :data:`LINES` lines. The numbers come from the run's plans and are
    not measured.

    Args:
        model: the model.
        scan: result of scanning the model.
        plans: plans of this rank's preconditioners, see :func:`report`.
        facts: facts about the update rule.
        optimizer: class or type of the innermost optimizer.
        mode: the engine's mode, in words.
        warnings: the report's warnings. The last ones are left out if there are too many.
        ratio: learning rate of the parameters outside of K-FAC layers, divided by the optimizer's
            learning rate.
    """
    plan = plans[0]
    share = share_of(model, scan)
    state_bytes = sum(max(plan.assignment.memory) for plan in plans)
    method = plan.method.words
    lines = [f"ds_kfac updates {share}"]
    if share.others:
        others = facts.others(optimizer, ratio, named(share.outside))
        lines.append(f"  all other trained parameters ({share.others:,}): {others}")
    if share.tables:
        lines.append(
            "  treated as tables, like embeddings, because the model's code looks up rows in them: "
            f"{named(share.tables)}"
        )
    lines += [
        f"  step: {facts.described(plan, optimizer, ratio)}",
        f"  {_intervals(plan.schedule, method)}",
        f"  memory: K-FAC state at most {number(state_bytes, 'B')} on a rank (factors, {method}, "
        "moments)",
        f"  {mode}",
    ]
    if share.fraction < LOW_SHARE:
        low = (
            f"  WARNING: K-FAC updates less than {LOW_SHARE:.0%} of the matrix parameters; left "
            f"out: {share.exceptions()}"
        )
        warnings = [low, *warnings]
    if share.unclear_fraction > 1 - LOW_SHARE:
        unclear = (
            "  WARNING: K-FAC does not update these large parameters, and the share above does not "
            "count them, because by their shape they are neither matrices nor tables: "
            f"{named(share.unclear)}"
        )
        warnings = [unclear, *warnings]
    if len(lines) + len(warnings) > LINES:
        shown = LINES - len(lines) - 1
        more = len(warnings) - shown
        pointer = (
            f'  WARNING: {more} more warnings: see engine.kfac.report, or set "report": "full"'
        )
        warnings = [*warnings[:shown], pointer]
    return [*lines, *warnings]


def _details(kfac: KFACPreconditioner) -> list[str]:
    """Return the lines about one preconditioner: what was configured or chosen for it, and a table
    of its layers."""
    config = kfac.config
    plan = kfac.plan
    domain = kfac.engine_view.domain.name
    lines = ["", f"{domain}:"] if domain else []
    lines += [
        f"  deepspeed {deepspeed.__version__}, torch {torch.__version__}; load max/mean "
        f"{plan.assignment.imbalance:.2f}",
        f"  factors: decay {config.factor.decay}, {config.factor.fisher} Fisher, "
        f"{config.factor.weight_sharing}, {plan.method.words} by {plan.method.solver}",
        f"  products: {kfac.direction.precision}; {_batched(kfac)}",
        f"  memory: {_memory(kfac)}",
        f"  ops: {chosen(kfac.curvature.device.type)}",
    ]
    if plan.schedule.burn_in:
        lines.append(f"  burn-in: {plan.schedule.burn_in}")
    lines.append(f"  {_traffic(kfac)}")
    if plan.answers:
        lines.append("  chosen: " + ", ".join(plan.answers))
    lines += [f"  plan: {reason}" for reason in plan.reasons]
    ranks = _ranks_of_layers(kfac) if config.report == "full" else None
    return [*lines, "", *layer_lines(kfac.layers, config, kfac.rule.facts, ranks)]


def _batched(kfac: KFACPreconditioner) -> str:
    """Say how many of this rank's layers are updated in batches."""
    groups = [group.layers for group in kfac.direction.layer_groups if len(group.layers) > 1]
    if not groups:
        return "layer by layer"
    return (
        f"{sum(map(len, groups))} of this rank's {len(kfac.worker_layers)} layers are updated in "
        f"{len(groups)} groups of equal shape, which hold {sum(map(basis_bytes, groups)):,} bytes "
        "of eigenvectors"
    )


def _traffic(kfac: KFACPreconditioner) -> str:
    """Say what ranks send to each other in a step that updates all factors."""
    _, buckets = kfac.curvature.reducer.plan.of(frozenset(kfac.curvature.specs), 0)
    wire = kfac.plan.wire
    total_bytes = sum(
        sum(part.values()) for bucket in buckets for part in payloads(bucket, wire.itemsize)
    )
    relayout = kfac.exchange.plan
    gradient_elements = sum(layer.numel for layer in kfac.layers)
    return (
        f"relayout moves {relayout.gather.total_numel:,} of {gradient_elements:,} gradient "
        f"elements to their workers, and {relayout.scatter.total_numel:,} elements of results "
        f"back; a rank sends {total_bytes // kfac.channel.world:,} bytes of batch sums on average, "
        f"in {_name(wire)} and in {len(buckets)} messages"
    )


def _ranks_of_layers(kfac: KFACPreconditioner) -> dict[str, tuple[str, str]]:
    """Return a dict from layer name to two texts: the ranks of the layer's gradient workers, and
    the ranks that decompose its factors."""
    assignment = kfac.plan.assignment
    ranks = {}
    for layer in kfac.layers:
        factors = kfac.curvature.of_layer.get(layer.name, {})
        workers = ", ".join(map(str, assignment.workers[layer.name]))
        owners = ", ".join(
            f"{side} {assignment.owners[factor.key]}" for side, factor in factors.items()
        )
        ranks[layer.name] = (workers, owners)
    return ranks


def _memory(kfac: KFACPreconditioner) -> str:
    """Describe the memory that K-FAC keeps on this rank once all factors, eigenbases and moments
    exist."""
    plan = kfac.plan
    state_bytes = plan.assignment.memory[kfac.rank]
    text = f"K-FAC state {state_bytes:,} bytes on this rank (factors, {plan.method.words}, moments)"
    if kfac.rule.optimizer_type is not None:
        view = kfac.engine_view
        others = shard_layout(
            kfac.layout.engine, view.other_params, view.domain.group, seam=view.seam
        )
        held_elements = sum(shard.numel for shard in others.own)
        optimizer_bytes = 8 * held_elements  # two moments in fp32
        moment_bytes = sum(
            state.moments.nbytes for state in kfac.state.values() if state.moments is not None
        )
        text += (
            f"; moments take {moment_bytes:,} bytes in eigenbases and {optimizer_bytes:,} in the "
            "optimizer"
        )
    kept_bytes = kfac.rule.facts.kept(plan, kfac.worker_layers, kfac.device.type)
    if kept_bytes:
        text += (
            f"; the CUDA graph of a step keeps {kept_bytes:,} bytes, and the memory of a step "
            "stays reserved"
        )
    return text


def _intervals(schedule: Schedule, method: str) -> str:
    update = _interval(schedule.update)
    refresh = _interval(schedule.refresh)
    text = f"factors every {update}, {method} every {refresh}"
    if not schedule.burnt_in:
        return text
    first_update, first_refresh = schedule.intervals(0)
    return (
        f"{text} (in the first {schedule.burnt_in} steps: every {first_update} and {first_refresh})"
    )


def _interval(value: Value) -> str:
    return f"{value} steps" if value.kind == "constant" else f"N steps, N = {value}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mode(kfac: KFACPreconditioner) -> str:
    """Describe the engine's mode: ZeRO stage, dtypes, optimizer, accumulation and world size."""
    layout = kfac.layout
    engine = kfac.layout.engine
    parameters = next(iter(layout.params)).dtype
    is_offloaded = engine.zero_optimization() and engine.zero_cpu_offload()
    offload = ", optimizer offloaded to CPU" if is_offloaded else ""
    return (
        f"ZeRO stage {int(engine.zero_optimization_stage())}, {_name(parameters)} parameters, "
        f"gradients in {_name(layout.dtype)}, {type(engine.optimizer).__name__}, gradient "
        f"accumulation {engine.gradient_accumulation_steps()}{offload}, world size {layout.world}"
    )


def layer_lines(
    layers: Sequence[LayerSpec],
    config: KFACConfig,
    facts: RuleFacts,
    ranks: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Return the table of the preconditioned layers.

    Args:
        layers: the layers.
        config: the "kfac" block.
        facts: facts about the update rule.
        ranks: layer name -> (gradient workers, ranks that decompose the layer's factors). If None,
            equal layers share a row. Otherwise each layer has its own row.
    """
    choices = [facts.choice(config, layer) for layer in layers]
    has_choices = any(choice is not None for choice in choices)
    head = ["layer", "type", "G", "A", "bias"]
    if ranks:
        head += ["workers", "decomposed on"]
    if has_choices:
        head.append("step")
    rows = []
    for layer, choice in zip(layers, choices, strict=True):
        row = [layer.name or "(model)", layer.kind]
        for side in (layer.G, layer.A):
            row.append(f"{side.dim}" if side.kind == "dense" else f"{side.dim} ({side.kind})")
        row.append("yes" if layer.bias else "no")
        if ranks:
            row += ranks[layer.name]
        if has_choices:
            row.append(choice or "")
        rows.append(tuple(row))
    return columns([tuple(head), *(rows if ranks else folded(rows))])


def skipped_lines(scan: Scan, *, every_module: bool = False) -> list[str]:
    """Return the table of the modules that are not preconditioned, with the reasons. Return an
    empty list if there are no such modules.

    Args:
        scan: result of scanning the model.
        every_module: whether each module has its own row. If False, equal modules share a row.
    """
    if not scan.skipped:
        return []
    head = ("not preconditioned", "type", "parameters", "why")
    rows = [
        (module.name or "(model)", module.kind, f"{module.numel:,}", module.reason)
        for module in scan.skipped
    ]
    return ["", *columns([head, *(rows if every_module else folded(rows))])]


def attach_warnings(kfac: KFACPreconditioner, given: KFACConfig) -> list[str]:
    """Return the lines of the report that ask for attention.

    Args:
        given: the config as the user gave it.
    """
    engine = kfac.layout.engine
    modules: dict[str, Any] = dict(engine.module.named_modules())
    texts = without_effect(kfac.rule, given, kfac.layers, type(kfac.engine_view.inner).__name__)
    has_damping = "damping" in kfac.rule.blocks
    is_pipeline = isinstance(engine, PipelineEngine) and engine.num_stages > 1
    if is_pipeline and has_damping:  # without damping the scale of G has no effect
        texts.append(PIPELINE_SCALES)
    if has_damping and kfac.config.damping.kind == "relative":
        texts += _zero_norms(modules)
    texts += far_from_recipes(kfac)
    texts += _memory_warnings(kfac)
    known_faults = [*faults(kfac.layout), *_batch_norm_faults(kfac, modules)]
    if kfac.layout.grad_scaler:
        known_faults.append(SILENT_SKIPS)
    lines = [f"  WARNING: {text}" for text in texts]
    lines += [f"  known fault of this mode in DeepSpeed: {fault}" for fault in known_faults]
    untested = deepspeed_versions.untested()
    if untested:
        lines.append(f"  {untested}")
    return lines


def _zero_norms(modules: Mapping[str, Any]) -> list[str]:
    """Return a warning if norms begin with a weight of zero."""
    names = []
    for name, module in modules.items():
        weight = module.weight if isinstance(module, BATCH_NORM | nn.GroupNorm) else None
        # at ZeRO stage 3 a weight has no elements while it is not on this rank
        if weight is not None and weight.numel() and not weight.detach().any():
            names.append(name)
    return [ZERO_NORMS.format(count=len(names), first=names[0])] if names else []


def _batch_norm_faults(kfac: KFACPreconditioner, modules: Mapping[str, Any]) -> list[str]:
    """Return the faults that BatchNorm has in DeepSpeed, with and without K-FAC."""
    batch_norms = [
        module
        for module in modules.values()
        if isinstance(module, BATCH_NORM) and module.running_mean is not None
    ]
    batch_norm_faults = []
    are_synced = all(isinstance(module, nn.SyncBatchNorm) for module in batch_norms)
    if kfac.layout.world > 1 and not are_synced:
        batch_norm_faults.append(LOCAL_STATISTICS)
    are_mixed = any(
        module.weight is not None and module.weight.dtype != module.running_mean.dtype
        for module in batch_norms
    )
    if are_mixed and kfac.device.type == "cpu":
        batch_norm_faults.append(MIXED_BATCH_NORM)
    return batch_norm_faults


def without_effect(
    rule: UpdateRule, config: KFACConfig, layers: Sequence[LayerSpec], optimizer: str
) -> list[str]:
    """Return a list with a warning that names the keys without effect. These are keys that the user
    gave, but that belong to another update rule or match no layer. Return an empty list if there
    are none."""
    all_blocks = {block for other in DIRECTIONS for block in other.blocks}
    keys = []
    for block in sorted(all_blocks - set(rule.blocks)):
        for key in sorted(getattr(config, block).model_fields_set):
            if key not in ("precision", "method"):
                keys.append(f"kfac.{block}.{key}")
    keys += rule.facts.idle(config, layers)
    if not keys:
        return []
    return [f"these keys have no effect with {rule.optimizer_type or optimizer}: {', '.join(keys)}"]


def _memory_warnings(kfac: KFACPreconditioner) -> list[str]:
    """Return a warning if K-FAC needs a large share of this device's free memory."""
    slots, _ = kfac.curvature.reducer.plan.of(frozenset(kfac.curvature.specs), 0)
    held_slots = [slot for slot in slots if kfac.rank in {slot.owner, *slot.contributors}]
    sum_bytes = 4 * sum(slot.numel for slot in held_slots)
    state_bytes = int(kfac.plan.assignment.memory[kfac.rank])
    free_bytes = get_accelerator().available_memory()
    needed_bytes = state_bytes + sum_bytes
    if needed_bytes <= MEMORY_SHARE * free_bytes:
        return []
    return [
        f"K-FAC needs {state_bytes / 1e9:.1f} GB on this rank and {sum_bytes / 1e9:.1f} GB more in "
        f"a step that updates all factors, together {needed_bytes / free_bytes:.0%} of the "
        f"{free_bytes / 1e9:.1f} GB that are free: to save memory, see kfac.factor.dense_max, "
        "kfac.layers.exclude, kfac.offload, or assignment.memory_budget_gb at ZeRO stage 0"
    ]
