"""Calls of layers on their way through autograd: what waits for the gradient of an output, and becomes rows then;
and which layers are called with one input.

A hook on a node of the graph holds its call as long as the graph lives. So a call must never hold the node: that cycle
runs through C++, where no garbage collector sees it, and would never free the graph and its activations.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo, Fit
from ds_kfac.model.convolutions import Convolution
from ds_kfac.model.layers import LayerSpec, LayerType
from ds_kfac.model.rows import BatchSum, LossTerms, RowRule, gradient_rows, input_rows


@dataclass(eq=False)
class Forward:
    """One run of the model.

    Its input sums wait for its backward: a batch that is skipped, and a run for another engine's loss, count nothing.
    Held by its calls, so that they go with the graph.

    Attributes:
        loss: what is known of its loss.
        detached: whether no input of the model came from another graph.
        waiting: layer -> sum of the inputs so far.
    """

    loss: LossTerms = field(default_factory=LossTerms)
    detached: bool = True
    waiting: dict[str, BatchSum] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """One call of a module whose output gradient is still to come.

    Attributes:
        kind: the layer's type.
        info: of the micro-batch, as it is for this module.
        rows: which of its rows count.
        shape: of the gradient of its rows, with examples and positions.
        sides: whose rows it has, of "AG".
        select: which rows of the output are the call's, of a product of several layers; None: all.
        columns: which of the layer's outputs they are; None: all.
        lay: makes rows of the gradient that arrives; None: it has them.
        x: its input; kept only where it is needed with the gradient, so that checkpointing can free it.
        recomputed: whether it is a recomputation, whose A is added with the gradient.
        edge: where the gradient of its output arrives, maybe flattened, if autograd is to be asked for it; no node may
            hold such a call.
    """

    layer: LayerSpec
    kind: LayerType
    module: nn.Module
    info: BatchInfo
    rows: Fit
    shape: torch.Size
    sides: str
    forward: Forward
    x: Tensor | None
    recomputed: bool
    select: slice | Tensor | None = None
    columns: slice | None = None
    lay: Callable[[Tensor], Tensor] | None = None
    edge: GradientEdge | None = None

    def gradient_of(self, gradient: Tensor) -> Tensor:
        """Its part of the gradient of an output; zero in columns that it does not have."""
        gradient = gradient if self.lay is None else self.lay(gradient)
        if self.select is not None:
            return gradient.reshape(-1, self.shape[-1])[self.select]
        if self.columns is None:
            return gradient
        part = gradient.reshape(*self.shape[:-1], self.columns.stop - self.columns.start)
        return F.pad(part, (self.columns.start, self.shape[-1] - self.columns.stop))


def edge_of(output: Tensor) -> GradientEdge:
    """Where in the graph the gradient of ``output``, or of the tensor that it is a reshaped view of, arrives.

    An in-place activation replaces the grad_fn of a view, which the output of a Linear with bias is; the node of the
    viewed tensor stays.
    """
    base = output._base
    viewed = base is not None and base.numel() == output.numel() and base.grad_fn is not None
    origin = base if viewed and base is not None else output
    assert origin.grad_fn is not None, "the output requires no gradient"
    return GradientEdge(origin.grad_fn, origin.output_nr)


def no_graph(arguments: Iterable[Any]) -> bool:
    """Whether no tensor in ``arguments`` and containers in it was computed in a graph."""
    for value in arguments:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                return False
        elif isinstance(value, (list, tuple, Mapping)):
            if not no_graph(value.values() if isinstance(value, Mapping) else value):
                return False
    return True


class OwnBackward:
    """Whose backward is running: an engine's statistics are of its own loss.

    A generator's loss goes through the discriminator, whose layers it leaves as they are: it says nothing of their
    Fisher. Own is a backward that the engine announced; or, as long as it never announced any, one outside of all
    engines' announced ones through a forward whose inputs came from no other graph: a plain ``loss.backward()``.
    """

    _running: ClassVar[list["OwnBackward"]] = []
    """Of all engines of the process."""

    def __init__(self) -> None:
        self._announced = False  # whether any ever was

    def begin(self) -> None:
        """The engine's backward begins; until :meth:`end`."""
        self._announced = True
        self._running.append(self)

    def end(self) -> None:
        """It has ended, maybe by an exception."""
        self._running.remove(self)

    def covers(self, forward: Forward) -> bool:
        """Whether a gradient that arrives now at a call of ``forward`` is of the engine's own loss."""
        if self._running:
            return self in self._running
        return forward.detached and not self._announced


logger = logging.getLogger("ds_kfac")


class RowSums:
    """Turns the tensors of layer calls into rows and adds them to the sums of the step.

    Args:
        rule: how rows are made.
        stage: context in which rows are added, for timings.
        divided: whether the loss may be divided by something else than its terms, according to the micro-batch.

    Attributes:
        turn: the step, moves the sub-sample of positions.
    """

    def __init__(
        self, rule: RowRule, stage: Callable[[], AbstractContextManager[None]] = nullcontext, *, divided: bool = True
    ) -> None:
        self.rule, self.turn = rule, 0
        self._stage, self._divided = stage, divided
        self._counted: set[tuple[LossTerms, str]] = set()  # layers whose loss terms are
        self._warned = False

    @property
    def open(self) -> bool:
        """Whether gradients came since the last :meth:`close`."""
        return bool(self._counted)

    def close(self) -> None:
        """The next gradients are of other loss terms."""
        self._counted.clear()

    @torch.no_grad()
    def add_input(self, call: Call, x: Tensor, sum_A: BatchSum) -> None:
        """Of a call with ``x``."""
        layer, kind, bias = call.layer, call.kind, call.layer.bias is not None
        with self._stage():
            if self.rule.weight_sharing == "expand" and isinstance(kind, Convolution):
                patches = kind.input_patches(call.module, x)
                grid = patches.grid(self.rule, self.turn, max(layer.shape[-2:]))
                patches.add_to_(sum_A.sum_P, layer.A, grid, bias=bias)
                sum_A.count.add_(patches.count)
                return
            tensor = kind.input_rows(call.module, x)
            assert tensor is not None  # the type does not wait for gradients
            rows = input_rows(tensor, call.rows.mask, self.rule, examples=call.rows.examples)
            layer.A.accumulate_(sum_A.sum_P, rows.x, ones_column=rows.counts_R1 if bias else None)
            sum_A.count.add_(rows.count)

    @torch.no_grad()
    def add_gradient(self, call: Call, gradient: Tensor, sum_: BatchSum, seed: Tensor | float) -> None:
        """Rows of M g-hat / seed: the gradient of each loss term, M of them averaged in the loss. To G, or to A
        where that is made of them.

        Or of items g-hat / seed, where the loss that the model returned divides by items, and seed is what reached it.

        fp32 rows are unscaled before the product: the square of a gradient scaled by 2^16 may overflow. Rows in 16
        bits go as they are, the square of M / seed comes after: fp16 squares stay below 2^32, bf16 is not scaled.
        """
        layer, kind, gradient = call.layer, call.kind, gradient.detach().reshape(call.shape)
        with self._stage():
            if self.rule.weight_sharing == "expand" and isinstance(kind, Convolution):
                patches = kind.gradient_patches(call.module, gradient)
                gain = self._gain(call, patches.examples, seed, sum_)
                grid = patches.grid(self.rule, self.turn, max(layer.shape[-2:]))  # the same for both sides
                patches.add_to_(sum_.sum_P, layer.G, grid, gain=gain)
                return
            tensor = kind.gradient_rows(call.module, call.x, gradient)
            rows, own = gradient_rows(tensor, call.rows.mask, self.rule, examples=call.rows.examples)
            gain, scale = self._gain(call, own, seed, sum_), 1.0
            if rows.dtype == torch.float32:
                rows = rows * gain
            else:
                scale = gain**2
            side = layer.A if kind.needs_gradients else layer.G
            side.accumulate_(sum_.sum_P, rows, scale=scale)

    def _gain(self, call: Call, own: Tensor | int, seed: Tensor | float, sum_: BatchSum) -> Any:
        """What output gradients are multiplied by. Counts the call's loss terms in ``sum_``, unless they are: a second
        use of a layer in a forward adds rows, not terms.

        Args:
            own: the call's rows that count.
        """
        loss, info = call.forward.loss, call.info
        terms, divisor = self._terms(call, own), info.divisor
        key = loss, call.layer.name  # A's and G's rows are the same terms, and one of both is made
        if key not in self._counted:
            self._counted.add(key)
            sum_.count.add_(terms * info.ranks)
        if loss.seed is not None and info.items is not None:
            seed, divisor = loss.seed, info.items
        return (divisor if self._divided and divisor is not None else terms) / seed

    def _terms(self, call: Call, own: Tensor | int) -> Tensor | int:
        """M of the call's forward, the same for all layers."""
        loss = call.forward.loss
        if loss.terms is not None:
            return loss.terms
        own = own if call.info.tokens is None else call.info.tokens
        if call.select is not None and loss.guess is not None:  # rows of one of several layers say nothing of it
            return loss.guess
        if loss.guess is None:
            loss.guess = own
        known = isinstance(own, int) and isinstance(loss.guess, int)  # numbers on the device are not looked at
        if not self._warned and (own != loss.guess if known else type(own) is not type(loss.guess)):
            self._warned = True
            logger.warning(
                f"ds_kfac: {call.layer.name} has other rows than the layer nearest to the loss. The number of loss "
                "terms is taken from that layer, because neither labels nor an output of the model show it. Set "
                "engine.kfac.read_batch to return the labels (docs/tuning.md)"
            )
        return loss.guess


# layers that see the same input, such as q, k, v or gate, up: found by tensor identity, and verified from then on

Fingerprint = tuple[StorageWeakRef, Any, tuple[int, ...], tuple[int, ...], int]


def _fingerprint(x: Tensor) -> Fingerprint:
    """Memory and version, not the Python object: ZeRO-3 hands every module a view of its own."""
    return StorageWeakRef(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x._version


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    # memory that was given back may hold another tensor by now
    return not a[0].expired() and a[0].cdata == b[0].cdata and a[1:] == b[1:]


class SharedInputs:
    """Watches the inputs of captured calls: first it looks for groups, then it checks that the groups in use hold.

    Args:
        candidates: names of layers that may form groups; none: it does nothing.

    Attributes:
        searching: whether the groups are still to be found.
        broken: groups in use that did not hold in this step.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching = bool(candidates)
        self.broken: set[tuple[str, ...]] = set()
        self._watched = frozenset(candidates)
        self._numbers: dict[str, list[int]] = {}  # layer -> number of each of its inputs so far
        self._inputs: list[tuple[int, Fingerprint]] = []  # those of this micro-batch
        self._total = 0
        self._group: dict[str, tuple[str, ...]] = {}
        self._calls: dict[tuple[str, ...], list[Fingerprint]] = {}  # of the layer that was first to call so often
        self._counts: Counter[str] = Counter()

    def see(self, layer: str, x: Tensor) -> None:
        """A layer was called with ``x``. If it is in a group and another one of it was called with something else, the
        group is broken."""
        if layer not in self._watched:
            return
        mark = _fingerprint(x)
        if self.searching:
            number = next((number for number, other in self._inputs if _same(other, mark)), None)
            if number is None:
                number, self._total = self._total, self._total + 1
                self._inputs.append((number, mark))
            self._numbers.setdefault(layer, []).append(number)
            return
        calls = self._calls.setdefault(self._group[layer], [])
        self._counts[layer] += 1
        if len(calls) < self._counts[layer]:
            calls.append(mark)
        elif not _same(calls[self._counts[layer] - 1], mark):
            self.broken.add(self._group[layer])

    def begin_batch(self) -> None:
        """The next inputs are those of another micro-batch; the last one may have been given up half way."""
        self._inputs, self._counts, self._calls = [], Counter(), {}

    def end_batch(self) -> None:
        """A micro-batch is complete. A group is broken whose first layer, whose inputs are what is captured, was called
        less often than another one."""
        self.broken |= {group for group, seen in self._calls.items() if self._counts[group[0]] < len(seen)}
        self.begin_batch()

    def found(self) -> Mapping[str, tuple[int, ...]]:
        """Layer -> numbers of its inputs; layers with equal ones share them. A layer that was not called is missing."""
        return {layer: tuple(numbers) for layer, numbers in self._numbers.items()}

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; from now on every batch is checked against these groups, called in whatever order."""
        self.searching = False
        self.broken.clear()
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self._numbers.clear()
        self.begin_batch()


def agreed(found: Sequence[Mapping[str, tuple[int, ...]]], kinds: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs wherever they were called, in the order of ``kinds``.

    Args:
        found: of every rank.
        kinds: layer -> what has to be equal too, such as its side.
    """
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in found)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
