"""Public functions: initialize (drop-in), enable (if a framework calls deepspeed.initialize), attach (to an engine)."""

import base64
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist, logger
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

from ds_kfac.config.keys import KFACConfig
from ds_kfac.config.parse import find_block, parse
from ds_kfac.directions.table import DIRECTIONS, rule_in
from ds_kfac.engine.attachment import HANDLE, Attachment
from ds_kfac.engine.refusals import without_optimizer

_plain_initialize: Callable[..., tuple] = deepspeed.initialize
"""DeepSpeed's own. Ours is in its place from the import on; until :func:`enable` it only warns."""
_enabled = False
YES, NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
"""What ``DS_KFAC`` may be; ds_kfac.pth has those that mean no, too."""
NOT_ENABLED = (
    'ds_kfac: not attached: the config has a "kfac" block, but deepspeed.initialize ran without ds_kfac.enable(). '
    "Call that before it, start with `python -m ds_kfac run` or with DS_KFAC=1, or ds_kfac.attach(engine) now; "
    "otherwise this engine trains without K-FAC"
)


def initialize(*args: Any, **kwargs: Any) -> tuple:
    """Drop-in for ``deepspeed.initialize``: same arguments, same result; attaches if the config has a "kfac" block. An
    engine without an optimizer (a reference model, an evaluation) is left as it is, with a line in the log.

    Raises:
        ValueError: the block is wrong, or the engine's mode is refused; before any training.
    """
    _warn_of_compilation()
    # DeepSpeed looks a scheduler's type up here
    deepspeed.runtime.lr_schedules.PolynomialDecay = PolynomialDecay
    bound = inspect.signature(_plain_initialize).bind(*args, **kwargs)
    source = _config_source(bound.arguments)
    block = find_block(source) if source is not None else None
    rule = rule_in(source or {}, bound.arguments.get("optimizer"))
    if rule.optimizer_type is not None and block is None:
        block = {}  # the optimizer's name alone asks for K-FAC
    config = None if block is None else parse(block)  # before the engine is built: a wrong one fails at once
    if rule.optimizer_type is not None and config is not None:
        rule.install(bound.arguments, config, source or {})
    if config is not None:
        _check_tensors(bound.arguments.get("model"))
    result = _plain_initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    block = find_block(engine.config) if block is None else block
    if block is not None and without_optimizer(engine):
        logger.info("ds_kfac: this engine has no optimizer, so it trains nothing: left as it is")
    elif block is not None and attach(engine, block) is None:
        log_dist('ds_kfac: not attached: the config says "enabled": false', ranks=[0])
    return result


COMPILED = "deepspeed_shm_comm"


@cache
def _warn_of_compilation() -> None:
    """Once: DeepSpeed compiles at a first start on a CPU; a run killed meanwhile leaves a lock, for which later ones
    wait for ever."""
    first = os.environ.get("RANK", "0") == "0" and not deepspeed.comm.is_initialized()
    if not first or get_accelerator().device_name() != "cpu" or not deepspeed.ops.__compatible_ops__.get(COMPILED):
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not any((folder / f"{COMPILED}.so").exists() for folder in (root / COMPILED, *root.glob(f"*/{COMPILED}"))):
        logger.warning(
            f"ds_kfac: DeepSpeed compiles {COMPILED} below {root} now, once, for one to two minutes. If it takes "
            "longer, remove the file lock there, which a run that was killed has left"
        )


def _check_tensors(model: Any) -> None:
    """Raise ValueError for weights that DeepSpeed cannot send as bytes: its own error names no reason."""
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if not parameter.ndim:
            raise ValueError(
                f"ds_kfac: {name} has no dimension, as CLIP's logit_scale, which deepspeed.initialize cannot broadcast "
                "with any optimizer; make it one of shape [1] before: p.data = p.data.view(1)"
            )
        if parameter.ndim and parameter.numel() and parameter.stride(-1) != 1:
            raise ValueError(
                f"ds_kfac: {name} is stored in another order than its shape (channels_last?), which "
                "deepspeed.initialize cannot broadcast; convert the images to channels_last instead, or at ZeRO stage "
                "0 the model after initialize"
            )


def asked_for(word: str) -> bool:
    """Whether ``DS_KFAC`` in the environment asks for K-FAC.

    Raises:
        ValueError: another word than those of YES and NO.
    """
    if word.strip().lower() not in (*YES, *NO):
        raise ValueError(f"DS_KFAC: got {word!r}; must be one of {', '.join(YES)}, or of {', '.join(filter(None, NO))}")
    return word.strip().lower() in YES


def enable() -> None:
    """Make ``deepspeed.initialize`` ours, for code that calls it itself (HF Trainer, Accelerate, Lightning).

    Idempotent; :func:`disable` undoes it. Call it before the trainer is built.
    """
    global _enabled
    _warn_of_compilation()
    if deepspeed.initialize is _plain_initialize:  # someone gave it back; a wrapper of ours is never wrapped
        deepspeed.initialize = _our_initialize
    _enabled = True


def disable() -> None:
    """Undo :func:`enable`: ``deepspeed.initialize`` passes through, and warns of a "kfac" block."""
    global _enabled
    _enabled = False


@wraps(_plain_initialize)
def _our_initialize(*args: Any, **kwargs: Any) -> tuple:
    optimizer = inspect.signature(_plain_initialize).bind(*args, **kwargs).arguments.get("optimizer")
    if _enabled or any(rule.given(optimizer) for rule in DIRECTIONS):
        return initialize(*args, **kwargs)
    result = _plain_initialize(*args, **kwargs)
    block = find_block(result[0].config)
    if block is not None and not (isinstance(block, Mapping) and block.get("enabled") is False):
        log_dist(NOT_ENABLED, ranks=[0], level=logging.WARNING)
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


class PolynomialDecay:
    """SP-NGD's learning rate (Osawa et al. 2020, arXiv:2002.06015; Osawa et al. 2019, arXiv:1811.12019):
    ``"scheduler": {"type": "PolynomialDecay", "params": {"start": 100, "end": 3000, "power": 3.5}}``.

        rate(t) = rate_0 (1 - (t - start) / (end - start))^power   from start to end, constant before and after
        momentum(t) = momentum_0 rate(t) / rate_0                  if "ties_momentum"

    The papers' velocity holds the rate, v <- m (rate / last rate) v - rate g, W <- W + v. torch's does not,
    W <- W - rate b with b <- m b + g, which is the same.

    Args:
        optimizer: torch's, or DeepSpeed's wrapper of one.
        start, end: steps between which the rate falls. Training may end before ``end``.
        power: 1 is linear.
        ties_momentum: whether the momentum of groups that have one falls with the rate.

    Raises ValueError if the steps or the power cannot be.
    """

    def __init__(
        self, optimizer: Any, *, end: float, start: float = 0, power: float = 1.0, ties_momentum: bool = False
    ) -> None:
        if not 0 <= start < end or power < 0:
            raise ValueError(
                f"PolynomialDecay: needs 0 <= start < end and power >= 0, got start {start}, end {end}, power {power}"
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        self.optimizer, self.start, self.end, self.power = inner, start, end, power
        self.ties_momentum, self.steps = ties_momentum, 0
        self.first = [(float(group["lr"]), group.get("momentum")) for group in inner.param_groups]
        self._set()

    @property
    def part(self) -> float:
        """Of the first rate."""
        done = (self.steps - self.start) / (self.end - self.start)
        return (1 - min(max(done, 0.0), 1.0)) ** self.power

    def step(self, last_batch_iteration: int | None = None) -> None:
        """After an optimizer step, or to a given one."""
        self.steps = self.steps + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_lr(self) -> list[float]:
        """Of every group."""
        return [rate * self.part for rate, _ in self.first]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.first = state["steps"], [tuple(pair) for pair in state["first"]]
        self._set()

    def _set(self) -> None:
        for group, (rate, momentum) in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * self.part
            if self.ties_momentum and momentum is not None:
                group["momentum"] = momentum * self.part
