"""The public functions that switch K-FAC on: ``initialize`` replaces ``deepspeed.initialize``,
``enable`` is for frameworks that call ``deepspeed.initialize`` themselves, and ``attach`` takes an
existing engine.

All of them attach a :class:`Job`. It has one preconditioner, with layers and a plan, for each of
the engine's domains (``zero/registry.py``).
"""

import base64
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

import ds_kfac_startup
from ds_kfac.checkpoint.moving import watch_loads
from ds_kfac.config.keys import KFACConfig, parse
from ds_kfac.config.values import find_block
from ds_kfac.diagnostics.preflight import (
    check_objects,
    check_tensors,
    saying_how_to_launch,
    start_alone,
    trains_nothing,
    warn_of_compilation,
)
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.table import DIRECTIONS, is_factory, rule_in, when_made
from ds_kfac.engine.assembly import assembled
from ds_kfac.engine.attachment import HANDLE, Attachment
from ds_kfac.engine.refusals import (
    Context,
    check_config,
    of_config,
    of_engine,
    refused,
    without_optimizer,
)
from ds_kfac.log import say, warn
from ds_kfac.lr_schedulers.polynomial_decay import PolynomialDecay

_plain_initialize: Callable[..., tuple] = deepspeed.initialize
"""DeepSpeed's own function. Our function replaces it when ds_kfac is imported. Unless K-FAC is
enabled, our function attaches K-FAC only to engines with KFACAdamW, and warns about other engines
with a "kfac" block."""
_enabled: bool | None = None
"""True if :func:`enable` was called last, False if :func:`disable` was called last. None if neither
was called. In this case the environment variable ``DS_KFAC`` decides."""
_unattached: str | None = (
    "deepspeed.initialize was never called, and K-FAC works only in engines that this function "
    "makes. Give the launcher or the trainer a DeepSpeed config"
)
"""The reason why no engine has K-FAC so far. None once an engine has it, or once a config said
``"enabled": false``."""
YES, NO = ("1", "true", "yes", "on"), ds_kfac_startup.NO
"""Valid values of ``DS_KFAC``."""
NOT_ENABLED = (
    'not attached: the config has a "kfac" block, but ds_kfac.enable() was not called before '
    "deepspeed.initialize, so this engine trains without K-FAC. Either call ds_kfac.enable() "
    "before deepspeed.initialize, or start the script with `python -m ds_kfac run` or DS_KFAC=1, "
    "or call ds_kfac.attach(engine) now"
)

on_attached: list[Callable[[], None]] = []
"""Functions that :func:`initialize` calls once an engine has K-FAC. Integrations add functions
here, because this module must not import them."""
NO_MODEL = (
    "ds_kfac.initialize: model: got {got}; must be a torch.nn.Module, as in initialize("
    'model=model, model_parameters=model.parameters(), config="ds_config.json")'
)
NO_ENGINE = (
    "the argument must be the engine that deepspeed.initialize returns. If you have only a model, "
    "call ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=..)"
)
ATTACHED = "ds_kfac: this engine already has K-FAC, so this call of ds_kfac.attach changes nothing"
FROZEN = (
    "ds_kfac: all parameters are frozen: unfreeze the parameters to be trained. If you only want "
    "to evaluate, use ZeRO stage 0 or 3"
)
NOT_NAMED = (
    'the DeepSpeed config does not name K-FAC. Set the optimizer to {"type": "KFACAdamW"}, or add '
    'a "kfac": {} block to keep your own optimizer'
)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike | Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Build a DeepSpeed engine and attach K-FAC to it. A drop-in replacement for
    ``deepspeed.initialize`` with the same arguments and the same result.

    K-FAC is attached if the config has a "kfac" block or the optimizer is KFACAdamW. An engine
    without an optimizer, such as the engine of a reference model, is left unchanged, and a line in
    the log says so. If no launcher has started the process, for example in a notebook, the process
    becomes a job of one rank.

    Args:
        args: namespace of command-line arguments. Its ``deepspeed_config`` is used if ``config`` is
            not given.
        model: the model to train.
        optimizer: an optimizer object, such as :class:`ds_kfac.KFACAdamW`; None: the config's
            optimizer.
        model_parameters: trained parameters, or groups of them; needed if the config names the
            optimizer.
        config: DeepSpeed config, a dict or a file.

    Returns engine, optimizer, data loader and scheduler. The last two may be None.

    Raises:
        ValueError: there is no model, the "kfac" block is wrong, or K-FAC refuses the engine's
            mode. The error is raised before any training.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return _initialized(inspect.signature(_plain_initialize).bind(**given), wanted=True)


def _initialized(bound: inspect.BoundArguments, *, wanted: bool) -> tuple[Any, Any, Any, Any]:
    """Build an engine as :func:`initialize` does.

    Args:
        bound: the arguments of ``deepspeed.initialize``.
        wanted: whether to attach K-FAC if the config has a "kfac" block. If False, K-FAC is
            attached only to an engine with KFACAdamW, because DeepSpeed alone cannot step this
            optimizer. The config may name KFACAdamW, or the program may pass a KFACAdamW object or
            a function that makes one.
    """
    arguments = bound.arguments
    source = _config_source(arguments) or {}
    rule = rule_in(source, arguments.get("optimizer"))
    wanted |= rule.optimizer_type is not None
    if wanted:
        _check_model(arguments.get("model"))
        if arguments.get("dist_init_required") is not False:
            start_alone()
        warn_of_compilation(source)
        # DeepSpeed looks up a config's scheduler type in this module
        deepspeed.runtime.lr_schedules.PolynomialDecay = PolynomialDecay
    check_objects(arguments, source, rule)
    block = find_block(source) if wanted else None
    if rule.optimizer_type is not None and block is None:
        block = {}  # the optimizer's name alone asks for K-FAC
    if block is not None:
        _prepare(arguments, source, rule, parse(block))
    if rule.optimizer_type is None and is_factory(arguments.get("optimizer")):
        when_made(arguments, source)
    with ds_kfac_startup.InitializeCall(), saying_how_to_launch() if wanted else nullcontext():
        result = _plain_initialize(*bound.args, **bound.kwargs)
    _attach_or_say_why_not(result[0], block, wanted=wanted)
    return result


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        got = "none" if model is None else f"a {type(model).__name__}"
        raise ValueError(NO_MODEL.format(got=got))


def _prepare(
    arguments: dict[str, Any], source: Mapping[str, Any], rule: UpdateRule, config: KFACConfig
) -> None:
    """Change the arguments of ``deepspeed.initialize``, so that the engine can use K-FAC.

    Args:
        arguments: the arguments, which are changed in place.
        source: the DeepSpeed config.
        rule: the update rule of the optimizer.
        config: the "kfac" block of the DeepSpeed config. It is parsed before the engine is built,
            so that a wrong block fails at once.
    """
    model = arguments.get("model")
    check_tensors(model, arguments if config.enabled else {})
    if model is not None and config.enabled and any(p.grad is not None for p in model.parameters()):
        model.zero_grad()
        warn(
            "dropped gradients that parameters had before deepspeed.initialize, because the first "
            "step would have used them"
        )
    if trains_nothing(model):
        _leave_out_the_optimizer(arguments, source)
        return
    if config.enabled and arguments.get("optimizer") is None:
        _refuse_config(source, rule, config)
    if rule.optimizer_type is not None:
        rule.install(arguments, config, source)


def _refuse_config(source: Mapping[str, Any], rule: UpdateRule, config: KFACConfig) -> None:
    """Raise ValueError if the DeepSpeed config alone shows that K-FAC refuses the engine.

    :func:`attach` would also refuse the engine, but only after DeepSpeed has built it. Building it
    may take minutes of compilation.
    """
    optimizer = str((source.get("optimizer") or {}).get("type") or "")
    if not optimizer:  # an engine that trains nothing is left as it is
        return
    resolved, _ = rule.resolved(config, optimizer)
    _raise_if_refused(of_config(source, resolved, rule.optimizer_type))


def _raise_if_refused(context: Context) -> None:
    problems = refused(context)
    if problems:
        raise ValueError("ds_kfac cannot attach to this engine:\n  " + "\n  ".join(problems))


def _leave_out_the_optimizer(arguments: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Remove the optimizer from the arguments if all parameters of the model are frozen.

    Older versions of TRL, for example, give the reference model the config of the trained model.
    DeepSpeed does not know KFACAdamW and would refuse this config.
    """
    if (source.get("zero_optimization") or {}).get("stage") in (1, 2):
        raise ValueError(FROZEN)
    arguments["config"] = {key: value for key, value in source.items() if key != "optimizer"}
    # DeepSpeed accepts either ``config`` or ``args.deepspeed_config``, not both
    if getattr(arguments.get("args"), "deepspeed_config", None) is not None:
        arguments["args"] = copy(arguments["args"])
        arguments["args"].deepspeed_config = None


def _attach_or_say_why_not(engine: Any, block: Any, *, wanted: bool) -> None:
    """Attach K-FAC to a new engine, or say why it is not attached.

    Args:
        engine: the new engine.
        block: the "kfac" block that was found in the arguments, or None.
        wanted: whether to attach K-FAC, as in :func:`_initialized`.
    """
    block = find_block(engine.config) if block is None else block
    if _rule_of(engine).optimizer_type is not None:
        wanted = True
        block = {} if block is None else block
    if not wanted:
        watch_loads(engine)
        if block is not None and not (isinstance(block, Mapping) and block.get("enabled") is False):
            warn(NOT_ENABLED)
    elif block is None:
        _remember(NOT_NAMED)
        watch_loads(engine)
        # do not warn if another engine has K-FAC
        if not (without_optimizer(engine) or (enabled() and _unattached is None)):
            warn(
                f"this engine trains without K-FAC: {NOT_NAMED}. If this is intended, "
                'add "kfac": {"enabled": false}'
            )
    elif without_optimizer(engine):
        say("ds_kfac: not attached: this engine has no optimizer, so it trains nothing")
    elif attach(engine, block) is None:
        watch_loads(engine)
        _remember(None)
        say('ds_kfac: not attached: the config says "enabled": false')
    else:
        for tell in on_attached:
            tell()


def _remember(why: str | None) -> None:
    """Record why an engine has no K-FAC, unless an earlier engine has K-FAC or has a config with
    ``"enabled": false``.

    Args:
        why: the reason; None if this engine's config has ``"enabled": false``.
    """
    global _unattached
    _unattached = None if _unattached is None else why


def unattached() -> str | None:
    """Return why no engine of this process has had K-FAC although K-FAC is enabled. None if an
    engine has had it, or if K-FAC is not enabled."""
    wanted = ds_kfac_startup.asked() if _enabled is None else _enabled
    return _unattached if wanted else None


def enabled() -> bool:
    """Return whether ``deepspeed.initialize`` must attach K-FAC. The last call of :func:`enable` or
    :func:`disable` decides. If neither was called, ``DS_KFAC`` decides. This variable is read in
    each call, because a script may set it after it has imported ds_kfac. Raises ValueError as
    :func:`asked_for` does."""
    return asked_for(os.environ.get("DS_KFAC", "")) if _enabled is None else _enabled


def asked_for(word: str) -> bool:
    """Return whether a value of ``DS_KFAC`` asks for K-FAC. Raises ValueError for a word that is
    neither in YES nor in NO."""
    if word.strip().lower() not in (*YES, *NO):
        raise ValueError(
            f"DS_KFAC: got {word!r}; must be one of {', '.join(YES)} to switch K-FAC on, or one of "
            f"{', '.join(filter(None, NO))} to leave K-FAC off"
        )
    return word.strip().lower() in YES


def enable() -> None:
    """Make ``deepspeed.initialize`` attach K-FAC. This is for frameworks that call
    ``deepspeed.initialize`` themselves (HF Trainer, Accelerate, Lightning).

    Call ``enable`` before you build the trainer. Further calls change nothing. :func:`disable`
    undoes the call. If no engine gets K-FAC, rank 0 prints a message when the program ends.
    """
    global _enabled
    warn_of_compilation()
    # Replace the function only if other code has restored DeepSpeed's own. If other code has
    # wrapped ours, leave the wrapper: our function must not run twice.
    if deepspeed.initialize is _plain_initialize:
        deepspeed.initialize = _our_initialize
    _enabled = True
    ds_kfac_startup.watch()


def disable() -> None:
    """Undo :func:`enable`: ``deepspeed.initialize`` then only warns about a "kfac" block. K-FAC is
    still attached to an engine with KFACAdamW, because DeepSpeed alone cannot step this
    optimizer."""
    global _enabled
    _enabled = False


@wraps(_plain_initialize)
def _our_initialize(*args: Any, **kwargs: Any) -> tuple:
    return _initialized(
        inspect.signature(_plain_initialize).bind(*args, **kwargs), wanted=enabled()
    )


deepspeed.initialize = _our_initialize


def attach(engine: Any, config: KFACConfig | Mapping[str, Any] | None = None) -> Attachment | None:
    """Precondition the gradients of an existing engine. Collective: call this function on every
    rank.

    Args:
        engine: a DeepSpeedEngine that has not started a step.
        config: the "kfac" block; None: the "kfac" block of the engine's config.

    Returns the attachment, which is also ``engine.kfac``. If the engine already has an attachment,
    this attachment is returned. Returns None if the block has ``"enabled": false``.

    Raises:
        ValueError: ``engine`` is not an engine, there is no "kfac" block, the block is wrong or
            differs between ranks, K-FAC refuses the engine's mode, or there is no layer to
            precondition.
        RuntimeError: the self-test did not find DeepSpeed's gradients where it expected them.
    """
    global _unattached
    if not isinstance(engine, DeepSpeedEngine):
        raise ValueError(f"ds_kfac.attach: got a {type(engine).__name__}; {NO_ENGINE}")
    attached = getattr(engine, HANDLE, None)
    if isinstance(attached, Attachment) and config is None:
        say(ATTACHED)
        return attached
    config = find_block(engine.config) if config is None else config
    if config is None:
        raise ValueError(
            'ds_kfac.attach: the engine\'s DeepSpeed config has no "kfac" block; add this block, '
            "or pass it as config="
        )
    given = config if isinstance(config, KFACConfig) else parse(config)
    if isinstance(attached, Attachment):
        if given != attached.given:
            raise ValueError(
                "ds_kfac.attach: this engine already has K-FAC with another config; call "
                "engine.kfac.detach() first"
            )
        say(ATTACHED)
        return attached
    check_config(given)
    if not given.enabled:
        return None
    rule = _rule_of(engine)
    config, answers = rule.resolved(given, type(getattr(engine, "basic_optimizer", None)).__name__)
    _raise_if_refused(of_engine(engine, config, rule.optimizer_type))
    job, found = assembled(engine, config, answers, rule)
    attachment = Attachment(engine, given, job, found)
    _unattached = None
    return attachment


def _rule_of(engine: Any) -> UpdateRule:
    optimizer = getattr(engine, "basic_optimizer", None)
    return next(rule for rule in DIRECTIONS if rule.claims(optimizer))


def _config_source(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the DeepSpeed config as DeepSpeed will read it. Return None if the config is not a
    dict, a file or base64."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        source = hjson.loads(Path(source).read_text())
    elif isinstance(source, (str, os.PathLike)):
        try:
            source = hjson.loads(base64.urlsafe_b64decode(str(source)).decode())
        except ValueError:  # DeepSpeed will say what is wrong
            return None
    return source if isinstance(source, Mapping) else None
