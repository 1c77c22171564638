"""Find which rows are padding, from the attention masks of a forward pass.

A row that a mask leaves out is padding only if the row's gradient is also zero
(docs/explanation/capture.md).

Shape suffixes: N examples, T positions.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
ReadMask = Callable[[tuple, Mapping[str, Any]], Tensor | Iterable[Tensor] | None]
"""A function that gets the arguments and keyword arguments of the model's forward, and returns the
forward's attention masks [N, T]: a tensor, several tensors, or None."""

NAME = "attention_mask"


class ArgumentMasks:
    """Reads the attention masks among the arguments of a model's forward.

    A mask is a 2-D tensor whose name ends in :data:`NAME`. It is an argument itself, or an entry of
    a mapping that is an argument.
    """

    def __init__(self, model: nn.Module) -> None:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [parameter.name for parameter in parameters if parameter.kind in positional]

    def __call__(self, arguments: tuple, keywords: Mapping[str, Any]) -> list[Tensor]:
        named = [*zip(self._names, arguments, strict=False), *keywords.items()]
        mappings = [
            value for value in (*arguments, *keywords.values()) if isinstance(value, Mapping)
        ]
        for mapping in mappings:
            named += mapping.items()
        masks = (value for name, value in named if str(name).endswith(NAME))
        return [mask for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]


def masks_in(read: Tensor | Iterable[Tensor] | None) -> Iterator[Tensor]:
    """Yield the masks that a :data:`ReadMask` returned, as bool [N, T], False for padding.

    A mask with entries other than 0 and 1, such as an additive mask, does not leave out any row.
    This check runs on the device, so that the host does not wait.

    Args:
        read: what the :data:`ReadMask` returned.

    Raises:
        ValueError: it returned something other than masks or None.
    """
    masks = [read] if isinstance(read, Tensor) else list(read or ())
    for mask in masks:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"engine.kfac.mask: got {got}; must return a mask [N, T], a list of masks, or None"
            )
        mask = mask.detach()
        if mask.dtype is torch.bool:
            # a copy, because the user may reuse the memory before the gradient arrives
            yield mask.clone()
        else:
            binary = ((mask == 0) | (mask == 1)).all()
            yield (mask != 0) | ~binary


class Forward:
    """One forward pass of the model.

    Args:
        masks: the attention masks, bool [N, T].
        detached: whether the inputs have no autograd graph. If they have a graph, a backward pass
            through this forward may belong to another model's loss.
        step: the step in which the forward ran.
        saved: names of the layers whose inputs the forward saves.

    Attributes:
        calls: layer name -> list with a pair (leading dimensions of the rows, number of rows) for
            each call of the layer. The dimensions are None for images, which no mask can fit.
        is_watched: whether a hook reports when a backward pass reaches the output.
        begins: sequence number of the first autograd node that this forward could make. Autograd
            numbers nodes in order of their creation.
    """

    def __init__(
        self,
        masks: Iterable[Tensor] = (),
        *,
        detached: bool = True,
        step: int = -1,
        saved: frozenset[str] = frozenset(),
    ) -> None:
        self.masks = list(masks)
        self.detached = detached
        self.step = step
        self.saved = saved
        self.is_watched = False
        self.begins: int = torch._C._autograd._get_sequence_nr()
        self.calls: dict[str, list[tuple[Shape | None, int]]] = {}
        self._sides: set[Shape] = set()  # each call's first two leading dimensions

    def note(self, layer: str, leading: Shape | None, rows: int) -> None:
        """Record that a layer was called.

        Args:
            layer: name of the layer.
            leading: leading dimensions of its rows; None for images.
            rows: number of rows.
        """
        self.calls.setdefault(layer, []).append((leading, rows))
        if leading is not None:
            self._sides.add(leading[:2])

    def mask(self, leading: Shape | None) -> Tensor | None:
        """Return a bool tensor of the shape ``leading``, False for rows of a call that the masks
        leave out; None if no mask fits.

        A mask fits rows of shape [N, T, ..] or [T, N, ..]. It also fits rows of shape [N * T],
        unless another call of the forward has rows [N, T, ..] or [T, N, ..]. If several masks fit,
        a row is left out only if each of them leaves it out.
        """
        union: Tensor | None = None
        if leading is None:
            return None
        for mask in self.masks:
            fitted = _fitted(mask, leading, self._has(mask))
            if fitted is not None:
                union = fitted if union is None else union | fitted
        return union

    def _has(self, mask: Tensor) -> bool:
        """Return whether a call of the forward has rows [N, T, ..] or [T, N, ..]."""
        examples, positions = mask.shape
        return (examples, positions) in self._sides or (positions, examples) in self._sides

    def rows(self, layer: str, weight_sharing: str) -> int | Tensor:
        """Return how many rows a layer's calls had, not counting rows that a mask leaves out.

        With ``weight_sharing`` "reduce", return the number of examples with at least one row that
        no mask leaves out.
        """
        total: int | Tensor = 0
        for leading, rows in self.calls.get(layer, ()):
            mask = self.mask(leading)
            if mask is None:
                total += rows
            elif weight_sharing == "reduce":
                has_row = mask.flatten(1).any(dim=1) if mask.ndim > 1 else mask
                total += has_row.sum()
            else:
                total += mask.sum()
        return total


def _fitted(mask: Tensor, leading: Shape, is_2d: bool) -> Tensor | None:
    """Return a mask [N, T] as bool of the shape ``leading``; None if it does not fit.

    Args:
        is_2d: whether other calls have rows [N, T, ..] or [T, N, ..]. Rows [N * T] then have
            another meaning, and the mask does not fit them.
    """
    examples, positions = mask.shape
    if leading[:2] == (examples, positions):
        fitted = mask
    elif leading[:2] == (positions, examples):
        fitted = mask.T
    elif leading == (examples * positions,) and not is_2d:
        return mask.reshape(-1)
    else:
        return None
    return fitted.reshape(*leading[:2], *[1] * (len(leading) - 2)).expand(leading)
