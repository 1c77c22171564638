"""One forward, mostly on the meta device: which layers see one input, and how many rows of theirs an example has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import ADDED, COPIES, LINEAR, RIGHT, multiplied
from ds_kfac.model.shared_inputs import SharedInputs

CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
"""Modules whose tensors' second dimension is what others have last."""


@dataclass(frozen=True)
class Trace:
    """What a forward shows; an empty one knows nothing.

    Attributes:
        inputs: module name -> numbers of its inputs; modules with equal ones share them.
        rows: module name -> rows of one unit (token, or image); 1 for those that are not in it.
        stacked: name of a parameter that is a stack of matrices, such as experts -> rows of one unit that each of them
            multiplies, in the mean of them.
        units: in the example.
    """

    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)
    stacked: Mapping[str, float] = field(default_factory=dict)
    units: int = 0

    def knows(self, layer: LayerSpec) -> bool:
        """Whether it knows the rows of a layer of a stack; of others a unit has one at least."""
        return layer.part[1] == 1 or not layer.product or layer.weight in self.stacked

    def rows_of(self, layer: LayerSpec) -> float:
        """Rows of one unit that a layer has; if not known, as if each took part."""
        return self.stacked.get(layer.weight, self.rows.get(layer.module, 1.0))


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
    stacks = _Stacks(modules)

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
        with torch.no_grad(), stacks:
            model(*example)
    except Exception as problem:
        raise ValueError(
            f"{type(model).__name__} does not run on its example inputs ({type(problem).__name__}: {problem}); give "
            "others, or none: then no layers are assumed to share theirs"
        ) from problem
    finally:
        for handle in handles:
            handle.remove()
    per_unit = {name: count / units for name, count in rows.items()}
    return Trace(seen.found(), per_unit, {name: count / units for name, count in stacks.rows.items()}, units)


class _Stacks(TorchFunctionMode):
    """Sees products with stacks of matrices while it is entered, whole ones, views, or matrices picked out for each
    row. It reads shapes alone: which matrix takes a row is not known on the meta device.

    Attributes:
        rows: name of a parameter -> rows that its matrices multiplied, in the mean of them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.rows: dict[str, float] = {}
        self._sides: dict[int, tuple[str, int, int]] = {}  # id of a parameter -> name, matrices, outputs of one
        self._copies: dict[int, tuple[Tensor, int]] = {}  # and of what: ids are of living tensors
        for name, module in modules.items():
            for parameter, lies in multiplied(module).items():
                weight = module._parameters[parameter]
                shape = lies.shape(parameter_shape(weight))
                if len(shape) == 3:
                    outputs = shape[-1] if lies.turned else shape[-2]
                    self._sides[id(weight)] = f"{name}.{parameter}".lstrip("."), shape[0], outputs

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if isinstance(output, Tensor) and name in COPIES | {"__getitem__", "index_select"}:
            source = self._source(args[0])
            if source is not None and output._base is None:
                self._copies[id(output)] = output, source
        elif isinstance(output, Tensor) and name in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            operands = (*args, *(kwargs or {}).values())
            source = next((found for x in operands if (found := self._source(x)) is not None), None)
            if source is not None:
                parameter, count, outputs = self._sides[source]
                self.rows[parameter] = self.rows.get(parameter, 0.0) + output.numel() / outputs / count
        return output

    def _source(self, x: Any) -> int | None:
        """The stack that a tensor is, is a view of, or was copied from."""
        if not isinstance(x, Tensor):
            return None
        base = x if x._base is None else x._base
        return id(base) if id(base) in self._sides else self._copies.get(id(base), (None, None))[1]
