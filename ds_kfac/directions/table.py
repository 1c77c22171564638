"""The list :data:`DIRECTIONS` of all update rules, and functions that select a rule by config."""

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
"""All update rules. An engine uses the first rule that claims its optimizer. The last rule claims
any optimizer."""


def rule_in(ds_config: Mapping[str, Any], optimizer: Any = None) -> UpdateRule:
    """Return the rule that an engine with this DeepSpeed config would use.

    Args:
        optimizer: the ``optimizer`` argument of ``deepspeed.initialize``.

    Raises:
        ValueError: the "optimizer" block is not an object, or misspells the name of a rule's own
            optimizer, or has a wrong parameter for it.
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
    """Whether this ``optimizer`` argument of ``deepspeed.initialize`` is a function that creates an
    optimizer from parameters."""
    return callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)


def when_made(arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> None:
    """Wrap the function that creates the user's optimizer, so that a rule is installed after
    DeepSpeed has called the function.

    Only DeepSpeed can call the user's function. Until then, it is not known whether the optimizer
    is one that an update rule supplies itself.

    Args:
        arguments: arguments of ``deepspeed.initialize``, in which ``optimizer`` and
            ``lr_scheduler`` are replaced.
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
