"""Runs a model over data for :mod:`ds_kfac.factors.fitting`. Ranks take their batches at the same time; autograd is
asked for the gradients of layer outputs, so no parameter gets one."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any
from typing import Any as ArgumentReader
from typing import Any as BatchInfo
from typing import Any as ReadBatch

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from tqdm import tqdm

from ds_kfac.comm.message import Channel, failing_together, gathered
from ds_kfac.factors.files import FactorsError, crc32
from ds_kfac.factors.progress import Progress
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec, tensors_of

returned_loss = None  # noqa
from ds_kfac.model.rows import Call, RowSums
from ds_kfac.model.sampled_loss import Sampler
from ds_kfac.zero.deepspeed_versions import autocast

SCALES = {torch.float16: 2.0**12}
"""dtype -> factor on the loss, where gradients would underflow."""
SEED = 0x5EED
END = object()
AROUND = DeepSpeedEngine, nn.DataParallel, nn.parallel.DistributedDataParallel
"""What holds the model as ``module``."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Batch:
    """Results of a batch on this rank; empty if the rank has no batch left.

    Attributes:
        number: the same on all ranks, from 0.
        calls: (layer's call, gradient of its output times ``Passes.seed``, None if the loss does not depend on it).
        sequences: first dimension of the batch's first tensor.
        rows: elements of that tensor if they are tokens, else its first dimension.
        positions: product of its first two dimensions.
        problem: text of what is wrong with the batch; "" if nothing is.
    """

    number: int
    calls: Sequence[tuple[Call, Tensor | None]] = ()
    sequences: int = 0
    rows: int = 0
    positions: int = 0
    problem: str = ""


class Passes:
    """Passes of a model over data.

    Args:
        model: an nn.Module or a DeepSpeedEngine.
        loss, reduction, read_batch: see :func:`ds_kfac.factors.fitting.fit`.
        fisher: "empirical", "monte_carlo", or "activations_only", which needs no gradients.
        padding: which rows count, as the config's ``padding.count``.

    Attributes:
        seed: factor on gradients.
        device: the model's.
        mark: checksum of this rank's data, see :func:`_marked`; None until it was read to its end.
    """

    def __init__(
        self, model: Any, data: Iterable[Any], loss: Loss | None, *,
        reduction: str, fisher: str, sampler: Sampler, read_batch: ReadBatch | None, padding: str, channel: Channel,
        shows: bool,
    ) -> None:  # fmt: skip
        self.engine = model if isinstance(model, DeepSpeedEngine) else None
        self.model: nn.Module = model.module if isinstance(model, AROUND) else model
        self.data, self.loss, self.channel, self.shows = data, loss, channel, shows
        self.fisher, self.sampler = fisher, sampler
        first: Tensor = next(self.model.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
        self.device = torch.device(first.device if self.engine is None else self.engine.device)
        with self._autocast():
            casts = torch.is_autocast_enabled(self.device.type)
            dtype = torch.get_autocast_dtype(self.device.type) if casts else first.dtype
        self.seed = SCALES.get(dtype, 1.0)
        self._error: Exception | None = None
        self.mark: int | None = None
        # at ZeRO stage 3 all ranks fetch weights together: a rank without a batch runs its last one again
        self.sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        self._reader = read_batch or ArgumentReader(self.model, count=padding)
        self._divisor = 1.0 if reduction == "sum" and fisher != "monte_carlo" else None

    def weights(self) -> str:
        """A fingerprint of the weights: their squared norm. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.model.parameters():
            local = getattr(parameter, "ds_tensor", parameter).detach()
            norm = torch.linalg.vector_norm(local, dtype=torch.float64).to(self.device) if local.numel() else 0.0
            total += norm**2
        return f"{float(self.channel.sum(total)):.9g}"

    def marks(self) -> list[int]:
        """Checksums of all ranks' batches, see :func:`_marked`; reads the data if no pass has. Collective."""
        with failing_together("ds_kfac.fit: data", self.channel.group, FactorsError):
            if self.mark is None:
                self.mark = reduce(_marked, self.data, 0)
        return gathered(self.mark, self.channel.group)

    def capture(self, layers: Iterable[LayerSpec], weight_sharing: str) -> Capture:
        """Hooks for :meth:`over`."""
        rows = RowSums(weight_sharing, positions=False, divided=self.fisher != "monte_carlo")
        return Capture(self.model, layers, lambda: self.seed, rows=rows, on_demand=True, read_batch=self._read_batch)

    def over(
        self, what: str, capture: Capture, keys: frozenset[str], progress: Progress,
        saved: Callable[[], Mapping[str, Tensor]], wrong: Callable[[], str],
    ) -> Iterator[Batch]:  # fmt: skip
        """The batches of a pass, after those of the last save. Collective; raises FactorsError on every rank.

        Args:
            what: name of the pass, for the progress bar.
            saved: gives the tensors to save now and then.
            wrong: gives a text if the last batch's sums are invalid, else "".
        """
        seen, begun, last, mark, iterator = list(progress.seen), progress.batches, None, 0, iter(self.data)
        try:
            total = len(self.data)  # type: ignore[arg-type]
        except TypeError:  # a stream
            total = None
        hidden = not self.shows or self.channel.rank > 0
        with tqdm(total=total, initial=begun, desc=what, unit=" batches", disable=hidden) as bar:
            rows = progress.seen[2]  # of earlier runs
            for number in itertools.count(begun):
                batch, problem = END, ""
                try:
                    for skipped in itertools.islice(iterator, begun if number == begun else 0):
                        last, mark = skipped, _marked(mark, skipped)
                    if number == begun > 0 and mark != progress.mark:
                        problem = (
                            "the data is not what it was before the last save; remove the folder, or give that data"
                        )
                    batch = next(iterator, END)
                    if batch is not END and not any(x.ndim for x in tensors_of(batch)):
                        problem = f"batch {number}, counted from 0: has no tensor of at least one dimension"
                except Exception as error:  # raised on all ranks by _summed, as they wait for this one
                    problem = f"batch {number}: {type(error).__name__}: {error}"
                    self._error = error
                has = batch is not END
                last, mark = (batch, _marked(mark, batch)) if has else (last, mark)
                without = self.sharded and last is None
                left, save, lacking = self._summed(problem, has, self.channel.rank == 0 and progress.due, without)
                if not left:
                    break
                if lacking:  # a rank that never had a batch, or resumes after its last one, runs another rank's
                    others = gathered(batch if has else None, self.channel.group)
                    last = next(other for other in others if other is not None) if without else last
                result = self._try(last, number, capture, keys) if has or self.sharded else Batch(number)
                result = result if has else Batch(number)
                yield result
                result.calls = ()  # the caller still refers to the result: free gradients before the next batch runs
                problem = result.problem or (wrong() and f"batch {number}, counted from 0: {wrong()}")
                more = self._summed(problem, has, result.sequences, result.rows)
                seen = [a + b for a, b in zip(seen, more, strict=True)]
                rate = (seen[2] - rows) / max(1e-9, bar.format_dict["elapsed"])
                bar.set_postfix_str(f"{seen[2]:,.0f} rows, {rate:,.0f} a second", refresh=False)
                bar.update()
                if save:
                    progress.save(number + 1, seen, mark, saved)
        progress.seen, self.mark = seen, mark
        if not seen[0]:
            raise FactorsError("ds_kfac.fit: the data is empty, on every rank")

    def _summed(self, problem: str, *numbers: float) -> list[float]:
        """Numbers summed over ranks. Collective; raises FactorsError on all ranks if one has a problem."""
        vector = torch.tensor([bool(problem), *map(float, numbers)], dtype=torch.float64, device=self.device)
        problems, *sums = self.channel.sum(vector).tolist()
        if problems:
            everyone = enumerate(gathered(problem, self.channel.group))
            texts = [f"rank {rank}, {text}" for rank, text in everyone if text]
            raise FactorsError("ds_kfac.fit: " + "; ".join(texts[:4])) from self._error
        return sums

    def _read_batch(self, arguments: tuple, keywords: Mapping[str, Any]) -> BatchInfo:
        info = self._reader(arguments, keywords)
        return info if self._divisor is None else replace(info, divisor=self._divisor, items=None)

    def _try(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        try:
            return self._run(_to(batch, self.device), number, capture, keys)
        except FactorsError as problem:
            return Batch(number, problem=f"batch {number}, counted from 0: {problem}")
        except Exception as error:
            if self.sharded and self.channel.world > 1:  # others wait inside the forward for this rank's weights
                raise
            self._error = error
            return Batch(number, problem=f"batch {number}: {type(error).__name__}: {error}")

    def _run(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        """Raises FactorsError for a batch that has no factors."""
        first = next(x for x in tensors_of(batch) if x.ndim)
        capture.begin_step(keys, number)
        with torch.enable_grad(), self._autocast():
            value = self._value(batch, number, capture)
        calls = capture.pending
        if self.fisher == "activations_only":
            gradients: Sequence[Tensor | None] = [call.x for call in calls]
        else:
            problem = self._no_loss(value, calls)
            refused = float(bool(problem))
            if self.sharded:  # others would wait in their backward for this rank's weights
                refused = float(self.channel.sum(torch.tensor(refused, dtype=torch.float64, device=self.device)))
            if problem:
                raise FactorsError(problem)
            if refused:
                return Batch(number)
            edges = [call.edge for call in calls if call.edge is not None]
            gradients = torch.autograd.grad(value, edges, torch.full_like(value, self.seed), allow_unused=True)
            if not bool(torch.isfinite(value)):  # checked after the backward: at ZeRO stage 3 all ranks must run it
                raise FactorsError(f"the loss is {float(value.detach())}; leave the batch out")
        rows = len(first) if first.is_floating_point() else first.numel()
        return Batch(number, list(zip(calls, gradients, strict=True)), len(first), rows, first.shape[:2].numel())

    def _no_loss(self, value: Any, calls: Sequence[Any]) -> str:
        """Why this has no gradients; "": it has."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = type(value).__name__ if not isinstance(value, Tensor) else f"shape {list(value.shape)}"
            got = "no loss (a scalar)" if value is None else got
            if self.loss is not None:
                return f"the loss is no scalar: got {got}"
            return f"the model returned {got}: give it labels, or fit the argument loss"
        return "" if calls and value.requires_grad else "its loss depends on no layer"

    def _autocast(self) -> AbstractContextManager[Any]:
        """The engine's autocast; without an engine, that around the call stays."""
        dtype = None if self.engine is None else autocast(self.engine)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _value(self, batch: Any, number: int, capture: Capture) -> Any:
        """The loss of a batch; with "monte_carlo" on drawn labels."""
        outputs: list[Any] = []
        handle = self.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            if self.loss is not None:
                value: Any = self.loss(self.model, batch)
            elif isinstance(batch, Mapping):
                value = returned_loss(self.model(**batch))
            else:
                value = returned_loss(self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch))
        finally:
            handle.remove()
        if self.fisher != "monte_carlo":
            return value
        drawn = torch.Generator(device=self.device)
        drawn.manual_seed(SEED + number * 1_000_003 + self.channel.rank)
        return self.sampler(outputs[-1], capture.forward.info, drawn).float()


def _marked(mark: int, batch: Any) -> int:
    """CRC-32 of a batch and those before it, whose CRC-32 is ``mark``."""
    for x in tensors_of(batch):
        mark = crc32(x, zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), mark))
    return zlib.crc32(b"end", mark)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if hasattr(batch, "to"):  # a tensor, a PackedSequence
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        values = [_to(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
