"""What the first captured batch shows: which layers have one A in common, and how many rows a rank has of each.

Agreed on by all ranks before anything of that batch is kept. Later any rank may see that layers of a group got
different inputs: it contributes no rows to their A, and tells the others along with the step's scalars; all hosts read
that when a later capture comes next, when it has long arrived, and take the group apart together.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.comm.message import Channel, Move, Part, RelayoutPlan, deliver, gathered
from ds_kfac.curvature.factor import KroneckerFactor
from ds_kfac.model.shared_inputs import SharedInputs, agreed
from ds_kfac.plan.plan import Groups, Known
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factor_state import FactorState
from ds_kfac.step.factors import FactorUpdates
from ds_kfac.step.host_copy import HostCopy


class Sharing:
    """What the ranks agree on: groups of layers that share their inputs, see ``inputs``, and rows of each layer."""

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs, self.channel = inputs, channel
        self.forget()

    def forget(self) -> None:
        """Start afresh."""
        self._unread: HostCopy | None = None

    def changed(
        self, known: Known, curvature: FactorUpdates, due: FactorsDue, step: int, measured: Mapping[str, Sequence[int]]
    ) -> Known | None:
        """What is known from this step on, if it may be something else than ``known``. Collective in these steps; call
        it in every step, after its batch sums have been reduced.

        Args:
            due: what ``step`` captures.
            measured: layer name -> rows here in this step, see :class:`ds_kfac.model.capture.Capture`.
        """
        if self.inputs.searching or (curvature.plan.measures and known.rows is None):
            return self._learned(known, curvature, measured) if due.capture else None
        if known.groups and (due.capture or curvature.schedule.due(step + 1).capture) and self._parted():
            return replace(known, groups=self._lasting(known.groups, curvature))
        return None

    def note(self, scalars: Mapping[Hashable, Tensor], known: Known) -> None:
        """After a step that captured: on how many ranks layers were seen to part, of the scalars of all ranks."""
        flags = [scalars["parted", rank] for rank in range(self.channel.world) if ("parted", rank) in scalars]
        if not flags and self.channel.world == 1 and known.groups:
            flags = [torch.full((), float(self.inputs.parted()))]
        self._unread = HostCopy(torch.stack(flags).sum().reshape(1)) if flags else None

    def _learned(self, known: Known, curvature: FactorUpdates, measured: Mapping[str, Sequence[int]]) -> Known:
        rows = {layer: max(counts) for layer, counts in measured.items()}  # of first runs or of recomputations
        everyone = self._everyone((dict(self.inputs.found()), rows), curvature)
        groups = known.groups
        if self.inputs.searching:
            groups = agreed([found for found, _ in everyone], curvature.plan.sharing_candidates)
        if known.rows is not None:  # of a checkpoint
            return replace(known, groups=groups)
        total: Counter[str] = Counter()
        for _, own in everyone:
            total.update(own)
        return Known(groups, {layer: count / len(everyone) for layer, count in total.items()})

    def _parted(self) -> bool:
        """Whether some rank saw a group part in an earlier step. The same on every rank; waits for nothing but that
        step."""
        unread, self._unread = self._unread, None
        return unread is not None and unread.tolist()[0] > 0

    def _lasting(self, groups: Groups, curvature: FactorUpdates) -> Groups:
        """The groups that no rank saw part."""
        everyone = self._everyone(sorted(self.inputs.broken), curvature)
        broken = {tuple(group) for groups in everyone for group in groups}
        if self.channel.rank == 0:
            names = "; ".join(", ".join(group) for group in groups if group in broken)
            logger.warning(
                f"ds_kfac: layers that shared their input got different ones in a later step ({names}). Each has an A "
                "of its own from here on, which starts as the common one"
            )
        return tuple(group for group in groups if group not in broken)

    def _everyone(self, mine: Any, curvature: FactorUpdates) -> list[Any]:
        """By rank. Which factors have been decomposed comes along: with common ones eigenbases may begin to travel, and
        then all ranks have to know."""
        everyone = gathered((mine, sorted(curvature.ready)), self.channel.group)
        curvature.ready = {key for _, ready in everyone for key in ready}
        return [one for one, _ in everyone]


def copy_shared(old: FactorUpdates, new: FactorUpdates) -> None:
    """Give layers that shared a factor in ``old`` and have one of their own in ``new`` a copy of it. Collective where
    there are any, which every rank knows."""
    origins = {key: old.of_layer[spec.layers[0]]["A"].key for key, spec in new.specs.items() if key not in old.specs}
    if not origins:
        return
    keys, device = list(origins), new.device
    moves = [
        Move(index, 0, new.specs[key].side.numel + 1, old.decomposers[origins[key]], new.decomposers[key])
        for index, key in enumerate(keys)
        if old.decomposers[origins[key]] != new.decomposers[key]
    ]

    def piece(move: Move) -> Tensor:
        factor = old.factors[origins[keys[move.param]]].factor
        return torch.cat([factor.packed_P.to(device), factor.updates.to(device).reshape(1)])

    part = Part("factors", RelayoutPlan(new.channel.world, tuple(moves)), piece, torch.float32)
    (arrived,) = deliver([part], new.channel, device)
    received = {keys[move.param]: flat for move, flat in arrived}
    for key, origin in origins.items():
        side = new.specs[key].side
        if key in received:
            flat = received[key].clone()
            factor = KroneckerFactor(side, flat[:-1], flat[-1]).to(new.home)
            new.factors[key] = FactorState(factor, new.empty_of(side).history)
        elif new.decomposers[key] == new.rank:
            new.factors[key] = FactorState(old.factors[origin].factor, new.empty_of(side).history)
    new.ready |= {key for key, origin in origins.items() if origin in old.ready}
    timetable = new.schedule.state()
    clocks = old.schedule.state()["factors"]
    timetable["factors"] |= {key: clocks[origin] for key, origin in origins.items() if origin in clocks}
    new.schedule.restore(timetable)
