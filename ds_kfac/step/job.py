"""K-FAC of one rank: a preconditioner for each of its domains, which step as one."""

from collections.abc import Sequence

import torch

from ds_kfac.comm.message import Channel, gathered
from ds_kfac.step.draft import StepDraft
from ds_kfac.step.preconditioner import KFACPreconditioner


class Job:
    """The preconditioners of this rank's domains.

    Collectives of several domains follow each other in the order of ``preconditioners``, the same on every rank.

    Args:
        preconditioners: that of the dense layers first.
        everywhere: whether there are other domains, here or on other ranks.

    Attributes:
        channel: connects all ranks that train the model.
    """

    def __init__(self, preconditioners: Sequence[KFACPreconditioner], *, everywhere: bool) -> None:
        self.preconditioners, self.everywhere = tuple(preconditioners), everywhere
        self.channel = Channel(torch.distributed.group.WORLD) if everywhere else self.preconditioners[0].channel

    @property
    def steps(self) -> int:
        """Applied steps, of all domains alike."""
        return self.preconditioners[0].steps

    def capture_together(self) -> None:
        """From now on calls are seen on all ranks in every step in which a domain of any of them may capture: ranks of
        experts then tell each other of their micro-batches, and plans, and what the adaptive rule makes of them, are
        each domain's own. Collective."""
        mine = {offset for kfac in self.preconditioners for offset in (0, *kfac.plan.offsets.values())}
        dense, offsets = self.preconditioners[0], set().union(*gathered(mine))
        schedules = [dense.plan.schedule.displaced(offset) for offset in sorted(offsets)]
        dense.accompanies = lambda step: any(schedule.due(step).capture for schedule in schedules)
        dense.resume()

    @property
    def active(self) -> bool:
        """Whether any domain captures in this step."""
        return any(kfac.capture.active for kfac in self.preconditioners)

    def step(self) -> list[StepDraft]:
        """Replace all gradients. Collective. What kl-clip needs is summed over all domains: one small all-reduce.

        Returns what each domain's step computed, for :meth:`commit`.
        """
        drafts, sums = [kfac.prepare() for kfac in self.preconditioners], None
        pairs = list(zip(self.preconditioners, drafts, strict=True))
        for kfac, draft in pairs:
            kfac.precondition(draft)
        if self.everywhere:
            parts = [torch.stack(draft.local.numbers) / kfac.plan.workers for kfac, draft in pairs]
            with self.preconditioners[0].metrics.stage("relayout"):
                sums = self.channel.sum(torch.stack(parts).sum(dim=0))
        for kfac, draft in pairs:
            kfac.finish(draft, sums)
        return drafts

    def commit(self, drafts: Sequence[StepDraft], *, applied: bool) -> None:
        """After the user's optimizer. Collective."""
        for kfac, draft in zip(self.preconditioners, drafts, strict=True):
            kfac.commit(draft, applied=applied)

    def reset(self) -> None:
        """Start afresh: no factors, no eigenbases, step 0."""
        for kfac in self.preconditioners:
            kfac.load_state_dict({})

    def close(self) -> None:
        """Give back hooks, threads and process groups. Local, and harmless when repeated."""
        for kfac in self.preconditioners:
            kfac.close()
        if self.everywhere:
            self.channel.close()
