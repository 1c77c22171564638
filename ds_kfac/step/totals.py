"""Sum scalars over the layers of all ranks: the scalars of ``Outcome.numbers``, counts, and flags.
Each rank sends its part of the sums in the same message as the results of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Channel, MessagePart, SummedVector, stacked
from ds_kfac.directions.base import UpdateRule
from ds_kfac.directions.direction import Direction, Outcome, StepContext
from ds_kfac.metrics import SUMMARY
from ds_kfac.plan.plan import Plan
from ds_kfac.step.factors import FactorStep
from ds_kfac.step.messages import FAILED, NONE_UNUSUAL, UNUSUAL, unusual
from ds_kfac.step.proving import Verdict

_NAMES = tuple(SUMMARY)


@dataclass
class Running:
    """State of a step between its two halves, ``precondition`` and ``scatter``.

    Attributes:
        outcome: numbers, flags and counts that the direction has computed on this rank.
        update: record of what the step has done to the factors; None if the step does not change
            factors.
        verdict: result of the proof of rows; None if the step runs no proof.
    """

    context: StepContext
    outcome: Outcome
    update: FactorStep | None
    verdict: Verdict | None


class Totals:
    """Sums one fp32 vector over all ranks.

    The vector has three parts: first ``Outcome.numbers``, then counts in the order of
    :data:`SUMMARY`, and finally a flag for each layer of the plan if the rule asks for flags.
    """

    def __init__(
        self,
        rule: UpdateRule,
        plan: Plan,
        direction: Direction,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self.rule = rule
        self.direction = direction
        self.device = device
        self.flag_count = len(plan.layers) if rule.flags(plan.config) else 0
        place = {layer.name: index for index, layer in enumerate(plan.layers)}
        places = [place[name] for name in direction.names]
        self._places = torch.tensor(places, dtype=torch.long, device=device)
        numel = rule.numbers + len(SUMMARY) + self.flag_count
        self._vector = SummedVector(numel, channel.world, channel.rank, plan.rows)

    def part(self, running: Running) -> MessagePart:
        """Return the message part with this rank's vector.

        Raises:
            ValueError: the length of ``Outcome.numbers`` is not :attr:`UpdateRule.numbers`.
        """
        outcome = running.outcome
        if len(outcome.numbers) != self.rule.numbers:
            raise ValueError(
                f"ds_kfac: {type(self.rule).__name__}.numbers is {self.rule.numbers}, but its "
                f"Direction.step gave {len(outcome.numbers)} scalars in Outcome.numbers; the two "
                "numbers must be equal"
            )
        vector = stacked([*outcome.numbers, *self._counts(running)], self.device)
        if self.flag_count:
            assert outcome.flags is not None
            flags = torch.zeros(self.flag_count, dtype=torch.float32, device=self.device)
            vector = torch.cat([vector, flags.index_copy_(0, self._places, outcome.flags)])
        return self._vector.part(vector)

    def _counts(self, running: Running) -> list[Tensor | float]:
        """Return this rank's counts, in the order of :data:`SUMMARY`."""
        outcome = running.outcome
        update = running.update
        failed = 0
        limited, empty, missed = NONE_UNUSUAL
        # If eigenbases are sent to other ranks, FactorUpdates.deliver() has already sent these four
        # counts to all ranks, and read() adds them to the sums.
        if update is not None and not update.travels:
            failed = [*update.outcomes.values()].count(FAILED)
            limited, empty, missed = update.unusual
        left_out = outcome.left_out.sum() if isinstance(outcome.left_out, Tensor) else 0.0
        unprepared = sum(
            not prepared for group in self.direction.layer_groups for prepared in group.prepared
        )
        counts = {
            "not_finite_layers": outcome.replaced,
            "unpreconditioned_layers": unprepared,
            "refresh_failures": failed,
            "unused_layers": outcome.unused,
            "left_out_gradients": left_out,
            "limited_factors": outcome.limited + limited,
            "empty_updates": empty,
            "missed_updates": missed,
        }
        return [counts[name] for name in SUMMARY]

    def read(self, received: Arrivals, running: Running) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sums over ranks as a triple: ``Outcome.numbers``; the counts; and the flags as
        bool, or None if the rule does not ask for flags."""
        total = self._vector.total(received)
        numbers, summary, flags = total.tensor_split(
            (self.rule.numbers, self.rule.numbers + len(SUMMARY))
        )
        update = running.update
        if update is not None and update.travels:
            failed = [*update.outcomes.values()].count(FAILED)  # on all ranks
            # add_ takes a Python number without a copy from the host, which a tensor would need
            summary[_NAMES.index("refresh_failures")].add_(failed)
            summary[-len(UNUSUAL) :].add_(unusual(update.scalars))
        return numbers, summary, flags > 0 if self.flag_count else None
