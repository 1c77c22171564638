"""K-FAC of one rank: an optimizer for each of its domains, which step, save and load as one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.traffic import Channel


class Job:
    """The optimizers of this rank's domains.

    Collectives of several domains follow each other in the order of ``optimizers``, the same on every rank.

    Args:
        optimizers: that of the dense layers first.
        everywhere: whether there are other domains, here or on other ranks.

    Attributes:
        channel: connects all ranks that train the model.
    """

    def __init__(self, optimizers: Sequence[KFACOptimizer], *, everywhere: bool) -> None:
        self.optimizers, self.everywhere = tuple(optimizers), everywhere
        self.channel = Channel(torch.distributed.group.WORLD) if everywhere else self.optimizers[0].channel

    @property
    def steps(self) -> int:
        """Applied steps, of all domains alike."""
        return self.optimizers[0].steps

    @property
    def active(self) -> bool:
        """Whether any domain captures in this step."""
        return any(kfac.capture.active for kfac in self.optimizers)

    def step(self) -> None:
        """Replace all gradients. Collective. What kl-clip needs is summed over all domains: one small all-reduce."""
        if not self.everywhere:
            self.optimizers[0].step()
            return
        numbers = torch.stack([kfac.prepare() for kfac in self.optimizers]).sum(dim=0)
        with self.optimizers[0].metrics.stage("relayout"):
            totals = self.channel.sum(numbers)
        for kfac in self.optimizers:
            kfac.finish(totals)

    def commit(self, *, applied: bool) -> None:
        """After the user's optimizer. Collective."""
        for kfac in self.optimizers:
            kfac.commit(applied=applied)

    def begin_backward(self, seed: torch.Tensor) -> None:
        """Tell what gradient reached the user's loss."""
        for kfac in self.optimizers:
            kfac.capture.begin_backward(seed)

    @contextmanager
    def own_backward(self, *, retain_graph: bool = False) -> Iterator[None]:
        """Around a backward of this engine's loss, also where nothing is captured: its gradients, and no others, count.
        Closes the micro-batch."""
        for kfac in self.optimizers:
            kfac.capture.begin_own()
        try:
            yield
        finally:
            for kfac in self.optimizers:
                kfac.capture.end_own(retain_graph=retain_graph)

    def reset(self) -> None:
        """Start afresh."""
        for kfac in self.optimizers:
            kfac.reset()

    def close(self) -> None:
        """Give back hooks, threads and process groups. Local, and harmless when repeated."""
        for kfac in self.optimizers:
            kfac.close()
        if self.everywhere:
            self.channel.close()
