"""What the owner of a factor keeps of it: the average and, for SP-NGD's adaptive rule, its last values: a factor that
barely changes is captured and refreshed less often.

Shape suffixes: P packed elements of a factor.

Source: Osawa et al. 2020 (arXiv:2002.06015), sec. 5.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.curvature.factor import KroneckerFactor, Side, averaged, moved

PIECE = 1 << 18
"""Elements of which torch takes a norm: their squares are added up in fp32, with a relative error of 2e-6."""


@dataclass(frozen=True)
class History:
    """A factor as it was when it was last folded into, and before that; what a new one is compared with.

    Attributes:
        last, before: fp32 [P]; None until there were so many.
        norms: fp32 [2], |last|_F and |before|_F, NaN where there is none; stays on the device of the arithmetic. None:
            not known, found when it is next compared.
    """

    side: Side
    last: Tensor | None = None
    before: Tensor | None = None
    norms: Tensor | None = None

    def to(self, device: torch.device) -> "History":
        """The values on another device; pinned if that is the host of a GPU."""
        last, before = (None if kept is None else moved(kept, device) for kept in (self.last, self.before))
        return replace(self, last=last, before=before)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.last, self.before, self.norms) if kept is not None)


def compared(
    histories: Sequence[History], packed_P: Sequence[Tensor], *, tolerance: float
) -> tuple[Tensor, list[History]]:
    """New values of several factors against their histories, all at once, without waiting for the device.

    A value is similar to an old one if |new - old|_F < tolerance |old|_F: never if there is none, if it is zero, or if
    something is not finite. Takes the memory of one more copy of the values.

    Args:
        packed_P: fp32 [P] of each, on one device; kept, not copied.

    Returns bool [n, 2]: similar to the last, similar to the one before; and the histories with the new values.
    """
    sides = [history.side for history in histories]
    old = torch.stack([_norms(history, packed.device) for history, packed in zip(histories, packed_P, strict=True)])
    changes = [
        _differences(packed_P, [history.last for history in histories], sides),
        _differences(packed_P, [history.before for history in histories], sides),
    ]
    similar = (torch.stack(changes, dim=1) < tolerance * old) & old.isfinite()
    kept = torch.stack([frobenius(packed_P, sides), old[:, 0]], dim=1).unbind()
    pushed = [
        replace(history, last=packed, before=history.last, norms=own)
        for history, packed, own in zip(histories, packed_P, kept, strict=True)
    ]
    return similar, pushed


def frobenius(packed_P: Sequence[Tensor], sides: Sequence[Side]) -> Tensor:
    """Frobenius norms of symmetric matrices, fp32 [n]: off the diagonal every packed element stands for two."""
    diagonals = [side.diagonal_of(packed) for side, packed in zip(sides, packed_P, strict=True)]
    return (2 * _squares(packed_P) - _squares(diagonals)).sqrt()


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of squares, fp32 [n]. In pieces, as torch's norm loses digits over millions of elements on a CPU."""
    pieces = [tensor.split(PIECE) for tensor in tensors]
    squares = torch.stack(torch._foreach_norm([piece for parts in pieces for piece in parts])).square()
    return torch.stack([part.sum() for part in squares.split([len(parts) for parts in pieces])])


def _differences(new_P: Sequence[Tensor], old_P: Sequence[Tensor | None], sides: Sequence[Side]) -> Tensor:
    """|new - old|_F, fp32 [n]; NaN where there is no old value."""
    known = [index for index, old in enumerate(old_P) if old is not None]
    found = [torch.full((), float("nan"), device=new.device) for new in new_P]
    if known:
        changed = torch._foreach_sub([new_P[index] for index in known], [old for old in old_P if old is not None])
        for index, norm in zip(known, frobenius(changed, [sides[index] for index in known]), strict=True):
            found[index] = norm
    return torch.stack(found)


def _norms(history: History, device: torch.device) -> Tensor:
    """Those of the values that it has; found if they are not known, as after loading a checkpoint without them."""
    if history.norms is not None:
        return history.norms.to(device)
    none = torch.full((), float("nan"), device=device)
    values = (history.last, history.before)
    return torch.stack([none if x is None else frobenius([x], [history.side])[0] for x in values])


@dataclass(frozen=True)
class FactorState:
    """Replaced, never changed in place: a skipped step just drops the new one.

    Attributes:
        factor: the running average; on the device, or in CPU memory if factors are offloaded.
        history: its last two values, for adaptive intervals; None if they are off.
    """

    factor: KroneckerFactor
    history: History | None = None

    @property
    def nbytes(self) -> int:
        """Of factor and history.

        The history's last value is the factor itself, unless that came back from another device.
        """
        if self.history is None:
            return self.factor.nbytes
        shared = self.factor.packed_P.nbytes if self.history.last is self.factor.packed_P else 0
        return self.factor.nbytes + self.history.nbytes - shared


def folded(
    states: Sequence[FactorState],
    sums_P: Sequence[Tensor],
    counts: Sequence[Tensor],
    *,
    decays: Sequence[float],
    device: torch.device,
    tolerance: float | None = None,
) -> tuple[list[tuple[FactorState, Tensor | None]], Tensor]:
    """Each with a reduced batch in its average, kept where the old one was. All factors in one call per operation.

    Args:
        sums_P, counts: of the batches, see :func:`ds_kfac.curvature.factor.averaged`.
        device: where they are and the arithmetic is done.
        tolerance: of similarity; read for those with a history.

    Returns also, for those with a history, bool [2] on the device: whether the average is similar to its last value and
    to the one before; and how many batches were scaled down, and how many had no row, [2].
    """
    factors, excess = averaged([state.factor.to(device) for state in states], sums_P, counts, decays)
    unusual = torch.zeros(2, device=device)
    if states:
        unusual = torch.stack([excess > 1, torch.stack(list(counts)) <= 0]).sum(dim=1)
    results: list[tuple[FactorState, Tensor | None]] = [
        (replace(state, factor=factor.to(state.factor.packed_P.device)), None)
        for state, factor in zip(states, factors, strict=True)
    ]
    histories = {index: state.history.to(device) for index, state in enumerate(states) if state.history is not None}
    if tolerance is None or not histories:
        return results, unusual
    packed = [factors[index].packed_P for index in histories]
    flags, pushed = compared(list(histories.values()), packed, tolerance=tolerance)
    for index, history, similar in zip(histories, pushed, flags.unbind(), strict=True):
        state = results[index][0]
        results[index] = replace(state, history=history.to(state.factor.packed_P.device)), similar
    return results, unusual
