"""Public functions: initialize (drop-in), enable (if a framework calls deepspeed.initialize), attach (to an engine).

What they attach is a :class:`Job`: an engine's domains, their layers, a plan for each, and what preconditions them.
"""

import base64
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed.utils import log_dist, logger

import ds_kfac_startup
from ds_kfac.assignment.costs import BUILTIN, CostModel, kept_bytes, measured, packed_bytes
from ds_kfac.comm.message import failing_together, gathered
from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.values import find_block
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.kfac_gradient import PolynomialDecay
from ds_kfac.directions.table import DIRECTIONS, is_recipe, rule_in, when_made
from ds_kfac.engine.attachment import HANDLE, Attachment
from ds_kfac.engine.beforehand import (
    check_config,
    check_objects,
    check_tensors,
    saying_how_to_launch,
    trains_nothing,
    warn,
    warn_of_compilation,
)
from ds_kfac.engine.refusals import check_model, of_engine, refused, without_optimizer
from ds_kfac.model.batch import ExpertRows
from ds_kfac.model.registry import SHARDS
from ds_kfac.model.scan import Scan, scan
from ds_kfac.ops import dispatch
from ds_kfac.plan.plan import Plan, Setting, make_plan
from ds_kfac.step.job import Job
from ds_kfac.step.preconditioner import KFACPreconditioner, Target
from ds_kfac.zero.layout import parameter_groups
from ds_kfac.zero.registry import Domain, check_names, domains, self_test, shard_layout
from ds_kfac.zero.shards import held_by_layer, parameter_names, pieces_of

_plain_initialize: Callable[..., tuple] = deepspeed.initialize
"""DeepSpeed's own. Ours is in its place from the import on; until :func:`enable` it only warns."""
_enabled: bool | None = None
"""What :func:`enable` or :func:`disable` has said; before, the environment is asked each time."""
_unattached: str | None = (
    "deepspeed.initialize was never called, and K-FAC works in the engines that it makes. Give the launcher or the "
    "trainer a DeepSpeed config"
)
"""Why no engine has K-FAC so far; None once one has, or was not to have it."""
YES, NO = ("1", "true", "yes", "on"), ds_kfac_startup.NO
"""What ``DS_KFAC`` may be."""
NOT_ENABLED = (
    'not attached: the config has a "kfac" block, but deepspeed.initialize ran without ds_kfac.enable(). '
    "Call that before it, start with `python -m ds_kfac run` or with DS_KFAC=1, or ds_kfac.attach(engine) now; "
    "otherwise this engine trains without K-FAC"
)

on_attached: list[Callable[[], None]] = []
"""Called by :func:`initialize` once an engine has K-FAC, for doors above this folder."""
NOT_NAMED = (
    'the DeepSpeed config names it nowhere. Set its optimizer to {"type": "KFACAdamW"}, or add a "kfac": {} block to '
    "keep your own"
)


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Drop-in for ``deepspeed.initialize``: same arguments, same result; attaches if the config has a "kfac" block. An
    engine without an optimizer (a reference model, an evaluation) is left as it is, with a line in the log.

    Raises:
        ValueError: the block is wrong, or the engine's mode is refused; before any training.
    """
    warn_of_compilation()
    # DeepSpeed looks a scheduler's type up here
    deepspeed.runtime.lr_schedules.PolynomialDecay = PolynomialDecay
    bound = inspect.signature(_plain_initialize).bind(*args, **kwargs)
    source = _config_source(bound.arguments) or {}
    rule, block = rule_in(source, bound.arguments.get("optimizer")), find_block(source)
    check_objects(bound.arguments, source, rule)
    if rule.optimizer_type is not None and block is None:
        block = {}  # the optimizer's name alone asks for K-FAC
    if block is not None:
        config = parse(block)  # before the engine is built: a wrong one fails at once
        if trains_nothing(bound.arguments.get("model")):
            # such as the reference model of older TRLs, whose config is the trained one's; DeepSpeed knows no KFACAdamW
            bound.arguments["config"] = {key: value for key, value in source.items() if key != "optimizer"}
        elif rule.optimizer_type is not None:
            rule.install(bound.arguments, config, source)
        check_tensors(bound.arguments.get("model"))
    if rule.optimizer_type is None and is_recipe(bound.arguments.get("optimizer")):
        when_made(bound.arguments, source)
    with saying_how_to_launch():
        result = _plain_initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    block = find_block(engine.config) if block is None else block
    if block is None and _rule_of(engine).optimizer_type is not None:
        block = {}
    if block is None:
        _known(NOT_NAMED)
        if not (without_optimizer(engine) or (enabled() and _unattached is None)):  # another one has it
            warn(f'this engine trains without K-FAC: {NOT_NAMED}. "kfac": {{"enabled": false}} says that it is meant')
    elif without_optimizer(engine):
        logger.info("ds_kfac: this engine has no optimizer, so it trains nothing: left as it is")
    elif attach(engine, block) is None:
        _known(None)
        log_dist('ds_kfac: not attached: the config says "enabled": false', ranks=[0])
    else:
        for tell in on_attached:
            tell()
    return result


def _known(why: str | None) -> None:
    """What became of an engine; one with K-FAC settles it."""
    global _unattached
    _unattached = None if _unattached is None else why


def unattached() -> str | None:
    """Why no engine of this process has had K-FAC, although it is enabled; None where nothing is amiss."""
    asked = ds_kfac_startup.asked() if _enabled is None else _enabled
    return _unattached if asked else None


def enabled() -> bool:
    """Whether ``deepspeed.initialize`` is to attach: as :func:`enable` and :func:`disable` say, else as ``DS_KFAC``
    does now: a script may have set it after it imported ds_kfac. ValueError as of :func:`asked_for`."""
    return asked_for(os.environ.get("DS_KFAC", "")) if _enabled is None else _enabled


def asked_for(word: str) -> bool:
    """Whether ``DS_KFAC`` in the environment asks for K-FAC; ValueError for another word than those of YES and NO."""
    if word.strip().lower() not in (*YES, *NO):
        raise ValueError(f"DS_KFAC: got {word!r}; must be one of {', '.join(YES)}, or of {', '.join(filter(None, NO))}")
    return word.strip().lower() in YES


def enable() -> None:
    """Make ``deepspeed.initialize`` ours, for code that calls it itself (HF Trainer, Accelerate, Lightning).

    Idempotent; :func:`disable` undoes it. Call it before the trainer is built. A program that ends without an engine
    that has K-FAC says so on rank 0.
    """
    global _enabled
    warn_of_compilation()
    if deepspeed.initialize is _plain_initialize:  # someone gave it back; a wrapper of ours is never wrapped
        deepspeed.initialize = _our_initialize
    _enabled = True
    ds_kfac_startup.watch()


def disable() -> None:
    """Undo :func:`enable`: ``deepspeed.initialize`` passes through, and warns of a "kfac" block. Only a KFACAdamW is
    attached to in any case: nobody else knows it."""
    global _enabled
    _enabled = False


@wraps(_plain_initialize)
def _our_initialize(*args: Any, **kwargs: Any) -> tuple:
    bound = inspect.signature(_plain_initialize).bind(*args, **kwargs)
    source, optimizer = _config_source(bound.arguments) or {}, bound.arguments.get("optimizer")
    rule = rule_in(source, optimizer)
    if enabled() or rule.optimizer_type is not None:  # by its name or as an object, which DeepSpeed alone would refuse
        return initialize(*args, **kwargs)
    check_objects(bound.arguments, source, rule)
    if is_recipe(optimizer):
        when_made(bound.arguments, source)
    result = _plain_initialize(*bound.args, **bound.kwargs)
    block = find_block(result[0].config)
    if _rule_of(result[0]).optimizer_type is not None:  # DeepSpeed alone could not step it
        attach(result[0], {} if block is None else block)
        for tell in on_attached:
            tell()
    elif block is not None and not (isinstance(block, Mapping) and block.get("enabled") is False):
        warn(NOT_ENABLED)
    return result


deepspeed.initialize = _our_initialize


def attach(engine: Any, config: KFACConfig | Mapping[str, Any] | None = None) -> Attachment | None:
    """Precondition the gradients of an existing engine. Collective: call on every rank.

    Args:
        engine: a DeepSpeedEngine that has not started a step.
        config: the "kfac" block; None takes it from the engine's config.

    Returns the attachment, also found as ``engine.kfac``; the existing one if there is one; None if the block says
    ``"enabled": false``.

    Raises:
        ValueError: no block, a wrong block or another one than on other ranks, a refused engine mode, or no layer to
            precondition.
        RuntimeError: the self-test found gradients elsewhere than expected.
    """
    global _unattached
    attached = getattr(engine, HANDLE, None)
    if isinstance(attached, Attachment) and config is None:
        return attached
    config = find_block(engine.config) if config is None else config
    if config is None:
        raise ValueError('ds_kfac.attach: the engine\'s DeepSpeed config has no "kfac" block; add it or pass config=')
    given = config if isinstance(config, KFACConfig) else parse(config)
    if isinstance(attached, Attachment):
        if given != attached.given:
            raise ValueError("ds_kfac.attach: this engine has K-FAC with another config; engine.kfac.detach() it first")
        return attached
    check_config(given)
    if not given.enabled:
        return None
    rule = _rule_of(engine)
    config, answers = rule.resolved(given, type(getattr(engine, "basic_optimizer", None)).__name__)
    if problems := refused(of_engine(engine, config, rule.optimizer_type)):
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(problems))
    experts = ExpertRows(engine.module) if engine.has_moe_layers else None
    try:
        job, scans = _assembled(engine, config, answers, rule, experts)
    except Exception:
        if experts is not None:
            experts.remove()
        raise
    attachment, _unattached = Attachment(engine, given, job, scans, experts), None
    return attachment


def _rule_of(engine: Any) -> UpdateRule:
    optimizer = getattr(engine, "basic_optimizer", None)
    return next(rule for rule in DIRECTIONS if rule.steps(optimizer))


# from an engine to its job


def _assembled(
    engine: Any, config: KFACConfig, answers: tuple[str, ...], rule: UpdateRule, experts: ExpertRows | None
) -> tuple[Job, tuple[Scan, ...]]:
    """Collective. Returns the job, tested, and what was found in each of its domains. Raises on every rank: ValueError
    if there is nothing to precondition, or no plan; RuntimeError if the self-test failed."""
    optimized = [param for group in parameter_groups(engine.optimizer) for param in group]
    parts = domains(engine, optimized)
    several = bool(parts[0].name)
    _choose_backend(engine, config)
    costs, sequence = _agreed_costs(torch.device(engine.device), config.assignment.costs), _sequence(engine)
    # one stage may have no layers, or too little memory
    headline = "ds_kfac cannot attach to this model-parallel engine"
    together: Any = partial(failing_together, headline, torch.distributed.group.WORLD, ValueError)
    agreeing = together if several else nullcontext
    with agreeing():
        found = scan(engine.module, rule.scanned(config), optimized=optimized)
        found = replace(found, layers=rule.cut(config, found.layers))
        pairs = _by_domain(found, parts)
        targets = [_target(engine, domain, part, rule, experts) for domain, part in pairs]
        plans = [
            make_plan(target.layers, _setting(target, config, sequence), budget, costs, answers)
            for target, budget in zip(targets, _budgets(targets, config), strict=True)
        ]
        for target in targets:
            rule.check_groups(target.model, target.layers, target.layout, target.rest)
    _check_copies(targets, plans)
    preconditioners = [KFACPreconditioner(target, plan) for target, plan in zip(targets, plans, strict=True)]
    job = Job(preconditioners, everywhere=several)
    try:
        with agreeing():
            for kfac in preconditioners:
                self_test(kfac.exchange, kfac.channel)
        check_model(engine.module, config, len(targets[0].rest.params))
        check_names([name for kfac in preconditioners for name in kfac.names.values()])
    except Exception:
        job.close()
        raise
    return job, tuple(part for _, part in pairs)


def _choose_backend(engine: Any, config: KFACConfig) -> None:
    """Build what is missing and check it. A backend that was asked for and cannot run on some rank is an error on all
    of them; one that was not, and an op that is wrong on some rank, is used nowhere then: replicas that round
    differently would drift apart."""
    name, device = config.ops.backend, torch.device(engine.device).type
    error = RuntimeError if name is None else ValueError
    with failing_together("ds_kfac cannot attach", torch.distributed.group.WORLD, error):
        choice = dispatch.use(name, device)
    everyone = enumerate(gathered(dict(choice.missing)))
    lacking = {what: f"rank {rank}: {why}" for rank, missing in everyone for what, why in missing.items()}
    if lacking.keys() - choice.missing:
        choice = dispatch.use(name, device, without={**lacking, **choice.missing})
    if choice.replaced and torch.distributed.get_rank() == 0:
        logger.warning(f"ds_kfac: plain torch runs instead, on all ranks: {'; '.join(choice.replaced.values())}")


def _target(engine: Any, domain: Domain, found: Scan, rule: UpdateRule, experts: ExpertRows | None) -> Target:
    """A domain's layers and where the engine keeps their gradients."""
    named = dict(engine.module.named_parameters())
    ours = [named[name] for name in parameter_names(found.layers)]
    own_ids = {id(parameter) for parameter in ours}
    return Target(
        model=engine.module,
        layers=found.layers,
        layout=shard_layout(engine, ours, domain.group, pieces_of(found.layers)),
        rest=shard_layout(engine, [p for p in domain.params if id(p) not in own_ids], domain.group),
        inner=engine.basic_optimizer,
        rule=rule,
        domain=domain,
        info_of=experts,
    )


def _setting(target: Target, config: KFACConfig, sequence: int) -> Setting:
    """What a plan has to know of the engine."""
    layout = target.layout
    return Setting(
        world=layout.world,
        held=None if layout.replicated else held_by_layer(target.layers, layout.shards),
        parameters=layout.params[0].dtype,
        gradients=layout.dtype,
        moments=target.rule.moments_count(config),
        device=torch.device(layout.engine.device),
        scheduled=layout.engine.lr_scheduler is not None,
        sequence=sequence,
    )


def _sequence(engine: Any) -> int:
    """So many consecutive ranks have the parts of one sequence; all ranks where they are not consecutive. Collective
    under sequence parallelism."""
    size = engine.sequence_parallel_size
    if size == 1:
        return 1
    every = torch.distributed.get_process_group_ranks(engine.seq_data_parallel_group)
    mine = [every.index(rank) for rank in torch.distributed.get_process_group_ranks(engine.seq_parallel_group)]
    first = min(mine)
    consecutive = sorted(mine) == list(range(first, first + size)) and first % size == 0
    return size if all(gathered(consecutive)) else len(every)


def _node(device: torch.device) -> tuple[int, int]:
    """Ranks of a node, as the launcher says, and the cores they share; one rank where nodes differ. Collective."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    at_once = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    mine = size, at_once if device.type == "cpu" and size > at_once else 0
    return mine if len(set(gathered(mine))) == 1 else (1, 0)


def _agreed_costs(device: torch.device, file: str | None) -> CostModel:
    """The cost model, the same on every rank of the job. ``file``: ``assignment.costs``. Collective; raises ValueError
    on every rank if one could not read the file, or has read another one."""
    node_size, node_cores = _node(device)
    costs = replace(BUILTIN["cpu" if device.type == "cpu" else "cuda"], node_size=node_size, node_cores=node_cores)
    if file is None:
        return costs
    with failing_together("ds_kfac: costs", None, ValueError):
        costs = measured(costs, file)
    if len(set(gathered(costs))) > 1:
        raise ValueError(f"kfac.assignment.costs: {file} is not the same on all ranks")
    return costs


def _by_domain(found: Scan, domains: Sequence[Domain]) -> list[tuple[Domain, Scan]]:
    """The layers of each domain that has some; what was skipped, in the first of them."""
    pairs: list[tuple[Domain, Scan]] = []
    for domain in domains:
        layers, shards = [], domain.shard[1]  # so many tensor-parallel ranks have a part of a layer, or a copy
        for layer in (layer for layer in found.layers if layer.weight in domain.names):
            cut = (1, shards) if SHARDS.get(layer.kind) else (shards, 1)
            layers.append(replace(layer, cut=cut) if layer.kind in SHARDS else replace(layer, copies=shards))
        if layers:
            pairs.append((domain, Scan(tuple(layers), () if pairs else found.skipped)))
    return pairs


def _budgets(targets: Sequence[Target], config: KFACConfig) -> list[KFACConfig]:
    """The config of each domain here: they share a rank's memory budget as their layers need it."""
    budget = config.assignment.memory_budget_gb
    if budget is None or len(targets) == 1:
        return [config] * len(targets)
    method = METHODS[config.preconditioner.method]
    needs = [
        sum(packed_bytes(side) + kept_bytes(side, method) for layer in target.layers for side in (layer.A, layer.G))
        / target.layout.world
        for target in targets
    ]
    return [config.having("assignment", memory_budget_gb=budget * need / sum(needs)) for need in needs]


def _check_copies(targets: Sequence[Target], plans: Sequence[Plan]) -> None:
    """What tensor-parallel ranks have copies of must be treated alike by all of them, though its owners differ. So all
    that depends on an owner is alike for copies: they have the rows of all ranks, rounded as what travels
    (``comm/reduce.py``, ``step/messages.py``, ``zero/exchange.py``), and no offsets. Collective under tensor
    parallelism; raises ValueError on every rank if plans differ in what is left."""
    if targets[0].domain.shard[1] > 1 and len(set(gathered((str(plans[0].wire), plans[0].lag)))) > 1:
        raise ValueError(
            "ds_kfac: the tensor-parallel ranks' shards are so different in size that their plans for the layers they "
            'have copies of differ in the dtype on the wire or in the lag; set "dtype" in kfac.communication and "lag" '
            "in kfac.eigenbasis"
        )


def _config_source(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The DeepSpeed config as DeepSpeed will read it: a dict, a file or base64; None if it is none of them."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        source = hjson.loads(Path(source).read_text())
    elif isinstance(source, (str, os.PathLike)):
        try:
            source = hjson.loads(base64.urlsafe_b64decode(str(source)).decode())
        except ValueError:  # DeepSpeed says what is wrong
            return None
    return source if isinstance(source, Mapping) else None
