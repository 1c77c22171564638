"""Which mask belongs to a call's rows: by shape, and in an encoder-decoder by where the call is.

A mask is [N, T], examples times positions. Rows may lie as [N, T, D], sequence first as [T, N, D], or flattened. Where
shapes leave a doubt it is said, once.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.model.batch_info import BatchInfo, encoder_decoders
from ds_kfac.model.hooks import own_hook

logger = logging.getLogger("ds_kfac")
SOURCE, TARGET = "source", "target"


@dataclass(frozen=True)
class Fit:
    """A mask as it fits the rows of a call.

    Attributes:
        mask: bool, [N, T] or [T, N] as the rows lie, maybe flattened; None: every row counts.
        examples: dimension of the rows that has the examples, 1 where sequences come first.
        doubt: what its shape leaves open, "" if all is clear.
    """

    mask: Tensor | None = None
    examples: int = 0
    doubt: str = ""


EVERY_ROW = Fit()
"""Counts."""


def fit(mask: Tensor | None, batch: tuple[int, ...], examples: int | None = None) -> Fit:
    """The mask for rows of leading shape ``batch``.

    Args:
        mask: bool [N, T]; one with other dimensions is of rows in their own order.
        examples: dimension of the examples in rows of this model, where it is known from elsewhere.
    """
    if mask is None:
        return Fit()
    if mask.ndim != 2:
        same = mask.numel() == prod(batch) and (len(batch) == 1 or batch[0] == len(mask))
        return Fit(mask.reshape(batch) if same else None)
    N, T = mask.shape
    direct = (batch[:1], prod(batch[1:])) == ((N,), T)
    turned = batch[:2] == (T, N) and prod(batch[2:]) == 1
    trivial = N <= 1 or T <= 1  # then both orders are the same
    if direct and turned and not trivial:
        doubt = "there are as many examples as positions; taken as examples first" if examples is None else ""
        return Fit(mask.T, 1, doubt) if examples == 1 else Fit(mask, 0, doubt)
    if direct:
        return Fit(mask)
    if turned:
        return Fit(mask.T, 1)
    if len(batch) == 1 and batch[0] == N * T:
        if examples == 1 and not trivial:
            return Fit(mask.T, 1, "flattened rows, in a model that has sequences first elsewhere; taken so here too")
        return Fit(mask)
    if prod(batch) == N * T and not trivial:
        return Fit(doubt="only their number fits; every row counts")
    return Fit()


class RowMasks:
    """Chooses among the masks of a micro-batch.

    Hooks on the encoders and decoders of a model record where a call is: rows in an encoder, and those that a decoder
    makes of the encoder's output, are the source's. A recomputation is assigned by its module's place.

    Args:
        model: the module whose forward takes the masks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._watching = model, False
        self._places: dict[str, str] = {}  # "encoder." -> SOURCE
        self._side: str | None = None
        self._outer: list[str | None] = []  # sides around the present one
        self._sources: list[StorageWeakRef] = []
        self._examples: dict[str, int] = {}  # module -> dimension of its examples, where shapes decide
        self._said: set[str] = set()
        self._handles: list[Any] = []
        for encoder, decoder in encoder_decoders(model):
            for name, side in ((encoder, SOURCE), (decoder, TARGET)):
                self._places[name + "."] = side
                self._watch(model.get_submodule(name), side)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """A forward of the model begins."""
        self._watching, self._side, self._sources, self._outer = True, None, [], []

    def end(self) -> None:
        """It is over; what comes now is recomputed. Encoder outputs stay known."""
        self._watching, self._side = False, None

    def of(self, module: str, x: Tensor, batch: tuple[int, ...], info: BatchInfo) -> Fit:
        """For a call of ``module`` with ``x``, whose rows have the leading shape ``batch``."""
        if info.rows is None and info.encoder_rows is None:
            return EVERY_ROW
        side = self._side_of(module, x)
        masks = [info.rows, info.encoder_rows]
        if side == SOURCE:
            masks = [info.encoder_rows]
        elif side == TARGET and info.rows is None:
            masks = []  # of their length nothing is known, and the source's may be the same
        inside = self._inside_attention(module)
        known = 1 if inside else self._order_of(module, batch)
        fits = [(mask, fit(mask, batch, known)) for mask in masks if mask is not None]
        if inside:
            fits = [(mask, replace(found, doubt="")) for mask, found in fits]
        good = [found for _, found in fits if found.mask is not None]
        found = good[0] if good else next((found for _, found in fits if found.doubt), Fit())
        if side is None and len(good) > 1:
            found = Fit(found.mask, found.examples, "the masks of source and target fit; the target's is taken")
        if found.doubt:
            shapes = " and ".join(str(list(mask.shape)) for mask, _ in fits)
            self._say(module, found.doubt, f"rows {list(batch)}, mask {shapes}")
        elif found.mask is not None and len(batch) > 1 and min(found.mask.shape) > 1 and len(set(batch[:2])) > 1:
            self._examples[module] = found.examples
        return found

    def _say(self, module: str, doubt: str, shapes: str) -> None:
        if doubt in self._said:
            return
        self._said.add(doubt)
        logger.warning(
            f"ds_kfac: which rows of {module} count is ambiguous ({shapes}): {doubt}. If that is wrong, set "
            "engine.kfac.read_batch, or kfac.padding.count to all (shown once, for the first such layer)"
        )

    def _inside_attention(self, module: str) -> bool:
        """Whether rows are those that torch's attention multiplies: sequences first, whatever its ``batch_first``."""
        around = module, module.rpartition(".")[0]
        return any(isinstance(self._model.get_submodule(name), nn.MultiheadAttention) for name in around)

    def _order_of(self, module: str, batch: tuple[int, ...]) -> int | None:
        if len(batch) == 1:  # flattened somewhere in between: as the others are
            return 1 if 1 in self._examples.values() else None
        if module in self._examples:
            return self._examples[module]
        place = module
        while place:  # what torch's own modules say, or a part of them
            place = place.rpartition(".")[0]
            around = self._model.get_submodule(place)
            for one in (around, *around.children()):
                if isinstance(getattr(one, "batch_first", None), bool):
                    return 0 if one.batch_first else 1
        return None

    # where a call is

    def _side_of(self, module: str, x: Tensor) -> str | None:
        if not self._places:
            return TARGET
        cdata = x.untyped_storage()._cdata
        if any(source.cdata == cdata and not source.expired() for source in self._sources):
            return SOURCE
        if self._side is not None:
            return self._side
        return next((side for place, side in self._places.items() if module.startswith(place)), None)

    def _watch(self, module: nn.Module, side: str) -> None:
        def enter(module: nn.Module, arguments: tuple) -> None:
            if self._watching:
                self._outer.append(self._side)
                self._side = side

        def leave(module: nn.Module, arguments: tuple, output: Any) -> None:
            if self._watching and self._outer:
                outer = self._outer.pop()
                self._side = TARGET if side == TARGET else outer  # what follows a decoder belongs to the target
                if side == SOURCE:
                    self._sources += [StorageWeakRef(x.untyped_storage()) for x in _tensors(output)]

        self._handles.append(module.register_forward_pre_hook(own_hook(module, enter)))
        self._handles.append(module.register_forward_hook(own_hook(module, leave), always_call=True))


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.ndim > 1 else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [x for value in values for x in _tensors(value)]
