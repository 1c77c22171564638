"""Which calls of layers count, and in which factor: what of a call waits for its gradient; layers that see the same
input, such as q, k, v or gate, up, which are found by tensor identity, and verified from then on."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.loss import Forward, Value
from ds_kfac.model.proof import Proof
from ds_kfac.model.rows import BatchSum, Call, RowSums
from ds_kfac.model.uses import Uses

logger = logging.getLogger("ds_kfac")

Fingerprint = tuple[StorageWeakRef, Any, tuple[int, ...], tuple[int, ...], int]
"""Memory and version of a tensor, not the Python object: ZeRO-3 hands every module a view of its own."""


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    # memory that was given back may hold another tensor by now
    return not a[0].expired() and a[0].cdata == b[0].cdata and a[1:] == b[1:]


class SharedInputs:
    """Watches the inputs of captured calls: first it looks for groups, then it checks that the groups in use hold.

    The rows of a group's A are those of the layer of it that is called first in a forward.

    Args:
        candidates: names of layers that may form groups; none: it does nothing.

    Attributes:
        found: layer -> number of each of its inputs so far; layers with equal ones share them.
        broken: groups in use that did not hold in this step.
    """

    def __init__(self, candidates: Collection[str] = ()) -> None:
        self.searching = bool(candidates)
        self.broken: set[tuple[str, ...]] = set()
        self._watched = frozenset(candidates)
        self.found: dict[str, tuple[int, ...]] = {}
        self._inputs: list[tuple[int, Fingerprint]] = []  # those of this micro-batch
        self._total = 0
        self._group: dict[str, tuple[str, ...]] = {}
        self._calls: dict[tuple[str, ...], list[Fingerprint]] = {}  # of the layer that was first to call so often
        self._counts: Counter[str] = Counter()
        self._giving: dict[tuple[str, ...], str] = {}
        self._called = set[str]()  # in this step
        # calls in this step that a gradient came to, and whether it is not zero to the last bit
        self._arrived: dict[str, list[tuple[Forward, Tensor | None]]] = {}

    def begin_step(self) -> None:
        self._called, self._arrived = set(), {}
        self.broken.clear()

    def grouped(self, layer: str) -> bool:
        return layer in self._group

    def arrived(self, call: Call, alive: Tensor | None) -> None:
        """A gradient came to a call. Heads on one trunk get the same input, but not always gradients of it. ``alive``:
        whether it is not zero to the last bit, as that of a loss times 0."""
        if call.layer.name in self._watched and not call.arrived:
            call.arrived = True
            self._arrived.setdefault(call.layer.name, []).append((call.forward, alive))

    def end_step(self) -> dict[tuple[str, ...], Tensor]:
        """A group is broken where gradients came to other calls of one of its layers than of another. Of the others:
        whether gradients that are not zero did, bool scalars."""
        found = {}
        for group in set(self._group.values()):
            calls = [self._arrived.get(name, []) for name in group if name in self._called]
            counts = [Counter(forward for forward, _ in own) for own in calls]
            if any(own != counts[0] for own in counts):
                self.broken.add(group)
            elif len(calls) > 1 and group not in self.broken:
                place = {forward: at for at, forward in enumerate(counts[0])}  # a backward may be of several
                ordered = [sorted(own, key=lambda call: place[call[0]]) for own in calls]
                flags = [[alive for _, alive in own if alive is not None] for own in ordered]
                if all(0 < len(own) == len(calls[0]) for own in flags):
                    alive_LC = torch.stack([torch.stack(own) for own in flags])
                    found[group] = (alive_LC != alive_LC[0]).any()
        return found

    @property
    def shown(self) -> dict[str, tuple[int, ...]]:
        """:attr:`found`, and to which of a layer's calls gradients came that are not zero, as negative numbers. Waits
        for the device."""
        arrived = [(name, *call) for name, own in self._arrived.items() for call in own]
        number = {forward: -1 - at for at, forward in enumerate(dict.fromkeys(forward for _, forward, _ in arrived))}
        calls = [(name, forward, alive) for name, forward, alive in arrived if alive is not None]
        alive = torch.stack([alive for *_, alive in calls]).tolist() if calls else []
        reached: dict[str, list[int]] = {name: [] for name in self.found}
        for (name, forward, _), is_alive in zip(calls, alive, strict=True):
            if is_alive and name in reached:
                reached[name].append(number[forward])
        return {name: (*own, *sorted(reached[name])) for name, own in self.found.items()}

    def key(self, layer: LayerSpec) -> str:
        """Of the factor that a layer's inputs are for."""
        group = self._group.get(layer.name)
        return key_of(group[0] if group else layer.shares or layer.name, "A")

    def gives(self, layer: LayerSpec) -> bool:
        """Whether the rows of this call of a layer are to be counted for its group."""
        group = self._group.get(layer.name)
        return self._giving.setdefault(group, layer.name) == layer.name if group else layer.shares is None

    def see(self, layer: str, x: Tensor) -> None:
        """A layer was called with ``x``. If it is in a group and another one of it was called with something else, the
        group is broken."""
        if layer not in self._watched:
            return
        self._called.add(layer)
        mark = StorageWeakRef(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride(), x._version
        if self.searching:
            number = next((number for number, other in self._inputs if _same(other, mark)), None)
            if number is None:
                number, self._total = self._total, self._total + 1
                self._inputs.append((number, mark))
            self.found[layer] = (*self.found.get(layer, ()), number)
            return
        calls = self._calls.setdefault(self._group[layer], [])
        self._counts[layer] += 1
        if len(calls) < self._counts[layer]:
            calls.append(mark)
        elif not _same(calls[self._counts[layer] - 1], mark):
            self.broken.add(self._group[layer])

    def begin_batch(self) -> None:
        """The next inputs are those of another micro-batch; the last one may have been given up half way."""
        self._inputs, self._counts, self._calls, self._giving = [], Counter(), {}, {}

    def end_batch(self) -> None:
        """A group is broken where those of its layers that were called were not called equally often."""
        for group, seen in self._calls.items():
            if any(0 < self._counts[name] < len(seen) for name in group):
                self.broken.add(group)
        self.begin_batch()

    def use(self, groups: Sequence[Sequence[str]]) -> None:
        """End the search; from now on every batch is checked against these groups."""
        self.searching = False
        self.broken.clear()
        self._group = {name: tuple(group) for group in groups for name in group}
        self._watched = frozenset(self._group)
        self.found = {}
        self.begin_batch()


def agreed(found: Sequence[Mapping[str, tuple[int, ...]]], kinds: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share their inputs wherever they were called, in the order of ``kinds``: layer -> what has
    to be equal too, such as its side. ``found``: of every rank."""
    groups: dict[tuple, list[str]] = {}
    for layer, kind in kinds.items():
        inputs = tuple(rank.get(layer, ()) for rank in found)
        if any(inputs):
            groups.setdefault((kind, inputs), []).append(layer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


class StepSums:
    """The sums of a step, and what waits for its gradient to be added to them.

    Args:
        inputs: receives every input of a captured call, to find and verify layers that share theirs.
        fallback_seed: the scale of a backward whose own is not known.
        asked: whether A is summed with the gradients.

    Attributes:
        sums: factor key -> rows of the step so far; missing where there are none.
        keys: of the factors that are summed.
        proof, uses: of the step, if it proves; uses of weights are noted while it is entered.
        failed: layer name -> what a hook raised; such a layer has no rows any more.
        counted: calls whose gradients came.
        seed: by what the gradients of this backward are scaled, if that was measured.
        losses: what the loss of this backward is the sum of, if that is known.
        arrived: calls of this backward with an input to be released after it.
    """

    def __init__(
        self, rows: RowSums, inputs: SharedInputs, fallback_seed: Callable[[], Tensor | float], *, asked: bool
    ) -> None:
        self.rows, self.inputs, self.asked, self._fallback_seed = rows, inputs, asked, fallback_seed
        self.sums: dict[str, BatchSum] = {}
        self.keys = frozenset[str]()
        self.proof: Proof | None = None
        self.uses: Uses | None = None
        self.failed: dict[str, str] = {}
        self.counted = 0
        self.seed: Tensor | float | None = None
        self.losses: set[Value] | None = None
        self.arrived: list[Call] = []

    def keep(self, call: Call, x: Tensor, *, makes_A: bool) -> None:
        """What of a call's input waits for its gradient."""
        of_gradients, layer = call.kind.needs_gradients, call.layer
        call.late = makes_A and not of_gradients and (call.recomputed or self.asked or call.rows.late)
        if call.late or self.asked or (of_gradients and (makes_A or call.proof is not None)):
            call.x = x
        if not makes_A or call.late or of_gradients or not x.numel():
            return
        if layer.name in call.forward.summed and x.numel() <= layer.A.numel:
            call.x, call.late = x.clone(), True  # someone may change it in place
            return
        call.forward.summed.add(layer.name)
        call.waiting = BatchSum.empty(layer.A.numel, x.device)
        self.rows.add_input(call, x, call.waiting)

    def add(self, call: Call, gradient: Tensor, seed: Tensor | float | None = None) -> None:
        """Rows of both sides; a call with an empty batch has none. ``seed``: where none was measured."""
        self.counted += 1
        layer, of_gradients = call.layer, call.kind.needs_gradients  # even A
        A, G = call.key_A, layer.keys[1]
        makes_A, makes_G = "A" in call.sides and A in self.keys, "G" in call.sides and G in self.keys
        # of factors that need no gradient it may be the input
        rows = gradient if self.asked and not makes_G and not of_gradients else call.gradient_of(gradient)
        if call.proof is not None:
            call.probed_G = call.proof.see_gradient(call, rows)
        alive = None if self.asked or not gradient.numel() else rows.any()
        self.inputs.arrived(call, alive)
        if call.waiting is not None and A in self.keys:
            self._count_input(call, call.waiting, alive)
        elif call.late and call.x is not None and call.x.numel() and A in self.keys:
            own = BatchSum.empty(layer.A.numel, gradient.device)
            self.rows.add_input(call, call.x, own)
            self._count_input(call, own, alive)
        call.waiting, call.late = None, False  # once, whatever the backwards
        if gradient.numel() and (makes_A and call.x is not None if of_gradients else makes_G):
            call.forward.take(self.losses)
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
            if key not in self.sums:
                self.sums[key] = BatchSum.empty(numel, gradient.device)
            self.rows.add_gradient(call, rows, self.sums[key], seed, alive)
        if call.recomputed:
            call.x = None
        elif call.x is not None:
            self.arrived.append(call)

    def _count_input(self, call: Call, own: BatchSum, alive: Tensor | None) -> None:
        """A call's sum goes to that of the step; nothing of it where its gradient is zero to the last bit."""
        if alive is not None:
            own.sum_P.masked_fill_(~alive, 0.0)
            own.count.mul_(alive)
        if call.proof is not None:
            call.proof.counted_input(call, self.rows.weight_sharing, alive)
        total = self.sums.setdefault(call.key_A, own)
        if total is not own:
            total.sum_P.add_(own.sum_P)
            total.count.add_(own.count)

    def fail(self, layer: LayerSpec, error: Exception) -> None:
        """A hook raised: the layer has no rows from here on, and none of this step."""
        self.failed[layer.name] = f"{type(error).__name__}: {error}"
        logger.warning(
            f"ds_kfac: the rows of {layer.name} ({layer.kind}) are not known, so it is left without curvature from "
            f"here on: {self.failed[layer.name]}"
        )
        for key in (self.inputs.key(layer), layer.keys[1]):
            self.sums.pop(key, None)

    def used(self, layer: str) -> str:
        """Where a layer's weight is, in words; "" if that was not noted."""
        return "" if self.uses is None else self.uses.of(layer)
