"""Layers of which every loss term uses some: experts. G of each is a mean over all loss terms, also over those of a
micro-batch, or a rank, that has no token for it.

A head that a micro-batch does not use is another task's, a block that it drops is no expert: their loss terms are those
of the micro-batches that use them. So experts have to be known:

- the entries of a stack are;
- entries of a ModuleList or ModuleDict are, as far as layers of one place in them have one shape, once a forward gave
  them 2-D rows of different numbers, or a mixture gave them places for tokens. Blocks and heads get the whole batch.
"""

from collections.abc import Collection, Iterable, MutableMapping

import torch
from torch import Tensor, nn

from ds_kfac.model.layers import LayerSpec, key_of
from ds_kfac.model.registry import LAYERS
from ds_kfac.model.rows import BatchSum


class Siblings:
    """Which layers are experts of one mixture, and the loss terms of the step that used one of them on this rank.

    Attributes:
        known: name of an expert -> name of its siblings.
        terms: name of siblings -> fp32 scalar, their loss terms in this step; a tensor that their sums of G share.
    """

    def __init__(self, model: nn.Module, layers: Iterable[LayerSpec]) -> None:
        self.known: dict[str, str] = {}
        self.terms: dict[str, Tensor] = {}
        self._layers: dict[str, list[LayerSpec]] = {}
        self._entries: dict[str, tuple[str, str]] = {}  # layer -> its siblings, if they are experts; its entry
        self._rows: dict[str, tuple[str, int]] = {}  # siblings -> the first entry called in this forward, its rows
        self._due: dict[str, bool] = {}
        for layer in layers:
            if LAYERS[layer.kind].needs_gradients:  # a norm has no G
                continue
            if layer.product and layer.part[1] > 1:
                name = self.known[layer.name] = layer.weight
            elif entry := _entry(model, layer):
                name = entry[0]
                self._entries[layer.name] = entry
            else:
                continue
            self._layers.setdefault(name, []).append(layer)

    def begin_step(self) -> None:
        self.terms, self._due = {}, {}
        self.begin_batch()

    def begin_batch(self) -> None:
        self._rows = {}

    def see(self, layer: str, x: Tensor, sums: MutableMapping[str, BatchSum]) -> None:
        """A layer was called with x [.., D]."""
        if layer in self._entries and layer not in self.known and x.ndim == 2:
            name, entry = self._entries[layer]
            first, rows = self._rows.setdefault(name, (entry, len(x)))
            if entry != first and rows != len(x):
                self.know(layer, sums)

    def know(self, layer: str, sums: MutableMapping[str, BatchSum]) -> None:
        """A layer of a ModuleList is an expert's, and so are its siblings. Up to now all of them were used alike."""
        if layer not in self._entries or layer in self.known:
            return
        name = self._entries[layer][0]
        self.known |= dict.fromkeys((other.name for other in self._layers[name]), name)
        if begun := [sums[other.keys[1]] for other in self._layers[name] if other.keys[1] in sums]:
            self.terms[name] = torch.stack([batch.count for batch in begun]).amax()
            for batch in begun:
                batch.count = self.terms[name]

    def due(self, layer: str, keys: Collection[str]) -> bool:
        """Whether loss terms that use a layer count for a sum of ``keys``: for its own G or a sibling's."""
        name = self.known.get(layer)
        if name is not None and name not in self._due:
            self._due[name] = any(other.keys[1] in keys for other in self._layers[name])
        return name is not None and self._due[name]

    def sum_of(self, layer: LayerSpec, numel: int, device: torch.device) -> BatchSum:
        """An empty sum, of an expert's G with the loss terms that its siblings had."""
        batch, name = BatchSum.empty(numel, device), self.known.get(layer.name)
        if name is not None:
            batch.count = self.terms.setdefault(name, batch.count)
        return batch

    def complete(self, sums: MutableMapping[str, BatchSum], keys: Collection[str], failed: Collection[str]) -> None:
        """Give each expert a sum of G, maybe of no row, with a count of its own: sums are reduced in place."""
        for name, terms in self.terms.items():
            layers = [x for x in self._layers[name] if x.keys[1] in keys and x.name not in failed]
            for layer, count in zip(layers, terms.repeat(len(layers)).unbind(), strict=True):
                key = layer.keys[1]
                if key not in sums:
                    sums[key] = BatchSum.empty(layer.G.numel, terms.device)
                sums[key].count = count
        self.terms = {}

    def used(self, sums: dict[str, BatchSum]) -> dict[str, BatchSum]:
        """The same sums of all ranks: an expert without a token on any has its siblings' terms; now it has none."""
        batches = [sums[key] for name in self.known if (key := key_of(name, "G")) in sums]
        if batches:
            sizes = torch._foreach_norm([batch.sum_P for batch in batches], float("inf"))
            for batch, size in zip(batches, sizes, strict=True):
                batch.count.mul_(size != 0)
        return sums


def _entry(model: nn.Module, layer: LayerSpec) -> tuple[str, str] | None:
    """(what the layers at this place of a ModuleList's entries have in common, the entry); None: it is in none."""
    names = layer.module.split(".")
    for at in reversed(range(len(names))):
        if isinstance(model.get_submodule(".".join(names[:at])), (nn.ModuleList, nn.ModuleDict)):
            place = ".".join((*names[:at], "*", *names[at + 1 :]))
            return f"{place} {layer.weight.rpartition('.')[2]} {list(layer.shape)}", names[at]
    return None
