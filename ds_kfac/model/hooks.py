"""Hooks that a deep copy of the model leaves alone."""

from collections.abc import Callable
from typing import Any

from torch import nn


def own_hook(own: nn.Module, function: Callable[..., Any]) -> Callable[..., None]:
    """``function`` as a hook of ``own`` only.

    ``copy.deepcopy`` of a module takes its hooks along: a bound method with all that it is bound to, process groups
    included; a plain function as it is, so that the copy's calls (an average of the weights, a frozen reference) would
    be taken for the model's.
    """

    def hook(module: nn.Module, *values: Any, **named: Any) -> None:
        if module is own:
            function(module, *values, **named)

    return hook
