"""How many terms the loss of a forward has, and the gradient that reaches it: read from what the model returned. Which
dimension of a prediction holds the outputs of one term, what made the prediction says in its graph; and which of the
losses that the model returned a caller's loss is made of.

Shape suffixes: N examples, T positions, C outputs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ds_kfac.model.batch import BatchInfo, fit
from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.slices import Fit

Value = tuple[int, int]
"""A tensor in a graph: the number of its node, and which output of it. No node is held: it would hold the graph."""
VECTORS, MOST_LOSSES = ("StackBackward", "CatBackward"), 64
"""What makes a vector of losses, and how long that is."""


def class_dim(prediction: Tensor) -> int:
    """Dimension of a term's outputs: the last of [N, C]; of more dimensions the one that the outputs of the last
    product have become: [N, C, L] and [N, C, H, W] of a convolution, [N, T, C] and [N, H, W, C] of a linear layer,
    wherever they were turned to. Where the graph does not say so, as in torch's losses: of images the second, else the
    last."""
    if prediction.ndim < 3:
        return -1
    place = _outputs(prediction.grad_fn, tuple(prediction.shape))
    return place if place is not None else 1 if prediction.ndim > 3 else -1


def _outputs(node: Any, shape: tuple[int, ...]) -> int | None:
    """The dimension of ``node``'s result that comes from the outputs of a product below it."""
    moves: list[Callable[[int], Any]] = []  # where a dimension of what it takes is in its result; None: nowhere
    place, convolution = None, False
    while node is not None:
        name = node.name()
        convolution = "Convolution" in name
        if convolution or "mmBackward" in name or "MmBackward" in name or _linear(node, name):
            place = 1 if convolution else len(shape) - 1 - _from_the_left(node)
            break
        if name.startswith("MvBackward"):  # a matrix and one row, or rows and one output
            place = 0 if _parameter(node.next_functions[0][0]) else None
            break
        below, before = _below(node, len(shape))
        if below is None:  # no product: tokens, if they can be
            place = len(shape) - 1 if 2 <= len(shape) <= 3 else None
            break
        moves.append(_move(node, name, before, shape))
        node, shape = below, before
    for move in reversed(moves):
        if place is not None:
            place = move(place)
        if isinstance(place, range):  # outputs that were split: classes are a convolution's first part, another's last
            place = place[0] if convolution else place[-1]
    return place


def _linear(node: Any, name: str) -> bool:
    """Torch's linear layer, or an autograd function of somebody's own that its name says to be one, as DeepSpeed's at
    ZeRO-3, Megatron's and TransformerEngine's; it takes a weight beside its input."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return name.startswith("LinearBackward")
    named = "linear" in name.lower() and not any(word in name.lower() for word in ("bilinear", "nonlinear"))
    return named and len(node.next_functions) > 1


def _below(node: Any, dims: int) -> tuple[Any, tuple[int, ...]]:
    """What made the operand that the result is made of, and its shape: no constant, no parameter; of the same number of
    dimensions, if one has it."""
    found = []
    for below, index in node.next_functions:
        if below is not None and "AccumulateGrad" not in below.name():
            metadata = getattr(below, "_input_metadata", ())
            if index < len(metadata):
                found.append((below, tuple(metadata[index].shape)))
    same = [pair for pair in found if len(pair[1]) == dims]
    return next(iter(same or found), (None, ()))


def _from_the_left(product: Any) -> bool:
    """Whether a matrix product is that of a parameter and columns, W x: its outputs are rows."""
    if _linear(product, product.name()):
        return False
    left, right = [None, *(below for below, _ in product.next_functions)][-2:]  # an own function may take one
    return _parameter(left) and not _parameter(right)


def _parameter(node: Any) -> bool:
    """Whether it is one, in any view or format."""
    while node is not None and "AccumulateGrad" not in node.name():
        if len(node.next_functions) != 1 or "Embedding" in node.name():
            return False
        node = node.next_functions[0][0]
    return node is not None


def _move(node: Any, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    """Of one operation that takes ``before`` and gives ``after``."""

    def dim(saved: int, of: Sequence[int] = before) -> int:  # negative ones are saved as unsigned
        return (saved + len(of)) % 2**64 % len(of)

    if name.startswith("TransposeBackward"):
        one, other = dim(node._saved_dim0), dim(node._saved_dim1)
        return lambda p: {one: other, other: one}.get(p, p)
    if name.startswith("PermuteBackward"):
        return [dim(d) for d in node._saved_dims].index
    if len(before) == len(after) and "View" not in name and "Reshape" not in name:
        return lambda p: p
    if prod(before) == prod(after):
        return lambda p: _viewed(p, before, after)
    saved = getattr(node, "_saved_dim", None)
    if saved is None:
        return lambda p: None
    if len(before) < len(after):  # stacked
        return lambda p: p + (dim(saved, after) <= p)
    gone = {dim(d) for d in ([saved] if isinstance(saved, int) else saved)}
    return lambda p: None if p in gone else p - sum(d < p for d in gone)


def _viewed(p: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | range | None:
    """Where a dimension is in another view of the same elements; a range: in these parts; None: in one with others."""
    if before == after:
        return p
    for first in range(len(after)):
        if prod(after[:first]) == prod(before[:p]):
            for last in range(first, len(after)):
                if prod(after[first : last + 1]) == before[p] and (after[first] != 1 or before[p] == 1):
                    return first if first == last else range(first, last + 1)
    return None


def losses_in(loss: Tensor) -> set[Value]:
    """The scalars that a loss is made of by way of scalars alone, itself included: of a sum of losses or a mean, each
    times a weight, these losses, and sums of some; of logits nothing."""
    found: set[Value] = set()
    waiting: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if (value := (node._sequence_nr(), output)) in found:
            continue
        found.add(value)
        for below, at in node.next_functions:
            shapes = () if below is None else below._input_metadata
            numel = prod(shapes[at].shape) if at < len(shapes) else 0
            if numel == 1 or (numel <= MOST_LOSSES and numel and below.name().startswith(VECTORS)):
                waiting.append((below, at))
    return found


def _of_scalars(node: Any) -> bool:
    """Whether everything that a scalar is made of is one: a temperature, as CLIP's, and no loss."""
    seen, waiting = set[Any](), [node]
    while waiting:
        node = waiting.pop()
        if "AccumulateGrad" in node.name():
            if prod(parameter_shape(node.variable)) != 1:
                return False
            continue
        if any(prod(metadata.shape) != 1 for metadata in node._input_metadata):
            return False
        waiting += [below for below, _ in node.next_functions if below is not None and below not in seen]
        seen.update(waiting)
    return True


@dataclass(eq=False)
class Forward:
    """What is known of one forward of the model and its loss. Held by its calls; holds no graph.

    Attributes:
        info: what its arguments show.
        detached: whether no input of the model came from another graph.
        summed: layers a call of which waits for its gradient with the sum of its inputs.
        proven: layers that were called, in a step that proves.
        terms: M, if labels or the model's output show it.
        seed: the gradient that reached the loss the model returned, whatever the caller makes of it, see :meth:`take`.
        guess: M where neither does: as many as the layer nearest to the loss has rows.
        most: rows and shape of the call with the most rows, of those that have a whole batch: no expert's, no slices.
        levels: whether predictions of several sizes were returned, and ``terms`` are those of the first.
    """

    info: BatchInfo = field(default_factory=BatchInfo)
    detached: bool = True
    summed: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    terms: Tensor | int | None = None
    seed: Tensor | None = None
    guess: Tensor | int | None = None
    most: tuple[Fit, torch.Size] | None = None
    levels: bool = False
    _losses: tuple[Value, ...] = ()
    _reached: dict[Value, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> Tensor | int:
        """M; 0 as long as it is not known."""
        terms = self.guess if self.terms is None else self.terms
        return 0 if terms is None else terms

    def has(self, rows: Fit, shape: torch.Size) -> None:
        """A call of a layer, with output [.., D] of ``shape``."""
        if rows.piece is None and not rows.late:
            if self.most is None or shape[:-1].numel() > self.most[1][:-1].numel():
                self.most = rows, shape

    def tokens(self, weight_sharing: str) -> Tensor | int:
        """How many rows of :attr:`most` count, or examples with "reduce"."""
        assert self.most is not None
        (rows, shape), reduced = self.most, weight_sharing == "reduce" and len(self.most[1]) > 2
        if rows.mask is None:
            return shape[rows.examples] if reduced else shape[:-1].numel()
        mask = rows.mask.flatten(1) if rows.mask.ndim > 2 else rows.mask
        return (mask.any(dim=1 - rows.examples) if reduced and mask.ndim > 1 else mask).sum().float()

    def begins(self, *, weight_sharing: str) -> "Forward":
        """Labels show the terms, or with "reduce" the examples that have one, before the model runs."""
        labelled = self.info.labelled
        if labelled is not None:
            self.terms = (labelled.flatten(1).any(dim=1) if weight_sharing == "reduce" else labelled).sum().float()
        return self

    def returned(self, output: Any, *, weight_sharing: str) -> None:
        """The model returned ``output``. Labels go first."""
        if self.terms is None:
            self.terms = output_terms(output, self.info, weight_sharing=weight_sharing)
            self.levels = self.terms is not None and of_levels(output)
        losses: dict[Value, Tensor] = {
            (x.grad_fn._sequence_nr(), x.output_nr): x for x in _losses(output) if x.grad_fn is not None
        }
        inside = set[Value]()  # another one, as a part of the whole
        if len(losses) > 1:
            inside.update(*(losses_in(loss) - {value} for value, loss in losses.items()))
        self._losses = tuple(value for value in losses if value not in inside)
        for value in self._losses:
            node: Any = losses[value].grad_fn
            node.register_prehook(partial(self._arrived, value))  # not the tensor's: DeepSpeed's hooks have run by then

    def _arrived(self, value: Value, gradients: tuple[Tensor | None, ...]) -> None:
        if (gradient := gradients[value[1]]) is not None:
            self._reached[value] = gradient.detach().float()

    def take(self, among: Collection[Value] | None) -> None:
        """Set :attr:`seed` in a backward, ``among``: of what its loss is the sum, if that is known. There is none where
        the sum has several that the model returned: then the loss is what the caller makes of them."""
        own = [value for value in self._losses if (value in self._reached if among is None else value in among)]
        self.seed = self._reached.get(own[0]) if own and (len(own) == 1 or among is None) else None


def _values(output: Any) -> Iterator[Tensor]:
    """Floating tensors of a model's output, ``logits`` first."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Tensor):
            yield from _values(value)


def returned_prediction(output: Any) -> Tensor | None:
    """What a loss is computed from: ``logits``, else the first tensor [N, .., C]; else [N]."""
    found = [value for value in _values(output) if value.ndim > 0]
    wide = [value for value in found if value.ndim > 1]
    return next(iter(wide or [value for value in found if len(value) > 1]), None)


def _losses(output: Any) -> Iterator[Tensor]:
    """Scalars that are not made of scalars alone, or that nothing is returned beside."""
    values = [*_values(output)]
    for value in values:
        if value.ndim == 0 and (len(values) == 1 or value.grad_fn is None or not _of_scalars(value.grad_fn)):
            yield value


def returned_loss(output: Any) -> Tensor | None:
    """The first scalar that may be one."""
    return next(_losses(output), None)


def of_levels(output: Any) -> bool:
    """Whether a model without ``logits`` returned predictions of the same outputs at other numbers of places, as of a
    pyramid: a loss may be a mean over all of them, or one for each."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return False
    wide = [value for value in _values(output) if value.ndim > 2 and value.grad_fn is not None]
    shapes = {(x.ndim, len(x), x.shape[class_dim(x)]): tuple(wide[0].shape) for x in wide[:1]}
    return any(shapes.get((x.ndim, len(x), x.shape[class_dim(x)]), tuple(x.shape)) != tuple(x.shape) for x in wide[1:])


def output_terms(output: Any, info: BatchInfo, *, weight_sharing: str) -> Tensor | int | None:
    """M of a loss that is computed outside of the model: a term for each prediction; of padded ones that the mask
    attends. None: the model returned no prediction."""
    prediction = returned_prediction(output)
    if prediction is None:
        return None
    shape = list(prediction.shape)
    if len(shape) > 1:
        del shape[class_dim(prediction)]
    elif _outputs(prediction.grad_fn, tuple(shape)) == 0:  # of a single row
        shape = [1]
    found = fit(info.rows, tuple(shape))
    if found.mask is not None:
        mask = found.mask.flatten(1) if found.mask.ndim > 2 else found.mask
        counted = mask.any(dim=1 - found.examples) if weight_sharing == "reduce" and mask.ndim > 1 else mask
        return counted.sum().float()
    return shape[0] if weight_sharing == "reduce" else prod(shape)


def accumulates(weight: Tensor) -> bool:
    """Whether the running backward adds to a parameter's gradient: all of them do, but autograd.grad, and a backward
    with other ``inputs``."""
    if not weight.requires_grad:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(weight).node))
    except RuntimeError:  # autograd.grad with the weight among its inputs: it goes to the caller
        return False
