"""Which rows of the batch a call has if it gets a slice: a tile of sequences, some examples, or a chunk of all rows.

- An input that is a view into a tensor of the whole batch shows its rows by its place in memory.
- A call with as many rows that follows such a call, such as the next layer's, has the same rows. This is not so for one
  position of several examples, which may be pooled rows.

A call of which neither is known has no mask. If a module's calls of that kind have as many rows as the batch, it is
said. A mask that is not for its rows is found by the proof (``proof.py``).

Shape suffixes: N examples, T positions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

UNKNOWN = "its calls get slices of the batch, and it does not show which; every row counts"
UNEVEN = "its calls get slices that cut examples, and weight_sharing reduce needs whole ones; every row counts"


class Piece(NamedTuple):
    """Some rows of [N, T], or of [T, N] if ``transposed``, as a view with size, stride and offset.

    Attributes:
        examples: which dimension of the view is that of the examples.
        long: whether it has several positions of an example.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    transposed: bool = False
    examples: int = 0
    long: bool = True

    def of(self, whole_NT: Tensor) -> Tensor:
        whole = (whole_NT.T if self.transposed else whole_NT).contiguous()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def rows(self, N: int, T: int) -> Tensor:
        """int64, the index of each row in the flattened [N, T]."""
        places = torch.tensor(self.offset, device="cpu")
        for size, step in zip(self.size, self.stride, strict=True):
            places = places.unsqueeze(-1) + step * torch.arange(size, device="cpu")
        places = places.flatten()
        return places % N * T + places // N if self.transposed else places


def in_memory(x: Tensor, N: int, T: int, order: int | None) -> Piece | None:
    """The rows of x [.., D] if it is a view into a tensor of N T rows, else None. ``order``: the dimension of examples
    in that tensor; None: unknown."""
    if x.is_sparse or not x.numel():
        return None
    x = x.unsqueeze(0) if x.ndim == 1 else x
    width, remainder = divmod(x.untyped_storage().nbytes() // x.element_size(), N * T)
    batch, stride = tuple(x.shape[:-1]), x.stride()[:-1]
    used = [(size, step) for size, step in zip(batch, stride, strict=True) if size > 1]
    if remainder or not width or (x.shape[-1] > 1 and x.stride(-1) != 1) or any(s % width for _, s in used):
        return None
    row, column = divmod(int(x.storage_offset()), width)
    used = [(size, step // width) for size, step in used]
    if column + x.shape[-1] > width or row + sum((size - 1) * step for size, step in used) >= N * T:
        return None

    def fits(inner: int) -> bool:
        """Whether the view is a part of a tensor [.., inner]. Only a 1-D view may go on in the next."""
        small = [size for size, step in used if step == 1]
        inside = len(batch) == 1 or all(row % inner + size <= inner for size in small)
        return inside and len(small) < 2 and all(step in (1, inner) for _, step in used)

    direct, transposed = fits(T), fits(N)
    if direct and transposed:
        if order is None and N != T and prod(batch) == N:  # one position of all examples, or consecutive rows
            return None
        direct = order != 1
    if not direct and not transposed:
        return None
    inner = T if direct else N
    steps = tuple(step // width if size > 1 else 0 for size, step in zip(batch, stride, strict=True))
    across = next((dim for dim, step in enumerate(steps) if step == inner != 1), None)
    along = next((dim for dim, step in enumerate(steps) if step == 1), None)
    examples, positions = (across, along) if direct else (along, across)
    long = positions is not None
    if examples is None and len(batch) > 1 and positions is not None:
        examples = 1 - positions
    return Piece(batch, steps, row, not direct, (examples or 0) if len(batch) > 1 else 0, long)


def has_all(x: Tensor, mask_NT: Tensor) -> bool:
    """Whether memory shows that the rows of x [R, D] are all rows of the batch, in their order."""
    N, T = mask_NT.shape
    return len(x) == N * T and in_memory(x, N, T, 0) is not None


@dataclass
class Fit:
    """A mask as it fits the rows of a call.

    Attributes:
        mask: bool, [N, T] or [T, N] in the order of the rows; None: every row counts.
        examples: dimension of the examples; 1 where sequences come first.
        doubt: what is ambiguous, in words; "" if nothing is.
        piece: which rows of the batch the call has; None: all of them.
    """

    mask: Tensor | None = None
    examples: int = 0
    doubt: str = ""
    piece: Piece | None = None


EVERY_ROW = Fit()
SQUARE = "there are as many examples as positions; taken as examples first"


def fit(mask: Tensor | None, batch: tuple[int, ...], examples: int | None = None) -> Fit:
    """A mask, bool [N, T], as it fits rows of leading shape ``batch``. One that is not 2-D must be in the rows' order.
    ``examples``: dimension of the examples in this model's rows, if other calls have shown it."""
    if mask is None:
        return Fit()
    if mask.ndim != 2:
        same = mask.numel() == prod(batch) and (len(batch) == 1 or batch[0] == len(mask))
        return Fit(mask.reshape(batch) if same else None)
    N, T = mask.shape
    direct = (batch[:1], prod(batch[1:])) == ((N,), T)
    transposed = batch[:2] == (T, N) and prod(batch[2:]) == 1
    trivial = N <= 1 or T <= 1  # then both orders are the same
    if direct and transposed and not trivial:
        doubt = SQUARE if examples is None else ""
        return Fit(mask.T, 1, doubt) if examples == 1 else Fit(mask, 0, doubt)
    if direct:
        return Fit(mask)
    if len(batch) == 3 and (batch[0] * batch[1], batch[2]) == (N, T):  # of choices, see ArgumentReader
        return Fit(mask.reshape(batch))
    if transposed:
        return Fit(mask.T, 1)
    if len(batch) == 1 and batch[0] == N * T:
        if examples == 1 and not trivial:
            return Fit(mask.T, 1, "flattened rows, in a model that has sequences first elsewhere; taken so here too")
        return Fit(mask)
    if prod(batch) == N * T and not trivial:
        return Fit(doubt="only the number of rows fits the mask; every row counts")
    return Fit()


def counted(mask: Tensor, weight_sharing: str, examples: int = 0) -> Tensor:
    """How many entries of a mask are set, with "reduce" how many examples have one; fp32 scalar. ``examples``: their
    dimension."""
    mask = mask.flatten(1) if mask.ndim > 2 else mask
    return (mask.any(dim=1 - examples) if weight_sharing == "reduce" and mask.ndim > 1 else mask).sum().float()


def part(mask_NT: Tensor, piece: Piece) -> Fit:
    """The mask of a piece, as [n, T] if its rows are flattened whole examples."""
    mask, T = piece.of(mask_NT), mask_NT.shape[1]
    if mask.ndim == 1 and whole_examples(piece, T):
        mask = mask.reshape(-1, T)
    return Fit(mask, piece.examples, piece=piece)


def whole_examples(piece: Piece, T: int) -> bool:
    """Whether a piece has every position of its examples."""
    if len(piece.size) > 1:
        return piece.size[1 - piece.examples] == T
    return not piece.transposed and piece.stride[0] in (0, 1) and piece.size[0] % T == piece.offset % T == 0


class Slices:
    """Gives calls their part of the mask. ``warn``: called with (module, leading shape, masks, what is ambiguous)."""

    def __init__(self, warn: Callable[[str, Sequence[int], Sequence[Tensor], str], None]) -> None:
        self._warn = warn
        self._last: Piece | None = None  # the last one that memory has shown
        self._since: set[str] = set()  # modules called with it
        self._unknown: Counter[str] = Counter()  # module -> rows of its calls that have no mask

    def begin(self) -> None:
        """A forward begins."""
        self._unknown.clear()
        self.whole()

    def whole(self) -> None:
        """A call had every row, or the forward is over: no call follows the last one."""
        self._last = None

    def fit_call(self, module: str, x: Tensor, mask: Tensor, order: int | None, *, reduced: bool = False) -> Fit:
        """The part of the mask, bool [N, T], for a call with fewer rows, x [.., D].

        Args:
            order: dimension of the batch's examples; None: unknown.
            reduced: whether weight_sharing is "reduce".
        """
        (N, T), batch = mask.shape, tuple(x.shape[:-1]) or (1,)
        if not 0 < prod(batch) < N * T or len(batch) > 2:
            return Fit()
        piece, last = in_memory(x, N, T, order), self._last
        if piece is not None:
            if piece != last or module in self._since:
                self._last, self._since = piece, set()
        elif last is not None and last.long and last.size == batch and module not in self._since:
            piece = last
        if piece is not None:
            self._since.add(module)
        if piece is None or (reduced and not whole_examples(piece, T)):
            self._unknown[module] += prod(batch)
            if self._unknown[module] == N * T:
                self._warn(module, batch, [mask], UNKNOWN if piece is None else UNEVEN)
            return Fit()
        return part(mask, piece)
