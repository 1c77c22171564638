"""Monte-Carlo Fisher in an engine: before each true backward of a due step, one of a loss on drawn labels."""

from typing import Any

import torch

from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.sampling import SAMPLERS, Sampler
from ds_kfac.zero.extra_backward import ExtraBackward

SEED = 0x5EED


class LossSampling:
    """Keeps the prediction of the last forward, and feeds the capture with gradients of a sampled loss.

    Attributes:
        sampler: draws labels and forms the loss.

    Raises:
        ValueError: the module that ``kfac.factor.prediction`` names does not exist.
    """

    def __init__(self, kfac: KFACOptimizer, engine: Any) -> None:
        self.kfac = kfac
        factor = kfac.config.factor
        self.sampler: Sampler = SAMPLERS[factor.sampler]
        modules = dict(engine.module.named_modules())
        if factor.prediction is not None and factor.prediction not in modules:
            raise ValueError(f"kfac.factor.prediction: the model has no module {factor.prediction!r}")
        self._prediction: Any = None
        self._extra = ExtraBackward(engine)
        self._handle = modules[factor.prediction or ""].register_forward_hook(self._keep)
        self._generator = torch.Generator(device=kfac.device)
        self._drawn, self._step = 0, -1

    def remove(self) -> None:
        self._extra.remove()
        self._handle.remove()
        self._prediction = None

    def _keep(self, module: Any, inputs: tuple, output: Any) -> None:
        if self.kfac.capture.active and module.training and torch.is_grad_enabled():
            if torch._C._current_graph_task_id() == -1:  # not a recomputation
                self._prediction = output

    def sample(self) -> None:
        """Draw, run the extra backward, add its statistics. At ZeRO-3 all ranks must call it together.

        Raises:
            ValueError: no forward was seen, or the graph does not allow a second backward.
        """
        capture = self.kfac.capture
        if not capture.active:
            return
        prediction, self._prediction = self._prediction, None
        if prediction is None:
            raise ValueError(
                'kfac.factor.fisher "monte_carlo": no prediction since the last backward; the module named in '
                "kfac.factor.prediction must be called in every forward, and backward follow each forward"
            )
        if self._step != self.kfac.steps:
            self._step, self._drawn = self.kfac.steps, 0
        # the same draws when a run is resumed, others on every rank, step and micro-batch
        self._generator.manual_seed(SEED + self._step * 1_000_003 + self._drawn * 10_007 + self.kfac.rank)
        self._drawn += 1
        with torch.enable_grad():
            loss = self.sampler(prediction, capture.info, self._generator)
        # about the loss scale, so that 16-bit gradients are neither lost nor too large
        seed = torch.as_tensor(self.kfac.layout.manual_scale(), dtype=torch.float32, device=loss.device)
        gradients = self._extra(loss, [call.edge for call in capture.pending], seed)
        capture.add_sampled(gradients, seed)

    def check(self) -> None:
        """At a due step: statistics without a sample would be a Fisher of nothing.

        Raises:
            ValueError: on this rank no sample was drawn since the last step.
        """
        if self.kfac.capture.active and self._step != self.kfac.steps:
            raise ValueError(
                'kfac.factor.fisher "monte_carlo": this step had no sampled backward; use engine.backward(loss), or '
                "call engine.kfac.sample() before loss.backward()"
            )
