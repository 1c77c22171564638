"""A layer's tensors -> the rows whose second moment is taken: weight sharing, padding, sub-sampling.

Shape suffixes: N examples, T positions that share the weight, D a side's width, R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowRule:
    """How rows are made.

    Attributes:
        weight_sharing: "expand": every position is a row (a loss per token). "reduce": every example is one, the mean
            of its inputs and the sum of its output gradients (a loss per sequence or image). Eschenhagen et al. 2023
            (arXiv:2311.00636).
        sample: take about so many rows a call, evenly spaced from a place that moves; None: all.
    """

    weight_sharing: str = "expand"
    sample: int | None = None


@dataclass(frozen=True)
class Rows:
    """Rows of one call.

    Attributes:
        x: [R, D], zero where a row does not count; or int64 [R], -1 where it does not.
        counts_R1: fp32 [R, 1], 1 where a row counts, else 0. The input of a bias.
        count: how many count, a number or a scalar on the device.
    """

    x: Tensor
    counts_R1: Tensor
    count: Tensor | int


def _positions(x: Tensor, width: int) -> Tensor:
    """[.., D] -> [N, T, D], or indices [..] -> [N, T]; a tensor without positions has T = 1."""
    tail = x.shape[-1:] if width else ()
    batch = x.shape[: x.ndim - width]
    if len(batch) == 1:
        return x.reshape(batch[0], 1, *tail)
    return x.reshape(batch[0], -1, *tail)


def _fitting(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask as [N, T, 1] if it speaks of these rows: as many of them, also where a model flattens [N, T]."""
    if mask is None or mask.numel() != x.shape[0] * x.shape[1]:
        return None
    return mask.reshape(x.shape[0], x.shape[1], 1)


def _spread(rows: int, rule: RowRule, turn: int) -> slice:
    """Every k-th row, starting at a place that visits all of 0 .. k-1 as turns go by."""
    if rule.sample is None or rows <= rule.sample:
        return slice(0, rows)
    stride = -(-rows // rule.sample)
    return slice(turn * 7919 % stride, None, stride)


def input_rows(x: Tensor, mask: Tensor | None, rule: RowRule, *, dim: int, turn: int = 0) -> Rows:
    """Rows of A.

    Args:
        x: inputs [.., D], or int indices [..].
        mask: bool [N, T], which of them count; ignored by a layer with another number of rows.
        dim: width of one-hot rows, for indices.
        turn: counts the batches, moves the sample.
    """
    indices = not x.is_floating_point()
    x = _positions(x.detach(), width=0 if indices else 1)
    mask = _fitting(mask, x)
    if rule.weight_sharing == "reduce":
        return _mean_rows(_one_hot(x, dim) if indices else x.float(), mask, rule, turn)
    if mask is not None:
        x = torch.where(mask.squeeze(-1), x, -1) if indices else x * mask
    flat = x.flatten(0, 1)
    chosen = _spread(len(flat), rule, turn)
    flat = flat[chosen]
    counts = torch.ones(len(flat), 1, device=x.device) if mask is None else mask.reshape(-1, 1)[chosen].float()
    return Rows(flat, counts, len(flat) if mask is None else counts.sum())


def _one_hot(index_NT: Tensor, dim: int) -> Tensor:
    """[N, T, D]; a negative index gives zeros."""
    return (index_NT.unsqueeze(-1) == torch.arange(dim, device=index_NT.device)).float()


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
    gradient: Tensor, mask: Tensor | None, rule: RowRule, *, turn: int = 0
) -> tuple[Tensor, Tensor | int, float]:
    """Rows of output gradients [R, D], how many loss terms the call has if nothing else tells, and a factor.

    The factor times the sum of the rows' outer products stands for that of all rows; 1 unless they are a sample.
    bf16 and fp16 rows are as they were, so that tensor cores multiply them; sums over positions and others are fp32.
    """
    g_NTD = _positions(gradient.detach(), width=1)
    if g_NTD.dtype not in (torch.bfloat16, torch.float16):
        g_NTD = g_NTD.float()
    mask = _fitting(mask, g_NTD)
    if mask is not None:
        g_NTD = g_NTD * mask.to(g_NTD.dtype)  # of 0 and 1, exact in any dtype
    reduced = rule.weight_sharing == "reduce"
    flat = g_NTD.sum(dim=1, dtype=torch.float32) if reduced else g_NTD.flatten(0, 1)
    terms: Tensor | int = len(flat)
    if mask is not None:
        terms = (mask.flatten(1).any(dim=1) if reduced else mask).sum().float()
    chosen = _spread(len(flat), rule, turn)
    sample = flat[chosen]
    return sample, terms, len(flat) / max(1, len(sample))
