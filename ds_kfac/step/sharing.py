"""What the first captured batch shows: which layers have one A in common, and how many rows a rank has of each.

All ranks agree on it before anything of that batch is kept; it stays for the run. In a later step any rank may see that
layers of a group got different inputs: it contributes no rows to their A then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from deepspeed.utils import logger

from ds_kfac.comm.message import Channel, gathered
from ds_kfac.model.calls import SharedInputs, agreed
from ds_kfac.model.layers import key_of
from ds_kfac.model.rows import BatchSum
from ds_kfac.plan.plan import Known
from ds_kfac.step.factors import FactorUpdates


class Sharing:
    """Groups of layers that share their inputs, see ``inputs``, and rows of each layer."""

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs, self.channel, self._warned = inputs, channel, False

    def learned(self, known: Known, curvature: FactorUpdates, measured: Mapping[str, Sequence[int]]) -> Known | None:
        """What this captured step shows, None if all is known. Collective where it is not.

        Args:
            measured: layer name -> rows here in this step, see :class:`ds_kfac.model.capture.Capture`.
        """
        if not self.inputs.searching and (known.rows is not None or not curvature.plan.measures):
            return None
        rows = {layer: max(counts) for layer, counts in measured.items()}  # of first runs or of recomputations
        # with common factors eigenbases may begin to travel, and then all ranks have to know which there are
        everyone = gathered((dict(self.inputs.found()), rows, curvature.ready), self.channel.group)
        curvature.ready = {key for *_, ready in everyone for key in ready}
        groups = known.groups
        if self.inputs.searching:
            groups = agreed([found for found, *_ in everyone], curvature.plan.sharing_candidates)
        if known.rows is not None:  # of a checkpoint
            return replace(known, groups=groups)
        total: Counter[str] = Counter()
        for _, own, _ in everyone:
            total.update(own)
        return Known(groups, {layer: count / len(everyone) for layer, count in total.items()})

    def leave_out(self, sums: Mapping[str, BatchSum]) -> int:
        """Clear the common A of groups whose layers got different inputs here in this step: it would not be of all of
        theirs. Returns how many there are."""
        parted = [group for group in self.inputs.broken if key_of(group[0], "A") in sums]
        for group in parted:
            sums[key_of(group[0], "A")].clear()
        if parted and not self._warned:
            self._warned = True
            logger.warning(
                f"ds_kfac: rank {self.channel.rank}: layers that shared their input in the first step got different "
                f"ones ({'; '.join(map(', '.join, parted))}). Their common A has no rows of this rank in such steps. "
                "This warning appears once; parted_inputs counts on"
            )
        return len(parted)
