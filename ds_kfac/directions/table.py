"""The update rules, a line each."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_kfac.config.keys import parse
from ds_kfac.config.values import find_block
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.directions.kfac_adamw.user_optimizer import with_users_groups
from ds_kfac.directions.kfac_gradient import KFACGradientRule

DIRECTIONS: list[UpdateRule] = [KFACAdamWRule(), KFACGradientRule()]
"""The first that claims an engine's optimizer; the last works with any."""


def rule_in(ds_config: Mapping[str, Any], optimizer: Any = None) -> UpdateRule:
    """The rule of the engine that DeepSpeed would build.

    Args:
        optimizer: the argument of ``deepspeed.initialize``.

    Raises:
        ValueError: the block is no object; or it has a rule's own optimizer, misspelt or with a
            wrong parameter.
    """
    block = ds_config.get("optimizer")
    if not isinstance(block, Mapping | None):
        example = '{"type": "KFACAdamW", "params": {"lr": 1e-3}}'
        raise ValueError(
            f"DeepSpeed config: optimizer: got {block!r}; must be an object such as {example}"
        )
    named = [
        rule
        for rule in DIRECTIONS
        if rule.optimizer_params(ds_config) is not None or rule.given(optimizer)
    ]
    return named[0] if named else DIRECTIONS[-1]


def is_factory(optimizer: Any) -> bool:
    """Whether this argument of ``deepspeed.initialize`` is a function that makes an optimizer of
    parameters."""
    return callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)


def when_made(arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> None:
    """For an optimizer that is given as a function, which only DeepSpeed can call: if it returns a
    rule's own optimizer, the rule is installed then.

    Args:
        arguments: of ``deepspeed.initialize``; ``optimizer`` and ``lr_scheduler`` are replaced.
    """
    make: Callable[[Any], Any] = arguments["optimizer"]
    before = dict(arguments)
    with_users_groups(arguments, ds_config)

    def made(parameters: Any) -> Any:
        optimizer = make(parameters)
        changed = {**before, "optimizer": optimizer, "model_parameters": None}
        for rule in DIRECTIONS:
            if rule.given(optimizer):
                rule.install(changed, parse(find_block(ds_config) or {}), ds_config)
        return changed["optimizer"]

    arguments["optimizer"] = made
