"""Where a weight is used, for the message about a layer that does not fit: nothing is computed with it."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_kfac.model.batch import tensors_of

NOT_A_USERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
MOST = 4
"""Places that are told of a weight."""


class Uses(TorchFunctionMode):
    """While it is entered, notes each torch function that takes one of some parameters, or a view of one.

    Attributes:
        places: layer -> "model.py:41 (matmul)", without those of a module's own forward in torch.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self.places: dict[str, dict[str, None]] = {}

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        with suppress(Exception):  # of tensors that are none, as inside of vmap
            if isinstance(output, Tensor) and output.requires_grad:
                self._note(getattr(function, "__name__", str(function)), (args, kwargs))
        return output

    def _note(self, function: str, arguments: Any) -> None:
        for tensor in tensors_of(arguments):
            name = self._names.get(id(tensor if tensor._base is None else tensor._base))
            if name is not None:
                self.places.setdefault(name, {})[f"{_line()} ({function})"] = None

    def of(self, layer: str) -> str:
        """In words; "" if there is none."""
        found = list(self.places.get(layer, ()))
        more = ", .." if len(found) > MOST else ""
        return f"; its weight is used in {', '.join(found[:MOST])}{more}" if found else ""


def _line() -> str:
    """Of the innermost code that is neither torch's nor ours."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_A_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
