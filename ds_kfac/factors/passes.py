"""One pass of a model over data, for :mod:`ds_kfac.factors.fitting`.

Ranks take their batches at the same time. Autograd is asked for the gradients of layer outputs, so
no parameter gets one. At ZeRO stage 3 all ranks fetch weights together: a rank without a batch then
runs an earlier one again, or another rank's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils import _pytree
from tqdm import tqdm

from ds_kfac.comm.message import Channel, gathered
from ds_kfac.config.keys import FactorConfig
from ds_kfac.factors.files import FactorsError
from ds_kfac.model.calls import Call
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import tensors_of
from ds_kfac.model.sampled_loss import SAMPLERS, prediction_tensor
from ds_kfac.zero.deepspeed_versions import autocast

SCALES = {torch.float16: 2.0**12}
"""dtype -> factor on the loss, where gradients would underflow."""
SEED = 0x5EED
END = object()
WRAPPERS = DeepSpeedEngine, nn.DataParallel, nn.parallel.DistributedDataParallel
"""What holds the model as ``module``."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(eq=False)
class Batch:
    """Results of a batch on this rank; empty if the rank has no batch left.

    Attributes:
        number: the same on all ranks, from 0.
        calls: of the layers, in the order in which they ran.
        gradients: of the calls' outputs, None where the loss does not depend on one; or None for
            all: there was no backward pass.
        sequences: first dimension of the batch's first tensor.
        rows: fp32 scalar, rows of the layer nearest to the loss, without padding: R_p.
        gain: fp32 scalar, factor from a gradient to that of a term's own loss.
        problem: text of what is wrong with the batch; "" if nothing is.
    """

    number: int
    calls: Sequence[Call] = ()
    gradients: Sequence[Tensor | None] | None = ()
    sequences: int = 0
    rows: Tensor | float = 0.0
    gain: Tensor | float = 1.0
    problem: str = ""


class Passes:
    """Passes of a model over data.

    Args:
        model: an nn.Module or a DeepSpeedEngine.
        loss, reduction: see :func:`ds_kfac.factors.fitting.fit`.

    Attributes:
        device: the model's.
    """

    def __init__(
        self,
        model: Any,
        data: Iterable[Any],
        loss: Loss | None,
        reduction: str,
        config: FactorConfig,
        channel: Channel,
        *,
        shows: bool,
    ) -> None:
        self.engine = model if isinstance(model, DeepSpeedEngine) else None
        self.model: nn.Module = model.module if isinstance(model, WRAPPERS) else model
        self.data, self.loss, self.channel, self.shows = data, loss, channel, shows
        self.config, self.fisher = config, config.fisher
        self.is_sum = reduction == "sum" and self.fisher != "monte_carlo"
        first = next(self.model.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        self.device = torch.device(first.device if self.engine is None else self.engine.device)
        with self._autocast():
            casts = torch.is_autocast_enabled(self.device.type)
            dtype = torch.get_autocast_dtype(self.device.type) if casts else first.dtype
        self.seed = SCALES.get(dtype, 1.0)
        self.is_sharded = any(hasattr(one, "ds_id") for one in self.model.parameters())

    def over(self, what: str, capture: Capture, keys: frozenset[str]) -> Iterator[Batch]:
        """Run the model on every batch. Collective: a rank gets as many results as the others.

        Args:
            what: name of the pass, for the progress bar.
            keys: of the factors that are to be captured.

        Raises:
            FactorsError: on every rank, if there is no batch, or a result has a problem, which the
                caller may have found.
        """
        iterator, last = iter(self.data), END
        total = len(self.data) if hasattr(self.data, "__len__") else None
        hidden = not self.shows or self.channel.rank > 0
        for number in tqdm(itertools.count(), what, total, unit=" batches", disable=hidden):
            problem, batch = "", END
            try:
                batch = next(iterator, END)
            except Exception as error:
                problem = f"batch {number}: {type(error).__name__}: {error}"
            last = last if batch is END else batch
            has_batch = [has for _, has in self._together(problem, batch is not END)]
            if not any(has_batch):
                break
            if number == 0 and self.is_sharded and not all(has_batch):
                others = (one for _, one in self._together("", None if batch is END else batch))
                last = batch if batch is not END else next(one for one in others if one is not None)
            result = Batch(number)
            if batch is not END or self.is_sharded:
                result = self._try(last, number, capture, keys)
            if batch is END:
                result = Batch(number)
            yield result
            # the caller still has the result: free the gradients before the next batch runs
            result.calls = result.gradients = ()
            self._together(result.problem)
        if not number:
            raise FactorsError("ds_kfac.fit: the data is empty, on every rank")

    def _together(self, problem: str, value: Any = None) -> list[tuple[str, Any]]:
        """(problem, value) of every rank. Raises FactorsError on all if one has a problem."""
        everyone = gathered((problem, value), self.channel.group)
        texts = [f"rank {rank}, {text}" for rank, (text, _) in enumerate(everyone) if text]
        if texts:
            raise FactorsError("ds_kfac.fit: " + "; ".join(texts[:4]))
        return everyone

    def _try(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        try:
            return self._run(batch, number, capture, keys)
        except FactorsError as problem:
            return Batch(number, problem=f"batch {number}, counted from 0: {problem}")
        except Exception as error:
            if self.is_sharded and self.channel.world > 1:  # others wait for this rank's weights
                raise
            return Batch(number, problem=f"batch {number}: {type(error).__name__}: {error}")

    def _run(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        """Raises FactorsError for a batch that has no factors."""
        batch = _pytree.tree_map(
            lambda x: x.to(self.device) if hasattr(x, "to") else x,
            batch,
            is_leaf=lambda x: hasattr(x, "to"),
        )
        tensor = next((x for x in tensors_of(batch) if x.ndim), None)
        if tensor is None:
            raise FactorsError("has no tensor of at least one dimension")
        result = Batch(number, sequences=len(tensor))
        capture.begin_step(keys, number)
        with torch.enable_grad(), self._autocast():
            value = self._value(batch, number)
        result.calls = calls = capture.pending
        if self.fisher == "activations_only":
            result.gradients = None
            return result
        problem = self._no_loss(value, calls)
        if self.is_sharded:  # others would wait in their backward for this rank's weights
            self._together(problem and f"batch {number}, counted from 0: {problem}")
        if problem:
            raise FactorsError(problem)
        edges = [call.edge for call in calls if call.edge is not None]
        seed = torch.full_like(value, self.seed)
        gradients = torch.autograd.grad(value, edges, seed, allow_unused=True)
        if not bool(torch.isfinite(value)):  # not before the backward: all ranks must run it
            raise FactorsError(f"the loss is {float(value.detach())}; leave the batch out")
        result.gradients = gradients
        self._weigh(result, capture)
        return result

    def _weigh(self, result: Batch, capture: Capture) -> None:
        """Set the number of rows, and the gain: a mean's terms are divided by that number."""
        sharing = capture.rows.weight_sharing
        for call, gradient in zip(reversed(result.calls), reversed(result.gradients or ())):
            if gradient is not None:  # the layer nearest to the loss
                capture.current.arrived(call.rows, call.gradient_rows(gradient), sharing)
                break
        rows = capture.current.rows(sharing)
        result.rows = torch.as_tensor(rows, dtype=torch.float32, device=self.device)
        result.gain = (torch.ones_like(result.rows) if self.is_sum else result.rows) / self.seed

    def _value(self, batch: Any, number: int) -> Any:
        """The loss of a batch; with "monte_carlo" on drawn labels."""
        outputs: list[Any] = []
        predicting = self.model.get_submodule(self.config.prediction or "")
        handle = predicting.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            if self.loss is not None:
                value: Any = self.loss(self.model, batch)
            elif isinstance(batch, Mapping):
                value = _returned_loss(self.model(**batch))
            else:
                arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
                value = _returned_loss(self.model(*arguments))
        finally:
            handle.remove()
        if self.fisher != "monte_carlo":
            return value
        prediction = prediction_tensor(outputs[-1])
        reached = torch.ones_like(prediction, dtype=torch.bool)
        is_loss = isinstance(value, Tensor) and value.numel() == 1 and value is not prediction
        if is_loss and value.requires_grad:
            gradient = torch.autograd.grad(
                value, prediction, retain_graph=True, materialize_grads=True, allow_unused=True
            )[0]
            reached = gradient != 0
        generator = torch.Generator(device=self.device)
        generator.manual_seed(SEED + number * 1_000_003 + self.channel.rank)
        return SAMPLERS[self.config.sampler](prediction, reached, generator).float()

    def _no_loss(self, value: Any, calls: Sequence[Call]) -> str:
        """Why a value has no gradients; "": it has."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, Tensor)
            got = f"shape {list(value.shape)}" if is_tensor else type(value).__name__
            if self.loss is not None:
                return f"the loss is no scalar: got {got}"
            return f"the model returned no loss (a scalar): got {got}; give fit the argument loss"
        return "" if calls and value.requires_grad else "its loss depends on no layer"

    def _autocast(self) -> AbstractContextManager[Any]:
        """The engine's autocast; without an engine, that around the call stays."""
        dtype = None if self.engine is None else autocast(self.engine)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def _returned_loss(output: Any) -> Any:
    """The loss in a model's output: ``loss`` of a mapping or an object, or the first scalar of a
    tuple; the output itself if there is none."""
    if isinstance(output, Mapping):
        return output.get("loss", output)
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        scalars = (x for x in output if isinstance(x, Tensor) and x.ndim == 0)
        return next(scalars, output)
    return getattr(output, "loss", output)
