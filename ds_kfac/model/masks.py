"""Which rows are padding. An attention mask says it, and the gradient confirms it
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
"""(arguments, keywords) of the model's forward -> its attention masks [N, T]: one, several or
None."""

NAME = "attention_mask"


class ArgumentMasks:
    """Reads the attention masks among the arguments of a model's forward: 2-D tensors of an
    argument, or of an entry of a mapping that is one, whose name ends in :data:`NAME`."""

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
    """The masks that a :data:`ReadMask` returned, as bool [N, T]: True where a row is no padding.

    A mask with other entries than 0 and 1, such as an additive one, leaves no row out. The device
    decides that, so that the host does not wait.

    Raises:
        ValueError: it returned something else.
    """
    masks = [read] if isinstance(read, Tensor) else list(read or ())
    for mask in masks:
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"engine.kfac.mask: got {got}; must return masks [N, T], or None")
        mask = mask.detach()
        if mask.dtype is torch.bool:
            yield mask.clone()  # its memory may hold the next batch's when the gradient arrives
        else:
            binary = ((mask == 0) | (mask == 1)).all()
            yield (mask != 0) | ~binary


class Forward:
    """One forward pass of the model.

    Args:
        masks: its attention masks, bool [N, T].
        detached: whether its inputs have no graph, so that its loss is not another model's.
        step: the step in which it ran.
        saved: names of the layers whose inputs it saves.

    Attributes:
        calls: layer -> (leading dimensions of its rows, number of rows) of each of its calls.
            Images have no leading dimensions that a mask could fit: None.
        is_watched: whether a backward pass shows when it comes to the output.
        begins: autograd numbers nodes in the order in which they are made; the first number of this
            forward.
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
        self._sides: set[Shape] = set()  # first two leading dimensions of its calls

    def note(self, layer: str, leading: Shape | None, rows: int) -> None:
        """A layer was called."""
        self.calls.setdefault(layer, []).append((leading, rows))
        if leading is not None:
            self._sides.add(leading[:2])

    def mask(self, leading: Shape | None) -> Tensor | None:
        """Which rows of a call the masks do not leave out, bool of the shape ``leading``; None: no
        mask fits.

        A mask fits rows of shape [N, T, ..] or [T, N, ..], and [N T] if no call of the forward has
        rows of the first two. If several fit, a row is left out only if each of them leaves it out.
        """
        fitting = (
            []
            if leading is None
            else [_fitted(mask, leading, self._has(mask)) for mask in self.masks]
        )
        found = [mask for mask in fitting if mask is not None]
        if not found:
            return None
        union = found[0]
        for mask in found[1:]:
            union = union | mask
        return union

    def _has(self, mask: Tensor) -> bool:
        """Whether a call of the forward has rows [N, T, ..] or [T, N, ..]."""
        examples, positions = mask.shape
        return (examples, positions) in self._sides or (positions, examples) in self._sides

    def rows(self, layer: str, weight_sharing: str) -> int | Tensor:
        """Number of rows that a layer's calls had, without those that a mask leaves out; with
        ``weight_sharing`` "reduce" of examples that have such a row."""
        total: int | Tensor = 0
        for leading, rows in self.calls.get(layer, ()):
            mask = self.mask(leading)
            if mask is None:
                total += rows
            elif weight_sharing == "reduce":
                total += (mask.flatten(1).any(dim=1) if mask.ndim > 1 else mask).sum()
            else:
                total += mask.sum()
        return total


def _fitted(mask: Tensor, leading: Shape, is_2d: bool) -> Tensor | None:
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
