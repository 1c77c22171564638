"""In which lines of code a weight is used, for the message about a layer whose rows do not fit."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_kfac.model.batch import tensors_of

SKIPPED_FOLDERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
MOST = 4
"""Lines that the message names for a weight, at most."""


class Uses(TorchFunctionMode):
    """While it is entered, notes every torch function with one of ``weights``, or a view of one, as an argument.

    Attributes:
        places: layer -> {"model.py:41 (matmul)": None}, with the line of the user's code that led to the call.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self.places: dict[str, dict[str, None]] = {}

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        with suppress(Exception):  # tensors inside of vmap and the like have no storage to compare
            if isinstance(output, Tensor) and output.requires_grad:
                self._note(getattr(function, "__name__", str(function)), (args, kwargs))
        return output

    def _note(self, function: str, arguments: Any) -> None:
        for tensor in tensors_of(arguments):
            name = self._names.get(id(tensor if tensor._base is None else tensor._base))
            if name is not None:
                self.places.setdefault(name, {})[f"{_line()} ({function})"] = None

    def of(self, layer: str) -> str:
        """Words about a layer's places; "" if there are none."""
        places = list(self.places.get(layer, ()))
        more = ", .." if len(places) > MOST else ""
        return f"; its weight is used in {', '.join(places[:MOST])}{more}" if places else ""


def _line() -> str:
    """ "FILE:LINE" of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED_FOLDERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
