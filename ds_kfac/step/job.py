"""K-FAC on one rank: a preconditioner for each of its domains (dense layers, experts), which step as one."""

from collections.abc import Sequence
from typing import Any

import torch

from ds_kfac.comm.message import Channel
from ds_kfac.step.draft import StepDraft
from ds_kfac.step.preconditioner import KFACPreconditioner


class Job:
    """The preconditioners of this rank's domains.

    Every rank enters the domains' collectives in the order of ``preconditioners``.

    Args:
        preconditioners: the dense layers' first.

    Attributes:
        everywhere: whether the job has more than one domain.
        channel: connects all ranks that train the model.
    """

    def __init__(self, preconditioners: Sequence[KFACPreconditioner]) -> None:
        self.preconditioners = tuple(preconditioners)
        self.everywhere = bool(self.preconditioners[0].engine_view.domain.name)
        self.channel = Channel(torch.distributed.group.WORLD) if self.everywhere else self.preconditioners[0].channel

    @property
    def steps(self) -> int:
        """Number of applied steps, the same in all domains."""
        return self.preconditioners[0].steps

    @property
    def active(self) -> bool:
        """Whether any domain captures in this step."""
        return any(kfac.capture.active for kfac in self.preconditioners)

    def step(self) -> list[StepDraft]:
        """Replace all gradients. Collective. kl-clip's numbers are summed over all domains by one small all-reduce.

        Returns a draft for each domain, for :meth:`commit`. If it raises, or is interrupted, K-FAC's state is as if it
        had not been begun; gradients, which it may have overwritten, are dropped.
        """
        try:
            drafts, sums = [kfac.prepare() for kfac in self.preconditioners], None
            pairs = list(zip(self.preconditioners, drafts, strict=True))
            for kfac, draft in pairs:
                kfac.precondition(draft)
            if self.everywhere and drafts[0].local.numbers:
                parts = [torch.stack(draft.local.numbers) / kfac.plan.workers for kfac, draft in pairs]
                with self.preconditioners[0].metrics.stage("relayout"):
                    sums = self.channel.sum(torch.stack(parts).sum(dim=0))
            for kfac, draft in pairs:
                kfac.finish(draft, sums)
            return drafts
        except BaseException:
            for kfac in self.preconditioners:
                kfac.layout.clear()
                kfac.layout.optimizer.zero_grad()
            self._abandon()
            raise

    def raised(self, error: Any, *_: Any) -> None:
        """The exit of a context around a backward."""
        if error is not None:
            self._abandon()

    def _abandon(self) -> None:
        """Drop what the step has seen so far. Local."""
        for kfac in self.preconditioners:
            kfac.resume(whole=False)

    def commit(self, drafts: Sequence[StepDraft], *, applied: bool, whole: bool = True) -> None:
        """Keep the drafts of a step that DeepSpeed has ``applied``, or drop them. Collective; of a step that raised,
        which is not ``whole``, local."""
        for kfac, draft in zip(self.preconditioners, drafts, strict=True):
            kfac.commit(draft, applied=applied, whole=whole)

    def reset(self) -> None:
        """Start again at step 0, without factors and eigenbases."""
        for kfac in self.preconditioners:
            kfac.load_state_dict({})

    def close(self) -> None:
        """Remove hooks and process groups. Local; may be called twice."""
        for kfac in self.preconditioners:
            kfac.close()
        if self.everywhere:
            self.channel.close()
