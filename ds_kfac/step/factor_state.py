"""What the rank that averages and decomposes a factor keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_kfac.curvature.factor import KroneckerFactor, averaged
from ds_kfac.curvature.history import History, compared
from ds_kfac.model.rows import BatchSum


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
    batches: Sequence[BatchSum],
    *,
    decays: Sequence[float],
    device: torch.device,
    tolerance: float | None = None,
) -> tuple[list[tuple[FactorState, Tensor | None]], Tensor]:
    """Each with a reduced batch in its average, kept where the old one was. All factors in one call per operation.

    Args:
        device: where the batches are and the arithmetic is done.
        tolerance: of similarity; read for those with a history.

    Returns also, for those with a history, bool [2] on the device: whether the average is similar to its last value and
    to the one before; and how many batches were scaled down, and how many had no row, [2].
    """
    sums, counts = [batch.sum_P for batch in batches], [batch.count for batch in batches]
    factors, excess = averaged([state.factor.to(device) for state in states], sums, counts, decays)
    unusual = torch.zeros(2, device=device)
    if batches:
        unusual = torch.stack([excess > 1, torch.stack(counts) <= 0]).sum(dim=1)
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
