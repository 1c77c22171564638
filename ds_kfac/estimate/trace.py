"""One forward, mostly on the meta device: which layers see one input, and how many rows of theirs an example has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.shared_inputs import SharedInputs

CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
"""Modules whose tensors' second dimension is what others have last."""


@dataclass(frozen=True)
class Trace:
    """What a forward shows; an empty one knows nothing.

    Attributes:
        inputs: module name -> numbers of its inputs; modules with equal ones share them.
        rows: module name -> rows of one unit (token, or image); 1 for those that are not in it.
        units: in the example.
    """

    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)
    units: int = 0


def units_of(example: Sequence[Any]) -> int:
    """Tokens of the first tensor if it is of integers, else its first dimension."""
    first = next((x for x in example if isinstance(x, Tensor)), None)
    if first is None or first.ndim == 0:
        raise ValueError("the example inputs have no tensor of at least one dimension")
    return len(first) if first.is_floating_point() else first.numel()


def trace(model: nn.Module, example: Sequence[Any]) -> Trace:
    """Run a model once, without gradients.

    Args:
        example: positional arguments of its forward, on its device.

    Raises:
        ValueError: it cannot run there.
    """
    units = units_of(example)
    modules = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    seen, rows, handles = SharedInputs(modules), Counter[str](), []

    def hook(name: str) -> Any:
        def called(module: nn.Module, inputs: tuple, named: Mapping[str, Any], output: Any) -> None:
            x = inputs[0] if inputs else next(iter(named.values()), None)
            if isinstance(x, Tensor):
                seen.see(name, x)
            seen_by = x if isinstance(module, nn.modules.conv._ConvTransposeNd) else output
            if isinstance(seen_by, Tensor) and seen_by.ndim:
                rows[name] += seen_by.numel() // seen_by.shape[1 if isinstance(module, CHANNELS_FIRST) else -1]

        return called

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
        with torch.no_grad():
            model(*example)
    except Exception as problem:
        raise ValueError(
            f"{type(model).__name__} does not run on its example inputs ({type(problem).__name__}: {problem}); give "
            "others, or none: then no layers are assumed to share theirs"
        ) from problem
    finally:
        for handle in handles:
            handle.remove()
    return Trace(seen.found(), {name: count / units for name, count in rows.items()}, units)
