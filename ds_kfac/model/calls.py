"""Which calls of layers count, and in which factor. Layers that see the same input, such as q, k, v or gate, up, share
one A: they are found by tensor identity, and checked from then on. A call's rows wait until its gradient arrives."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.log import logger
from ds_kfac.model.divisors import parts_of
from ds_kfac.model.expert_rows import Siblings
from ds_kfac.model.graph import Edge
from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.loss import Forward
from ds_kfac.model.products import Uses
from ds_kfac.model.proof import Proof
from ds_kfac.model.reductions import Reduction
from ds_kfac.model.rows import BatchSum, Call, RowSums

Fingerprint = tuple[StorageWeakRef, Any, tuple[int, ...], tuple[int, ...], int]
"""(storage, offset, shape, stride, version) of a tensor. Not the Python object: ZeRO-3 makes views."""


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    # freed memory may hold another tensor by now
    return not a[0].expired() and a[0].cdata == b[0].cdata and a[1:] == b[1:]


class SharedInputs:
    """Observes the inputs of captured calls: first it finds groups of layers that share them, then it checks these.

    A group's A gets the rows of the layer that is called first in a forward.

    Args:
        candidates: names of layers that may form groups; none: it does nothing.

    Attributes:
        found: layer called in this step -> numbers of its inputs; layers with equal numbers share their inputs.
        broken: groups in use whose layers got different inputs, or gradients of different calls, in this step.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching, self._watched = bool(candidates), frozenset(candidates)
        self._group: dict[str, tuple[str, ...]] = {}  # layer -> its group
        self._total = 0
        # in this micro-batch: group -> its (number, input); layer -> numbers of its inputs; group -> layer that gives A
        self._inputs: dict[Any, list[tuple[int, Fingerprint]]] = {}
        self._calls: dict[str, list[int]] = {}
        self._giving: dict[tuple[str, ...], str] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}
        self.broken: set[tuple[str, ...]] = set()
        # layer -> its calls to which a gradient came, and whether that is not zero to the last bit
        self._arrived: dict[str, list[tuple[Forward, Tensor | None]]] = {}

    def begin_batch(self) -> None:
        """Begin another micro-batch. One that was not ended may have been given up half way: it counts up to there."""
        self.end_batch(whole=False)

    def end_batch(self, *, whole: bool = True) -> None:
        """Mark groups as broken whose layers had different inputs, or were not called equally often; a layer without a
        call does not matter."""
        for group in self._inputs.keys() - {None}:
            calls = [self._calls[name] for name in group if name in self._calls]
            many = None if whole else min(map(len, calls))
            if any(numbers[:many] != calls[0][:many] for numbers in calls):
                self.broken.add(group)
        self._inputs, self._calls, self._giving = {}, {}, {}

    def grouped(self, layer: str) -> bool:
        return layer in self._group

    def arrived(self, call: Call, alive: Tensor | None) -> None:
        """A gradient came to a call: heads on one trunk share an input, but some may get no gradient. ``alive``: bool
        scalar, whether it is not zero to the last bit, as a loss times 0 gives."""
        if call.layer.name in self._watched and not call.arrived:
            call.arrived = True
            self._arrived.setdefault(call.layer.name, []).append((call.forward, alive))

    def end_step(self) -> dict[tuple[str, ...], Tensor]:
        """Mark groups as broken whose layers got gradients of different calls. For each other group: whether its layers
        differ in which of these gradients are zero, a bool scalar on the device."""
        differ = {}
        for group in set(self._group.values()):
            layers = [self._arrived.get(name, []) for name in group if name in self.found]
            counts = [Counter(forward for forward, _ in calls) for calls in layers]
            if any(count != counts[0] for count in counts):
                self.broken.add(group)
            elif len(layers) > 1 and group not in self.broken:
                place = {forward: at for at, forward in enumerate(counts[0])}  # a backward may be of several forwards
                ordered = [sorted(calls, key=lambda call: place[call[0]]) for calls in layers]
                flags = [[alive for _, alive in calls if alive is not None] for calls in ordered]
                if all(0 < len(row) == len(layers[0]) for row in flags):
                    alive_LC = torch.stack([torch.stack(row) for row in flags])
                    differ[group] = (alive_LC != alive_LC[0]).any()
        return differ

    @property
    def shown(self) -> dict[str, tuple[int, ...]]:
        """:attr:`found`, with a negative number for each of a layer's calls that got a gradient other than zero: layers
        share A only if these agree, too. Waits for the device."""
        arrived = [(name, *call) for name, layer_calls in self._arrived.items() for call in layer_calls]
        number = {forward: -1 - at for at, forward in enumerate(dict.fromkeys(forward for _, forward, _ in arrived))}
        calls = [(name, forward, alive) for name, forward, alive in arrived if alive is not None]
        alive = torch.stack([alive for *_, alive in calls]).tolist() if calls else []
        reached: dict[str, list[int]] = {name: [] for name in self.found}
        for (name, forward, _), is_alive in zip(calls, alive, strict=True):
            if is_alive and name in reached:
                reached[name].append(number[forward])
        return {name: (*numbers, *sorted(reached[name])) for name, numbers in self.found.items()}

    def key(self, layer: LayerSpec) -> str:
        """Key of the factor to which a layer's inputs go."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def gives(self, layer: LayerSpec) -> bool:
        """Whether this layer's calls give their rows to A: without a group always, else if it is called first."""
        group = self._group.get(layer.name)
        return self._giving.setdefault(group, layer.name) == layer.name if group else layer.shares is None

    def see(self, layer: str, x: Tensor) -> None:
        """A layer was called with ``x``."""
        if layer not in self._watched:
            return
        mark = StorageWeakRef(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x._version
        inputs = self._inputs.setdefault(self._group.get(layer), [])
        number = next((number for number, other in inputs if _same(other, mark)), None)
        if number is None:
            number, self._total = self._total, self._total + 1
            inputs.append((number, mark))
        self._calls.setdefault(layer, []).append(number)
        self.found[layer] = (*self.found.get(layer, ()), number)

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; from now on check every batch against these groups."""
        self.end_batch()
        self.searching = False
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.begin_step()


def agreed(shown: Sequence[Mapping[str, tuple[int, ...]]], kinds: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs on all ranks.

    Args:
        shown: :attr:`SharedInputs.shown` of every rank.
        kinds: layer -> other properties that must be equal in a group, such as its side; gives the order of layers.
    """
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in shown)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


class StepSums:
    """A step's batch sums, to which a call's rows are added when its gradient arrives.

    Args:
        inputs: receives every input of a captured call, to find and verify layers that share theirs.
        fallback_seed: gives the scale of a backward for which none was measured.
        on_demand: whether A is summed when the gradient comes, not in the forward.
        siblings: which layers are experts.

    Attributes:
        sums: factor key -> sum of the step so far; missing if there is none.
        keys: keys of the factors that are summed -> of how many rows one is taken.
        proof, uses: in a step that proves, the proof, and a recorder of where weights are used; else None.
        failed: layer name -> error that a hook raised; such a layer has no rows any more.
        counted: number of calls whose gradients came.
        measured: layer name -> [rows of first runs, rows of recomputations] that their masks count, since the last step
            on this rank, summed or not, of calls whose gradient came, in a step that keeps them; a scalar on the device
            where there is a mask. None: they are not counted.
        seed: factor on the gradients of this backward, if it was measured.
        losses: terms that this backward's loss is the sum of, if they are known.
        reductions: what these are made of.
        divided: of the step's own backwards, see :func:`parts_of`.
        arrived: calls of this backward whose input is to be released after it.
        passed, earlier: forwards that this backward went through, and the marks of those of the step's earlier ones.
        several: whether some backward was of several forwards whose losses the model did not return.
        forward: the model's last forward; ``loose`` for calls outside of any, as where a method of the model is called.
        running: the forward whose gradients come in this backward.
        inside: whether the model's forward runs.
        of_gradients: keys of factors of gradients.
    """

    def __init__(
        self, rows: RowSums, inputs: SharedInputs, fallback_seed: Callable[[], Tensor | float], siblings: Siblings, *,
        on_demand: bool,
    ) -> None:  # fmt: skip
        self.rows, self.inputs, self.on_demand, self._fallback_seed = rows, inputs, on_demand, fallback_seed
        self.siblings, rows.experts = siblings, siblings.known
        self.sums: dict[str, BatchSum] = {}
        self.keys: Mapping[str, int] = {}
        self.proof: Proof | None = None
        self.uses: Uses | None = None
        self.failed: dict[str, str] = {}
        self.measured: dict[str, list[int | Tensor]] | None = None
        self.counted = 0
        self.seed: Tensor | float | None = None
        self.losses: set[Edge] | None = None
        self.reductions: list[Reduction] = []
        self.divided: list[tuple[int, list[int]]] = []
        self.arrived: list[Call] = []
        self.passed, self.earlier, self.several = set[Forward](), set[object](), False
        self.forward = self.loose = Forward()
        self.running: Forward | None = None
        self.inside = False
        self.of_gradients = set[str]()

    def keep(self, call: Call, x: Tensor, *, makes_A: bool) -> None:
        """Let a call keep what its gradient will need: the sum for A, or the input."""
        of_gradients, layer = call.kind.needs_gradients, call.layer
        call.late = makes_A and not of_gradients and (call.recomputed or self.on_demand)
        if call.late or self.on_demand or (of_gradients and (makes_A or call.proof is not None)):
            call.x = x
        if not makes_A or call.late or of_gradients or not x.numel():
            return
        if layer.name in call.forward.summed and x.numel() <= layer.A.numel:
            call.x, call.late = x.clone(), True  # a clone, as x may be changed in place
            return
        call.forward.summed.add(layer.name)
        call.waiting = BatchSum.empty(layer.A.numel, x.device)
        self.rows.add_input(call, x, call.waiting)

    def measure(self, layer: str, many: Tensor | int | None, recomputed: bool) -> None:
        """Count a call's rows."""
        if self.measured is not None and many is not None:
            self.measured.setdefault(layer, [0, 0])[recomputed] += many

    def add(self, call: Call, gradient: Tensor, seed: Tensor | float | None = None) -> None:
        """A call's gradient came: add the rows of both sides. ``seed``: its scale if none was measured."""
        self.counted += 1
        if call.many is not None:
            self.measure(call.layer.name, call.many, call.recomputed)
            call.many = None
        layer, of_gradients = call.layer, call.kind.needs_gradients  # whether A, too, is made of gradients
        A, G = call.key_A, layer.keys[1]
        makes_A, makes_G = "A" in call.sides and A in self.keys, "G" in call.sides and G in self.keys
        # on demand, "gradient" may be the input for a call whose factor needs no gradient
        rows = gradient if self.on_demand and not makes_G and not of_gradients else call.gradient_of(gradient)
        if call.proof is not None:
            call.probed_G = call.proof.see_gradient(call, rows)
        alive = None if self.on_demand or not gradient.numel() else rows.any()
        self.inputs.arrived(call, alive)
        if call.waiting is not None and A in self.keys:
            self._count_input(call, call.waiting, alive)
        elif call.late and call.x is not None and call.x.numel() and A in self.keys:
            batch = BatchSum.empty(layer.A.numel, gradient.device)
            self.rows.add_input(call, call.x, batch)
            self._count_input(call, batch, alive)
        call.waiting, call.late = None, False  # A counts once, however many backwards there are
        adds = makes_A and call.x is not None if of_gradients else makes_G
        expert = layer.name in self.siblings.known
        counts = expert and "G" in call.sides and self.siblings.due(layer.name, self.keys)
        if gradient.numel() and (adds or counts):
            call.forward.take(self.losses, self.reductions, count=self.rows.weight_sharing == "expand")
            if seed is not None and call.forward.terms is None and self.seed is None:
                raise ValueError(
                    "a backward runs inside the model's forward, where nothing shows yet how many terms the loss has, "
                    "and so the scale of G; give the model its labels by that name, or set engine.kfac.read_batch"
                )
            if self.seed is not None:
                seed = self.seed
            elif seed is None:
                seed = self._fallback_seed()
            key, numel = (A, layer.A.numel) if of_gradients else (G, layer.G.numel)
            if adds:
                if key not in self.sums:
                    device = gradient.device
                    self.sums[key] = self.siblings.sum_of(layer, device) if expert else BatchSum.empty(numel, device)
                self.rows.add_gradient(call, rows, self.sums[key], seed, alive)
            else:  # of an expert whose G is summed on other ranks, but a sibling's here
                self.rows.add_terms(call, rows, self.siblings.sum_of(layer, gradient.device, 0), seed, alive)
        if call.recomputed:
            call.x = None
        elif call.x is not None:
            self.arrived.append(call)

    def _count_input(self, call: Call, batch: BatchSum, alive: Tensor | None) -> None:
        """Add a call's sum to the step's, or nothing if its gradient is zero to the last bit."""
        if alive is not None:
            batch.sum_P.masked_fill_(~alive, 0.0)
            batch.count.mul_(alive)
        if call.proof is not None:
            call.proof.counted_input(call, self.rows.weight_sharing, alive)
        total = self.sums.setdefault(call.key_A, batch)
        if total is not batch:
            total.sum_P.add_(batch.sum_P)
            total.count.add_(batch.count)

    def end_backward(self, *, last: bool = False) -> None:
        """Close the micro-batch: the next call of a layer is not another use of the same rows. ``last``: of the step;
        then each sum has a count of its own."""
        # one backward through several means: G's scale is only right if it was measured at losses the model returned
        unknown = [f.seed is None and f.term_weight is None and f.info.divisor is None for f in self.passed]
        self.several |= sum(unknown) > 1
        marks = {f.mark for f in self.passed}
        if self.divided and marks and marks <= self.earlier:
            self.divided.pop()  # another loss of the same forward, as a critic's beside an actor's, is no micro-batch
        elif self.divided and unknown not in ([], [True]):
            self.divided[-1][1].clear()
        self.earlier |= marks
        self.passed.clear()
        if self.forward is self.loose:
            self.forward = self.loose = Forward()
        self.seed, self.losses, self.running, self.reductions = None, None, None, []
        self.inside = False  # still set if the forward raised
        for call in self.arrived:
            call.x = None
        self.arrived.clear()
        self.inputs.end_batch()
        if last and self.siblings.terms:
            self.siblings.complete(self.sums, self.keys, self.failed)
        if last and self.divided:
            self._divide()

    def _divide(self) -> None:
        """A caller who ends steps himself divides each loss by the number of the step's backwards, which is known only
        now: what was taken for the mean over a loss's terms is a part of it."""
        square, self.divided = float(parts_of(self.divided) ** 2), []
        for key in self.sums.keys() & self.of_gradients if square > 1 else ():
            self.sums[key].sum_P.mul_(square)
            if self.proof is not None and key in self.proof.counted:
                self.proof.counted[key][1][0] *= square

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """A hook raised: the layer has no rows in this step, nor in later ones."""
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name or '(model)'} ({layer.kind}) are not known: its factors stay as they "
            f"are, and from the next check of rows on it is without curvature: {self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Text that says where a layer's weight is used; "" if that was not recorded."""
        return "" if self.uses is None else self.uses.of(layer)
