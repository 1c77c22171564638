"""Where token losses become one number, read from the loss's graph: then it does not matter what divides their sum.

A loss that is a sum of terms over the labels of all micro-batches, or over a constant, is no mean over this forward's
terms. The gradient that reaches the sum is one over that number, times all else that the caller makes of it: it is
measured there, and no number is read from the device.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_kfac.model.graph import Edge, Shape, kind_of, label_count, number, operand, saved
from ds_kfac.model.prediction import LOSSES, SUMS, UNKNOWN, VIEWS, LastProduct, moved, product_below

JOINED = {"Cat", "Stack"}
SAME = VIEWS | {
    "Neg", "ToCopy", "Clone", "Alias", "Slice", "Index", "MaskedSelect", "MaskedFill", "Where", "Permute", "Transpose",
    "T", "Expand", *JOINED,
}  # fmt: skip
"""What leaves the entries of a sum what they are, in another order, or leaves some out."""
ALIKE = VIEWS | {"Neg", "LogSoftmax", "ToCopy", "Clone", "Slice", "Index", "MaskedFill", "Sum", "Permute", "Transpose"}
"""What treats all outputs of a term alike."""


class TermWeight(NamedTuple):
    """``value``: of a term in the loss, fp32 scalar. ``sure``: bool scalar, whether the weights of all are known."""

    value: Tensor
    sure: Tensor


@dataclass(eq=False)
class Reduction:
    """A scalar in a loss's graph that is made of more than scalars. It holds no graph.

    Attributes:
        edge: itself.
        of_ratio: whether it is in one of two, as dice's: then it is no sum of terms, whatever its entries are.
        numel: of how many entries it is the sum, each times ``factor``; 0: it is none, or of weighed ones.
        single: whether an entry is one term, whose outputs became one number; None: the graph does not show it.
        masks: what entries are multiplied by, too.
        terms: how many entries count, where the graph shows it.
        joined: whether entries come from several places, of which one is followed.
        classes: C, of a sum over the outputs of a term, too, all alike, as what smooths labels is; else 0.
        mean: whether it is one, without weights of classes.
        opaque: whether a function of a user's, or of torch.compile's, made it.
        made: kinds of what was made of the product, up to the entries.
        passed: sequence numbers of the nodes from there down to the product that it is made of.
        gradient: that reached it in a backward.
    """

    edge: Edge
    of_ratio: bool = False
    numel: int = 0
    single: bool | None = None
    factor: Any = 1.0
    masks: list[Tensor] = field(default_factory=list)
    terms: Tensor | int | None = None
    joined: bool = False
    classes: int = 0
    mean: bool = False
    opaque: bool = False
    made: tuple[str, ...] = ()
    passed: set[int] = field(default_factory=set)
    gradient: Tensor | None = None

    def watch(self, node: Any) -> None:
        """Keep the gradient that reaches ``node``, and read what it sums up."""

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            if (gradient := gradients[self.edge[1]]) is not None:
                self.gradient = gradient.detach().float()

        node.register_prehook(arrived)
        with suppress(Exception):  # a hook asks: nodes of another torch, or of a user's, may lack what these have
            self._read(node)

    def _read(self, node: Any) -> None:
        kind, summed = kind_of(node), 0
        self.opaque = not kind
        self.mean = kind == "Mean" or (getattr(node, "_saved_reduction", 0) == 1 and saved(node, "weight") is None)
        (below, shape), product = operand(node, ()), None
        of_sums = kind == "Mean" and kind_of(Reduction(self.edge)._entries(below, shape)[0]) == "Sum"
        if kind in LOSSES or getattr(node, "_saved_reduction", 0) == 2:
            if kind in LOSSES:
                self.terms = label_count(node)
                self.single = self.terms is not None
                shape = (prod(shape) // shape[min(1, len(shape) - 1)],)
            if node._saved_reduction == 2 and self.single is not False and saved(node, "weight") is None:
                summed = prod(shape)
        elif kind in ("Sum", "Nansum") or of_sums:
            below, shape = self._entries(below, shape)
            summed = prod(shape)
            if of_sums:
                self.mean, self.factor = False, self.factor / max(1, summed)
        while below is not None:
            self.passed.add(below._sequence_nr())
            product = product_below(below, shape)
            if product is not None:
                self.passed |= {product.number, *(step._sequence_nr() for step, *_ in product.steps)}
                self.made = tuple(kind_of(step) for step, *_ in product.steps)
            if not summed or self.single or product is None:
                break
            again = self._outputs(product)
            if again is None:
                break
            below, shape = self._entries(*operand(below, shape)) if again else (None, (0,))
            summed = prod(shape)
        self.numel = summed
        if self.single and self.terms is None and product is not None and summed * product.outputs < product.numel:
            self.terms = summed  # of those that were picked before
        if self.joined:  # the graph was followed to the first of them
            self.terms, self.masks = None, [mask for mask in self.masks if mask.numel() == summed]

    def _entries(self, node: Any, shape: Shape) -> tuple[Any, Shape]:
        """From a sum down to what it is the sum of, times numbers."""
        while node is not None:
            kind, below = kind_of(node), operand(node, shape)
            if kind in ("Mul", "Div"):
                if not self._times(node, kind):
                    break
            elif kind not in SAME:
                break
            self.terms = self._left(node, kind, shape) if self.terms is None else self.terms
            self.joined |= kind in JOINED
            self.passed.add(node._sequence_nr())
            node, shape = below
        return node, shape

    def _left(self, node: Any, kind: str, shape: Shape) -> Tensor | int | None:
        """How many entries an operation leaves, where it leaves some out."""
        if kind in ("Index", "MaskedSelect"):
            return prod(shape)
        mask = saved(node, {"MaskedFill": "mask", "Where": "condition"}.get(kind, ""))
        if mask is None or mask.shape != shape:
            return None
        return mask.sum() if kind == "Where" and node.next_functions[0][0] is not None else (~mask).sum()

    def _times(self, node: Any, kind: str) -> bool:
        """Whether a node multiplies or divides by something that has no graph, which is kept."""
        graphs = [below is not None for below, _ in node.next_functions]
        if graphs not in ([True], [True, False], [False, True]) or (kind == "Div" and not graphs[0]):
            return False
        other = saved(node, "other" if graphs[0] else "self")
        if other is None or (kind == "Div" and isinstance(other, Tensor) and other.numel() != 1):
            return False
        if isinstance(other, Tensor) and other.numel() != 1:
            self.masks.append(other)
        else:
            if isinstance(other, Tensor):
                other = number(other) if other.is_cpu else other.detach().float().reshape(())
            self.factor = self.factor * other if kind == "Mul" else self.factor / other
        return True

    def _outputs(self, product: LastProduct) -> bool | None:
        """Whether the outputs of a term became one number: sets :attr:`single`. True: entries are plain sums of terms,
        which are further down; False: of several terms, which may have weights."""
        dims, alike, last = ([] if product.place is None else [product.place]), True, len(product.steps) - 1
        labels: Tensor | None = None
        if not product.weighed:
            return None
        for at, (node, before, after) in enumerate(product.steps):
            kind, width, outputs = kind_of(node), prod(before[dim] for dim in dims), bool(dims)
            if outputs:
                if kind in LOSSES:
                    if saved(node, "weight") is not None:
                        return None
                    several = any(kind_of(later) in JOINED for later, *_ in product.steps[at:])
                    labels = None if several else label_count(node)
                alike &= kind in ALIKE
                dims, end = moved(kind, node, dims, before, after)
                if end == UNKNOWN:
                    return None
            summed = kind in SUMS and prod(after) * width < prod(before)
            if not dims and (summed or getattr(node, "_saved_reduction", 0) == 1):
                self.terms = labels
                return kind == "Sum" and at == last
            if outputs and not dims and kind == "Sum" and alike:
                self.classes = width
        shape = product.steps[-1][2] if product.steps else product.shape
        self.single = all(shape[dim] == 1 for dim in dims)
        self.terms = self.terms if self.single and self.terms is not None else labels
        return None

    @property
    def weight(self) -> Tensor:
        """Of an entry in the loss of a backward."""
        return (self.gradient * self.factor).abs().reshape(())

    def shown(self) -> Tensor | int | None:
        """How many entries count; None: the graph does not show it."""
        masks = [mask for mask in self.masks if mask.numel() == self.numel and self.single is not False]
        return masks[0].count_nonzero() if masks else self.terms

    def of_terms(self, labels: Tensor | None) -> bool:
        """Whether it is a sum of terms: of as many as there are labels, where the graph does not show it, or without
        the last or the first of each example's."""
        if not self.numel or self.single is False or self.of_ratio:
            return False
        shifted = 0 if labels is None or labels.ndim < 2 else labels.numel() - len(labels)
        return bool(self.single) or (labels is not None and self.numel in (labels.numel(), shifted))


def term_weight(reductions: Iterable[Reduction], labels: Tensor | None, terms: Tensor | int) -> TermWeight | None:
    """The weight of one forward's ``terms`` in the loss: the root mean square of the terms' weights, at most the
    largest, as where each has a smaller one beside it. Smoothed labels have a sum for the label and one for all C
    classes. Of a mean each term has its part; what is neither may not weigh more."""
    reached = [x for x in reductions if x.gradient is not None]
    sums = [x for x in reached if x.of_terms(labels)]
    smooth = [x for x in sums if x.classes]
    plain = [x for x in sums if not x.classes] or (smooth if len(smooth) == len(reached) else [])
    if not plain:
        return None
    others = [x for x in reached if x not in sums and any(x.passed & y.passed for y in plain)]
    counts = [x.numel if (n := x.shown()) is None else n for x in plain]
    many = terms if isinstance(terms, Tensor) or terms else sum(counts)
    weights = torch.stack([x.weight / many if x.mean else x.weight for x in plain + others]).nan_to_num()
    seed = largest = weights.amax()
    tests = [((mask == 0) | (mask == 1)).all() for x in sums for mask in x.masks if mask.dtype != torch.bool]
    if len(weights) > 1:
        counts += [many if x.mean else 0 for x in others]
        numbers = torch.stack([n if isinstance(n, Tensor) else largest.new_full((), n) for n in counts])
        part = (weights / largest.clamp(min=1e-38)).square().mul(numbers).sum() / numbers.sum().clamp(max=many)
        seed = largest * part.sqrt().nan_to_num(nan=1.0).clamp(max=1.0)  # nan: without a term
        tests += [w <= seed for x, w in zip(others, weights[len(plain) :], strict=True) if not x.mean]
    if plain is not smooth and smooth:
        seed = seed + torch.stack([x.weight * x.classes for x in smooth]).amax()
    return TermWeight(seed, torch.stack(tests).all() if tests else torch.ones_like(seed, dtype=torch.bool))


def terms_in(reductions: Iterable[Reduction]) -> Tensor | int | None:
    """How many terms have a label or are not masked; None: it is not known of all. Sums that are made in different ways
    are of the same terms, as a loss and its z-loss: the most count."""
    found = dict[tuple[str, ...], Tensor | int]()
    for each in (x for x in reductions if not x.classes):
        if (number := each.shown()) is None:
            return None
        found[each.made] = found.get(each.made, 0) + number
    known = [each for each in found.values() if isinstance(each, int)]  # not made a tensor, which would be a CPU's
    if tensors := [each for each in found.values() if isinstance(each, Tensor)]:
        most = reduce(torch.maximum, tensors)
        return most.clamp(min=max(known)) if known else most
    return max(known, default=None)
