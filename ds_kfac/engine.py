"""The doors: initialize (drop-in), enable (for frameworks that call deepspeed.initialize), attach (existing engine)."""

import base64
import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson

from ds_kfac import optimizer_block
from ds_kfac.attachment import HANDLE, Attachment
from ds_kfac.config import KFACConfig, find_block, parse
from ds_kfac.grouping import kfac_first
from ds_kfac.scan import scan
from ds_kfac.zero.validate import validate

_plain_initialize: Callable[..., tuple] = deepspeed.initialize
"""DeepSpeed's own; :func:`enable` puts ours in its place."""
_enabled = _in_place = False


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Drop-in for ``deepspeed.initialize``: same arguments, same result; attaches if the config has a "kfac" block.

    Raises:
        ValueError: the block is wrong, or the engine's mode is refused; before any training.
    """
    bound = inspect.signature(_plain_initialize).bind(*args, **kwargs)
    source = _config_source(bound.arguments)
    block = find_block(source) if source is not None else None
    adam = optimizer_block.params_in(source) if source is not None else None
    if adam is not None and block is None:
        block = {}  # the optimizer's name alone asks for K-FAC
    config = None if block is None else parse(block)  # before the engine is built: a wrong one fails at once
    if adam is not None and config is not None:
        optimizer_block.put_into(bound.arguments, config, adam, source or {})
    elif config is not None and config.enabled and config.assignment.kfac_first:
        _group_kfac_first(bound.arguments, config)
    result = _plain_initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    block = find_block(engine.config) if block is None else block
    if block is not None:
        attach(engine, block, _grouped=config is not None)
    return result


def enable() -> None:
    """Make ``deepspeed.initialize`` ours, for code that calls it itself (HF Trainer, Accelerate, Lightning).

    Idempotent; :func:`disable` undoes it. Call it before the trainer is built.
    """
    global _plain_initialize, _enabled, _in_place
    if not _in_place or deepspeed.initialize is _plain_initialize:  # never wrap a wrapper of ours: it would recurse
        _plain_initialize = deepspeed.initialize
        deepspeed.initialize = _enabled_initialize
    _enabled = _in_place = True


def disable() -> None:
    """Give ``deepspeed.initialize`` back; if another library has wrapped ours since, ours passes through."""
    global _enabled, _in_place
    _enabled = False
    if deepspeed.initialize is _enabled_initialize:
        deepspeed.initialize = _plain_initialize
        _in_place = False


@wraps(_plain_initialize)
def _enabled_initialize(*args: Any, **kwargs: Any) -> tuple:
    return initialize(*args, **kwargs) if _enabled else _plain_initialize(*args, **kwargs)


def attach(
    engine: Any, config: KFACConfig | Mapping[str, Any] | None = None, *, _grouped: bool = False
) -> Attachment | None:
    """Precondition the gradients of an existing engine. Collective: call on every rank.

    Args:
        engine: a DeepSpeedEngine that has not started a step.
        config: the "kfac" block; None takes it from the engine's config.

    Returns the attachment, also found as ``engine.kfac``; the existing one if there is one; None if the block says
    ``"enabled": false``.

    Raises:
        ValueError: no block, a wrong block, a refused engine mode, or no layer to precondition.
        RuntimeError: the self-test found gradients elsewhere than expected.
    """
    attached = getattr(engine, HANDLE, None)
    if isinstance(attached, Attachment):
        if config is not None and _checked(config) != attached.given:
            raise ValueError("ds_kfac.attach: this engine has K-FAC with another config; engine.kfac.detach() it first")
        return attached
    if config is None:
        config = find_block(engine.config)
        if config is None:
            raise ValueError(
                'ds_kfac.attach: the engine\'s DeepSpeed config has no "kfac" block; add it or pass config='
            )
    config = _checked(config)
    if not config.enabled:
        return None
    validate(engine)
    if config.assignment.kfac_first and not _grouped:
        raise ValueError(
            "kfac.assignment.kfac_first lays out parameter groups before the engine exists: build the engine with "
            "ds_kfac.initialize (or ds_kfac.enable), not with ds_kfac.attach"
        )
    return Attachment(engine, config)


def _checked(config: KFACConfig | Mapping[str, Any]) -> KFACConfig:
    return config if isinstance(config, KFACConfig) else parse(config)


def _config_source(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The DeepSpeed config as DeepSpeed will read it: a dict, a file or base64; None if it is none of them."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(source, (str, os.PathLike)):
        if os.path.isfile(source):
            source = hjson.loads(Path(source).read_text())
        else:
            try:
                source = hjson.loads(base64.urlsafe_b64decode(str(source)).decode())
            except ValueError:  # DeepSpeed says what is wrong
                return None
    return source if isinstance(source, Mapping) else None


def _group_kfac_first(arguments: dict[str, Any], config: KFACConfig) -> None:
    optimizer, model = arguments.get("optimizer"), arguments["model"]
    if optimizer is not None:
        raise ValueError(
            "kfac.assignment.kfac_first needs the optimizer named in the DeepSpeed config, not passed as an object: "
            "its parameter groups are laid out before it is built"
        )
    found = scan(model, config.for_optimizer(adam=False).choice)
    arguments["model_parameters"] = kfac_first(model, found, arguments.get("model_parameters"))
