"""Runs a model over data for :mod:`ds_kfac.factors.fitting`: batches of all ranks in step, and of each the gradients of
layer outputs, which autograd is asked for; no parameter gets one."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ds_kfac.comm.message import Channel, failing_together, gathered
from ds_kfac.factors.files import FactorsError, crc32
from ds_kfac.factors.progress import Progress
from ds_kfac.model.batch import ArgumentReader, BatchInfo, ReadBatch, tensors_of
from ds_kfac.model.capture import Capture
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.loss import returned_loss
from ds_kfac.model.rows import Call, RowSums
from ds_kfac.model.samplers import Sampler
from ds_kfac.zero.deepspeed_versions import autocast

SCALES = {torch.float16: 2.0**12}
"""Of a loss whose gradients would underflow in 16 bits; others have 1."""
SEED = 0x5EED
END = object()

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Batch:
    """What a batch of this rank has shown; empty where it has none left.

    Attributes:
        number: the same on all ranks, from 0.
        calls: of layers, and the gradients of their outputs, times ``Passes.seed``; None where the loss does not depend
            on one.
        sequences, rows: in its first tensor: its first dimension; its elements, if they are tokens.
        positions: of all sequences, the first two dimensions.
        problem: what is wrong with it, "" if nothing is.
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
        fisher: what gradients are of, "empirical", "monte_carlo" or "activations_only": then there are none.
        padding: which rows count, the key ``padding.count`` of a config.

    Attributes:
        seed: by which gradients are multiplied.
        device: of the model.
        mark: of this rank's data; None before it was read to its end.
    """

    def __init__(
        self, model: Any, data: Iterable[Any], loss: Loss | None, *,
        reduction: str, fisher: str, sampler: Sampler, read_batch: ReadBatch | None, padding: str, channel: Channel,
        shows: bool,
    ) -> None:  # fmt: skip
        self.engine = model if isinstance(getattr(model, "module", None), nn.Module) else None
        self.model: nn.Module = model if self.engine is None else self.engine.module
        self.data, self.loss, self.channel, self.shows = data, loss, channel, shows
        self.fisher, self.sampler = fisher, sampler
        first = next(self.model.parameters())
        self.device = torch.device(first.device if self.engine is None else self.engine.device)
        with self._autocast():
            casts = torch.is_autocast_enabled(self.device.type)
            dtype = torch.get_autocast_dtype(self.device.type) if casts else first.dtype
        self.seed = SCALES.get(dtype, 1.0)
        self._error: Exception | None = None
        self.mark: int | None = None
        # at ZeRO stage 3 ranks fetch weights from each other: one without a batch runs its last one again
        self.sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        self._reader = read_batch or ArgumentReader(self.model, count=padding)
        self._divisor = 1.0 if reduction == "sum" and fisher != "monte_carlo" else None

    def weights(self) -> str:
        """A number that other weights hardly have. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.model.parameters():
            own = getattr(parameter, "ds_tensor", parameter).detach()
            total += torch.linalg.vector_norm(own, dtype=torch.float64).to(self.device) ** 2 if own.numel() else 0.0
        return f"{float(self.channel.sum(total)):.9g}"

    def marks(self) -> list[int]:
        """Of each rank's batches, see :func:`_marked`; reads them if no pass has. Collective."""
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
        """The batches of a pass that are not in the last save. Collective; raises FactorsError on every rank.

        Args:
            what: for people.
            saved: what is to be saved now and then.
            wrong: says whether the last batch's sums are of no use.
        """
        seen, begun, last, iterator = list(progress.seen), progress.batches, None, iter(self.data)
        mark = 0
        total = len(self.data) if isinstance(self.data, Sized) else None
        hidden = not self.shows or self.channel.rank > 0
        with tqdm(total=total, initial=begun, desc=what, unit=" batches", disable=hidden) as bar:
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
                except Exception as error:  # told to all ranks, which wait for this one
                    problem = f"batch {number}: {type(error).__name__}: {error}"
                    self._error = error
                own = batch is not END
                last, mark = (batch, _marked(mark, batch)) if own else (last, mark)
                without = self.sharded and last is None
                left, save, lacking = self._together(problem, own, self.channel.rank == 0 and progress.due, without)
                if not left:
                    break
                if lacking:  # a rank that had none, or resumes after its last one, runs another's
                    others = gathered(batch if own else None, self.channel.group)
                    last = next(other for other in others if other is not None) if without else last
                found = self._try(last, number, capture, keys) if own or self.sharded else Batch(number)
                if not own:
                    found = Batch(number)
                yield found
                found.calls = ()  # whoever took it holds it while the next one runs
                problem = found.problem or (wrong() and f"batch {number}, counted from 0: {wrong()}")
                seen = [
                    a + b for a, b in zip(seen, self._together(problem, own, found.sequences, found.rows), strict=True)
                ]
                rate = (seen[2] - progress.seen[2]) / max(1e-9, bar.format_dict["elapsed"])
                bar.set_postfix_str(f"{seen[2]:,.0f} rows, {rate:,.0f} a second", refresh=False)
                bar.update()
                if save:
                    progress.save(number + 1, seen, mark, saved)
        progress.seen, self.mark = seen, mark
        if not seen[0]:
            raise FactorsError("ds_kfac.fit: the data is empty, on every rank")

    def _together(self, problem: str, *numbers: float) -> list[float]:
        """Sums over ranks. Collective; raises FactorsError on all if one has a problem."""
        told = torch.tensor([bool(problem), *map(float, numbers)], dtype=torch.float64, device=self.device)
        some, *found = self.channel.sum(told).tolist()
        if some:
            everyone = enumerate(gathered(problem, self.channel.group))
            texts = [f"rank {rank}, {text}" for rank, text in everyone if text]
            raise FactorsError("ds_kfac.fit: " + "; ".join(texts[:4])) from self._error
        return found

    def _read_batch(self, arguments: tuple, keywords: Mapping[str, Any]) -> BatchInfo:
        info = self._reader(arguments, keywords)
        return info if self._divisor is None else replace(info, divisor=self._divisor, items=None)

    def _try(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        try:
            return self._run(batch, number, capture, keys)
        except Exception as error:
            if self.sharded and self.channel.world > 1:  # others wait for this rank's weights, not for what it says
                raise
            self._error = error
            return Batch(number, problem=f"batch {number}: {type(error).__name__}: {error}")

    def _run(self, batch: Any, number: int, capture: Capture, keys: frozenset[str]) -> Batch:
        batch = _to(batch, self.device)
        first = next((x for x in tensors_of(batch) if x.ndim), None)
        if first is None:
            return Batch(number, problem=f"batch {number}: has no tensor of at least one dimension")
        rows, positions = len(first) if first.is_floating_point() else first.numel(), first.shape[:2].numel()
        found = Batch(number, sequences=len(first), rows=rows, positions=positions)
        capture.begin_step(keys, number)
        with torch.enable_grad(), self._autocast():
            value = self._value(batch, number, capture)
        calls = capture.pending
        if self.fisher == "activations_only":
            found.calls = [(call, call.x) for call in calls]
        elif not isinstance(value, Tensor) or value.numel() != 1:
            got = type(value).__name__ if not isinstance(value, Tensor) else f"shape {list(value.shape)}"
            got = "no loss (a scalar)" if value is None else got
            found.problem = (
                f"batch {number}: the model returned {got}: give it labels, or fit the argument loss"
                if self.loss is None
                else f"batch {number}: the loss is no scalar: got {got}"
            )
        elif not calls or not value.requires_grad:
            found.problem = f"batch {number}: its loss depends on no layer"
        else:
            edges = [call.edge for call in calls if call.edge is not None]
            gradients = torch.autograd.grad(value, edges, torch.full_like(value, self.seed), allow_unused=True)
            if bool(torch.isfinite(value)):  # known after the backward, which at ZeRO stage 3 all ranks run together
                found.calls = list(zip(calls, gradients, strict=True))
            else:
                value = value.detach()
                found.problem = f"batch {number}, counted from 0: the loss is {float(value)}; leave the batch out"
        return found

    def _autocast(self) -> AbstractContextManager[Any]:
        """The engine's; else what is around the call, if anything is."""
        dtype = None if self.engine is None else autocast(self.engine)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _value(self, batch: Any, number: int, capture: Capture) -> Any:
        """The loss of a batch; on drawn labels for a true Fisher."""
        outputs: list[Any] = []
        handle = self.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            value: Any = None
            if self.loss is not None:
                value = self.loss(self.model, batch)
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
    """The CRC-32 of this batch and those before it, whose is ``mark``; others, or another order, hardly have it."""
    for x in tensors_of(batch):
        mark = crc32(x, zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), mark))
    return zlib.crc32(b"end", mark)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [_to(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
