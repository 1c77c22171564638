"""K-FAC of one rank: a preconditioner for each of its domains, which step, save and load as one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_kfac.comm.message import Channel
from ds_kfac.step.draft import Draft
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

    @property
    def active(self) -> bool:
        """Whether any domain captures in this step."""
        return any(kfac.capture.active for kfac in self.preconditioners)

    def step(self) -> list[Draft]:
        """Replace all gradients. Collective. What kl-clip needs is summed over all domains: one small all-reduce.

        Returns what each domain's step computed, for :meth:`commit`.
        """
        if not self.everywhere:
            return [self.preconditioners[0].step()]
        drafts = [kfac.prepare() for kfac in self.preconditioners]
        for kfac, draft in self._pairs(drafts):
            kfac.precondition(draft)
        parts = [kfac.numbers(draft) for kfac, draft in self._pairs(drafts)]
        with self.preconditioners[0].metrics.stage("relayout"):
            totals = self.channel.sum(torch.stack(parts).sum(dim=0))
        for kfac, draft in self._pairs(drafts):
            kfac.finish(draft, totals)
        return drafts

    def _pairs(self, drafts: Sequence[Draft]) -> zip:
        return zip(self.preconditioners, drafts, strict=True)

    def commit(self, drafts: Sequence[Draft], *, applied: bool) -> None:
        """After the user's optimizer. Collective."""
        for kfac, draft in self._pairs(drafts):
            kfac.commit(draft, applied=applied)

    def begin_backward(self, seed: torch.Tensor) -> None:
        """Tell what gradient reached the user's loss."""
        for kfac in self.preconditioners:
            kfac.capture.begin_backward(seed)

    @contextmanager
    def own_backward(self, *, retain_graph: bool = False) -> Iterator[None]:
        """Around a backward of this engine's loss, also where nothing is captured: its gradients, and no others, count.
        Closes the micro-batch."""
        for kfac in self.preconditioners:
            kfac.capture.begin_own()
        try:
            yield
        finally:
            for kfac in self.preconditioners:
                kfac.capture.end_own(retain_graph=retain_graph)

    def reset(self) -> None:
        """Start afresh."""
        for kfac in self.preconditioners:
            kfac.reset()

    def close(self) -> None:
        """Give back hooks, threads and process groups. Local, and harmless when repeated."""
        for kfac in self.preconditioners:
            kfac.close()
        if self.everywhere:
            self.channel.close()
