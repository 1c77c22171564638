"""Which rows of a micro-batch count, and how many loss terms it has: from the model's arguments, masks and experts.

**Masks** are [N, T], examples times positions. Rows may be [N, T, D], sequence-first [T, N, D], or flattened. Where
shapes are ambiguous, a warning says so once.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_kfac.log import logger
from ds_kfac.model.labels import aligned, encoder_decoders, have_loss, of_examples, shifts
from ds_kfac.model.layers import parameter_shape, tensors_of, value_of
from ds_kfac.model.slices import EVERY_ROW, SQUARE, Fit, Slices, fit, has_all

SOURCE, TARGET, OTHER = "source", "target", "other"


def own_hook(owner: nn.Module, function: Callable[..., Any], watcher: Any = None) -> Callable[..., None]:
    """``function`` as a hook of ``owner`` alone, not of its copies; with a ``watcher`` while that is ``watching``: then
    torch.compile, which may not trace ``function``, sees this condition alone.

    ``copy.deepcopy`` of a module copies its hooks: a bound method with its whole object, a plain function as it is. The
    calls of a copy (an average of the weights, a frozen reference model) would then count as the model's.
    """

    def hook(module: nn.Module, *values: Any, **named: Any) -> None:
        if module is owner and (watcher is None or watcher.watching):
            function(module, *values, **named)

    return hook


@dataclass(eq=False)
class Peers:
    """The ranks whose tokens an expert gets in one micro-batch. ``terms``: fp32 [ranks, 2] on the device, None before
    the backward: the loss terms of each rank, and by what its loss divides their sum."""

    terms: Tensor | None = None


@dataclass(frozen=True)
class BatchInfo:
    """What K-FAC has to know about a micro-batch. By default every row counts; the model's output gives M, its terms.

    Attributes:
        rows: bool [N, T], True where a row counts; for layers with N x T rows in any order. With an encoder and a
            decoder, the decoder's rows.
        labelled: bool [N] or [N, T], True where the loss has a term. Its sum is M.
        divisor: the loss is the sum of its terms over this number; None: over M. With sequence parallelism, for
            instance, it is the number of terms of the whole sequence.
        encoder_rows: bool [N, S], True where a row of the source counts, with an encoder and a decoder.
        items: the loss that the model returns is the sum of its terms over this number: Hugging Face's
            ``num_items_in_batch``, which counts all micro-batches and maybe all ranks.
        ranks: from how many ranks an expert's rows come; each is taken to have M loss terms, unless ``peers`` are set.
        peers: these ranks, if the first dimension of the rows is the rank.
        tokens: M where neither labels nor the model's output show it; None: the number of rows of the layer nearest to
            the loss.
        places: whether an expert's rows are places for tokens; a place without a token is all zeros.
        padding: whether all rows that the masks leave out are padding. Padding has no gradient: a layer in which such
            rows have one got a mask that is not for its rows.
        attended: bool [N, T], True for all but padding, where ``rows`` leaves out more than padding, such as prompts.
        classes: whether ``labelled`` may be [N, C], of classes of an example, or [N], a condition: then the prediction
            may give M.
    """

    rows: Tensor | None = None
    labelled: Tensor | None = None
    divisor: Tensor | float | None = None
    encoder_rows: Tensor | None = None
    items: Tensor | float | None = None
    ranks: int = 1
    tokens: int | None = None
    places: bool = False
    padding: bool = False
    attended: Tensor | None = None
    classes: bool = False
    peers: Peers | None = None


TOKENS = "input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"
OF_TEXT = re.compile("embeds|mask|label|bias|logits|hidden|position")
SENSED = re.compile("pixel|image|img|vi[ds]|frame|patch|audio|speech|sound|wave|mel|spec|input_(features|values)")
"""In names of arguments: those of tokens; and those of images and sounds, whatever their shape."""
ReadBatch = Callable[[tuple, Mapping[str, Any]], BatchInfo]
"""(arguments, keyword arguments) of the model's forward -> BatchInfo. A user may set ``engine.kfac.read_batch``."""


class ArgumentReader:
    """Reads padding masks [N, T], 0 at padding, and integer labels from the forward's arguments, which it finds by
    Hugging Face's names, also in a batch that is a mapping. With an encoder and a decoder the source and the target
    have a mask each.

    What labels are of the model's class says (``labels.py``). ``count`` is ``kfac.padding.count``.
    """

    def __init__(self, model: nn.Module, *, count: str = "labelled") -> None:
        compiled: Any = model._modules.get("_orig_mod")  # torch.compile's
        self._signature = inspect.signature((compiled or model).forward)
        self.count, self._model = count, model
        self.two_sided = any(True for _ in encoder_decoders(model))
        self.shifted, self._aligned = shifts(model, two_sided=self.two_sided), aligned(model)

    def __call__(self, arguments: tuple, keywords: Mapping[str, Any]) -> BatchInfo:
        values: dict[str, Any] = {}
        with suppress(TypeError):  # they fit another function, as Lightning's training_step, or the call will raise
            values = self._signature.bind_partial(*arguments, **keywords).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                values = {**values, **values.get(name, {})}
        batch: dict[str, Any] = {}
        for value in (*arguments, *keywords.values()):
            for key, x in value.items() if isinstance(value, Mapping) else ():
                batch[key] = None if key in batch else x  # of two mappings, as a query's and a text's, neither
        values = batch | {key: x for key, x in values.items() if isinstance(x, Tensor) or key not in batch}
        placed, labelled, items = values.get("shift_labels"), None, values.get("num_items_in_batch")
        placed = placed if isinstance(placed, Tensor) else None  # of some models it is a switch
        labels = values.get("labels") if placed is None else placed  # what Transformers has shifted before it cut
        if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dtype != torch.bool:
            labelled = have_loss(labels, self._model)
            if self._aligned:
                known = of_examples(labels, self._model)
                labelled, items = known["labelled"], known["items"]
            elif self.shifted and placed is None and labelled.ndim == 2:
                labelled = torch.cat([labelled[:, 1:], labelled.new_zeros(len(labelled), 1)], dim=1)
        rows, encoder_rows = self._mask(values), None
        if self.two_sided:
            rows, encoder_rows = self._mask(values, "decoder_"), rows
        padding, attended = rows is not None or encoder_rows is not None, None
        classes = labelled is not None and labelled.ndim == 1 and not self._aligned
        if labelled is not None and labelled.ndim == 2:
            positions = self._positions(labelled, values) if rows is None else rows.shape == labelled.shape
            classes = positions is not True and labelled.shape[1] > 1
            if self.count == "labelled" and positions is not False:
                if rows is not None:
                    attended = rows | labelled  # with padding on the left, the last pad predicts the first token
                    rows = rows & labelled
                else:
                    rows = labelled
                padding = False  # unlabelled prompts are left out as well, and they have gradients
        return BatchInfo(
            rows, labelled, encoder_rows=encoder_rows, items=items, padding=padding, attended=attended, classes=classes
        )

    def _positions(self, labelled: Tensor, values: Mapping[str, Any]) -> bool | None:
        """Whether labels [N, ..] are of positions of the model's input, where no mask shows it; None: unknown."""
        prefix = "decoder_" if self.two_sided else ""
        if labelled.shape[1] == 1:  # a column of a data set, or one position, of which each example has one
            return False
        names = [prefix + "input_ids", prefix + "inputs_embeds"]
        if not self.two_sided:
            names += [name for name in values if "labels" not in name]
        x = next((values[name] for name in names if isinstance(values.get(name), Tensor)), None)
        if x is None or x.ndim not in (2, 3) or (x.ndim == 2 and x.is_floating_point()):  # features, images
            return None
        return Counter(labelled.shape) <= Counter(x.shape)

    def _mask(self, values: Mapping[str, Any], prefix: str = "") -> Tensor | None:
        """The mask [N, T] of a batch; [N K, T] of one whose tokens are [N, K, T], as of K choices: models make that of
        it. Another mask of three dimensions is of pairs of positions."""
        mask = values.get(prefix + "attention_mask")
        if not isinstance(mask, Tensor) or self.count == "all":
            return None
        if mask.ndim == 3:
            tokens, embedded = values.get(prefix + "input_ids"), values.get(prefix + "inputs_embeds")
            shapes = [
                x.shape[:3] for x, dims in ((tokens, 3), (embedded, 4)) if isinstance(x, Tensor) and x.ndim == dims
            ]
            mask = mask.flatten(0, 1) if mask.shape in shapes else mask
        return mask.bool() if mask.ndim == 2 else None


class RowMasks:
    """Chooses a mask of the micro-batch for the rows of each call.

    Hooks on encoders and decoders record in which of them a call runs. Rows in an encoder are the source's, and so are
    a decoder's rows made of the encoder's output (cross-attention). A recomputation has its module's side.

    Beside tokens a batch may have images or sounds. Modules that do not have the embedding of the tokens, and are
    called with those, or with what such a module returned, and no other rows [N, T, D], have rows of another modality,
    which no mask or label is of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.watching = model, False
        called: Any = model._modules.get("_orig_mod") or model  # torch.compile's
        self._names = [*inspect.signature(called.forward).parameters]
        self._places: dict[str, str] = {}  # "encoder." -> SOURCE
        self._side: str | None = None
        self._outer: list[str | None] = []  # sides around the present one
        self._sources: list[StorageWeakRef] = []  # storages of encoder outputs
        self._others: list[tuple[StorageWeakRef, Any]] = []  # of tensors of another modality; the batch's, and dtypes
        self._of_others = set[str]()  # layers that got them in this forward
        self._examples: dict[str, int] = {}  # module -> dimension of its examples, where shapes decide
        self._in_order: dict[str, bool] = {}  # module -> whether its stack's matrices get the batch's rows in order
        self._warned: set[str] = set()
        self._slices = Slices(self._warn)
        self._handles: list[Any] = []
        for encoder, decoder in encoder_decoders(model):
            for name, side in ((encoder, SOURCE), (decoder, TARGET)):
                self._places[name + "."] = side
                self._watch(model.get_submodule(name), side)
        tables = {name: x for name, x in model.named_modules() if isinstance(x, nn.Embedding)}
        words = max(tables, key=lambda name: tables[name].num_embeddings, default="")
        for at in range(words.count(".") + 1) if words else ():  # the modules around the embedding of the tokens
            around, inside = ".".join(words.split(".")[:at]), words.split(".")[at]
            for name, child in model.get_submodule(around).named_children():
                path, shapes = f"{around}.{name}.".lstrip("."), map(parameter_shape, child.parameters())
                if name != inside and path not in self._places and any(len(shape) > 1 for shape in shapes):
                    self._watch(child, OTHER)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, batch: Iterable[Any] = ()) -> None:
        """A forward of the model begins. ``batch``: its arguments, and a mapping of its keyword arguments."""
        self.watching, self._side, self._sources, self._outer = True, None, [], []
        self._others, self._of_others = [], set()
        batch = [*batch]
        named = dict(zip(self._names, batch, strict=False))
        within = [x for part in batch if isinstance(part, Mapping) for x in part.values()]  # as of model(batch=..)
        named |= {key: x for part in (*within, *batch) if isinstance(part, Mapping) for key, x in part.items()}
        if tokens := [named[key] for key in TOKENS if isinstance(named.get(key), Tensor)]:
            others = {key: x for key, x in named.items() if isinstance(x, Tensor) and not OF_TEXT.search(key)}
            shape = tokens[0].shape[:2]  # features [N, T, ..] of tokens have their mask, but what is seen or heard
            self._add_others((x for key, x in others.items() if x.shape[:2] != shape or SENSED.search(key)), cast=True)
        self._in_order.clear()
        self._slices.begin()

    def end(self) -> None:
        """The forward is over; later calls are recomputations. Encoder outputs are still recognised."""
        self.watching, self._side = False, None
        self._slices.whole()

    def fit_call(self, module: str, x: Tensor, info: BatchInfo, *, reduced: bool = False) -> Fit:
        """The mask for a call with the input x [.., D]. ``reduced``: whether weight_sharing is "reduce"."""
        result, (side, masks) = self._whole(module, x, info), self._masks(module, x, info)
        if result.doubt and (masks or reduced):
            self._warn(module, x.shape[:-1], masks, result.doubt)
        if result.mask is not None:
            self._slices.whole()
        elif not result.doubt and masks and masks[0].ndim == 2 and (side is not None or len(masks) == 1):
            order = None if self._attends(module) else self._order_of(module, tuple(x.shape[:-1]))
            if order is None and len(orders := set(self._examples.values())) == 1:
                order = orders.pop()
            return self._slices.fit_call(module, x, masks[0], order, reduced=reduced)
        return result

    def of_stack(self, module: str, x: Tensor, select: Any, info: BatchInfo, *, picked: bool) -> Fit:
        """The mask for one layer of a stack: its matrix multiplies the rows ``select`` of x [.., D].

        Rows that are ``picked`` for a matrix, or a tensor [E, C, D], are tokens sorted by expert, and a place without a
        token is zero. The batch's mask fits only where each matrix gets all rows of the batch in their order: then the
        matrices are no experts, or every expert gets every token.
        """
        # 2-D rows that are no view were picked for their matrix; later products in the module follow the first one
        gathered = x.ndim == 2 and not self._in_order.setdefault(module, x._base is not None)
        result = EVERY_ROW if picked or gathered else self._whole(module, x, info)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat if select is None else flat[select]
        if picked and isinstance(select, slice) and x.ndim == 3:
            masks = self._masks(module, x, info)[1]
            if len(masks) == 1 and masks[0].ndim == 2 and all(has_all(entry, masks[0]) for entry in x):
                return Fit(masks[0].repeat(len(rows) // masks[0].numel(), 1))
        if result.mask is None and (info.places or x.ndim == 3):
            return Fit(rows.ne(0).any(-1))
        return result

    def _warn(self, module: str, batch: Sequence[int], masks: Sequence[Tensor], doubt: str) -> None:
        if doubt in self._warned:
            return
        self._warned.add(doubt)
        shapes = " and ".join(str(list(mask.shape)) for mask in masks) or "none"
        logger.warning(
            f"ds_kfac: which rows of {module} count is ambiguous (rows {list(batch)}, mask {shapes}): {doubt}. If that "
            "is wrong, set engine.kfac.read_batch, or kfac.padding.count to all (shown once, for the first such layer)"
        )

    def _masks(self, module: str, x: Tensor, info: BatchInfo) -> tuple[str | None, list[Tensor]]:
        """On which side the rows ``x`` are, and the masks that may be theirs."""
        side, masks = self._side_of(module, x), [info.rows, info.encoder_rows]
        if side == SOURCE:
            masks = [info.encoder_rows]
        elif side == TARGET and info.rows is None:
            masks = []  # the target has no mask, and the source's could fit by chance
        return side, [mask for mask in masks if mask is not None and side != OTHER]

    def _whole(self, module: str, x: Tensor, info: BatchInfo) -> Fit:
        """The mask for a call that gets all rows of the batch; none fits one that gets a slice."""
        batch = tuple(x.shape[:-1])
        inside = self._attends(module)
        if info.rows is None and info.encoder_rows is None:
            if inside and len(batch) > 1:
                return Fit(examples=1)
            order = self._order_of(module, batch) if len(batch) > 1 and batch[0] == batch[1] > 1 else 0
            return EVERY_ROW if order == 0 else Fit(examples=order or 0, doubt="" if order else SQUARE)
        side, masks = self._masks(module, x, info)
        order = 1 if inside else self._order_of(module, batch)
        fits = [fit(mask, batch, order) for mask in masks]
        if inside:
            fits = [replace(each, doubt="") for each in fits]
        good = [each for each in fits if each.mask is not None]
        result = good[0] if good else next((each for each in fits if each.doubt), EVERY_ROW)
        if side is None and len(good) > 1:
            result = Fit(result.mask, result.examples, "the masks of source and target fit; the target's is taken")
        certain = not result.doubt and len(batch) > 1 and len(set(batch[:2])) > 1
        if certain and result.mask is not None and min(result.mask.shape) > 1:
            self._examples[module] = result.examples
        return result

    def _attends(self, module: str) -> bool:
        """Whether a module is torch's attention, which multiplies sequence-first rows whatever its ``batch_first``."""
        around = module, module.rpartition(".")[0]
        return any(isinstance(self._model.get_submodule(name), nn.MultiheadAttention) for name in around)

    def _order_of(self, module: str, batch: tuple[int, ...]) -> int | None:
        """Dimension of the examples in a module's rows; None: unknown."""
        if len(batch) == 1:  # flattened rows keep the order that other modules of the model show
            return 1 if 1 in self._examples.values() else None
        if module in self._examples:
            return self._examples[module]
        place = module
        while place:  # torch's modules have ``batch_first``: one around this module, or a sibling
            place = place.rpartition(".")[0]
            around = self._model.get_submodule(place)
            for each in (around, *around.children()):
                if isinstance(first := value_of(each, "batch_first"), bool):
                    return 0 if first else 1
        return None

    def _side_of(self, module: str, x: Tensor) -> str | None:
        """Whether the rows ``x`` are SOURCE, TARGET or OTHER; None: unknown."""
        cdata = x.untyped_storage()._cdata
        recomputed = not self.watching and module in self._of_others
        if self._others and (recomputed or self._side == OTHER or self._is_other(x)):
            self._of_others.add(module)
            return OTHER
        if not self._places:
            return TARGET
        if any(source.cdata == cdata and not source.expired() for source in self._sources):
            return SOURCE
        if self._side is not None:
            return self._side
        return next((side for place, side in self._places.items() if module.startswith(place)), None)

    def _add_others(self, tensors: Iterable[Any], *, cast: bool = False) -> None:
        wide = (x for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1)
        self._others += [(StorageWeakRef(x.untyped_storage()), (x.shape, x.dtype) if cast else None) for x in wide]

    def _is_other(self, x: Any, *, cast: bool = False) -> bool:
        """Whether a tensor is one of another modality or a view of it; with ``cast``, a copy in another dtype."""
        return isinstance(x, Tensor) and any(
            (mark.cdata == x.untyped_storage()._cdata and not mark.expired())
            or (cast and given is not None and given[0] == x.shape and given[1] != x.dtype)
            for mark, given in self._others
        )

    def _watch(self, module: nn.Module, side: str) -> None:
        def enter(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            self._outer.append(self._side)
            floats = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            others = [self._is_other(x, cast=True) for x in floats]
            # text looks at another modality; a parameter's rows, such as queries to sum it up by, are no text
            rows = [x for x, other in zip(floats, others, strict=True) if x.ndim == 3 and not other]
            text = any(not isinstance(x._base, nn.Parameter) for x in rows)
            if side != OTHER or (any(others) and not text):
                self._side = side

        def leave(module: nn.Module, arguments: tuple, output: Any) -> None:
            if not self._outer:
                return
            outer, entered = self._outer.pop(), side != OTHER or self._side == OTHER
            if entered:
                self._side = TARGET if side == TARGET else outer  # a head after the decoder has the target's rows
            if entered and side == OTHER:
                self._add_others(tensors_of(output))
            elif side == SOURCE:
                self._sources += [StorageWeakRef(x.untyped_storage()) for x in tensors_of(output) if x.ndim > 1]

        for register, function, how in (
            (module.register_forward_pre_hook, enter, {"with_kwargs": True}),
            (module.register_forward_hook, leave, {"always_call": True}),
        ):
            self._handles.append(register(own_hook(module, torch.compiler.disable(function), self), **how))
