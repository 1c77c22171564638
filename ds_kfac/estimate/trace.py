"""What one forward pass of a model shows about its layers, for an estimate."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import ADDED, COPIES, LINEAR, RIGHT, multiplied
from ds_kfac.model.shared import SharedInputs

CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
"""Types of modules whose tensors have channels as their second dimension. Other modules have
features as their last dimension."""


@dataclass
class Trace:
    """What one forward pass without gradients shows about layers.

    A trace contains only shapes. Shapes do not show which matrix of a stack multiplies which rows.
    An empty trace stands for a model that has not been run.

    Attributes:
        units: number of units (tokens or images) in the example.
        inputs: module name -> numbers that identify the module's inputs. Modules with equal numbers
            share their inputs.
        rows: module name -> number of rows per unit. A module that is missing has one row per unit.
        stacked: parameter name -> number of rows per unit that one of its matrices multiplies,
            averaged over the matrices. The dict has only parameters that are stacks of matrices,
            such as experts.
    """

    units: int = 0
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    stacked: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, example: Sequence[Any]) -> "Trace":
        """Run a model on an example and return what it shows.

        Args:
            example: positional arguments of the model's forward, on the model's device. If the
                first tensor has integers, each of its elements is a unit (a token). Otherwise each
                entry of its first dimension is a unit (an image).

        Raises:
            ValueError: the model does not run.
        """
        first = next((x for x in example if isinstance(x, Tensor) and x.ndim), None)
        if first is None:
            raise ValueError("the example inputs contain no tensor with at least one dimension")
        trace = cls(units=len(first) if first.is_floating_point() else first.numel())
        modules = {
            name: module
            for name, module in model.named_modules()
            if list(module.parameters(recurse=False))
        }
        shared = SharedInputs(modules)
        try:
            with ExitStack() as stack:
                for name, module in modules.items():
                    hook = partial(trace._record_call, shared, name)
                    handle = module.register_forward_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
                stack.enter_context(torch.no_grad())
                stack.enter_context(_StackedProducts(modules, trace))
                model(*example)
        except Exception as problem:
            raise ValueError(
                f"{type(model).__name__} does not run on its example inputs "
                f"({type(problem).__name__}: {problem}); give other example inputs, or none. "
                "Without example inputs, each layer is assumed to have an input of its own"
            ) from problem
        return trace

    def rows_of(self, layer: LayerSpec) -> float:
        """Return a layer's number of rows per unit, or 1 if the layer is not in the trace."""
        return self.stacked.get(layer.weight, self.rows.get(layer.module, 1.0))

    def multiplications(self, model: nn.Module) -> float:
        """Return the number of multiplications per unit in the forward pass. Each parameter adds
        its number of elements times its number of rows per unit.

        Looking up rows of an embedding costs nothing. A head that shares the embedding's weight
        does count.
        """
        total = 0.0
        counted = set[nn.Parameter]()
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            parameters = dict(module.named_parameters(name, recurse=False))
            stacks = [each for each in parameters if each in self.stacked]
            rows = self.stacked[stacks[0]] if stacks else self.rows.get(name, 1)
            for each, parameter in parameters.items():
                if parameter not in counted:
                    counted.add(parameter)
                    total += prod(parameter_shape(parameter)) * self.stacked.get(each, rows)
        return total

    def _record_call(
        self,
        shared: SharedInputs,
        name: str,
        module: nn.Module,
        inputs: tuple,
        named: Mapping[str, Any],
        output: Any,
    ) -> None:
        """Forward hook that records the input and the number of rows of a module's call."""
        x = inputs[0] if inputs else next(iter(named.values()), None)
        if isinstance(x, Tensor):
            self.inputs[name] = (*self.inputs.get(name, ()), shared.number(name, x))
        # a transposed convolution has one row for each pixel of its input
        of_rows = x if isinstance(module, nn.modules.conv._ConvTransposeNd) else output
        if isinstance(of_rows, Tensor) and of_rows.ndim:
            features = of_rows.shape[1 if isinstance(module, CHANNELS_FIRST) else -1]
            rows = of_rows.numel() // features / self.units
            self.rows[name] = self.rows.get(name, 0.0) + rows


class _Stack(NamedTuple):
    """A parameter that is a stack of matrices.

    Attributes:
        name: the parameter's name.
        matrices: number of matrices.
        outputs: number of outputs of each matrix.
    """

    name: str
    matrices: int
    outputs: int


class _StackedProducts(TorchFunctionMode):
    """Records in a trace how many rows each stack of matrices multiplies."""

    def __init__(self, modules: Mapping[str, nn.Module], trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        # a parameter, or a copy of a parameter or of a part of it -> its stack
        self.stacks: Any = WeakTensorKeyDictionary()
        for name, module in modules.items():
            for parameter, layout in multiplied(module).items():
                weight = module._parameters[parameter]
                shape = layout.shape(parameter_shape(weight))
                if len(shape) == 3:
                    outputs = shape[-1] if layout.transposed else shape[-2]
                    full_name = f"{name}.{parameter}".lstrip(".")
                    self.stacks[weight] = _Stack(full_name, shape[0], outputs)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if isinstance(output, Tensor) and name in COPIES | {"__getitem__", "index_select"}:
            stack = self._stack_of(args[0])
            if stack is not None and output._base is None:
                self.stacks[output] = stack
        elif isinstance(output, Tensor) and name in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            self._record_product((*args, *(kwargs or {}).values()), output)
        return output

    def _record_product(self, operands: Sequence[Any], output: Tensor) -> None:
        stacks = [stack for x in operands if (stack := self._stack_of(x)) is not None]
        if stacks:
            stack = stacks[0]
            rows = output.numel() / stack.outputs / stack.matrices / self.trace.units
            self.trace.stacked[stack.name] = self.trace.stacked.get(stack.name, 0.0) + rows

    def _stack_of(self, x: Any) -> _Stack | None:
        """If x is a stacked parameter, or a view or copy of one, return that stacked parameter.
        Otherwise return None."""
        if not isinstance(x, Tensor):
            return None
        return self.stacks.get(x if x._base is None else x._base)
