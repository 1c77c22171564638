"""Run a model over data, and collect the layers' calls and the gradients of their outputs for each
batch.

Ranks run their batches at the same time. Only the gradients of layer outputs are requested from
autograd, so no parameter gets a gradient. At ZeRO stage 3 all ranks fetch weights together. So a
rank that has no batch left runs its last batch again. A rank that never had a batch runs a batch of
another rank.
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
"""Dtype of the model -> number by which the loss is multiplied, for dtypes in which gradients would
underflow."""
SEED = 0x5EED
"""Seed of the labels that are drawn with "monte_carlo"."""
WRAPPERS = DeepSpeedEngine, nn.DataParallel, nn.parallel.DistributedDataParallel
"""Classes that hold the model as ``module``."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(eq=False)
class Batch:
    """Results of running a batch on this rank. They are empty if the rank has no batch left.

    Attributes:
        number: index of the batch, counted from 0, the same on all ranks.
        calls: calls of the layers, in the order in which they ran.
        gradients: gradient of each call's output, None where the loss does not depend on the
            output. None in place of the list if there was no backward pass.
        sequences: number of sequences, which is the size of dimension 0 of the batch's first
            tensor.
        rows: number of rows of the layer nearest to the loss, without padding.
        gain: number by which a gradient is multiplied to get the gradient of a single loss term.
    """

    number: int
    calls: Sequence[Call] = ()
    gradients: Sequence[Tensor | None] | None = ()
    sequences: int = 0
    rows: Tensor | float = 0.0
    gain: Tensor | float = 1.0


class Passes:
    """Passes of a model over data. ``loss``, ``reduction``: see :func:`ds_kfac.fit`."""

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
        self.data = data
        self.loss = loss
        self.config = config
        self.channel = channel
        self.is_sum = reduction == "sum" and config.fisher != "monte_carlo"
        self.is_hidden = not shows or channel.rank > 0
        first = next(self.model.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        self.device = torch.device(first.device if self.engine is None else self.engine.device)
        with self._autocast():
            casts = torch.is_autocast_enabled(self.device.type)
            dtype = torch.get_autocast_dtype(self.device.type) if casts else first.dtype
        self.scale = SCALES.get(dtype, 1.0)
        self.is_sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())

    def over(self, what: str, capture: Capture, keys: frozenset[str]) -> Iterator[Batch]:
        """Run the model on every batch. Collective.

        Args:
            what: title of the progress bar.
            keys: factors to capture.

        Yields the same number of results on every rank.

        Raises:
            FactorsError: on every rank, if a batch of any rank is wrong, or if no rank has a batch.
        """
        bar = tqdm(self.data, what, unit=" batches", disable=self.is_hidden)
        iterator = iter(bar)
        last = None
        problem = ""  # this rank's problem; the other ranks learn of it with the next batch
        for number in itertools.count():
            batch = None
            try:
                batch = next(iterator, None)
                if batch is not None and _first(batch) is None:
                    raise ValueError("the batch contains no tensor with at least one dimension")
            except Exception as error:
                problem = problem or f"batch {number}: {type(error).__name__}: {error}"
            has_batch = batch is not None
            # at ZeRO stage 3 a rank that never has a batch runs one that another rank sends
            sends_batch = self.is_sharded and number == 0
            sent: Any = batch if sends_batch else has_batch or None
            present = [value for value in self._together(problem, sent) if value is not None]
            if not present:
                break
            if has_batch:
                last = batch
            elif number == 0:
                last = present[0]
            result = Batch(number)
            if has_batch or self.is_sharded:
                result, problem = self._try(last, number, capture, keys)
            if not has_batch:
                result = Batch(number)
            yield result
            result.calls = result.gradients = ()  # the caller still has it: free the memory
        if not number:
            raise FactorsError("ds_kfac.fit: the data is empty, on every rank")

    def _together(self, problem: str, value: Any = None) -> list[Any]:
        """Return every rank's value. Raises FactorsError on all ranks if any rank has a problem."""
        everyone = gathered((problem, value), self.channel.group)
        texts = [f"rank {rank}, {text}" for rank, (text, _) in enumerate(everyone) if text]
        if texts:
            raise FactorsError("ds_kfac.fit: " + "; ".join(texts[:4]))
        return [value for _, value in everyone]

    def _try(
        self, batch: Any, number: int, capture: Capture, keys: frozenset[str]
    ) -> tuple[Batch, str]:
        """Return a batch's result, and a text that says what is wrong with the batch, or ""."""
        result = Batch(number)
        try:
            problem = self._run(batch, result, capture, keys)
            if problem:
                problem = f"batch {number}: {problem}"
        except FactorsError:
            raise
        except Exception as error:
            if self.is_sharded and self.channel.world > 1:  # others wait for this rank's weights
                raise
            problem = f"batch {number}: {type(error).__name__}: {error}"
        return (Batch(number), problem) if problem else (result, "")

    def _run(self, batch: Any, result: Batch, capture: Capture, keys: frozenset[str]) -> str:
        """Run the model on a batch and fill its result. Returns what is wrong with the batch, or
        ""."""
        for layer, error in capture.failed.items():
            return f"the rows of {layer} in the previous batch are not known: {error}"
        batch = _pytree.tree_map(
            lambda x: x.to(self.device) if _moves(x) else x, batch, is_leaf=_moves
        )
        result.sequences = len(_first(batch))
        capture.begin_step(keys, result.number)
        with torch.enable_grad(), self._autocast():
            value = self._value(batch, result.number)
        result.calls = calls = list(capture.pending)
        if self.config.fisher == "activations_only":
            result.gradients = None
            return ""
        problem = self._no_loss(value, calls)
        if self.is_sharded:  # others would wait in their backward pass for this rank's weights
            self._together(f"batch {result.number}: {problem}" if problem else "")
        if problem:
            return problem
        edges = [call.edge for call in calls if call.edge is not None]
        seed = torch.full_like(value, self.scale)
        gradients = torch.autograd.grad(value, edges, seed, allow_unused=True)
        if not value.isfinite().all():  # check only now: all ranks must run the backward pass
            return f"the loss is {float(value.detach())}; leave the batch out"
        sums = [g.sum(dtype=torch.float32) for g in gradients if g is not None]
        if sums and not torch.stack(sums).isfinite().all():
            return "a gradient is not finite; leave the batch out"
        result.gradients = gradients
        rows = capture.rows_of_pass(calls, gradients)
        result.rows = torch.as_tensor(rows, dtype=torch.float32, device=self.device)
        result.gain = (torch.ones_like(result.rows) if self.is_sum else result.rows) / self.scale
        return ""

    def _value(self, batch: Any, number: int) -> Any:
        """Return the loss of a batch. With "monte_carlo" it is the loss on labels drawn from the
        model's prediction."""
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
        if self.config.fisher != "monte_carlo":
            return value
        prediction = prediction_tensor(outputs[-1])
        # only entries of the prediction on which the loss depends get labels
        reached = torch.ones_like(prediction, dtype=torch.bool)
        is_loss = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
        if is_loss:
            (gradient,) = torch.autograd.grad(value, prediction, retain_graph=True)
            reached = gradient != 0
        generator = torch.Generator(device=self.device)
        generator.manual_seed(SEED + number * 1_000_003 + self.channel.rank)
        return SAMPLERS[self.config.sampler](prediction, reached, generator).float()

    def _no_loss(self, value: Any, calls: Sequence[Call]) -> str:
        """Return why a loss has no gradients; "" if it has gradients."""
        if isinstance(value, Tensor) and value.numel() == 1:
            return "" if calls and value.requires_grad else "the loss depends on no layer"
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        advice = "" if self.loss else "; pass the argument loss to fit"
        return f"the loss is not a scalar: got {got}{advice}"

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the engine's autocast context. Without an engine, the caller's autocast stays in
        effect."""
        dtype = None if self.engine is None else autocast(self.engine)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def _first(batch: Any) -> Any:
    """Return the first tensor of a batch that has at least one dimension. Its first dimension
    counts the batch's sequences. Return None if the batch has no such tensor."""
    return next((x for x in tensors_of(batch) if x.ndim), None)


def _moves(x: Any) -> bool:
    return hasattr(x, "to")


def _returned_loss(output: Any) -> Any:
    """Return the loss in a model's output: its ``loss``, the first scalar of a tuple, or else the
    output itself."""
    if isinstance(output, Mapping):
        return output.get("loss", output)
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        return next((x for x in output if isinstance(x, Tensor) and x.ndim == 0), output)
    return getattr(output, "loss", output)
