"""Monte-Carlo Fisher: statistics from a loss on labels that are drawn from the model's own
prediction (Kunstner et al. 2019, arXiv:1905.12558).

In a captured step (one that collects statistics), a backward pass of this sampled loss runs through
the same graph before each backward pass of the true loss. The extra pass computes only the
gradients of layer outputs. DeepSpeed does not notice it, and the user's backward pass gives bitwise
the same gradients as without it.

The extra pass calls ``autograd.grad`` with inputs. This call does not run AccumulateGrad nodes, so
ZeRO's gradient hooks do not fire. The hooks that ``engine.forward`` puts on its outputs would fire,
so they are switched off during the pass. At stage 3, the extra pass would also have to fetch and
release weights without DeepSpeed's parameter coordinator, so :func:`ds_kfac.attach` refuses stage
3.

Users can replace the :class:`ds_kfac.model.sampled_loss.Sampler`.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ds_kfac.log import logger
from ds_kfac.model.layers import tensors_of
from ds_kfac.model.masks import Forward
from ds_kfac.model.sampled_loss import SAMPLERS, Sampler, prediction_tensor
from ds_kfac.step.preconditioner import KFACPreconditioner

_WHAT = 'kfac.factor.fisher "monte_carlo" needs a second backward pass through the graph'
_CHECKPOINTING = (
    f"{_WHAT}, which this activation checkpointing refuses; use torch.utils.checkpoint with "
    "use_reentrant=False (deepspeed.checkpointing and torch's reentrant mode do not work)"
)
_DONATED = (
    f"{_WHAT}, but a compiled graph overwrites its buffers in the first backward pass; set "
    "torch._functorch.config.donated_buffer = False before the first forward pass"
)
SEED = 0x5EED


def graph(root: Node | None) -> Iterator[Node]:
    """Yield all nodes that a backward pass from ``root`` may run."""
    seen = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(next_node for next_node, _ in node.next_functions)


class LossSampling:
    """Keeps the prediction of each forward pass until its backward pass. Passes the gradients of a
    sampled loss to the :class:`~ds_kfac.model.capture.Capture`, which adds up the statistics.

    Attributes:
        sampler: function that draws labels and computes the loss.
    """

    def __init__(self, kfac: KFACPreconditioner, engine: Any) -> None:
        self.kfac = kfac
        factor = kfac.config.factor
        modules = dict(engine.module.named_modules())
        self.sampler: Sampler = SAMPLERS[factor.sampler]
        # forward pass -> its prediction, kept as long as calls of layers in this pass are pending
        self._predictions: WeakKeyDictionary[Forward, Any] = WeakKeyDictionary()
        # DeepSpeed's OutputBackwardHookManager of each forward pass whose outputs still exist
        self._managers: WeakSet = WeakSet()
        self._predicting = modules[factor.prediction or ""]
        self._handles = [
            engine.register_forward_hook(lambda module, inputs, output: self._collect(output)),
            self._predicting.register_forward_hook(self._keep),
        ]
        self._generator = torch.Generator(device=kfac.device)
        self._drawn = 0  # number of draws of labels in step self._step, one per prediction
        self._step = -1
        self._warned = False

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._predictions.clear()

    def _collect(self, output: Any) -> None:
        for tensor in tensors_of(output):
            self._managers.update(getattr(tensor, "_backward_hook_managers", ()))

    def _keep(self, module: Any, inputs: tuple, output: Any) -> None:
        # Return at once in steps that are not captured. They run under torch.compile, and the code
        # below would break the graph.
        if not self.kfac.capture.active or not torch.is_grad_enabled():
            return
        is_copy = module is not self._predicting  # a copy of the module has the same hooks
        is_recomputation = torch._C._current_graph_task_id() != -1
        if not is_copy and not is_recomputation:
            self._predictions[self.kfac.capture.forward] = output

    def sample(self, loss: Tensor) -> None:
        """Draw labels for every forward pass on which the loss depends, run the extra backward
        pass, and add its statistics.

        Args:
            loss: the true loss. The predictions of forward passes on which this loss does not
                depend are kept for a later call.

        Raises:
            ValueError: no forward pass was seen in this step, or the graph does not allow a second
                backward pass.
        """
        capture = self.kfac.capture
        if not capture.active:
            return
        nodes = set(graph(loss.grad_fn))
        reached = {
            call.rows.forward for call in capture.pending if call.edge and call.edge.node in nodes
        }
        calls = [call for call in capture.pending if call.rows.forward in reached]
        if not calls and self._step == self.kfac.steps:
            return  # another backward pass through a forward pass that has been sampled already
        forwards = list(dict.fromkeys(call.rows.forward for call in calls))
        if not calls or any(forward not in self._predictions for forward in forwards):
            raise ValueError(
                'kfac.factor.fisher "monte_carlo": no prediction since the last backward pass; '
                "every forward pass must call the module that kfac.factor.prediction names, and "
                "must be followed by a backward pass"
            )
        if self._step != self.kfac.steps:
            self._step = self.kfac.steps
            self._drawn = 0
        # torch's and DeepSpeed's checkpointing have nodes of the same name
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
            raise ValueError(_CHECKPOINTING)
        # scale like the true loss, so that 16-bit gradients neither underflow nor overflow
        scale = torch.as_tensor(
            self.kfac.layout.loss_scale(), dtype=torch.float32, device=loss.device
        ).reshape(())
        predictions = [prediction_tensor(self._predictions.pop(forward)) for forward in forwards]
        true_gradients = self._gradients(loss, predictions, scale)
        losses = [
            self._sampled(prediction, gradient)
            for prediction, gradient in zip(predictions, true_gradients, strict=True)
        ]
        for forward, sampled in zip(reversed(forwards), reversed(losses), strict=True):
            calls_of_forward = [call for call in calls if call.rows.forward is forward]
            edges = [call.edge for call in calls_of_forward if call.edge]
            with capture.recomputing(forward):
                # divide, to get a mean over forward passes
                gradients = self._gradients(sampled / len(forwards), edges, scale)
            capture.add_asked(calls_of_forward, gradients, scale)
        capture.end_pass()

    def _gradients(self, loss: Tensor, inputs: Sequence[Any], scale: Tensor) -> list[Tensor | None]:
        """Return the gradients of ``loss * scale`` at ``inputs``; None where the loss does not
        depend on an input."""
        if not loss.requires_grad or not inputs:
            return [None] * len(inputs)
        # during this pass, the outputs of engine.forward must pass gradients on unchanged, and must
        # not begin a backward pass of the engine
        saved = [(one, one.preprocess_done, one.preprocess_per_tensor_fn) for one in self._managers]
        for manager, _, _ in saved:
            manager.preprocess_done = True
            manager.preprocess_per_tensor_fn = None
        seed = scale.to(loss.dtype).expand(loss.shape)
        try:
            return list(
                torch.autograd.grad(loss, list(inputs), seed, retain_graph=True, allow_unused=True)
            )
        except RuntimeError as error:
            # DeepSpeed's non-reentrant checkpointing has no node that sample() could find
            if "not compatible with .grad()" in str(error):
                raise ValueError(_CHECKPOINTING) from error
            if "donated buffers" in str(error):
                raise ValueError(_DONATED) from error
            raise
        finally:
            for manager, done, function in saved:
                manager.preprocess_done = done
                manager.preprocess_per_tensor_fn = function

    @torch.enable_grad()
    def _sampled(self, prediction: Tensor, gradient: Tensor | None) -> Tensor:
        """Return a loss on labels drawn from a prediction. The loss has only the terms for which
        ``gradient``, the true loss's gradient with respect to the prediction, is not zero.

        The generator is seeded from step, forward pass and rank, so a resumed run draws the same
        labels.
        """
        if gradient is None:
            reached = torch.zeros_like(prediction, dtype=torch.bool)
        else:
            reached = gradient != 0
        self._generator.manual_seed(
            SEED + self._step * 1_000_003 + self._drawn * 10_007 + self.kfac.rank
        )
        self._drawn += 1
        return self.sampler(prediction, reached, self._generator).float()

    def check(self) -> None:
        """Check that something was sampled in a captured step. If not, warn once.

        Without a sample this rank has no statistics in this step. This is not an error: the rank's
        batch may have been skipped, and an error on one rank would stop the job.

        Raises:
            ValueError: nothing was ever sampled on this rank, so the program does not call
                :meth:`sample`.
        """
        if self.kfac.capture.active and self._step != self.kfac.steps:
            text = (
                'kfac.factor.fisher "monte_carlo": this step had no sampled backward pass; use '
                "engine.backward(loss), or call engine.kfac.sample(loss) before loss.backward()"
            )
            never_sampled = self._step < 0
            if never_sampled:
                raise ValueError(text)
            if not self._warned:
                logger.warning(
                    f"ds_kfac: rank {self.kfac.rank} has no statistics in step {self.kfac.steps}: "
                    f"{text}"
                )
            self._warned = True
        # Drop predictions of forward passes without a backward pass. The weak keys alone do not
        # suffice, because a hook on the graph may hold a key.
        self._predictions.clear()
