"""How many terms the loss of a forward has, and the gradient that reaches it.

Autograd's graph shows of which returned losses and tensors the caller's loss is made (here), which dimension of a
prediction holds the outputs of one term (``prediction.py``), and where terms are summed (``reductions.py``).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.divisors import divided_by
from ds_kfac.model.graph import Edge, edge_of, inputs_of, made_of, runs, under
from ds_kfac.model.layers import tensors_of
from ds_kfac.model.output import (
    COLLECTING,
    LEVELS,
    MOST_LOSSES,
    OPAQUE,
    VECTORS,
    Terms,
    floats_of,
    losses_of,
    of_classes,
    of_examples,
    of_levels,
    of_scalars,
    predictions_in,
    terms_of,
)
from ds_kfac.model.reductions import Reduction, TermWeight, term_weight, terms_in
from ds_kfac.model.slices import Fit, counted

ERRORS = "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "LogSigmoid", "Softplus"
"""Nodes of an error of a prediction, as the square of a difference is one."""


def losses_in(loss: Tensor, reductions: list[Reduction] | None = None, *, errors: bool = False) -> set[Edge]:
    """The scalars that a loss is computed from through scalars alone, itself included. For a weighted sum or a mean of
    losses these are the losses and all partial sums; no logits, and no value of a single example, of which an error is
    computed, unless with ``errors``. ``reductions`` gets what they are made of, watched."""
    scalars, others = set[Edge](), set[Any]()
    waiting = list[tuple[Any, int, bool]]([(loss.grad_fn, loss.output_nr, False)])
    while waiting:
        node, output, of_ratio = waiting.pop()
        if (edge := (node._sequence_nr(), output)) in scalars:
            continue
        scalars.add(edge)
        name, operand = node.name(), next((below.name() for below, _ in node.next_functions if below is not None), "")
        squared = name.startswith("PowBackward") and operand.startswith(("SubBackward", "RsubBackward"))
        goes_on, made = errors or not (squared or name.startswith(ERRORS)), False
        divisor = node.next_functions[1][0] if name.startswith("DivBackward") and len(node.next_functions) > 1 else None
        of_ratio |= divisor is not None and not of_scalars(divisor)
        for below, at in node.next_functions:
            shapes = () if below is None else below._input_metadata
            numel = prod(shapes[at].shape) if at < len(shapes) else 0
            few = 1 < numel <= MOST_LOSSES and below.name().startswith(VECTORS)
            follows = goes_on and (numel == 1 or (few and _collects(below, others)))
            waiting += [(below, at, of_ratio)] if follows else []
            made |= numel > 1 and not follows
        if made and reductions is not None and prod(node._input_metadata[output].shape) == 1:
            reductions.append(Reduction(edge, of_ratio=of_ratio))
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


def trained(loss: Tensor, forwards: Sequence["Forward"], reductions: list[Reduction] | None = None) -> set[Edge]:
    """The :func:`losses_in` a loss, and what it is made of in ``reductions``. Tells ``forwards`` which of the other
    tensors that they returned it is made of.

    Without the losses that one of them returned where the caller adds to these what he made of such tensors, as a
    reconstruction's error to a KL divergence: their weight is then none of the whole loss's."""
    scalars = losses_in(loss, reductions)
    tensors = {edge for forward in forwards for edge in forward.tensors}
    losses = {edge for forward in forwards for edge in forward.losses}
    used = made_of([loss], min(tensors)[0], without=losses, ends=tensors) & tensors
    for forward in forwards:
        forward.uses(used)
    own = [forward for forward in forwards if not scalars.isdisjoint(forward.losses)]
    return scalars - losses if used and len(own) == 1 else scalars


@dataclass(eq=False)
class Forward:
    """One forward of the model and its loss. The calls of its layers hold it; it holds no graph.

    Attributes:
        info: what the model's arguments show about the micro-batch; without ``items`` once the model ignored them.
        captures_G: whether rows of gradients are captured, whose scale is to be known.
        detached: whether no input of the model came from another graph.
        guessed: whether ``info`` is by the names of arguments, of which a model may ignore some.
        summed: layers with a call whose sum of inputs was made at once, and whose gradient is still to come.
        proven: layers that were called, in a step that proves.
        terms: M, the number of loss terms, if labels or the model's output show it.
        seed: gradient of the caller's loss with respect to the loss that the model returned, see :meth:`take`.
        term_weight: the same with respect to each of its terms, where the loss's graph shows their sum.
        guess: M if neither shows it: the number of rows of the layer nearest to the loss.
        most: row mask and output shape of the call with the most rows, among calls that have the whole batch: neither
            an expert's nor a slice's.
        losses, tensors: what the model returned: scalars that may be losses, and all other tensors.
        doubt: why ``terms`` may be wrong, and for which loss; "": nothing shows that.
        mark: stands for it until the step ends, as it may hold masks as large as a prediction.
    """

    info: BatchInfo = field(default_factory=BatchInfo)
    captures_G: bool = False
    detached: bool = True
    guessed: bool = True
    summed: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    terms: Tensor | int | None = None
    seed: Tensor | None = None
    term_weight: TermWeight | None = None
    guess: Tensor | int | None = None
    most: tuple[Fit, torch.Size] | None = None
    doubt: str = ""
    losses: tuple[Edge, ...] = ()
    tensors: frozenset[Edge] = frozenset()
    mark: object = field(default_factory=object)
    _predictions: list[Edge] = field(default_factory=list)  # the likeliest first, or the one that the loss is made of
    _terms: dict[Edge, Terms] = field(default_factory=dict)  # of each prediction
    _sums: dict[Edge, list[Reduction]] = field(default_factory=dict)  # returned loss -> what it is made of
    _scalars: set[Edge] = field(default_factory=set)  # of all of these
    # of the running backward
    _reached: dict[Edge, Tensor] = field(default_factory=dict)  # returned loss -> its gradient
    _beside: bool = False  # whether it goes through a returned tensor that no returned loss is made of
    _weighed: tuple[Any, int] = (None, 0)  # the reductions of which the weight is, and of how many, about

    @property
    def count(self) -> Tensor | int:
        """M; 0 while it is unknown."""
        terms = self.guess if self.terms is None else self.terms
        return 0 if terms is None else terms

    def note_call(self, rows: Fit, shape: torch.Size) -> None:
        """A layer was called, with output [.., D] of ``shape``."""
        if rows.piece is None and (self.most is None or shape[:-1].numel() > self.most[1][:-1].numel()):
            self.most = rows, shape

    def guessed_by(self, rows: Tensor | int, *, whole: bool, weight_sharing: str) -> Tensor | int:
        """:attr:`guess`, set by the first layer that asks: how many of its ``rows`` count, or where they are not the
        ``whole`` batch's, of those of :attr:`most`; with "reduce", how many examples have such a row."""
        if self.guess is None:
            self.guess = rows
            if not whole and self.most is not None:
                its_rows, shape = self.most
                weight_sharing = weight_sharing if len(shape) > 2 else "expand"
                self.guess = shape[its_rows.examples] if weight_sharing == "reduce" else shape[:-1].numel()
                if its_rows.mask is not None:
                    self.guess = counted(its_rows.mask, weight_sharing, its_rows.examples)
        return self.guess

    def returned(self, output: Any, *, weight_sharing: str) -> None:
        """Set :attr:`terms` from the model's ``output``, unless labels did, and watch the losses in it."""
        if self.terms is None or (self.info.classes and of_classes(output, self.info)):
            self._count_terms(output, weight_sharing)
        if self.captures_G:
            self._predictions += [edge_of(x) for x in predictions_in(output) if x.grad_fn is not None]
        losses = {edge_of(x): x for x in losses_of(output) if x.grad_fn is not None}
        self.losses = self._outermost(losses)
        items = self.info.items if self.guessed else None
        if items is not None and losses and not any(divided_by(loss.grad_fn, items) for loss in losses.values()):
            self.info = replace(self.info, items=None)
        every = (*tensors_of(output), *floats_of(output))
        nodes = {edge_of(x): x.grad_fn for x in every if x.ndim and x.grad_fn is not None}
        self.tensors, beside = frozenset(nodes.keys() - losses.keys()), set[Edge]()
        if self.losses and self.tensors:
            beside.update(self.tensors - made_of(losses.values(), min(self.tensors)[0]))
        for edge in self.losses:
            node: Any = losses[edge].grad_fn
            # a hook of the node, not of the tensor: a tensor's would see the gradient before DeepSpeed's hooks scale it
            node.register_prehook(partial(self._arrived, edge, [nodes[other] for other in beside]))

    def _count_terms(self, output: Any, weight_sharing: str) -> None:
        """Set :attr:`terms` to those of the likeliest prediction, and keep those of every one."""
        labelled, self.terms, self.doubt = self.terms, None, ""
        predictions = predictions_in(output)
        levels = bool(predictions) and of_levels(output)
        for at, x in enumerate(predictions):
            terms, by_labels = terms_of(output, self.info, weight_sharing=weight_sharing, prediction=x), False
            if levels:
                terms = Terms(terms.number, LEVELS)
            if x.grad_fn is not None:
                if by_labels := labelled is not None and of_examples(terms.number, self.info):
                    terms = Terms(labelled)
                self._terms[edge_of(x)] = terms
            if by_labels or not at:
                self.terms, self.doubt = terms

    def _outermost(self, losses: Mapping[Edge, Tensor]) -> tuple[Edge, ...]:
        """Those of the returned losses that are no summands of another one."""
        summands = set[Edge]()
        for edge, loss in losses.items() if self.captures_G or len(losses) > 1 else ():
            scalars = losses_in(loss, self._sums.setdefault(edge, []) if self.captures_G else None, errors=True)
            summands |= scalars - {edge}
            self._scalars |= scalars
        return tuple(edge for edge in losses if edge not in summands)

    def uses(self, tensors: Collection[Edge]) -> None:
        """The caller's loss is made of these of the returned tensors: :attr:`terms` are those of the first of them."""
        self._predictions = [edge for edge in self._predictions if edge in tensors] or self._predictions
        for edge in [edge for edge in self._terms if edge in tensors][:1]:
            self.terms, self.doubt = self._terms[edge]

    def _arrived(self, loss: Edge, beside: Iterable[Any], gradients: tuple[Tensor | None, ...]) -> None:
        """A loss's gradient came. ``beside``: nodes of the tensors that no returned loss is made of."""
        if (gradient := gradients[loss[1]]) is not None:
            self._reached[loss] = gradient.detach().float().reshape(())
            self._beside = next(filter(runs, beside), None) is not None

    def take(self, among: Collection[Edge] | None, reductions: Sequence[Reduction] = (), *, count: bool) -> None:
        """Set :attr:`seed` and :attr:`term_weight` in a backward. ``among``: the scalars of its loss
        (:func:`losses_in`), made of ``reductions``; None: unknown. ``count``: set :attr:`terms`, too, where no labels
        did and the sums show it."""
        mine = self._set_seed(among, reductions)
        arrived = sum(x.gradient is not None for x in mine)
        now = reductions, arrived >> (rest := max(0, arrived.bit_length() - 4)) << rest  # a loop's: after some more
        if now[0] is not self._weighed[0] or now[1] != self._weighed[1]:
            self._weighed = now
            self._weigh(mine, count=count)

    def _set_seed(self, among: Collection[Edge] | None, reductions: Sequence[Reduction]) -> Sequence[Reduction]:
        """Set :attr:`seed`: None where the loss sums several that the model returned, or one and another that the
        caller made of what it returned: their weights are the caller's. Returns the sums of this forward's terms."""
        losses = [edge for edge in self.losses if (edge in self._reached if among is None else edge in among)]
        if among is None and self._beside:
            losses = []
        prediction = self._predictions[0][0] if self._predictions else None
        mine = [x for x in reductions if prediction in x.passed]
        outside = any(x.edge not in self._scalars for x in mine)
        if outside:  # what the model returned beside is no more than a part of the loss, unless made of the prediction
            losses = [loss for loss in losses if any(prediction in x.passed for x in self._sums[loss])]
        self.seed = self._reached.get(losses[0]) if losses and (len(losses) == 1 or among is None) else None
        if not losses:
            return mine
        inside = self._sums.get(losses[0], []) if self.seed is not None and not outside else []
        return [x for x in inside if prediction in x.passed] or inside

    def _weigh(self, sums: Sequence[Reduction], *, count: bool) -> None:
        """Set :attr:`term_weight`, and with ``count`` :attr:`terms`, from the sums of this forward's terms."""
        labels = self.info.labelled
        of_terms = count or (labels is not None and labels.ndim == 1)  # an example's tokens are one term with "reduce"
        shown = (of_terms and all(x.of_terms(labels) for x in sums)) or sum(not x.classes for x in sums) == 1
        if count and labels is None and shown and (terms := terms_in(sums)) is not None:
            self.terms, self.doubt = terms, ""
        self.term_weight = term_weight(sums, labels, self.count) if of_terms else None
        if any(x.opaque and x.edge not in self._scalars for x in sums):
            self.doubt = self.doubt or OPAQUE
