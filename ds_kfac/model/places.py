"""Where the elements of a tensor lie in a parameter: of its views, of copies, of what is picked out of a stack.

A tensor is the parameter's only if the gradient of its elements is that of the parameter's, as autograd's graph has it:
not what is scaled, masked, changed in place, or made without gradient.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ds_kfac.model.product_code import BOUNDS, COPIES

VIEWS = {
    f"{name}Backward"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Select", "Slice",
        "Split", "SplitWithSizes", "Unbind", "Alias", "ToCopy", "Clone", "Clamp",
    )
}  # fmt: skip
PASSES = VIEWS | {"ExpandBackward", "IndexBackward", "IndexSelectBackward"}
"""Nodes of autograd that hand a gradient on, element by element. "Clamp": where nothing is bounded, see
:meth:`Places.follow`."""


class Place(NamedTuple):
    """Where a tensor's elements lie in a parameter.

    Attributes:
        shape, stride, offset: as those of a view of it.
        chosen: of what was picked out of a stack: which of its matrices; ``stride`` has them one after the other.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    chosen: Tensor | None = None


class Places:
    """Of tensors in some parameters, each a stack of so many equal matrices. :meth:`follow` is told of copies."""

    def __init__(self, params: Mapping[nn.Parameter, int]) -> None:
        self._params = {id(param): (param, count) for param, count in params.items()}
        self._copies = WeakTensorKeyDictionary()  # -> its version, and its place; None: of a frozen parameter's

    def clear(self) -> None:
        self._copies.clear()

    def count(self, param: nn.Parameter) -> int:
        """Matrices in it."""
        return self._params[id(param)][1]

    def follow(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> bool:
        """A torch function of that name was called: whether it made a copy of what is known, or picked out of it."""
        if not isinstance(output, Tensor):
            return False
        if name in COPIES:
            return self._copied(name, args, kwargs, output)
        return name in ("__getitem__", "index_select") and self._picked(name, args, kwargs, output)

    def holder(self, tensor: Tensor) -> nn.Parameter | None:
        """Whose view, or copy that was followed, a tensor is."""
        base = base_of(tensor)
        _, place = self._copies.get(base, (0, None))
        found: tuple[Any, int] = self._params.get(id(base), (None, 0))
        return found[0] if place is None else place.param

    def find(self, tensor: Any) -> Place | None:
        """Where it lies in a parameter, if the gradient of its elements is that of the parameter's."""
        if not isinstance(tensor, Tensor):
            return None
        base = base_of(tensor)
        if id(base) in self._params:
            place, version = Place(base, base.shape, base.stride()), base._version  # type: ignore[arg-type]
        else:
            version, place = self._copies.get(base, (0, None))
        if place is None or version != base._version or leaf_of(tensor, PASSES) is not place.param:
            return None
        if tensor is not base:
            if tensor.dtype != base.dtype or not lies_as(base, place):
                return None
            offset = place.offset + int(tensor.storage_offset() - base.storage_offset())
            place = place._replace(shape=tensor.shape, stride=tensor.stride(), offset=offset)
        return place

    def _copied(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> bool:
        source = args[0] if args else kwargs.get("input")
        if source is output or not isinstance(source, Tensor):
            return False
        place, base = self.find(source), base_of(source)
        if place is None:
            if isinstance(base, nn.Parameter) and not base.requires_grad:
                self._copies[output] = output._version, None
            return False
        if not output.requires_grad or output.shape != source.shape:
            return False
        if name in BOUNDS and (output.dtype != source.dtype or not torch.equal(output, source)):  # waits for the device
            return False
        self._copies[output] = output._version, place
        return True

    def _picked(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> bool:
        """``stack[indices]`` with a vector of indices is a copy that knows nothing of the stack."""
        given = dict(
            zip(("input", "dim", "index") if name == "index_select" else ("input", "index"), args, strict=False)
        )
        given |= kwargs
        place, index = self.find(given.get("input")), given.get("index")
        if place is None or output._base is not None or place.chosen is not None or given.get("dim", 0) != 0:
            return False
        if isinstance(index, list) and all(type(i) is int for i in index):
            index = torch.tensor(index)
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype is torch.uint8:  # that would be a mask
            return False
        index = index.nonzero().flatten() if index.dtype is torch.bool else index
        param, count = self._params[id(place.param)]
        size, step = param.numel() // count, place.stride[0]
        if (place.shape[0] > 1 and step % size) or output.shape != (len(index), *place.shape[1:]):
            return False
        entries = place.offset // size + index.remainder(place.shape[0]) * (step // size)
        stride = (size, *place.stride[1:])
        self._copies[output] = output._version, Place(param, output.shape, stride, place.offset % size, entries)
        return True

    def is_weight(self, x: Tensor) -> bool:
        """Whether rows are a parameter's, as in a low-rank update or a penalty, and no batch's. Those repeated
        for each example are a batch's."""
        base = base_of(x)
        if base in self._copies or isinstance(leaf_of(x, VIEWS), nn.Parameter):
            return True
        return isinstance(base, nn.Parameter) and not base.requires_grad and 0 not in x.stride()


def base_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def leaf_of(tensor: Tensor, passes: Collection[str]) -> Tensor | None:
    """Whose gradient is that of a tensor, handed on by such nodes alone."""
    node: Any = tensor.grad_fn
    if node is None:
        return tensor if tensor.requires_grad else None
    while (name := type(node).__name__)[:-1] in passes and name[-1].isdigit():  # a custom Function's has no digit
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def lies_as(copy: Tensor, place: Place) -> bool:
    """Whether a copy lies in its own memory as what it is a copy of does in the parameter's."""
    return all(n == 1 or a == b for n, a, b in zip(copy.shape, copy.stride(), place.stride, strict=True))
