"""Find out which elements of a parameter a tensor holds.

The tensor may be a view of the parameter, a copy of it, or matrices that were picked out of a
stack. It has a place in the parameter only if autograd's graph shows that the gradient of its
elements is the gradient of the parameter's elements. A tensor that was scaled, masked, changed in
place or detached has no place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
"""Names, without the final digit, of autograd nodes that pass on each element's gradient unchanged.
A "Clamp" node does so only if it has clamped no element. :meth:`Places.follow` checks this."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor's elements are in a parameter.

    Attributes:
        param: the parameter.
        shape, stride, offset: shape, strides and storage offset of a view of the parameter that has
            the same elements.
        chosen: int64, the indices of the matrices that were picked out of a stack; None if no
            matrices were picked. If some were picked, ``shape`` and ``stride`` describe the copy,
            in which the picked matrices follow each other.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    chosen: Tensor | None = None

    @classmethod
    def of_parameter(cls, param: nn.Parameter) -> "Place":
        """Return the place of the parameter itself."""
        return cls(param, param.shape, param.stride())

    @property
    def is_all(self) -> bool:
        """Whether the tensor holds all elements of the parameter, in the parameter's order."""
        is_first = self.offset == 0 and self.chosen is None
        return is_first and self.shape == self.param.shape and self.stride == self.param.stride()


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy of a tensor that has a place.

    Attributes:
        version: value of the copy's autograd version counter when the copy was made.
        place: the place that the copy was made from; None if it was made from a frozen parameter.
    """

    version: int
    place: Place | None


class Places:
    """Finds the places of tensors in some parameters.

    Call :meth:`follow` after each torch function, so that copies are recognised.

    Args:
        params: parameter -> number of matrices of equal shape that it holds; 1 if it is not a
            stack.
    """

    def __init__(self, params: Mapping[nn.Parameter, int]) -> None:
        self._counts = dict(params)
        # copy -> _Copy
        self._copies = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all copies."""
        self._copies.clear()

    def count(self, param: nn.Parameter) -> int:
        """Return the number of matrices in a parameter."""
        return self._counts[param]

    def follow(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> bool:
        """Remember the result of a torch function, if it is a copy.

        Returns whether ``output`` is a copy of a tensor that has a place, or was picked out of such
        a tensor.

        Args:
            name: name of the function.
            args, kwargs: arguments of the function.
            output: result of the function.
        """
        if not isinstance(output, Tensor):
            return False
        if name in COPIES:
            return self._copied(name, args, kwargs, output)
        return name in ("__getitem__", "index_select") and self._picked(name, args, kwargs, output)

    def find(self, tensor: Any) -> Place | None:
        """Return the place of a tensor. None if its elements are not elements of a parameter, or if
        their gradients are not the gradients of the parameter's elements."""
        if not isinstance(tensor, Tensor):
            return None
        base = base_of(tensor)
        place: Place | None
        if isinstance(base, nn.Parameter) and base in self._counts:
            place = Place.of_parameter(base)
            version = base._version
        else:
            copy = self._copies.get(base, _Copy(0, None))
            place = copy.place
            version = copy.version
        if place is None or version != base._version or leaf_of(tensor, PASSES) is not place.param:
            return None
        if tensor is base:
            return place
        if tensor.dtype != base.dtype or not lies_as(base, place):
            return None
        offset = place.offset + int(tensor.storage_offset() - base.storage_offset())
        return replace(place, shape=tensor.shape, stride=tensor.stride(), offset=offset)

    def _copied(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> bool:
        """Remember a copy of a whole tensor. Returns whether the tensor has a place."""
        source = args[0] if args else kwargs.get("input")
        if source is output or not isinstance(source, Tensor):
            return False
        place = self.find(source)
        if place is None:
            base = base_of(source)
            if isinstance(base, nn.Parameter) and not base.requires_grad:
                self._copies[output] = _Copy(output._version, None)
            return False
        if not output.requires_grad or output.shape != source.shape:
            return False
        # torch.equal waits for the device
        if name in BOUNDS and (output.dtype != source.dtype or not torch.equal(output, source)):
            return False
        self._copies[output] = _Copy(output._version, place)
        return True

    def _picked(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> bool:
        """Remember ``stack[indices]`` with a vector of indices. The result is a copy that does not
        refer to the stack. Returns whether the stack has a place."""
        names = ("input", "dim", "index") if name == "index_select" else ("input", "index")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        place = self.find(arguments.get("input"))
        if place is None or place.chosen is not None:
            return False
        if output._base is not None or arguments.get("dim", 0) != 0:
            return False
        index = _vector(arguments.get("index"), place.param.device)
        if index is None:
            return False
        matrices = place.shape[0]
        numel = place.param.numel() // self.count(place.param)  # elements of a matrix
        apart = place.stride[0]  # distance in elements from one entry of the stack to the next
        if (matrices > 1 and apart % numel) or output.shape != (len(index), *place.shape[1:]):
            return False
        chosen = place.offset // numel + index.remainder(place.shape[0]) * (apart // numel)
        picked = Place(
            place.param,
            shape=output.shape,
            stride=(numel, *place.stride[1:]),
            offset=place.offset % numel,
            chosen=chosen,
        )
        self._copies[output] = _Copy(output._version, picked)
        return True

    def is_weight(self, x: Tensor) -> bool:
        """Return whether rows x are elements of a parameter, as in a low-rank update or a penalty.

        A parameter that is expanded over the examples counts as rows of a batch.
        """
        base = base_of(x)
        if base in self._copies or isinstance(leaf_of(x, VIEWS), nn.Parameter):
            return True
        return isinstance(base, nn.Parameter) and not base.requires_grad and 0 not in x.stride()


def _vector(index: Any, device: torch.device) -> Tensor | None:
    """Return an index as a vector of numbers; None if it is not a vector."""
    if isinstance(index, list) and all(type(i) is int for i in index):
        index = torch.tensor(index, device=device)
    # torch treats an index of dtype uint8 as a mask
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype is torch.uint8:
        return None
    return index.nonzero().flatten() if index.dtype is torch.bool else index


def base_of(tensor: Tensor) -> Tensor:
    """Return the base of a view. A tensor that is not a view is its own base."""
    return tensor if tensor._base is None else tensor._base


def leaf_of(tensor: Tensor, passes: Collection[str]) -> Tensor | None:
    """Return the leaf from which a tensor was computed, if all autograd nodes between the leaf and
    the tensor are in ``passes``; otherwise None.

    Each element of the tensor then has the same gradient as the leaf's element that it came from.

    Args:
        passes: names of autograd nodes, without the digit at their end.
    """
    node: Any = tensor.grad_fn
    if node is None:
        return tensor if tensor.requires_grad else None
    while _passes(node, passes):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _passes(node: Any, passes: Collection[str]) -> bool:
    name = type(node).__name__
    # names of torch's own nodes end in a digit, names of a custom autograd.Function's nodes do not
    return name[:-1] in passes and name[-1].isdigit()


def lies_as(copy: Tensor, place: Place) -> bool:
    """Return whether a copy has the strides of the place that it was copied from."""
    return same_strides(copy.shape, copy.stride(), place.stride)


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two tuples of strides describe the same layout of a tensor of this shape. The
    stride of a dimension of size 1 does not matter."""
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))
