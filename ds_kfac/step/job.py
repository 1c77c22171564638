"""K-FAC on one rank. The rank has one preconditioner for each domain, for example one for its dense
layers and one for its experts (``zero/registry.py``). All preconditioners run in the same step."""

from collections.abc import Sequence

import torch

from ds_kfac.comm.message import Channel, gathered
from ds_kfac.step.preconditioner import KFACPreconditioner


class Job:
    """The preconditioners of this rank's domains.

    Every rank enters the collectives of the domains in the order of ``preconditioners``.

    Args:
        preconditioners: one for each domain. The preconditioner of the dense layers is the first.

    Attributes:
        everywhere: whether the job has more than one domain.
        channel: connects all ranks that train the model.
        numel: number of weight elements of the layers of all domains on all ranks. Each layer is
            counted once.
    """

    def __init__(self, preconditioners: Sequence[KFACPreconditioner]) -> None:
        self.preconditioners = tuple(preconditioners)
        self.everywhere = bool(self.preconditioners[0].engine_view.domain.name)
        if self.everywhere:
            self.channel = Channel(torch.distributed.group.WORLD)
        else:
            self.channel = self.preconditioners[0].channel
        # Several ranks have the same layer. Each rank adds a fraction of the layer's elements, so
        # the sum over all ranks counts the layer once.
        numel = sum(
            layer.numel / layer.copies / kfac.layout.world
            for kfac in self.preconditioners
            for layer in kfac.layers
        )
        self.numel: float = sum(gathered(numel, self.channel.group))

    @property
    def steps(self) -> int:
        """Number of applied steps, the same in all domains."""
        return self.preconditioners[0].steps

    @property
    def active(self) -> bool:
        """Whether this step collects statistics in any domain."""
        return any(kfac.capture.active for kfac in self.preconditioners)

    def begin(self) -> None:
        """Prepare for a step. Call this when DeepSpeed starts to process the gradients of the
        step."""
        for kfac in self.preconditioners:
            kfac.layout.begin()

    def step(self) -> None:
        """Replace all gradients by K-FAC's results. Collective.

        With several domains, a small all-reduce sums the scalars that the update rule needs (for
        example for clipping) over all domains. If the step raises an error, some of K-FAC's state
        may already have changed, as in a torch optimizer.
        """
        running = [(kfac, kfac.compute_results()) for kfac in self.preconditioners]
        sums = None
        if self.everywhere and self.preconditioners[0].rule.numbers:
            # each gradient worker of a layer has counted the layer in its numbers, so divide by the
            # number of gradient workers
            parts = [
                torch.stack([*now.outcome.numbers]) / kfac.plan.workers for kfac, now in running
            ]
            with self.preconditioners[0].metrics.stage("relayout"):
                sums = self.channel.sum(torch.stack(parts).sum(dim=0))
        for kfac, now in running:
            kfac.scatter(now, sums)

    def end(self, *, applied: bool) -> None:
        """Finish a step, after DeepSpeed's own step. Collective."""
        for kfac in self.preconditioners:
            kfac.layout.end()
            if not applied:
                kfac.skipped()
            kfac.resume()

    def drop_step(self) -> None:
        """Drop the rows that the hooks have captured, because a step or a backward pass raised an
        error. Local."""
        for kfac in self.preconditioners:
            kfac.resume(after_error=True)

    def reset(self) -> None:
        """Start again at step 0, without factors and eigenbases."""
        for kfac in self.preconditioners:
            kfac.load_state_dict({})

    def close(self) -> None:
        """Remove the hooks and process groups. Local. May be called twice."""
        for kfac in self.preconditioners:
            kfac.close()
        if self.everywhere:
            self.channel.close()
