"""Which rows of the batch a call has if it gets a slice: a tile of sequences, some examples, or a chunk of all rows.

- An input that is a view into a tensor of the whole batch shows its rows by its place in memory.
- A call with as many rows that follows such a call, such as the next layer's, is guessed to have the same rows.
- Other calls of a module are guessed to come in the order of the rows.

A guess is right if the module's calls got every row of the batch exactly once. That is known when the forward ends;
inputs that the graph keeps are summed then, before gradients come. Under checkpointing the graph keeps no inputs, and
gradients come call by call during recomputations. There a guess is used at once if the call follows one that memory
shows, or if the module's calls got every row once in an earlier round. If such a guess fails, a warning says so.

Shape suffixes: N examples, T positions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEARNED = (
    "its calls get slices of the batch; from the next update on each has its part of the mask, in this one every row "
    "counts"
)
INCOMPLETE = "its calls get slices that do not make up the batch; every row counts"
WRONG = (
    "its calls got slices of the batch, and now they do not make it up; in this update they may have a part of the "
    "mask that is not theirs, from the next one on every row counts"
)
EITHER = "its calls get slices of the batch, of examples or of positions; every row counts"
UNEVEN = "its calls get slices that cut examples, and weight_sharing reduce needs whole ones; every row counts"


class Piece(NamedTuple):
    """Some rows of [N, T], or of [T, N] if ``transposed``, as a view with size, stride and offset. ``examples``: which
    dimension of the view is that of the examples."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    transposed: bool = False
    examples: int = 0

    def of(self, whole_NT: Tensor) -> Tensor:
        whole = (whole_NT.T if self.transposed else whole_NT).contiguous()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def rows(self, N: int, T: int) -> Tensor:
        """int64, the index of each row in the flattened [N, T]."""
        places = torch.tensor(self.offset)
        for size, step in zip(self.size, self.stride, strict=True):
            places = places.unsqueeze(-1) + step * torch.arange(size)
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
    examples = across if direct else along
    if examples is None and len(batch) > 1 and (other := along if direct else across) is not None:
        examples = 1 - other
    return Piece(batch, steps, row, not direct, (examples or 0) if len(batch) > 1 else 0)


def has_all(x: Tensor, mask_NT: Tensor) -> bool:
    """Whether memory shows that the rows of x [R, D] are all rows of the batch, in their order."""
    N, T = mask_NT.shape
    return len(x) == N * T and in_memory(x, N, T, 0) is not None


def in_order(batch: tuple[int, ...], N: int, T: int, order: int | None, done: int) -> Piece | None:
    """The rows of a call with leading shape ``batch`` after calls with ``done`` rows; None: that is ambiguous."""
    if len(batch) == 1:
        pooled = batch[0] == N and not done and min(N, T) > 1 and (order != 1 or N == T)  # maybe a row per example
        return None if pooled else Piece(batch, (1,), done, order == 1)
    pieces = []
    for first in (0, 1) if order is None else (order,):
        outer, inner = (T, N) if first else (N, T)
        if batch[0] == outer and batch[1] < inner:
            pieces.append(Piece(batch, (inner, 1), done // outer, first == 1, first))
        elif batch[1] == inner and batch[0] < outer:
            pieces.append(Piece(batch, (inner, 1), done, first == 1, first))
    return pieces[0] if len(pieces) == 1 else None


@dataclass
class Fit:
    """A mask as it fits the rows of a call.

    Attributes:
        mask: bool, [N, T] or [T, N] in the order of the rows; None: every row counts.
        examples: dimension of the examples; 1 where sequences come first.
        doubt: what is ambiguous, in words; "" if nothing is.
        piece: which rows of the batch the call has; None: all of them.
        late: whether ``mask`` is set only when the forward ends; A is then summed when the gradient comes.
    """

    mask: Tensor | None = None
    examples: int = 0
    doubt: str = ""
    piece: Piece | None = None
    late: bool = False


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


UNSEEN = object()


@dataclass
class _Calls:
    """A round: the calls of a module until they have had every row of the batch.

    Attributes:
        place: sequence number of the graph node whose backward recomputes the calls that come in order.
        batch, order: leading shape of the last call's rows, and their dimension of examples.
        waiting: (fit, its piece) of calls whose mask is set when the round ends.
        covered, done: bool [N T] on the host, rows that the calls had; their number, each once.
        guessed, unknown: numbers of calls with guessed rows, and of rows for which there is no guess.
        believed: whether a guess was used at once.
        repeated: whether a row came twice, or was outside of the batch.
        cut: whether an example that must be whole was cut.
    """

    mask: Tensor
    covered: Tensor
    place: Any = UNSEEN
    batch: tuple[int, ...] = ()
    order: int | None = None
    waiting: list[tuple[Fit, Piece]] = field(default_factory=list)
    done: int = 0
    guessed: int = 0
    unknown: int = 0
    believed: bool = False
    repeated: bool = False
    cut: bool = False


def graph_keeps_inputs() -> tuple[bool, bool]:
    """(whether the graph keeps inputs: not under checkpointing; whether a non-reentrant recomputation runs now)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # an older torch
        return False, False
    hooks = top(False)
    return hooks is None, hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")


class Slices:
    """Gives calls their part of the mask. ``warn``: called with (module, leading shape, masks, what is ambiguous)."""

    def __init__(self, warn: Callable[[str, Sequence[int], Sequence[Tensor], str], None]) -> None:
        self._warn = warn
        self._open: dict[tuple[str, bool], _Calls] = {}  # (module, whether it is recomputed) -> its round
        self._last: Piece | None = None  # the last one that memory has shown
        self._since: set[str] = set()  # modules called with it
        self._whole: set[str] = set()  # modules whose calls had every row once in a round
        self._orders: dict[str, int | None] = {}  # module in _whole -> the dimension of the batch's examples
        self._failed: Counter[str] = Counter()  # module -> wrong guesses in this forward and its recomputations

    def begin(self) -> None:
        """A forward begins. Calls of the last one may still be open: it may have raised."""
        for key in [key for key in self._open if key[1]]:
            self._settle(key)
        self._open.clear()
        self._failed.clear()
        self._last = None

    def end(self) -> None:
        """The forward is over: rounds that have not had every row by now have failed."""
        for key in [key for key in self._open if not key[1]]:
            self._settle(key)
        self._last = None

    def whole(self) -> None:
        """A call had every row."""
        self._last = None

    def fit_call(
        self, module: str, x: Tensor, mask: Tensor, order: int | None, *,
        again: bool = False, reduced: bool = False, attention: bool = False,
    ) -> Fit:  # fmt: skip
        """The part of the mask, bool [N, T], for a call with fewer rows, x [.., D].

        Args:
            order: dimension of the batch's examples; None: unknown.
            again: whether the call is a recomputation; within the backward of one graph node these keep their order.
            reduced: whether weight_sharing is "reduce".
            attention: whether the module is torch's attention, which transposes rows to [T, N] before it flattens them.
        """
        (N, T), batch = mask.shape, tuple(x.shape[:-1]) or (1,)
        if not 0 < prod(batch) < N * T or len(batch) > 2:
            return Fit()
        keeps_inputs, recomputes = graph_keeps_inputs()
        if again and recomputes:
            return Fit()  # a non-reentrant recomputation may stop before its last call; its rows do not count anyway
        node = torch._C._current_autograd_node() if again else None
        place = node._sequence_nr() if node is not None else None  # the node itself would keep its graph
        order, key = self._orders.get(module) if order is None else order, (module, again)
        piece = in_memory(x, N, T, order)
        proven = piece is not None
        follows = not proven and self._last is not None and self._last.size == batch and module not in self._since
        if not proven and not follows and key in self._open and self._open[key].place not in (UNSEEN, place):
            self._settle(key)
        calls = self._open.setdefault(key, _Calls(mask, torch.zeros(N * T, dtype=torch.bool)))
        calls.batch, calls.order = batch, order
        if piece is not None:
            if piece != self._last or module in self._since:
                self._last, self._since = piece, set()
            self._since.add(module)
        elif follows:
            piece = self._last
            self._since.add(module)
        else:
            calls.place = place
            transposed = attention and len(batch) == 1
            piece = None if transposed else in_order(batch, N, T, 1 if attention else order, calls.done)
        if piece is None:
            calls.unknown += prod(batch)
            return Fit()
        last = piece.offset + sum((size - 1) * step for size, step in zip(batch, piece.stride, strict=True))
        calls.guessed += not proven
        calls.repeated |= last >= N * T or bool(calls.covered[rows := piece.rows(N, T)].any())
        if not calls.repeated:
            calls.covered[rows], calls.done = True, calls.done + len(rows)
        if reduced and not whole_examples(piece, T):
            calls.cut, fit = True, Fit()
        elif proven:
            fit = part(mask, piece)
        elif not again and keeps_inputs:
            calls.waiting.append((fit := Fit(late=True), piece))
        elif not calls.repeated and (follows or module in self._whole):
            fit, calls.believed = part(mask, piece), True
        else:
            fit = Fit()
        if calls.done == N * T:
            self._settle(key)
        return fit

    def _settle(self, key: tuple[str, bool]) -> None:
        """End a round: set waiting masks if the guesses were right, else warn."""
        calls, module = self._open.pop(key), key[0]
        whole = calls.done == calls.mask.numel() and not calls.repeated
        if calls.cut:
            if whole:
                self._warn(module, calls.batch, [calls.mask], UNEVEN)
            return
        if not calls.guessed and not calls.unknown:
            return
        if calls.guessed and whole:
            for fit, piece in calls.waiting:
                made = part(calls.mask, piece)
                fit.mask, fit.examples, fit.piece = made.mask, made.examples, piece
            if not calls.waiting and not calls.believed:
                self._warn(module, calls.batch, [calls.mask], LEARNED)
            self._whole.add(module)
            self._orders[module] = calls.order
            return
        self._whole.discard(module)
        self._failed[module] += calls.guessed
        if calls.believed:
            self._warn(module, calls.batch, [calls.mask], WRONG)
        elif self._failed[module] > 1:
            self._warn(module, calls.batch, [calls.mask], INCOMPLETE)
        elif calls.unknown and calls.unknown + calls.done == calls.mask.numel():
            self._warn(module, calls.batch, [calls.mask], EITHER)
