"""What is summed over all layers, and travels with a step's results: numbers of the update rule,
counts, and flags."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Channel, MessagePart, SummedVector
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.direction import Direction, Outcome, StepContext
from ds_kfac.metrics import SUMMARY
from ds_kfac.plan.plan import Plan
from ds_kfac.step.factors import FactorStep
from ds_kfac.step.messages import FAILED, NONE_UNUSUAL, UNUSUAL, unusual
from ds_kfac.step.proving import Verdict


@dataclass
class Running:
    """A step between its two halves.

    Attributes:
        update: what it has done to the factors; None in a step that does not change them.
        verdict: of a step that has proven rows.
    """

    context: StepContext
    outcome: Outcome
    update: FactorStep | None
    verdict: Verdict | None


class Totals:
    """A vector of each rank, fp32: the rule's numbers; counts in the order of :data:`SUMMARY`; and,
    if the rule asks for it, a flag for each layer of the plan.
    """

    def __init__(
        self,
        rule: UpdateRule,
        plan: Plan,
        direction: Direction,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self.rule, self.direction, self.device = rule, direction, device
        self.layers = len(plan.layers) if rule.flags(plan.config) else 0
        place = {layer.name: index for index, layer in enumerate(plan.layers)}
        places = [place[name] for name in direction.names]
        self._places = torch.tensor(places, dtype=torch.long, device=device)
        numel = rule.numbers + len(SUMMARY) + self.layers
        self._vector = SummedVector(numel, channel.world, channel.rank, plan.rows)

    def part(self, running: Running) -> MessagePart:
        """The message part with this rank's vector. A wrong number of the rule's numbers is a
        ValueError."""
        outcome, update = running.outcome, running.update
        if len(outcome.numbers) != self.rule.numbers:
            raise ValueError(
                f"ds_kfac: {type(self.rule).__name__}.numbers is {self.rule.numbers}, but its "
                f"Direction.step gave "
                f"{len(outcome.numbers)} scalars in Outcome.numbers; make them the same number"
            )
        # where eigenbases travel the counts of refreshes and updates have come with them, from all
        # ranks
        own = None if update is None or update.travels else update
        failed = 0 if own is None else [*own.outcomes.values()].count(FAILED)
        limited, *empty = NONE_UNUSUAL if own is None else own.unusual
        left_out = outcome.left_out.sum() if isinstance(outcome.left_out, Tensor) else 0.0
        unprepared = sum(
            not prepared for group in self.direction.layer_groups for prepared in group.prepared
        )
        counts = [
            outcome.replaced,
            unprepared,
            failed,
            outcome.unused,
            left_out,
            outcome.limited + limited,
            *empty,
        ]
        vector = _stacked([*outcome.numbers, *counts], self.device)
        if self.layers:
            assert outcome.flags is not None
            flags = torch.zeros(self.layers, dtype=torch.float32, device=self.device)
            vector = torch.cat([vector, flags.index_copy_(0, self._places, outcome.flags)])
        return self._vector.part(vector)

    def read(self, received: Arrivals, running: Running) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sums: the rule's numbers; the counts; and the flags, bool, None if the rule asks for
        none."""
        total, update = self._vector.total(received), running.update
        numbers, summary, flags = total.tensor_split(
            (self.rule.numbers, self.rule.numbers + len(SUMMARY))
        )
        if update is not None and update.travels:
            failed = [*update.outcomes.values()].count(FAILED)  # of all ranks
            # numbers from a list would be copied
            summary[[*SUMMARY].index("refresh_failures")].add_(failed)
            summary[-len(UNUSUAL) :].add_(unusual(update.scalars))
        return numbers, summary, flags > 0 if self.layers else None


def _stacked(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """fp32, of scalars on the device and of what the host knows, of which each is filled in: a list
    would be copied."""
    known = {x for x in values if not isinstance(x, Tensor)}
    filled = {x: torch.full((), x, device=device, dtype=torch.float32) for x in known}
    return torch.stack(
        [x.float().reshape(()) if isinstance(x, Tensor) else filled[x] for x in values]
    )
