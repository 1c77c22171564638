"""The commands ``python -m ds_kfac estimate`` and ``check``, and the same estimates from Python.

As in DeepSpeed's estimators, the function that ends in ``_live`` takes a model and the one that
ends in ``_cold`` takes shapes.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.assignment.assign import worker_counts
from ds_kfac.assignment.costs import BUILTIN, CostModel, measured
from ds_kfac.config.values import find_block
from ds_kfac.curvature.methods import METHODS, Method
from ds_kfac.diagnostics.recipes import config_far_from_recipes
from ds_kfac.diagnostics.report import layer_lines, skipped_lines, summary, without_effect
from ds_kfac.diagnostics.share import share
from ds_kfac.diagnostics.text import columns, number
from ds_kfac.directions.base import DISABLED
from ds_kfac.directions.kfac_adamw.optimizer import NAME, PARAMS
from ds_kfac.engine.refusals import check_model
from ds_kfac.estimate.estimates import BESIDE, KINDS, PARTS, STATE, TRANSIENT, Estimate, same_block
from ds_kfac.estimate.models import build
from ds_kfac.estimate.subject import Subject, config_of
from ds_kfac.estimate.trace import Trace
from ds_kfac.factors.fitting import peak_bytes, plan_of
from ds_kfac.metrics import STAGES
from ds_kfac.model.scan import scan

DEFAULT: Mapping[str, Any] = {"optimizer": {"type": NAME}, "kfac": {}}
"""The config that ``estimate`` uses without ``--config``."""


@dataclass(frozen=True)
class Refused:
    """A strategy that a run with this config cannot use, with the reason."""

    name: str
    reason: str


def estimate_kfac_mem_needs_all_live(
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike,
    world: int,
    *,
    example: Sequence[Any] | None = None,
    batch_rows: int | None = None,
    device: str = "cuda",
    node_size: int | None = None,
    stage: int | None = None,
) -> tuple[Estimate | Refused, ...]:
    """Print and return the costs of K-FAC on a rank for every strategy: memory, bytes on the wire,
    FLOPs and seconds.

    The numbers come from the plan that a run would make. The model may be on the meta device:

        with torch.device("meta"):
            model = Net()
        estimate_kfac_mem_needs_all_live(model, "ds_config.json", world=64)

    Args:
        model: the model that a run would pass to ``ds_kfac.initialize``, together with
            ``model_parameters=model.parameters()``.
        config: DeepSpeed config, a dict or the path of a file.
        world: number of data-parallel ranks.
        example: arguments of the model's forward. The forward pass is run once to find the layers
            that share an input, and each layer's number of rows per token. If None, each layer is
            assumed to have an input of its own, with one row per token.
        batch_rows: number of tokens (or images) that one rank processes in a step. If None, the
            estimate leaves out captures and the model's own time.
        device: "cuda" or "cpu", the device whose builtin costs are used.
        node_size: number of ranks per node; None: 1. Consecutive ranks share a node.
        stage: ZeRO stage; None: the config's stage.

    Returns an :class:`Estimate` or :class:`Refused` for every gradient-worker fraction. If ZeRO
    partitions gradients, each layer has one gradient worker, so there is only one strategy.

    Raises:
        ValueError: the config is wrong, or the model has no layer to precondition.
    """
    model_device = next((p.device for p in model.parameters()), torch.device("meta"))
    arguments = [x.to(model_device) if isinstance(x, Tensor) else x for x in example or ()]
    subject = Subject(
        model, config_of(config), stage, Trace.of(model, arguments) if arguments else None
    )
    costs = replace(costs_of(device), node_size=node_size or 1)
    lines, strategies = described(subject, costs, world, batch_rows)
    print("\n".join(lines))
    return strategies


def estimate_kfac_mem_needs_all_cold(
    shapes: Sequence[tuple[int, int, bool]],
    config: Mapping[str, Any] | str | os.PathLike,
    world: int,
    **options: Any,
) -> tuple[Estimate | Refused, ...]:
    """Print and return the estimate for a model of which you know only the shapes of its linear
    layers.

        shapes = [(4096, 11008, False), (11008, 4096, False)] * 32
        estimate_kfac_mem_needs_all_cold(shapes, "ds_config.json", world=64)

    Args:
        shapes: a tuple (number of inputs, number of outputs, whether there is a bias) for every
            layer, in the model's order.
        options: keyword arguments of :func:`estimate_kfac_mem_needs_all_live`, except ``example``.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
    return estimate_kfac_mem_needs_all_live(model, config, world, **options)


def costs_of(device: str, file: str | None = None) -> CostModel:
    """Return the cost model of a type of device. Values that are not in ``file`` are builtin. Raise
    ValueError if the device is unknown, or if the file is missing or wrong."""
    if device not in BUILTIN:
        raise ValueError(f"device: got {device!r}; must be one of {', '.join(BUILTIN)}")
    return BUILTIN[device] if file is None else measured(BUILTIN[device], file)


def described(
    subject: Subject, costs: CostModel, world: int, rows: int | None, assumed: str = ""
) -> tuple[list[str], tuple[Estimate | Refused, ...]]:
    """Describe every strategy in one line, and the strategy that the config chooses in detail.

    Args:
        rows: number of tokens (or images) that one rank processes in a step; None: unknown.
        assumed: text that follows the batch size if the batch size is only assumed.

    Returns the lines of text, and all strategies.
    """
    if world < 1:
        raise ValueError(f"world: got {world}; must be at least 1 rank")
    chosen: Estimate | None = None
    problem: list[str] = []
    strategies: list[Estimate | Refused] = []
    try:
        chosen = Estimate(subject, costs, world, rows)
    except ValueError as refused:
        problem = [f"  this config is refused: {refused}"]
    for workers in worker_counts(world) if subject.replicated else (1,):
        if chosen is not None and chosen.plan.workers == workers:
            strategies.append(chosen)
            continue
        forced = copy(subject)
        forced.config = subject.config.having(
            "assignment", gradient_worker_fraction=workers / world
        )
        try:
            strategies.append(Estimate(forced, costs, world, rows))
        except ValueError as refused:
            strategies.append(Refused(subject.strategy(workers, world), str(refused)))
    if subject.replicated:
        strategies.append(
            Refused("ZeRO owners", "at this ZeRO stage every rank has every gradient")
        )
    else:
        strategies.append(
            Refused("several workers", "at this ZeRO stage no rank has every gradient")
        )
    parameters = sum(numel for group in subject.groups for _, numel in group)
    shared = len(subject.shared)
    sharing = f"; {shared} groups of layers share an input" if shared else ""
    method = METHODS[subject.config.preconditioner.method] if chosen is None else chosen.plan.method
    schedule = subject.config.schedule
    update, refresh = schedule.intervals(schedule.settled)
    lines = [f"  {share(subject.layers, parameters)}{sharing}"]
    if not subject.trace.units:
        lines.append(
            "  no forward pass was traced: each layer is assumed to have an input of its own, with "
            "one row per token"
        )
    lines += [*skipped_lines(subject.scan), ""]
    lines.append(
        f"  {world} ranks, {subject}; factors every {update} steps, {method.words} every {refresh}"
    )
    lines += [
        *machine_lines(costs, method),
        "",
        *strategy_lines(strategies, costs, chosen),
        *problem,
    ]
    lines += chosen_lines(chosen, assumed) if chosen is not None else []
    return [*lines, *factors_lines(subject, world)], tuple(strategies)


def factors_lines(subject: Subject, world: int) -> list[str]:
    """Describe the memory that ``ds_kfac.fit`` needs for this model."""
    choice = replace(subject.config.choice, curvature=True, gradients=True)
    plan = plan_of(scan(subject.model, choice).layers, subject.config, world, torch.device("cpu"))
    nbytes = number(max(peak_bytes(plan)), "B")
    return [
        "",
        "  memory to compute A and G of this model by ds_kfac.fit, without training "
        f"(docs/howto/factors_for_other_tools.md): {nbytes} on a rank at most",
    ]


def machine_lines(costs: CostModel, method: Method) -> list[str]:
    """Describe the machine's speeds from which seconds are predicted, and say for each of them
    whether it was measured."""
    times = ", ".join(
        f"{size}: {_time(seconds)}" for size, seconds in getattr(costs, method.solver_seconds)
    )
    if method.step_flops:
        times = (
            f"eigh {times}; a step of orthogonal iteration takes {method.step_flops:.3g} n^3 "
            f"FLOPs, at {number(costs.ieee_flops, 'FLOP/s')}"
        )
    rates = (costs.gemm_flops, costs.syrk_flops, costs.model_flops or costs.gemm_flops)
    products, moments, model = (number(rate, "") for rate in rates)
    memory = number(costs.copy_bytes, "B/s")
    call = _time(costs.call_seconds)
    latency = _time(costs.link_seconds)
    link, within = (
        f"{8 * rate / 1e9:.4g} Gbit/s"
        for rate in (costs.link_bytes, costs.node_bytes or costs.link_bytes)
    )
    nodes = f"; {costs.node_size} ranks per node, {within} inside" if costs.node_size > 1 else ""
    lines = {
        method.solver_seconds: times if method.step_flops else f"{method.solver} {times}",
        "gemm_flops": f"FLOP/s of matrix products {products}, of second moments {moments}; memory "
        f"traffic {memory}; {call} to start a kernel",
        "model_flops": f"FLOP/s of the model, and of K-FAC's products in 16 bits, {model}",
        "link_bytes": f"{link} per rank in each direction, {latency} latency{nodes}",
    }
    return [
        f"  {'measured' if field in costs.measured else 'assumed'}: {text}"
        for field, text in lines.items()
    ]


def strategy_lines(
    strategies: Sequence[Estimate | Refused], costs: CostModel, chosen: Estimate | None
) -> list[str]:
    """Return the lines of a table with a row for every strategy. ``chosen``, the strategy that the
    config chooses, is marked."""
    nbytes = (
        "K-FAC state",
        "mean rank",
        "in a step",
        "sent/step",
        "other nodes",
        "no update",
        "update",
        "refresh",
    )
    rows: list[tuple[str, ...]] = [("strategy", *nbytes, "time/step", "worst step", "of the model")]
    refused = list[str]()
    for each in strategies:
        if isinstance(each, Refused):
            refused.append(f"  {each.name}: refused: {each.reason}")
            continue
        far = (each.mean.payload.sum(axis=0) * ~same_block(each.world, costs.node_size)).sum(axis=1)
        sent = (
            each.mean.sent(),
            far,
            *(step.sent() for step in (each.plain, each.update, each.refresh)),
        )
        sizes = (
            each.state.max(),
            each.state.mean(),
            each.memory[BESIDE].max(),
            *(nbytes.max() for nbytes in sent),
        )
        times = (
            _time(each.seconds),
            _time(each.worst),
            "?" if each.overhead is None else f"{each.overhead:.1%}",
        )
        mark = " *" if each is chosen else ""
        rows.append((each.name + mark, *(number(size, "B") for size in sizes), *times))
    table = columns(rows, right=True) if len(rows) > 1 else []
    return [*table, *refused, *(["  * what this config chooses"] if chosen is not None else [])]


def chosen_lines(chosen: Estimate, assumed: str = "") -> list[str]:
    """Describe one strategy in detail: a sentence about the rank that needs most memory, followed
    by tables of memory, bytes on the wire, FLOPs and seconds.

    Args:
        assumed: text that follows the batch size if the batch size is only assumed.
    """
    plan = chosen.plan
    memory = chosen.memory
    state, beside = (number(nbytes.max(), "B") for nbytes in (chosen.state, memory[BESIDE]))
    answer = f"K-FAC keeps {state} of state on a rank, and needs at most {beside} more in a step"
    if chosen.model is not None:
        worst = (chosen.model + chosen.worst) / (chosen.model + chosen.seconds)
        dtype = str(chosen.subject.context.parameters).removeprefix("torch.")
        answer += (
            f"; it adds {chosen.overhead:.1%} to a step of {chosen.rows:,} tokens or images per "
            f"rank{assumed} in {dtype}{chosen.subject.assumed}, and its worst step is {worst:.2f} "
            "x the mean"
        )
    lines = ["", f"  {answer}", f"  {chosen.name}: load max/mean {plan.assignment.imbalance:.2f}"]
    lines += [f"  plan: {reason}" for reason in plan.reasons]

    table = {plan.method.words if kind == "eigenbases" else kind: memory[kind] for kind in STATE}
    table |= {
        "state": chosen.state,
        **{f"{kind}, if a step captures all factors": memory[kind] for kind in TRANSIENT},
    }
    rows = [
        (kind, number(nbytes.max(), "B"), number(nbytes.mean(), "B"))
        for kind, nbytes in table.items()
    ]
    lines += ["", *columns([("memory", "most", "mean"), *rows], right=True)]

    steps = (chosen.mean, chosen.plain, chosen.update, chosen.refresh)
    others = set(PARTS) - {part.kind for part in plan.method.parts}
    sent = {kind: [step.sent(kind) for step in steps] for kind in KINDS if kind not in others}
    sent |= {
        "all": [step.sent() for step in steps],
        "received": [step.sent(axis=0) for step in steps],
    }
    traffic = [
        (kind, *(number(nbytes.max(), "B") for nbytes in each)) for kind, each in sent.items()
    ]
    traffic.append(("collectives", *(f"{step.calls.sum():.3g}" for step in steps)))
    head = ("bytes sent by a rank", "mean", "no update", "update", "refresh")
    lines += ["", *columns([head, *traffic], right=True)]

    flops = {
        stage: number(each.max(), "") if each.any() else "?" for stage, each in chosen.flops.items()
    }
    times = [_time(chosen.stages[stage]) for stage in STAGES]
    model = "?" if chosen.model is None else _time(chosen.model)
    work = [
        ("", *STAGES, "K-FAC", "model"),
        ("seconds of a mean step", *times, _time(chosen.seconds), model),
    ]
    work.append(
        (
            "FLOPs of the busiest rank, all layers once",
            *(flops.get(stage, "") for stage in (*STAGES, "", "")),
        )
    )
    return [*lines, "", *columns(work, right=True)]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def run(arguments: argparse.Namespace) -> str:
    """Return the text of the estimate. Raise ValueError if the config, the model or a number is
    wrong."""
    if arguments.node_gbps is not None and arguments.node_size is None:
        raise ValueError("--node-gbps needs --node-size, the number of ranks per node")
    ds_config = config_of(arguments.config or DEFAULT, arguments.optimizer, arguments.dtype)
    model, example = build(arguments.model, arguments.lora)
    trace = None
    if example is not None:
        try:
            trace = Trace.of(model, example)
        except ValueError:
            # Some MoE models of transformers do not run on the meta device. A user's own example
            # must run.
            if not arguments.model.startswith("hf:"):
                raise
    subject = Subject(model, ds_config, arguments.stage, trace)
    if not subject.config.enabled:
        raise ValueError(
            "kfac.enabled is false, so K-FAC adds no cost to this run; remove the key to estimate"
        )
    costs = costs_of(arguments.device, arguments.costs)
    flops = arguments.device_flops
    if flops:
        costs = replace(
            costs, gemm_flops=flops, syrk_flops=flops, product_flops=(), model_flops=0.0
        )
    links = {"link_bytes": arguments.link_gbps, "node_bytes": arguments.node_gbps}
    link_rates = {name: gbps * 1e9 / 8 for name, gbps in links.items() if gbps}
    costs = replace(
        costs,
        model_flops=arguments.model_flops or costs.model_flops,
        node_size=arguments.node_size or 1,
        **link_rates,
    )
    rows = arguments.batch_rows
    origin = "--batch-rows"
    assumed = ""
    if rows is None and trace is not None:
        rows, origin, in_config = batch_units(ds_config, arguments.world, trace.units)
        assumed = "" if in_config else " (assumed: the config has no batch size, give --batch-rows)"
    lines, _ = described(subject, costs, arguments.world, rows, assumed)
    batch = f"batch of a rank: {origin}" if rows else "batch of a rank unknown: give --batch-rows"
    lora = f" with LoRA of rank {arguments.lora}" if arguments.lora else ""
    title = (
        f"ds_kfac estimate: {arguments.model}{lora}, config {arguments.config or 'default'}; "
        f"{batch}"
    )
    return "\n".join([title, *lines])


def batch_units(ds_config: Mapping[str, Any], world: int, units: int) -> tuple[int, str, bool]:
    """Return three values: the number of tokens or images that a rank processes in a step, a text
    that says how this number was computed, and whether the config has a batch size.

    Args:
        units: number of tokens or images in one example.
    """
    keys = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    steps, micro, batch = (
        value if type(value) is int else None for value in map(ds_config.get, keys)
    )
    in_config = bool(micro or batch)
    origin = "" if in_config else ", assumed: the config has no batch size"
    examples = micro * (steps or 1) if micro else max(1, (batch or 0) // world)
    return examples * units, f"{examples} x {units:,} tokens or images{origin}", in_config


def check(arguments: argparse.Namespace) -> str:
    """Return the report that ``ds_kfac.attach`` would print for this config and model, without
    starting a run. Raise ValueError if ``attach`` would reject them."""
    ds_config = config_of(arguments.config, arguments.optimizer, arguments.dtype)
    model, _ = build(arguments.model, arguments.lora)
    subject = Subject(model, ds_config)
    config = subject.config
    rule = subject.rule
    optimizer = subject.context.optimizer
    scanned = subject.scan
    if find_block(ds_config) is None and rule.optimizer_type is None:
        why = 'trains without K-FAC: it has no "kfac" block and its optimizer is not KFACAdamW'
        raise ValueError(f"{arguments.config} {why}")
    if not config.enabled and rule.optimizer_type is not None:
        raise ValueError(DISABLED.format(optimizer=rule.optimizer_type))
    if not config.enabled:
        raise ValueError(f"{arguments.config} trains without K-FAC: kfac.enabled is false")
    plan = subject.plan(subject.shards(arguments.world), costs_of("cuda"))
    check_model(model, config)
    texts = without_effect(rule, subject.user_config, scanned.layers, optimizer)
    defaults = PARAMS if rule.optimizer_type == NAME else {"weight_decay": 0.0}
    texts += config_far_from_recipes(ds_config, defaults, scanned.layers, model)
    warnings = [f"  WARNING: {text}" for text in texts]
    lines = [
        f"{arguments.config} fits {arguments.model} (for its costs: python -m ds_kfac estimate)"
    ]
    mode = f"{subject}, world size {arguments.world}"
    ratio = rule.facts.ratio(ds_config)
    lines += summary(model, scanned, [plan], rule.facts, optimizer, mode, warnings, ratio)
    lines += ["  chosen: " + ", ".join(subject.answers)] if subject.answers else []
    lines += [f"  plan: {reason}" for reason in plan.reasons]
    return "\n".join(
        [*lines, "", *layer_lines(scanned.layers, config, rule.facts), *skipped_lines(scanned)]
    )
