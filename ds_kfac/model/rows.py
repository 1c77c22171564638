"""A layer's tensors -> the rows whose second moment is taken: weight sharing, padding, sub-sampling; and their sums.

Shape suffixes: N examples, T positions that share the weight, D a side's width, R rows, P a packed triangle.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


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
        sample: take about so many rows a call, evenly spaced from a place that moves; None: all.
        positions: whether convolutions take a sub-sample of positions, see ``patches.py``, unless ``sample`` says more.
    """

    weight_sharing: str = "expand"
    sample: int | None = None
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


def _spread(rows: int, rule: RowRule, turn: int) -> slice:
    """Every k-th row, starting at a place that visits 0 .. k-1 alike as turns go by."""
    if rule.sample is None or rows <= rule.sample:
        return slice(0, rows)
    stride = -(-rows // rule.sample)
    return slice(phase(turn, stride), None, stride)


def input_rows(x: Tensor, mask: Tensor | None, rule: RowRule, *, turn: int = 0, examples: int = 0) -> Rows:
    """Rows of A.

    Args:
        x: inputs [.., D].
        mask: bool, which of them count: of the leading shape of ``x``, or [N, T] where that is flattened.
        turn: of the step, moves the sample.
        examples: dimension of the examples, 1 where sequences come first.
    """
    turned = examples == 1 and rule.weight_sharing == "reduce"  # each row by itself: the order does not matter
    x, mask = _positions(x.detach(), mask, turned)
    if rule.weight_sharing == "reduce":
        return _mean_rows(x.float(), mask, rule, turn)
    if mask is not None:
        x = x * mask
    flat = x.flatten(0, 1)
    chosen = _spread(len(flat), rule, turn)
    flat = flat[chosen]
    counts = torch.ones(len(flat), 1, device=x.device) if mask is None else mask.reshape(-1, 1)[chosen].float()
    return Rows(flat, counts, len(flat) if mask is None else counts.sum())


def _mean_rows(x_NTD: Tensor, mask: Tensor | None, rule: RowRule, turn: int) -> Rows:
    if mask is None:
        rows, counts = x_NTD.mean(dim=1), torch.ones(len(x_NTD), 1, device=x_NTD.device)
    else:
        positions = mask.sum(dim=1)
        rows, counts = (x_NTD * mask).sum(dim=1) / positions.clamp(min=1), (positions > 0).float()
    chosen = _spread(len(rows), rule, turn)
    counts = counts[chosen]
    return Rows(rows[chosen], counts, len(counts) if mask is None else counts.sum())


def gradient_rows(
    gradient: Tensor, mask: Tensor | None, rule: RowRule, *, turn: int = 0, examples: int = 0
) -> tuple[Tensor, Tensor | int, float]:
    """Rows of output gradients [R, D], how many loss terms the call has if nothing else shows it, and a factor.

    The factor times the sum of the rows' outer products stands for that of all rows; 1 unless they are a sample.
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
    chosen = _spread(len(flat), rule, turn)
    sample = flat[chosen]
    return sample, terms, len(flat) / max(1, len(sample))
