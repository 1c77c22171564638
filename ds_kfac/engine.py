"""The seam into DeepSpeed: initialize, enable and attach. Four attributes of one engine instance and module hooks.

No DeepSpeed class is patched. ``_take_model_step`` is where gradients are averaged but not yet checked, clipped or
stepped, in every stage; ``backward`` tells the scale of the output gradients; the checkpoint methods carry our state.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson
import torch
from deepspeed.utils import logger

from ds_kfac import checkpoint
from ds_kfac.config import KFACConfig, find_block, parse
from ds_kfac.grouping import kfac_first
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.report import attach_report
from ds_kfac.scan import scan
from ds_kfac.zero.exchange import parameter_names
from ds_kfac.zero.registry import shard_layout
from ds_kfac.zero.selftest import self_test
from ds_kfac.zero.validate import validate

_HANDLE = "kfac"
"""Name under which an engine carries its :class:`Attachment`."""

_plain_initialize: Callable[..., tuple] = deepspeed.initialize
"""DeepSpeed's own; :func:`enable` puts ours in its place."""


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Drop-in for ``deepspeed.initialize``: same arguments, same result; attaches if the config has a "kfac" block.

    Raises:
        ValueError: the block is wrong, or the engine's mode is refused; before any training.
    """
    bound = inspect.signature(_plain_initialize).bind(*args, **kwargs)
    config = _early_config(bound.arguments)
    grouped = config is not None and config.enabled and config.assignment.kfac_first
    if grouped:
        _group_kfac_first(bound.arguments, config)
    result = _plain_initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    block = find_block(engine.config)
    if block is not None:
        attach(engine, block, _grouped=grouped)
    return result


def enable() -> None:
    """Make ``deepspeed.initialize`` ours, for code that calls it itself (HF Trainer, Accelerate, Lightning).

    Idempotent; :func:`disable` undoes it. Call it before the trainer is built.
    """
    global _plain_initialize
    if deepspeed.initialize is not _enabled_initialize:
        _plain_initialize = deepspeed.initialize
        _enabled_initialize.__wrapped__ = _plain_initialize
        deepspeed.initialize = _enabled_initialize


def disable() -> None:
    """Give ``deepspeed.initialize`` back."""
    if deepspeed.initialize is _enabled_initialize:
        deepspeed.initialize = _plain_initialize


@wraps(_plain_initialize)
def _enabled_initialize(*args: Any, **kwargs: Any) -> tuple:
    return initialize(*args, **kwargs)


def attach(
    engine: Any, config: KFACConfig | Mapping[str, Any] | None = None, *, _grouped: bool = False
) -> "Attachment | None":
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
    attached = getattr(engine, _HANDLE, None)
    if isinstance(attached, Attachment):
        return attached
    if config is None:
        config = find_block(engine.config)
        if config is None:
            raise ValueError('ds_kfac.attach: the engine\'s DeepSpeed config has no "kfac" block; add one or pass config=')
    if not isinstance(config, KFACConfig):
        config = parse(config)
    if not config.enabled:
        return None
    validate(engine)
    if config.assignment.kfac_first and not _grouped:
        raise ValueError(
            "kfac.assignment.kfac_first lays out parameter groups before the engine exists: build the engine with "
            "ds_kfac.initialize (or ds_kfac.enable), not with ds_kfac.attach"
        )
    return Attachment(engine, config)


class Attachment:
    """A K-FAC optimizer at work in one engine.

    Attributes:
        optimizer: the :class:`KFACOptimizer`.
        report: the text printed at attach.
    """

    def __init__(self, engine: Any, config: KFACConfig) -> None:
        self.engine = engine
        found = scan(engine.module, include=config.layers.include, exclude=config.layers.exclude)
        named = dict(engine.module.named_parameters())
        layout = shard_layout(engine, [named[name] for name in parameter_names(found.layers)])
        self.optimizer = KFACOptimizer(
            engine.module, found.layers, layout, config, scheduled_lr=engine.lr_scheduler is not None
        )
        self._active = True
        try:
            self_test(layout, self.optimizer.exchange.owners)
        except Exception:
            self.optimizer.capture.remove()
            raise
        self._originals: dict[str, tuple[Any, Any]] = {}
        self._wrap("_take_model_step", self._take_model_step)
        self._wrap("backward", self._backward)
        self._wrap("save_checkpoint", self._save_checkpoint)
        self._wrap("load_checkpoint", self._load_checkpoint)
        setattr(engine, _HANDLE, self)
        self.report = attach_report(self.optimizer, found)
        if engine.global_rank == 0:
            print(self.report, flush=True)

    @property
    def metrics(self):
        return self.optimizer.metrics

    def detach(self) -> None:
        """Restore the engine: remove hooks and wrappers. Call on every rank, between steps."""
        self.optimizer.capture.remove()
        self._active = False
        for name, (wrapper, previous) in self._originals.items():
            # Someone may have wrapped ours since; then it stays in the chain and passes everything through.
            if vars(self.engine).get(name) is wrapper:
                if previous is None:
                    delattr(self.engine, name)
                else:
                    setattr(self.engine, name, previous)
        delattr(self.engine, _HANDLE)

    def load_state(self, load_dir: str | os.PathLike, tag: str) -> None:
        """Load only the K-FAC state of a checkpoint, whatever stage and world size wrote it. Collective."""
        directory = checkpoint.find(Path(load_dir) / str(tag))
        if directory is None:
            raise ValueError(f"ds_kfac: no K-FAC state in {Path(load_dir) / str(tag)}")
        checkpoint.load(self.optimizer, directory)

    # the four wrapped attributes

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(self.engine, name)
        previous = vars(self.engine).get(name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs) if self._active else original(*args, **kwargs)

        self._originals[name] = (wrapped, previous)
        setattr(self.engine, name, wrapped)

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kfac, engine = self.optimizer, self.engine
        monitored = kfac.schedule.due(kfac.steps).capture and engine.monitor.enabled and engine.global_rank == 0
        self._warn_of_silent_layers()
        kfac.step()
        scaler = kfac.layout.grad_scaler
        scale = scaler.get_scale() if scaler else 0.0
        result = original(*args, **kwargs)
        # A GradScaler skips the step by itself; only its falling scale tells. It has synchronised already.
        skipped = bool(scaler) and scaler.get_scale() < scale
        kfac.commit(applied=engine.was_step_applied() and not skipped)
        if monitored:
            engine.monitor.write_events(self.metrics.events(engine.global_samples))
        return result

    def _warn_of_silent_layers(self) -> None:
        """Once, after the first captured step: layers whose hooks never fired here pass through untouched."""
        kfac = self.optimizer
        if kfac.steps or not kfac.capture.active:
            return
        silent = [layer.name for layer in kfac.layers if layer.name not in kfac.capture.called]
        if silent:
            logger.warning(
                f"ds_kfac: rank {kfac.rank} saw no rows of {', '.join(silent)} in its first step. A layer that no rank "
                "calls is not preconditioned until it has data; if it is never called as a module, exclude it"
            )

    def _backward(self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        capture = self.optimizer.capture
        if not capture.active or not loss.requires_grad:
            return original(loss, *args, **kwargs)
        scale_wrt_gas = kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
        # The caller who switches that off has divided by the micro-batches himself.
        divisor = 1 if scale_wrt_gas else self.engine.gradient_accumulation_steps()
        hook = loss.register_hook(lambda seed: capture.begin_backward(seed / divisor))
        try:
            return original(loss, *args, **kwargs)
        finally:
            hook.remove()
            capture.end_backward()

    def _save_checkpoint(
        self, original: Callable[..., Any], save_dir: str, tag: Any = None, client_state: Any = None, *args, **kwargs
    ) -> Any:
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        header = checkpoint.save(self.optimizer, Path(save_dir) / tag) if save_dir else None
        client_state = {**(client_state or {}), checkpoint.CLIENT_KEY: header}
        return original(save_dir, tag, client_state, *args, **kwargs)

    def _load_checkpoint(self, original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(load_dir, *args, **kwargs).arguments
        path, client_state = original(load_dir, *args, **kwargs)
        if path is None:
            return path, client_state
        header = client_state.pop(checkpoint.CLIENT_KEY, None) if client_state else None
        tag_directory = Path(path).parent
        directory = checkpoint.find(tag_directory)
        if arguments.get("load_module_only"):
            self._say(f"load_module_only: K-FAC starts afresh; engine.kfac.load_state loads the state of {tag_directory}")
        elif directory is not None:
            checkpoint.load(self.optimizer, directory)
            self._say(f"loaded K-FAC state of step {self.optimizer.steps} from {directory}")
        elif header is not None:
            raise ValueError(
                f"ds_kfac: {tag_directory} was saved with K-FAC state, but its folder {checkpoint.FOLDER!r} is missing; "
                "copy it there, or load with load_module_only=True to start K-FAC afresh"
            )
        else:
            self._say(f"WARNING: {tag_directory} has no K-FAC state, K-FAC starts afresh: expect some steps to recover")
        return path, client_state

    def _say(self, text: str) -> None:
        if self.engine.global_rank == 0:
            logger.warning(f"ds_kfac: {text}")


def _early_config(arguments: Mapping[str, Any]) -> KFACConfig | None:
    """The checked block before the engine is built, so that a wrong one fails at once."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        source = hjson.loads(Path(source).read_text())
    if not isinstance(source, Mapping):  # base64, or nothing: attach checks it
        return None
    block = find_block(source)
    return None if block is None else parse(block)


def _group_kfac_first(arguments: dict[str, Any], config: KFACConfig) -> None:
    optimizer, model = arguments.get("optimizer"), arguments["model"]
    if optimizer is not None:
        raise ValueError(
            "kfac.assignment.kfac_first needs the optimizer named in the DeepSpeed config, not passed as an object: "
            "its parameter groups are laid out before it is built"
        )
    found = scan(model, include=config.layers.include, exclude=config.layers.exclude)
    arguments["model_parameters"] = kfac_first(model, found, arguments.get("model_parameters"))
