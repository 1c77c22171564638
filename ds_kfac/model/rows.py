"""A layer's tensors -> the rows whose second moment is taken: weight sharing, padding, sub-sampling; and their sums.

How many terms the loss of a forward has, and the gradient that reaches it, is read from what the model returned; which
dimension of a prediction holds the outputs of one term, what made the prediction says in its graph.

Shape suffixes: N examples, T positions that share the weight, D a side's width, R rows, P a packed triangle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.batch import BatchInfo, fit


class BatchSum:
    """A sum over rows, added to in place. It takes memory from the first rows on.

    Args:
        numel: of the packed sum.

    Attributes:
        sum_P: fp32, packed sum of outer products.
        count: fp32 scalar: of A its rows (uses of the layer times loss terms), of G loss terms.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        self._sum_P: Tensor | None = None
        self._count: Tensor | None = None

    @property
    def sum_P(self) -> Tensor:
        if self._sum_P is None:
            self._sum_P = torch.zeros(self.numel, device=self.device)
        return self._sum_P

    @property
    def count(self) -> Tensor:
        if self._count is None:
            self._count = torch.zeros((), device=self.device)
        return self._count

    def take(self, other: "BatchSum") -> None:
        """Add ``other``, which must not be used afterwards: its memory may be this one's then."""
        if self._sum_P is None and self._count is None:
            self._sum_P, self._count = other._sum_P, other._count
        else:
            self.sum_P.add_(other.sum_P)
            self.count.add_(other.count)

    def clear(self) -> None:
        """No rows, and no memory."""
        self._sum_P = self._count = None


@dataclass(frozen=True)
class RowRule:
    """How rows are made.

    Attributes:
        weight_sharing: "expand": every position is a row (a loss per token). "reduce": every example is one, the mean
            of its inputs and the sum of its output gradients (a loss per sequence or image). Eschenhagen et al. 2023
            (arXiv:2311.00636).
        positions: whether convolutions take a sub-sample of positions, see ``convolutions.py``.
    """

    weight_sharing: str = "expand"
    positions: bool = True


@dataclass(frozen=True)
class Rows:
    """Rows of one call.

    Attributes:
        x: [R, D], zero where a row does not count.
        counts_R1: fp32 [R, 1], 1 where a row counts, else 0. The input of a bias.
        count: how many count, a number or a scalar on the device.
    """

    x: Tensor
    counts_R1: Tensor
    count: Tensor | int


def _positions(x: Tensor, mask: Tensor | None, turned: bool) -> tuple[Tensor, Tensor | None]:
    """[.., D] -> [N, T, D], and the mask [N, T, 1]; without positions T = 1.

    ``turned``: sequences come first, [T, N, ..].
    """
    batch = x.shape[:-1] or (1,)
    if mask is not None and len(batch) == 1:  # a model that flattens [N, T]
        batch = mask.shape
    sides = batch[0], prod(batch[1:])
    x = x.reshape(*sides, x.shape[-1])
    mask = None if mask is None else mask.reshape(*sides, 1)
    if turned:
        return x.transpose(0, 1), None if mask is None else mask.transpose(0, 1)
    return x, mask


def phase(turn: int, stride: int) -> int:
    """A place in 0 .. stride - 1, like a draw from a uniform distribution but the same for the same turn.

    splitmix64's finalizer (Steele et al. 2014): turns that are multiples of anything still visit all places.
    """
    z = (turn + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (z ^ z >> 31) % stride


def input_rows(x: Tensor, mask: Tensor | None, rule: RowRule, *, examples: int = 0) -> Rows:
    """Rows of A.

    Args:
        x: inputs [.., D].
        mask: bool, which of them count: of the leading shape of ``x``, or [N, T] where that is flattened.
        examples: dimension of the examples, 1 where sequences come first.
    """
    turned = examples == 1 and rule.weight_sharing == "reduce"  # each row by itself: the order does not matter
    x, mask = _positions(x.detach(), mask, turned)
    if rule.weight_sharing == "reduce":
        return _mean_rows(x.float(), mask)
    if mask is not None:
        x = x * mask
    flat = x.flatten(0, 1)
    counts = torch.ones(len(flat), 1, device=x.device) if mask is None else mask.reshape(-1, 1).float()
    return Rows(flat, counts, len(flat) if mask is None else counts.sum())


def _mean_rows(x_NTD: Tensor, mask: Tensor | None) -> Rows:
    if mask is None:
        rows, counts = x_NTD.mean(dim=1), torch.ones(len(x_NTD), 1, device=x_NTD.device)
    else:
        positions = mask.sum(dim=1)
        rows, counts = (x_NTD * mask).sum(dim=1) / positions.clamp(min=1), (positions > 0).float()
    return Rows(rows, counts, len(counts) if mask is None else counts.sum())


def gradient_rows(
    gradient: Tensor, mask: Tensor | None, rule: RowRule, *, examples: int = 0
) -> tuple[Tensor, Tensor | int]:
    """Rows of output gradients [R, D], and how many loss terms the call has if nothing else shows it.

    bf16 and fp16 rows are as they were, so that tensor cores multiply them; sums over positions and others are fp32.
    """
    reduced = rule.weight_sharing == "reduce"
    g_NTD, mask = _positions(gradient.detach(), mask, examples == 1 and reduced)
    if g_NTD.dtype not in (torch.bfloat16, torch.float16):
        g_NTD = g_NTD.float()
    if mask is not None:
        g_NTD = g_NTD * mask.to(g_NTD.dtype)  # of 0 and 1, exact in any dtype
    flat = g_NTD.sum(dim=1, dtype=torch.float32) if reduced else g_NTD.flatten(0, 1)
    terms: Tensor | int = len(flat)
    if mask is not None:
        terms = (mask.flatten(1).any(dim=1) if reduced else mask).sum().float()
    return flat, terms


# loss terms


Move = Callable[[int], int | None]
"""Where a dimension of what an operation takes is in its result; None: nowhere."""


def class_dim(prediction: Tensor) -> int:
    """Dimension of a term's outputs: the last of [N, C]; of more dimensions the one that the outputs of the last
    product have become: [N, C, L] and [N, C, H, W] of a convolution, [N, T, C] and [N, H, W, C] of a linear layer,
    wherever they were turned to. Where the graph of ``prediction`` does not say so, it is the last of [N, T, C], and
    the second of images [N, C, H, W], as in torch's losses.
    """
    if prediction.ndim < 3:
        return -1
    place = _outputs(prediction.grad_fn, tuple(prediction.shape))
    return place if place is not None else 1 if prediction.ndim > 3 else -1


def _outputs(node: Any, shape: tuple[int, ...]) -> int | None:
    """The dimension of ``node``'s result of that shape which comes from the outputs of a product below it."""
    moves: list[Move] = []
    place, convolution = None, False
    while node is not None:
        name = node.name()
        convolution = "Convolution" in name
        if convolution or "mmBackward" in name or "MmBackward" in name or name.startswith("LinearBackward"):
            place = 1 if convolution else len(shape) - 1 - _from_the_left(node)
            break
        below, before = _below(node, len(shape))
        if below is None:  # no product: tokens, if they can be
            place = len(shape) - 1 if len(shape) <= 3 else None
            break
        moves.append(_move(node, name, before, shape))
        node, shape = below, before
    for move in reversed(moves):
        if place is not None:
            place = move(place)
        if isinstance(place, range):  # outputs that were split: classes are a convolution's first part, another's last
            place = place[0] if convolution else place[-1]
    return place


def _below(node: Any, dims: int) -> tuple[Any, tuple[int, ...]]:
    """What made the operand that the result is made of, and its shape: no constant, no parameter; of the same number of
    dimensions, if one has it."""
    found = []
    for below, index in node.next_functions:
        if below is not None and "AccumulateGrad" not in below.name():
            metadata = getattr(below, "_input_metadata", ())
            if index < len(metadata):
                found.append((below, tuple(metadata[index].shape)))
    same = [pair for pair in found if len(pair[1]) == dims]
    return next(iter(same or found), (None, ()))


def _from_the_left(product: Any) -> bool:
    """Whether a matrix product is that of a parameter and columns, W x: its outputs are rows."""
    if product.name().startswith("LinearBackward"):
        return False
    left, right = [None, *(below for below, _ in product.next_functions)][-2:]  # an own function may take one
    return _parameter(left) and not _parameter(right)


def _parameter(node: Any) -> bool:
    """Whether it is one, in any view or format."""
    while node is not None and "AccumulateGrad" not in node.name():
        if len(node.next_functions) != 1 or "Embedding" in node.name():
            return False
        node = node.next_functions[0][0]
    return node is not None


def _move(node: Any, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    """Of one operation that takes ``before`` and gives ``after``."""

    def dim(saved: int, of: Sequence[int] = before) -> int:  # negative ones are saved as unsigned
        return (saved + len(of)) % 2**64 % len(of)

    if name.startswith("TransposeBackward"):
        one, other = dim(node._saved_dim0), dim(node._saved_dim1)
        return lambda p: {one: other, other: one}.get(p, p)
    if name.startswith("PermuteBackward"):
        return [dim(d) for d in node._saved_dims].index
    if len(before) == len(after) and "View" not in name and "Reshape" not in name:
        return lambda p: p
    if prod(before) == prod(after):
        return lambda p: _viewed(p, before, after)
    saved = getattr(node, "_saved_dim", None)
    if saved is None:
        return lambda p: None
    if len(before) < len(after):  # stacked
        return lambda p: p + (dim(saved, after) <= p)
    gone = {dim(d) for d in ([saved] if isinstance(saved, int) else saved)}
    return lambda p: None if p in gone else p - sum(d < p for d in gone)


def _viewed(p: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | range | None:
    """Where a dimension is in another view of the same elements; a range: in these parts; None: in one with others."""
    if before == after:
        return p
    for first in range(len(after)):
        if prod(after[:first]) == prod(before[:p]):
            for last in range(first, len(after)):
                if prod(after[first : last + 1]) == before[p] and (after[first] != 1 or before[p] == 1):
                    return first if first == last else range(first, last + 1)
    return None


@dataclass(eq=False)
class LossTerms:
    """What is known of the loss of one forward of the model. Holds no graph.

    Attributes:
        info: what its arguments show.
        terms: M, if labels or the model's output show it.
        seed: the gradient that reached the loss the model returned; measured only if ``info.items`` asks for it.
        guess: M where neither does: as many as the layer nearest to the loss has rows.
    """

    info: BatchInfo = field(default_factory=BatchInfo)
    terms: Tensor | int | None = None
    seed: Tensor | None = None
    guess: Tensor | int | None = None

    def returned(self, output: Any, *, weight_sharing: str) -> None:
        """The model returned ``output``. Labels go first."""
        self.terms = self.info.terms(weight_sharing=weight_sharing)
        if self.terms is None:
            self.terms = output_terms(output, self.info, weight_sharing=weight_sharing)
        loss = returned_loss(output) if self.info.items is not None else None
        if loss is not None and loss.grad_fn is not None:
            # of the node, not the tensor: DeepSpeed's hooks on what a forward returns have run by then
            index = loss.output_nr
            loss.grad_fn.register_prehook(lambda gradients: self._reached(gradients[index]))

    def _reached(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.seed = gradient.detach().float()


def _values(output: Any) -> Iterator[Tensor]:
    """Floating tensors of a model's output, ``logits`` first."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Tensor):
            yield from _values(value)


def returned_prediction(output: Any) -> Tensor | None:
    """What a loss is computed from: ``logits``, else the first tensor [N, .., C]; else [N]."""
    found = [value for value in _values(output) if value.ndim > 0]
    wide = [value for value in found if value.ndim > 1]
    return next(iter(wide or [value for value in found if len(value) > 1]), None)


def returned_loss(output: Any) -> Tensor | None:
    """The first scalar."""
    return next((value for value in _values(output) if value.ndim == 0), None)


def output_terms(output: Any, info: BatchInfo, *, weight_sharing: str) -> Tensor | int | None:
    """M of a loss that is computed outside of the model: a term for each prediction; of padded ones that the mask
    attends. None: the model returned no prediction."""
    prediction = returned_prediction(output)
    if prediction is None:
        return None
    shape = list(prediction.shape)
    if len(shape) > 1:
        del shape[class_dim(prediction)]
    found = fit(info.rows, tuple(shape))
    if found.mask is not None:
        mask = found.mask.flatten(1) if found.mask.ndim > 2 else found.mask
        counted = mask.any(dim=1 - found.examples) if weight_sharing == "reduce" and mask.ndim > 1 else mask
        return counted.sum().float()
    return shape[0] if weight_sharing == "reduce" else prod(shape)
