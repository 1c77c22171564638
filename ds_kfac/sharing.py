"""Which layers have one A in common: agreed after the first captured step, given up where it no longer holds.

Any rank may see that layers of a group got different inputs. That travels with its batch sums, so that in the same step
every rank knows it on its device and no decomposer folds the batch; and all hosts read it before a later capture, when
it has long arrived, and take the group apart together.
"""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.curvature import Curvature
from ds_kfac.factor import KroneckerFactor
from ds_kfac.factor_state import FactorState
from ds_kfac.host_copy import HostCopy
from ds_kfac.layer_state import LayerState
from ds_kfac.mail import Leg, deliver
from ds_kfac.shared_inputs import SharedInputs, agreed
from ds_kfac.traffic import Channel
from ds_kfac.zero.relayout import Move, RelayoutPlan

Groups = tuple[tuple[str, ...], ...]


class Sharing:
    """What the ranks agree on about ``inputs``."""

    def __init__(self, inputs: SharedInputs, channel: Channel) -> None:
        self.inputs, self.channel = inputs, channel
        self.forget()

    def forget(self) -> None:
        """Start afresh."""
        self._unread: HostCopy | None = None

    def found(self, curvature: Curvature) -> Groups:
        """After the first captured batch. Collective, once in a run."""
        mine = dict(self.inputs.found())
        everyone = self._everyone(mine, curvature)
        return agreed(everyone, curvature.plan.sharing_candidates)

    def parted(self) -> bool:
        """Whether some rank saw a group part in a step before the last one. The same on every rank; waits for nothing
        but that step."""
        unread, self._unread = self._unread, None
        return unread is not None and unread.tolist()[0] > 0

    def note(self, flagged: Tensor | None) -> None:
        """After a captured step, see :attr:`ds_kfac.reducer.Reducer.flagged`."""
        self._unread = None if flagged is None else HostCopy(flagged.reshape(1))

    def lasting(self, groups: Groups, curvature: Curvature) -> Groups:
        """The groups that no rank saw part. Collective, when :meth:`parted`."""
        everyone = self._everyone(sorted(self.inputs.broken), curvature)
        broken = {tuple(group) for groups in everyone for group in groups}
        if self.channel.rank == 0:
            names = "; ".join(", ".join(group) for group in groups if group in broken)
            logger.warning(
                f"ds_kfac: layers that shared their input got different ones in a later step ({names}). Each has an A "
                "of its own from here on, which starts as the common one"
            )
        return tuple(group for group in groups if group not in broken)

    def _everyone(self, mine: Any, curvature: Curvature) -> list[Any]:
        """By rank. Which factors have been decomposed comes along: with common ones eigenbases may begin to travel, and
        then all ranks have to know."""
        everyone: list[Any] = [None] * self.channel.world
        torch.distributed.all_gather_object(everyone, (mine, sorted(curvature.ready)), group=self.channel.group)
        curvature.ready = {key for _, ready in everyone for key in ready}
        return [one for one, _ in everyone]


def copy_shared(old: Curvature, new: Curvature) -> None:
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

    leg = Leg("factors", RelayoutPlan(new.channel.world, tuple(moves)), piece, torch.float32)
    (arrived,) = deliver([leg], new.channel, device)
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
    timetable = new.agenda.state()
    clocks = old.agenda.state()["factors"]
    timetable["factors"] |= {key: clocks[origin] for key, origin in origins.items() if origin in clocks}
    new.agenda.restore(timetable)
    new.begin()


def with_common_bases(states: Mapping[str, LayerState], curvature: Curvature, *, carry: bool) -> dict[str, LayerState]:
    """Layers that share a factor have one copy of its eigenbasis where they have one gradient worker."""
    new = dict(states)
    for name, own in curvature.of_layer.items():
        state, leader = (new.get(key) for key in (name, own["A"].layers[0] if "A" in own else name))
        if state and leader and leader.A is not None and leader.A is not state.A:
            new[name] = state.rebased(A=leader.A, carry=carry)
    return new
