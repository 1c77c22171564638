"""How many terms the loss of a forward has, and the gradient that reaches it: read from what the model returned.

Autograd's graph shows which dimension of a prediction holds the outputs of one term (``prediction.py``), of which
returned losses the caller's loss is made. Shape suffixes: N examples, T positions, C outputs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.layers import parameter_shape, tensors_of
from ds_kfac.model.prediction import Place, class_place, inputs_of, is_scalar, last_product, under
from ds_kfac.model.reductions import Measured, Reduction, Value, divided, measured, terms_in
from ds_kfac.model.slices import Fit, counted, fit

ERRORS = "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "LogSigmoid", "Softplus"
"""Nodes of an error of a prediction, as the square of a difference is one."""
COLLECTING, MOST_LOSSES = ("StackBackward", "CatBackward"), 64
VECTORS = *COLLECTING, "MulBackward", "DivBackward", "WhereBackward", "IndexBackward", "ToCopyBackward"
"""Nodes that collect losses in a vector, the most in it; these and those that may weigh, cast or choose from it."""
LEVELS = (
    "the model returned predictions of several sizes, and the number of loss terms is taken to be that of the first. "
    "If the loss is a mean over all of them"
)
EACH = "each is taken to be a term of the loss. If the loss has one for each example, as a softmax over positions"
ONE = "each example is taken to be a term of the loss, as of a softmax over positions. If each number is one"


def losses_in(loss: Tensor, reductions: list[Reduction] | None = None, *, errors: bool = False) -> set[Value]:
    """The scalars that a loss is computed from through scalars alone, itself included. For a weighted sum or a mean of
    losses these are the losses and all partial sums; no logits, and no value of a single example, of which an error is
    computed, unless with ``errors``. ``reductions`` gets what they are made of, watched."""
    scalars, others, waiting = set[Value](), set[Any](), list[tuple[Any, int]]([(loss.grad_fn, loss.output_nr)])
    while waiting:
        node, output = waiting.pop()
        if (value := (node._sequence_nr(), output)) in scalars:
            continue
        scalars.add(value)
        name, operand = node.name(), next((below.name() for below, _ in node.next_functions if below is not None), "")
        squared = name.startswith("PowBackward") and operand.startswith(("SubBackward", "RsubBackward"))
        goes_on, made = errors or not (squared or name.startswith(ERRORS)), False
        for below, at in node.next_functions:
            shapes = () if below is None else below._input_metadata
            numel = prod(shapes[at].shape) if at < len(shapes) else 0
            few = 1 < numel <= MOST_LOSSES and below.name().startswith(VECTORS)
            follows = goes_on and (numel == 1 or (few and _collects(below, others)))
            waiting += [(below, at)] if follows else []
            made |= numel > 1 and not follows
        if made and reductions is not None and prod(node._input_metadata[output].shape) == 1:
            reductions.append(Reduction(value))
            reductions[-1].watch(node)
    return scalars


def _collects(node: Any, others: set[Any]) -> bool:
    """Whether a node of :data:`VECTORS` collects scalars alone, or weighs, casts or chooses from what does; if not, it
    and those under it join the ``others``."""
    nodes = {*under(node, lambda x, _: x not in others and x.name().startswith(VECTORS))} - others
    collecting = (x for x in nodes if x.name().startswith(COLLECTING))
    found = any(all(prod(shape) == 1 for *_, shape in inputs_of(each)) for each in collecting)
    others |= set() if found else nodes
    return found


def trained(loss: Tensor, forwards: Sequence["Forward"], reductions: list[Reduction] | None = None) -> set[Value]:
    """The :func:`losses_in` a loss, and what it is made of in ``reductions``. Tells ``forwards`` which of the other
    tensors that they returned it is made of.

    Without the losses that one of them returned where the caller adds to these what he made of such tensors, as a
    reconstruction's error to a KL divergence: their weight is then none of the whole loss's."""
    scalars = losses_in(loss, reductions)
    tensors = {value for forward in forwards for value in forward.tensors}
    losses = {value for forward in forwards for value in forward.losses}
    used = made_of([loss], min(tensors)[0], without=losses, ends=tensors) & tensors
    for forward in forwards:
        forward.uses(used)
    own = [forward for forward in forwards if not scalars.isdisjoint(forward.losses)]
    return scalars - losses if used and len(own) == 1 else scalars


def made_of(
    losses: Iterable[Tensor], oldest: int, *, without: Collection[Value] = (), ends: Collection[Value] = ()
) -> set[Value]:
    """What losses are computed from, themselves included, other than through ``without`` or what lies behind ``ends``.
    A node's operands are older than the node: what is older than the sequence number ``oldest`` is left out."""
    found, waiting = set(without), list[tuple[Any, int]]((x.grad_fn, x.output_nr) for x in losses)
    while waiting:
        node, output = waiting.pop()
        if (value := (node._sequence_nr(), output)) in found or value[0] < oldest:
            continue
        found.add(value)
        if value not in ends:
            waiting += [(below, at) for below, at in node.next_functions if below is not None]
    return found.difference(without)


def _of_scalars(node: Any) -> bool:
    """Whether a scalar is computed from scalars alone: then it is a temperature, such as CLIP's, and no loss."""
    for each in under(node, lambda *_: True):
        leaf = "AccumulateGrad" in each.name()
        shapes = [parameter_shape(each.variable)] if leaf else [metadata.shape for metadata in each._input_metadata]
        if any(prod(shape) != 1 for shape in shapes):
            return False
    return True


def _of_losses(vector: Tensor) -> bool:
    """Whether a vector collects losses, such as a cross entropy; sums and means may be predictions of an example."""
    parts = under(vector.grad_fn, lambda x, shape: prod(shape) == 1 or x.name().startswith(VECTORS))
    return any(getattr(each, "_saved_reduction", 0) for each in parts)


@dataclass(eq=False)
class Forward:
    """One forward of the model and its loss. The calls of its layers hold it; it holds no graph.

    Attributes:
        info: what the model's arguments show about the micro-batch; without ``items`` once the model ignored them.
        measures: whether rows of gradients are captured, whose scale is to be known.
        detached: whether no input of the model came from another graph.
        guessed: whether ``info`` is by the names of arguments, of which a model may ignore some.
        summed: layers with a call whose sum of inputs was made at once, and whose gradient is still to come.
        proven: layers that were called, in a step that proves.
        terms: M, the number of loss terms, if labels or the model's output show it.
        seed: gradient of the caller's loss with respect to the loss that the model returned, see :meth:`take`.
        sums: the same with respect to the sum of its terms, where the loss's graph shows one.
        guess: M if neither shows it: the number of rows of the layer nearest to the loss.
        most: row mask and output shape of the call with the most rows, among calls that have the whole batch: neither
            an expert's nor a slice's.
        losses, tensors: what the model returned: scalars that may be losses, and all other tensors.
        doubt: why ``terms`` may be wrong, and for which loss; "": nothing shows that.
    """

    info: BatchInfo = field(default_factory=BatchInfo)
    measures: bool = False
    detached: bool = True
    guessed: bool = True
    summed: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    terms: Tensor | int | None = None
    seed: Tensor | None = None
    sums: Measured | None = None
    guess: Tensor | int | None = None
    most: tuple[Fit, torch.Size] | None = None
    doubt: str = ""
    losses: tuple[Value, ...] = ()
    tensors: frozenset[Value] = frozenset()
    _reached: dict[Value, Tensor] = field(default_factory=dict)
    _terms: dict[Value, tuple[Tensor | int | None, str]] = field(default_factory=dict)  # terms, doubt of predictions
    _beside: bool = False  # whether a backward goes through a returned tensor that no returned loss is made of
    _made: dict[Value, list[Reduction]] = field(default_factory=dict)  # returned loss -> what it is made of
    _inside: set[Value] = field(default_factory=set)  # scalars of all of them
    _predictions: list[Value] = field(default_factory=list)  # the likeliest first, or the one that the loss is made of
    _taken: tuple[Any, int] = (None, 0)  # the backward of which the sums are, and of how many, about

    @property
    def count(self) -> Tensor | int:
        """M; 0 while it is unknown."""
        terms = self.guess if self.terms is None else self.terms
        return 0 if terms is None else terms

    def note_call(self, rows: Fit, shape: torch.Size) -> None:
        """A layer was called, with output [.., D] of ``shape``."""
        if rows.piece is None and (self.most is None or shape[:-1].numel() > self.most[1][:-1].numel()):
            self.most = rows, shape

    def tokens(self, weight_sharing: str) -> Tensor | int:
        """How many rows of :attr:`most` count; with "reduce", how many examples have such a row."""
        assert self.most is not None
        rows, shape = self.most
        if rows.mask is not None:
            return counted(rows.mask, weight_sharing if len(shape) > 2 else "expand", rows.examples)
        return shape[rows.examples] if weight_sharing == "reduce" and len(shape) > 2 else shape[:-1].numel()

    def begins(self, *, weight_sharing: str) -> None:
        """Set :attr:`terms` from labels before the model runs: labelled positions, with "reduce" labelled examples."""
        if self.info.labelled is not None:
            self.terms = counted(self.info.labelled, weight_sharing)

    def returned(self, output: Any, *, weight_sharing: str) -> None:
        """Set :attr:`terms` from the model's ``output``, unless labels did, and watch the losses in it."""
        if self.terms is None or (self.info.classes and of_classes(output, self.info)):
            labelled, self.terms = self.terms, output_terms(output, self.info, weight_sharing=weight_sharing)
            levels = self.terms is not None and of_levels(output)
            self.doubt = "" if self.terms is None else doubt_of(output, levels=levels)
            for x in [] if self.terms is None else predictions_in(output):
                if x.grad_fn is not None:
                    terms = output_terms(output, self.info, weight_sharing=weight_sharing, prediction=x)
                    doubt = doubt_of(output, x, levels=levels)
                    if labelled is not None and of_examples(terms, self.info):
                        self.terms, self.doubt = terms, doubt = labelled, ""
                    self._terms[x.grad_fn._sequence_nr(), x.output_nr] = terms, doubt
        for x in predictions_in(output) if self.measures else ():
            self._predictions += [] if x.grad_fn is None else [(x.grad_fn._sequence_nr(), x.output_nr)]
        losses: dict[Value, Tensor] = {
            (x.grad_fn._sequence_nr(), x.output_nr): x for x in _losses(output) if x.grad_fn is not None
        }
        inside = set[Value]()  # losses that are summands of another returned loss
        for value, loss in losses.items() if self.measures or len(losses) > 1 else ():
            scalars = losses_in(loss, self._made.setdefault(value, []) if self.measures else None, errors=True)
            inside |= scalars - {value}
            self._inside |= scalars
        self.losses = tuple(value for value in losses if value not in inside)
        items = self.info.items if self.guessed else None
        if items is not None and losses and not any(divided(loss.grad_fn, items) for loss in losses.values()):
            self.info = replace(self.info, items=None)
        every = (*tensors_of(output), *_values(output))
        nodes = {(x.grad_fn._sequence_nr(), x.output_nr): x.grad_fn for x in every if x.ndim and x.grad_fn is not None}
        self.tensors, beside = frozenset(nodes.keys() - losses.keys()), set[Value]()
        if self.losses and self.tensors:
            beside.update(self.tensors - made_of(losses.values(), min(self.tensors)[0]))
        for value in self.losses:
            node: Any = losses[value].grad_fn
            # a hook of the node, not of the tensor: a tensor's would see the gradient before DeepSpeed's hooks scale it
            node.register_prehook(partial(self._arrived, value, [nodes[other] for other in beside]))

    def uses(self, tensors: Collection[Value]) -> None:
        """The caller's loss is made of these of the returned tensors: :attr:`terms` are those of the first of them."""
        self._predictions = [value for value in self._predictions if value in tensors] or self._predictions
        for value in [value for value in self._terms if value in tensors][:1]:
            self.terms, self.doubt = self._terms[value]

    def _arrived(self, value: Value, beside: Iterable[Any], gradients: tuple[Tensor | None, ...]) -> None:
        """A loss's gradient came. ``beside``: nodes of the tensors that no returned loss is made of."""
        if (gradient := gradients[value[1]]) is not None:
            self._reached[value] = gradient.detach().float().reshape(())
            self._beside = next(filter(runs, beside), None) is not None

    def take(self, among: Collection[Value] | None, reductions: Sequence[Reduction] = (), *, count: bool) -> None:
        """Set :attr:`seed` and :attr:`sums` in a backward. ``among``: the scalars of its loss (:func:`losses_in`), made
        of ``reductions``; None: unknown. The seed is None where the loss sums several that the model returned, or one
        and another that the caller made of what it returned: their weights are the caller's. ``count``: set
        :attr:`terms`, too, where no labels did and the sums show it."""
        losses = [value for value in self.losses if (value in self._reached if among is None else value in among)]
        if among is None and self._beside:
            losses = []
        number = self._predictions[0][0] if self._predictions else None
        mine = [x for x in reductions if number in x.passed]
        outside = any(x.value not in self._inside for x in mine)
        if outside:  # what the model returned beside is no more than a part of the loss, unless made of the prediction
            losses = [loss for loss in losses if any(number in x.passed for x in self._made[loss])]
        self.seed = self._reached.get(losses[0]) if losses and (len(losses) == 1 or among is None) else None
        if losses:
            made = self._made.get(losses[0], []) if self.seed is not None and not outside else []
            mine = [x for x in made if number in x.passed] or made
        many = sum(x.gradient is not None for x in mine)
        now = reductions, many >> (rest := max(0, many.bit_length() - 4)) << rest  # of a loop's, again after some more
        if now[0] is self._taken[0] and now[1] == self._taken[1]:
            return
        self._taken, labels = now, self.info.labelled
        of_terms = count or (labels is not None and labels.ndim == 1)  # an example's tokens are one term with "reduce"
        shown = (of_terms and all(x.of_terms(labels) for x in mine)) or sum(not x.classes for x in mine) == 1
        if count and labels is None and shown and (terms := terms_in(mine)) is not None:
            self.terms, self.doubt = terms, ""
        self.sums = measured(mine, labels, self.count) if of_terms else None


def logits_of(output: Any, name: str = "logits") -> Tensor | None:
    """``logits`` of a model's output, as Hugging Face's have."""
    logits = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return logits if isinstance(logits, Tensor) else None


def _values(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors of a model's output, ``logits`` first."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
        return
    if (logits := logits_of(output)) is not None:
        yield logits
    held = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})  # a dataclass's, a namespace's
    values = output if isinstance(output, (tuple, list)) else held.values()
    for value in values:
        if isinstance(value, Tensor):
            yield from _values(value)


def predictions_in(output: Any) -> list[Tensor]:
    """The tensors that a loss may be computed from, the likeliest first: ``logits``, any [N, .., C], any [N]. Of
    several those with a graph, but for a target; and with rows, but for a task that has none in this batch. A vector
    without a graph beside a loss that has one are numbers to look at, such as the parts of a loss."""
    tensors = [value for value in _values(output) if value.ndim > 0 and not is_scalar(value)]
    wide = [value for value in tensors if value.ndim > 1]
    named = len(wide) < 2 or logits_of(output) is not None
    order = [(not x.numel(), not named and x.grad_fn is None, place) for place, x in enumerate(wide)]
    vectors = [value for value in tensors if value.ndim == 1 and len(value) > 1 and not _of_losses(value)]
    if vectors and returned_loss(output) is not None:
        vectors = [value for value in vectors if value.grad_fn is not None]
    return [wide[place] for _, _, place in sorted(order)] + vectors


def returned_prediction(output: Any) -> Tensor | None:
    """The first of :func:`predictions_in`, or None."""
    return next(iter(predictions_in(output)), None)


def _losses(output: Any) -> Iterator[Tensor]:
    """The scalars that may be losses: the only tensor returned, or one that is not computed from scalars alone."""
    values = [*_values(output)]
    for value in values:
        alone = len(values) == 1 or value.grad_fn is None
        if (value.ndim == 0 or is_scalar(value)) and (alone or not _of_scalars(value.grad_fn)):
            yield value


def returned_loss(output: Any) -> Tensor | None:
    """The first scalar of a model's output that may be a loss, or None."""
    return next(_losses(output), None)


def of_levels(output: Any) -> bool:
    """Whether a model without ``logits`` returned predictions of several resolutions, such as a feature pyramid's: the
    loss may then be one mean over all of them, or a sum of means."""
    if logits_of(output) is not None:
        return False
    wide = [value for value in _values(output) if value.ndim > 2 and value.grad_fn is not None]
    shapes = {(x.ndim, len(x), outputs_of(x)): tuple(wide[0].shape) for x in wide[:1]}
    return any(shapes.get((x.ndim, len(x), outputs_of(x)), tuple(x.shape)) != tuple(x.shape) for x in wide[1:])


def outputs_of(prediction: Tensor) -> int:
    """How many outputs a term has: C."""
    dim = class_place(prediction).dim if prediction.ndim > 1 else None
    return 1 if dim is None else prediction.shape[dim]


def _place(output: Any, prediction: Tensor) -> Place:
    """See :func:`class_place`. The ``start_logits`` of Hugging Face's answers are scores of an example's positions."""
    return Place(-1) if prediction is logits_of(output, "start_logits") else class_place(prediction)


def of_classes(output: Any, info: BatchInfo) -> bool:
    """Whether labels [N, C] are of classes: the prediction is [N, C], or there is none, and a mask has other positions.
    Then M is that of the same labels as floats. Or whether labels [N] may be what a prediction is conditioned on: the
    model returns no loss of them."""
    prediction = returned_prediction(output)
    if info.labelled is not None and info.labelled.ndim == 1:
        return prediction is not None and returned_loss(output) is None
    if prediction is None or info.labelled is None:
        return info.rows is not None and info.labelled is not None and info.rows.shape != info.labelled.shape
    return prediction.shape == info.labelled.shape and _place(output, prediction) in (Place(-1), Place(1))


def of_examples(terms: Tensor | int | None, info: BatchInfo) -> bool:
    """Whether labels [N] are of a prediction that has so many terms, and so say which of these have none."""
    labels = info.labelled
    return labels is not None and labels.ndim == 1 and isinstance(terms, int) and terms == len(labels)


def doubt_of(output: Any, prediction: Tensor | None = None, *, levels: bool | None = None) -> str:
    """Why the number of terms of a loss outside of the model may be another one, and for which loss; or "". It is made
    of ``prediction``; None: of the likeliest. ``levels``: :func:`of_levels` of the output, if it is known."""
    if of_levels(output) if levels is None else levels:
        return LEVELS
    prediction = returned_prediction(output) if prediction is None else prediction
    if prediction is None or not (place := _place(output, prediction)).doubt:
        return ""
    shape = list(prediction.shape)
    return f"the model returned {shape}, a number for each position, and {EACH if place.dim is None else ONE}"


def output_terms(
    output: Any, info: BatchInfo, *, weight_sharing: str, prediction: Tensor | None = None
) -> Tensor | int | None:
    """M of a loss outside of the model: a term per prediction that the mask does not leave out; None: no prediction.
    It is made of ``prediction``; None: of the likeliest."""
    if (prediction := returned_prediction(output) if prediction is None else prediction) is None:
        return None
    shape = list(prediction.shape)
    if len(shape) > 1:
        if (dim := _place(output, prediction).dim) is not None:
            del shape[dim]
    elif (product := last_product(prediction)) is not None and product.outputs == product.numel == shape[0]:
        shape = [1]  # [C], the outputs of a single row
    rows = fit(info.rows, tuple(shape))
    if rows.mask is not None:
        return counted(rows.mask, weight_sharing, rows.examples)
    return shape[0] if weight_sharing == "reduce" else prod(shape)


def runs(node: Any) -> bool:
    """Whether the running backward runs a node; of a parameter's, whether it adds to its gradient, as autograd.grad and
    other ``inputs`` do not."""
    with suppress(RuntimeError):  # autograd.grad with its tensor among the inputs: the gradient goes to the caller
        return bool(torch._C._will_engine_execute_node(node))
    return False
