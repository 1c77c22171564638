"""The update rules, a line each."""

from collections.abc import Mapping
from typing import Any

from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.directions.kfac_gradient import KFACGradientRule

DIRECTIONS: list[UpdateRule] = [KFACAdamWRule(), KFACGradientRule()]
"""The first that claims an engine's optimizer; the last works with any."""


def rule_in(ds_config: Mapping[str, Any], optimizer: Any = None) -> UpdateRule:
    """The rule of the engine that DeepSpeed would build.

    Args:
        optimizer: the argument of ``deepspeed.initialize``.

    Raises:
        ValueError: the block is no object; or it has a rule's own optimizer, misspelt or with a wrong parameter.
    """
    block = ds_config.get("optimizer")
    if not isinstance(block, Mapping | None):
        example = '{"type": "KFACAdamW", "params": {"lr": 1e-3}}'
        raise ValueError(f"DeepSpeed config: optimizer: got {block!r}; must be an object such as {example}")
    named = [rule for rule in DIRECTIONS if rule.parameters(ds_config) is not None or rule.given(optimizer)]
    return named[0] if named else DIRECTIONS[-1]
