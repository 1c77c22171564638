"""The numbers of a step that are summed over all ranks: they travel with the results."""

import torch
from torch import Tensor

from ds_kfac.comm.message import Arrivals, Part, Scalars
from ds_kfac.metrics import Metrics
from ds_kfac.plan.plan import Plan
from ds_kfac.step.draft import Draft
from ds_kfac.step.scalar_names import unusual


class Totals:
    """Of the direction, of the metrics, and a flag for each layer that has eigenbases.

    Args:
        travels: whether eigenbases ever do: then refreshes' counts have come with them.
    """

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, draft: Draft, metrics: Metrics, *, travels: bool
    ) -> None:
        self.layers, self.draft, self.metrics, self._device = plan.layers, draft, metrics, device
        local = draft.local
        failed = 0 if travels else metrics.step_counts["refresh_failures"]
        counts = local.counts(failed, None if travels else draft.factors.unusual)
        ready = {name for name, state in local.states.items() if state.prepared}
        flags = torch.zeros((), device=device), torch.ones((), device=device)
        self._sizes = len(local.numbers), len(counts), len(plan.layers)
        self._own = torch.stack([*local.numbers, *counts, *(flags[layer.name in ready] for layer in self.layers)])
        self._table = Scalars([range(len(self._own))] * plan.assignment.world, rank, plan.rows)

    @property
    def part(self) -> Part:
        return self._table.part(dict(enumerate(self._own)), self._device)

    def read(self, received: Arrivals) -> tuple[Tensor, dict[str, Tensor]]:
        """The direction's numbers, and which layers have eigenbases, bool scalars; the counts go to the metrics."""
        numbers, counts, ready = torch.stack(list(self._table.read(received).values())).sum(dim=0).split(self._sizes)
        factors = self.draft.factors
        self.metrics.summarise(counts, failed=factors.failed, unusual=unusual(factors.scalars))
        return numbers, {layer.name: flag > 0 for layer, flag in zip(self.layers, ready, strict=True)}
