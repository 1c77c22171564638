"""Which elements of a parameter a tensor holds: for views, for copies, and for matrices picked out
of a stack.

A tensor has a place in a parameter only if, by autograd's graph, the gradient of its elements is
the gradient of the parameter's elements. A tensor that is scaled, masked, changed in place or
detached has none.
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
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Unsqueeze",
        "Squeeze",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Alias",
        "ToCopy",
        "Clone",
        "Clamp",
    )
}
PASSES = VIEWS | {"ExpandBackward", "IndexBackward", "IndexSelectBackward"}
"""Nodes of autograd that pass on each element's gradient unchanged. "Clamp" does so only if no
element was bounded, which :meth:`Places.follow` checks."""


class Place(NamedTuple):
    """Where a tensor's elements are in a parameter.

    Attributes:
        shape, stride, offset: of a view of the parameter with the same elements.
        chosen: int64, matrices that were picked out of a stack, or None; ``stride`` has them one
            after the other.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    chosen: Tensor | None = None


class Places:
    """The places of tensors in ``params``: parameter -> number of equal matrices that it is a stack
    of. :meth:`follow` must be called after each torch function, so that copies are known."""

    def __init__(self, params: Mapping[nn.Parameter, int]) -> None:
        self._params = {id(param): (param, count) for param, count in params.items()}
        # copy -> (its version, its place; None: copied from a frozen one)
        self._copies = WeakTensorKeyDictionary()

    def clear(self) -> None:
        self._copies.clear()

    def count(self, param: nn.Parameter) -> int:
        """Number of matrices in a parameter."""
        return self._params[id(param)][1]

    def follow(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> bool:
        """Note a call of the torch function ``name``. Returns whether ``output`` is a copy of a
        tensor with a place, or was picked out of one."""
        if not isinstance(output, Tensor):
            return False
        if name in COPIES:
            return self._copied(name, args, kwargs, output)
        return name in ("__getitem__", "index_select") and self._picked(name, args, kwargs, output)

    def find(self, tensor: Any) -> Place | None:
        """The place of a tensor; None: its elements, or their gradients, are not a parameter's."""
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
        # waits for the device
        if name in BOUNDS and (output.dtype != source.dtype or not torch.equal(output, source)):
            return False
        self._copies[output] = output._version, place
        return True

    def _picked(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> bool:
        """Note ``stack[indices]`` with a vector of indices: a copy, in which nothing points to the
        stack."""
        names = ("input", "dim", "index") if name == "index_select" else ("input", "index")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        place, index = self.find(arguments.get("input")), arguments.get("index")
        if (
            place is None
            or output._base is not None
            or place.chosen is not None
            or arguments.get("dim", 0) != 0
        ):
            return False
        if isinstance(index, list) and all(type(i) is int for i in index):
            index = torch.tensor(index, device=place.param.device)
        # uint8 is a mask
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype is torch.uint8:
            return False
        index = index.nonzero().flatten() if index.dtype is torch.bool else index
        param, count = self._params[id(place.param)]
        size, step = param.numel() // count, place.stride[0]
        if (place.shape[0] > 1 and step % size) or output.shape != (len(index), *place.shape[1:]):
            return False
        entries = place.offset // size + index.remainder(place.shape[0]) * (step // size)
        stride = (size, *place.stride[1:])
        self._copies[output] = (
            output._version,
            Place(param, output.shape, stride, place.offset % size, entries),
        )
        return True

    def is_weight(self, x: Tensor) -> bool:
        """Whether rows x are a parameter's, as in a low-rank update or a penalty. A parameter that
        is expanded over the examples counts as a batch's rows."""
        base = base_of(x)
        if base in self._copies or isinstance(leaf_of(x, VIEWS), nn.Parameter):
            return True
        return isinstance(base, nn.Parameter) and not base.requires_grad and 0 not in x.stride()


def base_of(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def leaf_of(tensor: Tensor, passes: Collection[str]) -> Tensor | None:
    """The leaf from which ``passes`` nodes alone lead to a tensor, so that their gradients are
    equal; or None."""
    node: Any = tensor.grad_fn
    if node is None:
        return tensor if tensor.requires_grad else None
    # a custom Function's has no digit
    while (name := type(node).__name__)[:-1] in passes and name[-1].isdigit():
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def lies_as(copy: Tensor, place: Place) -> bool:
    """Whether a copy has the strides of its original's place in the parameter."""
    return all(
        n == 1 or a == b for n, a, b in zip(copy.shape, copy.stride(), place.stride, strict=True)
    )
