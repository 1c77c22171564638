"""Monte-Carlo Fisher in an engine: before each true backward of a due step, one of a loss on drawn labels."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_kfac.model.calls import Call
from ds_kfac.model.hooks import own_hook
from ds_kfac.model.loss_terms import LossTerms, output_terms
from ds_kfac.model.sampled_loss import SAMPLERS, Sampler
from ds_kfac.step.preconditioner import KFACPreconditioner
from ds_kfac.zero.extra_backward import ExtraBackward, graph

SEED = 0x5EED


class LossSampling:
    """Keeps the prediction of every forward until its backward, and feeds the capture with gradients of a sampled loss.

    Attributes:
        sampler: draws labels and forms the loss.
    """

    def __init__(self, kfac: KFACPreconditioner, engine: Any) -> None:
        self.kfac = kfac
        factor = kfac.config.factor
        self.sampler: Sampler = SAMPLERS[factor.sampler]
        modules = dict(engine.module.named_modules())
        self._predictions: WeakKeyDictionary[LossTerms, Any] = WeakKeyDictionary()  # live as long as pending calls
        self._extra = ExtraBackward(engine)
        predicting = modules[factor.prediction or ""]
        self._handle = predicting.register_forward_hook(own_hook(predicting, self._keep))
        self._generator = torch.Generator(device=kfac.device)
        self._drawn, self._step, self._warned = 0, -1, False

    def remove(self) -> None:
        self._extra.remove()
        self._handle.remove()
        self._predictions.clear()

    def _keep(self, module: Any, inputs: tuple, output: Any) -> None:
        if self.kfac.capture.active and module.training and torch.is_grad_enabled():
            if torch._C._current_graph_task_id() == -1:  # not a recomputation
                self._predictions[self.kfac.capture.loss] = output

    def sample(self, loss: Tensor | None = None) -> None:
        """Draw for every forward that waits for its backward, run the extra one, add its statistics.

        Args:
            loss: what the true backward starts from; forwards that it does not depend on go on waiting. None: all.

        Raises:
            ValueError: no forward was seen in this step, or the graph does not allow a second backward.
        """
        capture = self.kfac.capture
        if not capture.active:
            return
        calls = self._waiting(loss)
        if not calls and self._step == self.kfac.steps:
            return  # another backward through a forward that has been sampled
        forwards = list(dict.fromkeys(call.forward.loss for call in calls))
        if not calls or any(forward not in self._predictions for forward in forwards):
            raise ValueError(
                'kfac.factor.fisher "monte_carlo": no prediction since the last backward; the module named in '
                "kfac.factor.prediction must be called in every forward, and backward follow each forward"
            )
        if self._step != self.kfac.steps:
            self._step, self._drawn = self.kfac.steps, 0
        losses = [self._sampled(forward) for forward in forwards]
        # about the loss scale, so that 16-bit gradients are neither lost nor too large
        with torch.enable_grad():
            total = torch.stack(losses).sum()  # each a mean over its own terms
        seed = torch.as_tensor(self.kfac.layout.manual_scale(), dtype=torch.float32, device=total.device)
        capture.add_sampled(calls, self._extra(total, [call.edge for call in calls if call.edge], seed), seed)

    def _waiting(self, loss: Tensor | None) -> list[Call]:
        """The calls of forwards that ``loss`` depends on."""
        pending = self.kfac.capture.pending
        if loss is None or len({call.forward.loss for call in pending}) < 2:
            return pending
        nodes = set(graph(loss.grad_fn))
        reached = {call.forward.loss for call in pending if call.edge and call.edge.node in nodes}
        return [call for call in pending if call.forward.loss in reached]

    @torch.enable_grad()
    def _sampled(self, forward: LossTerms) -> Tensor:
        """A loss on labels drawn from a forward's prediction: the same when a run is resumed, others on every rank and
        in every step and forward."""
        prediction = self._predictions.pop(forward)
        info = forward.info
        if forward.terms is None:
            forward.terms = output_terms(prediction, info, weight_sharing=self.kfac.config.factor.weight_sharing)
        self._generator.manual_seed(SEED + self._step * 1_000_003 + self._drawn * 10_007 + self.kfac.rank)
        self._drawn += 1
        return self.sampler(prediction, info, self._generator).float()

    def check(self) -> None:
        """At a step. In a due one without a sample this rank has no statistics, which is said once: its batch may have
        been skipped, and what stops one rank stops the job.

        Raises:
            ValueError: none was ever drawn on this rank, so that the program lacks it.
        """
        if self.kfac.capture.active and self._step != self.kfac.steps:
            text = (
                'kfac.factor.fisher "monte_carlo": this step had no sampled backward; use engine.backward(loss), or '
                "call engine.kfac.sample() before loss.backward()"
            )
            if self._step < 0:
                raise ValueError(text)
            if not self._warned:
                logger.warning(f"ds_kfac: rank {self.kfac.rank} has no statistics in step {self.kfac.steps}: {text}")
            self._warned = True
        self._predictions.clear()  # of forwards without a backward: a hook on their own graph may hold the key
