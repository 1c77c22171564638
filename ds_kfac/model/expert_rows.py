"""Which layers are experts, which rows of an expert are tokens, and from which ranks they come.

**Experts** (deepspeed.moe, AutoEP) see what is dispatched to them, padded to a capacity or to a multiple of some rows.
An expert's A is the mean over the tokens routed to it; its G the sum over them for all loss terms of the batch. Their
product is the expert's Fisher, to which tokens routed elsewhere add nothing. Tokens come from all ranks of the
expert-parallel group, which tell each other how many loss terms each has; with AutoEP, where a row does not say from
which rank it is, each is taken to have as many as this one. Found by attributes, not by class.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.model.batch import BatchInfo, Peers, own_hook
from ds_kfac.model.layers import LayerSpec, key_of, value_of
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import BatchSum


def is_autoep(module: nn.Module) -> bool:
    """Whether it is a mixture of DeepSpeed's AutoEP: ``experts`` are this rank's stacks w1, w2, w3 [E, O, I]."""
    return getattr(module, "_is_autoep_layer", False) is True


class ExpertRows:
    """Hooks on experts; gives the :class:`BatchInfo` of any module's calls."""

    def __init__(self, model: nn.Module) -> None:
        self._mixtures: dict[str, str] = {}  # expert, or AutoEP's stack of them -> its mixture
        self._tokens: dict[str, int] = {}  # mixture -> tokens of this rank
        self._rows: dict[str, Tensor] = {}  # expert -> bool rows that are tokens
        self._ranks: dict[str, int] = {}  # stack -> ranks whose tokens it gets
        self._groups: dict[str, Any] = {}  # mixture -> expert-parallel group, of several ranks
        self._peers: dict[str, Peers] = {}  # mixture -> those of the newest micro-batch
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            inner = value_of(value_of(module, "experts"), "deepspeed_experts") or ()
            if not inner and not is_autoep(module):
                continue
            self._hook(module, self._tokens, name, partial(self._entered, name))
            if is_autoep(module):
                place = f"{name}.experts".lstrip(".")
                self._mixtures[place], self._ranks[place] = name, int(module.ep_size)
                continue
            if module.ep_size > 1:
                self._groups[name], self._peers[name] = module.ep_group, Peers()
            for index, expert in enumerate(inner):
                place = f"{name}.experts.deepspeed_experts.{index}"
                self._mixtures[place] = name
                # [expert-parallel ranks, 1, capacity, width], zero where there is no token
                self._hook(expert, self._rows, place, lambda dispatched: (dispatched != 0).any(-1))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_backward(
        self, info: BatchInfo, terms: Tensor | int | None, device: torch.device,
        gather: Callable[[Tensor, Any], Tensor],
    ) -> None:  # fmt: skip
        """The ranks of each expert-parallel group tell each other of the newest micro-batch. Collective: all of them
        run the backward of a mixture together, in which its own all-to-alls are.

        Args:
            terms: this rank's loss terms; None: as many as there are tokens.
            device: of what is told.
            gather: (fp32 [2], group) -> [ranks, 2].
        """
        for name, group in self._groups.items():
            if name not in self._tokens:  # it did not run
                continue
            own = self._tokens[name] if terms is None else terms
            divisor = next((x for x in (info.items, info.divisor) if x is not None), own)
            numbers = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in (own, divisor)]
            self._peers[name].terms = gather(torch.stack(numbers), group)

    def _entered(self, mixture: str, x: Tensor) -> int:
        """Its tokens here; in a forward, no recomputation, a micro-batch begins."""
        if mixture in self._peers and torch._C._current_graph_task_id() == -1:
            self._peers[mixture] = Peers()
        return x.shape[:-1].numel()

    def _hook(self, module: nn.Module, known: dict[str, Any], name: str, of: Callable[[Tensor], Any]) -> None:
        def keep(module: nn.Module, inputs: tuple) -> None:
            known[name] = of(inputs[0].detach())

        self._handles.append(module.register_forward_pre_hook(own_hook(module, keep)))

    def __call__(self, module: str, batch: BatchInfo) -> BatchInfo:
        place = next((place for place in self._mixtures if module == place or module.startswith(place + ".")), None)
        if place is None:
            return batch
        mixture = self._mixtures[place]
        rows, tokens, peers = self._rows.get(place), self._tokens[mixture], self._peers.get(mixture)
        ranks, places = self._ranks[place] if rows is None else len(rows), place in self._ranks
        return replace(batch, rows=rows, encoder_rows=None, ranks=ranks, tokens=tokens, places=places, peers=peers)


class Siblings:
    """Which layers are experts of one mixture, and the loss terms of the step that used one of them on this rank.

    G of an expert is a mean over all loss terms, also those of a micro-batch, or a rank, that has no token for it. A
    head that a micro-batch does not use is another task's, a block that it drops no expert. So experts are known: the
    entries of a stack; and those of a ModuleList or ModuleDict, as far as layers at one place in them have one shape,
    once a forward gave them 2-D rows of different numbers, or a mixture gave them places for tokens. Of lists in lists
    it is the innermost that shows it: an expert may be a list of layers itself, and a block of a list has a mixture.

    Attributes:
        entries: layer in a ModuleList -> for each around it, from the inside out, the name of its siblings, if they are
            experts, and its entry.
        dues: name of siblings -> whether their terms count in this step on this rank.
        known: name of an expert -> name of its siblings.
        rows: name of siblings -> the first entry that was called in this forward, and its number of rows.
        terms: name of siblings -> fp32 scalar, their loss terms in this step; a tensor that their sums of G share.
    """

    def __init__(self, model: nn.Module, layers: Iterable[LayerSpec]) -> None:
        self.known: dict[str, str] = {}
        self.terms: dict[str, Tensor] = {}
        self._layers: dict[str, list[LayerSpec]] = {}
        self.entries: dict[str, list[tuple[str, str]]] = {}
        self.rows: dict[str, tuple[str, int]] = {}
        self.dues: dict[str, bool] = {}
        for layer in layers:
            if LAYERS[layer.kind].needs_gradients:  # a norm has no G
                continue
            if layer.product and layer.part[1] > 1:
                self.known[layer.name] = layer.weight
                self._layers.setdefault(layer.weight, []).append(layer)
            elif entries := _entries(model, layer):
                self.entries[layer.name] = entries
                for name, _ in entries:
                    self._layers.setdefault(name, []).append(layer)

    def _of(self, name: str) -> list[LayerSpec]:
        """The experts with this name, without those of a list further inside."""
        return [layer for layer in self._layers[name] if self.known.get(layer.name) == name]

    def see(self, layer: str, x: Tensor, sums: MutableMapping[str, BatchSum]) -> None:
        """One of :attr:`entries` was called with x [.., D]."""
        for name, entry in self.entries[layer] if x.ndim == 2 else ():
            if self.known.get(layer) == name:
                return
            first, rows = self.rows.setdefault(name, (entry, len(x)))
            if entry != first and rows != len(x):
                self._know(layer, name, sums)
                return

    def know(self, layer: str, sums: MutableMapping[str, BatchSum]) -> None:
        """A layer is an expert's of DeepSpeed's, whose list is called so."""
        if layer in self.entries and layer not in self.known:
            names = [name for name, _ in self.entries[layer]]
            lists = [name for name in names if name.partition(".*")[0].endswith("deepspeed_experts")]
            self._know(layer, (lists or names)[0], sums)

    def _know(self, layer: str, name: str, sums: MutableMapping[str, BatchSum]) -> None:
        """A layer of a ModuleList is an expert's, and so are its siblings. Up to now all of them were used alike."""
        self.dues.clear()
        for other in self._layers[name]:
            names = [each for each, _ in self.entries[other.name]]
            if other.name not in self.known or names.index(name) < names.index(self.known[other.name]):
                self.known[other.name] = name
        if begun := [sums[other.keys[1]] for other in self._of(name) if other.keys[1] in sums]:
            self.terms[name] = torch.stack([batch.count for batch in begun]).amax()
            for batch in begun:
                batch.count = self.terms[name]

    def due(self, layer: str, keys: Collection[str]) -> bool:
        """Whether loss terms that use an expert count for a sum of ``keys``: for its own G or a sibling's."""
        name = self.known[layer]
        if name not in self.dues:
            self.dues[name] = any(other.keys[1] in keys for other in self._of(name))
        return self.dues[name]

    def sum_of(self, layer: LayerSpec, device: torch.device, numel: int | None = None) -> BatchSum:
        """An empty sum of an expert's G, with the loss terms that its siblings had."""
        batch = BatchSum.empty(layer.G.numel if numel is None else numel, device)
        batch.count = self.terms.setdefault(self.known[layer.name], batch.count)
        return batch

    def complete(self, sums: MutableMapping[str, BatchSum], keys: Collection[str], failed: Collection[str]) -> None:
        """Give each expert a sum of G, maybe of no row, with a count of its own: sums are reduced in place."""
        for name, terms in self.terms.items():
            layers = [x for x in self._of(name) if x.keys[1] in keys and x.name not in failed]
            for layer, count in zip(layers, terms.repeat(len(layers)).unbind(), strict=True):
                key = layer.keys[1]
                if key not in sums:
                    sums[key] = BatchSum.empty(layer.G.numel, terms.device)
                sums[key].count = count
        self.terms = {}

    def used(self, sums: Mapping[str, BatchSum]) -> None:
        """Sums of all ranks: an expert without a token on any has its siblings' terms; now it has none."""
        batches = [sums[key] for name in self.known if (key := key_of(name, "G")) in sums]
        if batches:
            sizes = torch._foreach_norm([batch.sum_P for batch in batches], float("inf"))
            for batch, size in zip(batches, sizes, strict=True):
                batch.count.mul_(size != 0)


def _entries(model: nn.Module, layer: LayerSpec) -> list[tuple[str, str]]:
    """(what the layers at this place of a ModuleList's entries have in common, the entry), of all lists around it."""
    names, found = layer.module.split("."), []
    for at in reversed(range(len(names))):
        holder = model.get_submodule(".".join(names[:at]))
        if isinstance(holder, (nn.ModuleList, nn.ModuleDict)) and len(holder) > 1:  # PEFT's have one adapter
            place = ".".join((*names[:at], "*", *names[at + 1 :]))
            found.append((f"{place} {layer.weight.rpartition('.')[2]} {list(layer.shape)}", names[at]))
    return found
