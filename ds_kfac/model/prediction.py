"""Which dimension of a prediction holds the outputs of one loss term: read from the prediction's graph.

The graph leads from the prediction to the matrix product that made it, which knows how many outputs it has and where.
From there on the dimension is followed through what the program did to the product, until it is turned, split or gone.
"""

from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ds_kfac.model.graph import Shape, kind_of, operands, signed

VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
SUMS = {"Sum", "Mean", "Logsumexp", "Amax", "Amin", "Max", "Min", "Norm", "LinalgVectorNorm", "Prod", "Std", "Var"}
LOSSES, STRANGE = {"NllLoss", "NllLoss2D"}, {"AsStrided", "Unfold", "Im2Col", "Col2Im"}
GONE, PICKED, UNKNOWN = "gone", "picked", "unknown"
"""The outputs of a term became one number, as a token's loss; one of them, or some sum, is left, which may be a value
of each row or one of the scores of an example; an operation that is not known."""


class LastProduct(NamedTuple):
    """A matrix product or convolution in a graph.

    Attributes:
        outputs: how many it has for each row.
        shape: of its result, rows and outputs.
        place: the dimension of its outputs; None: it has none, as of a matrix and a vector.
        weighed: whether it has a parameter. Of activations alone it makes scores, such as CLIP's, of either side.
        number: its node's sequence number.
        steps: what was made of the product, from it on: (node, shape before, shape after).
    """

    outputs: int
    shape: Shape
    place: int | None
    convolution: bool = False
    weighed: bool = True
    number: int = -1
    steps: tuple[tuple[Any, Shape, Shape], ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Place(NamedTuple):
    """Where the outputs of one term are: in dimension ``dim``, or None, where each entry of a prediction is a term.
    ``doubt``: that the graph leaves it open."""

    dim: int | None
    doubt: bool = False


def class_place(prediction: Tensor) -> Place:
    """The dimension of a prediction that holds the C outputs of one term, as its graph shows it: the last of [N, C],
    [N, T, C] and [N, H, W, C] of a linear layer, the second of a convolution's [N, C, L] and [N, C, H, W], also turned,
    cut or split; none of [N, T] that is a linear layer's [N, T, 1], or a logarithm of a probability for each token.

    One number of several, and a single output, may also be scores of an example's positions, as a pointer's are. Of
    [N, T] that is a doubt.

    Where the graph does not show it, it is a dimension with as many entries as the product has outputs; else, as in
    torch's losses, the second of images, or the last."""
    if prediction.ndim < 2:
        return Place(-1)
    product, last, shape = last_product(prediction), prediction.ndim - 1, tuple(prediction.shape)
    if product is None:
        return Place(1 if last > 2 else -1)
    usual = 1 if product.convolution else last
    dims, end = list[int](), UNKNOWN
    with suppress(Exception):  # a hook asks: nodes of another torch, or of a user's, may lack what these have
        dims, end = _followed(product)
    if dims:
        wide = [dim for dim in dims if shape[dim] > 1] or dims
        usual = last if last in wide else usual  # also of a convolution's that were turned, as anchors times classes
        return Place(usual if usual in wide and product.convolution else wide[-1])
    if end == GONE:
        return Place(None, doubt=product.outputs == 1 and last == 1 and shape[1] > 1)
    if end == PICKED and product.convolution and last > 1:
        return Place(None)  # a map with a number for each position
    doubt = end == PICKED and shape[-1] > 1
    if last == 1:
        return Place(-1, doubt)
    places = [place for place in (usual, *range(prediction.ndim)) if shape[place] == product.outputs]
    return Place(places[0] if places and end == UNKNOWN else 1 if last > 2 else usual, doubt)


def _followed(product: LastProduct) -> tuple[list[int], str]:
    """The dimensions that the outputs of a product have in the prediction, several where one was split; and what became
    of them where they have none: GONE, PICKED or UNKNOWN."""
    if not product.weighed:
        return [], UNKNOWN
    single = product.outputs == 1
    lost = GONE if single else PICKED
    dims, end = ([], lost) if product.place is None else ([product.place], "")
    for number, (node, before, after) in enumerate(product.steps):
        kind = kind_of(node)
        reshaped = kind in VIEWS and [size for size in after if size > 1] != [size for size in before if size > 1]
        if not dims:
            if kind in ("Stack", "Cat") and end == lost:
                return [], UNKNOWN  # of values that may be the outputs of one term
            if single and end == GONE and reshaped and (number or product.place is not None):
                end = PICKED  # rows as [N, K]: an example's candidates
            continue
        dims, end = moved(kind, node, dims, before, after)
        if end == PICKED:
            end = PICKED if single and reshaped else lost
        if end == UNKNOWN:
            break
    return dims, end


def moved(kind: str, node: Any, dims: list[int], before: Shape, after: Shape) -> tuple[list[int], str]:
    """Where dimensions are after one operation, see :func:`_followed`."""
    if kind in VIEWS:
        kept = [*_viewed(dims, before, after)]
        return kept, "" if kept else PICKED if prod(before[dim] for dim in dims) == 1 else UNKNOWN
    if kind in ("Transpose", "Permute", "T"):
        order = _saved(node, "_saved_dims", len(before)) if kind == "Permute" else [*range(len(before))]
        if kind != "Permute":
            ends = [0, -1] if kind == "T" else [node._saved_dim0, node._saved_dim1]
            one, other = (signed(end) % len(before) for end in ends)
            order[one], order[other] = other, one
        return [order.index(dim) for dim in dims], ""
    if kind in SUMS or kind in LOSSES or kind in ("Select", "Unbind"):
        gone = [min(1, len(before) - 1)] if kind in LOSSES else _saved(node, "_saved_dim", len(before))
        left = [dim for dim in dims if dim not in gone]
        if len(before) != len(after):
            left = [dim - sum(other < dim for other in gone) for dim in left]
        return left, "" if left else GONE if kind in LOSSES or kind == "Logsumexp" else PICKED
    if kind == "Gather" and (place := _saved(node, "_saved_dim", len(before))[0]) in dims and after[place] == 1:
        left = [dim for dim in dims if dim != place]
        return left, "" if left else GONE
    if kind == "Stack":
        place = _saved(node, "_saved_dim", len(after))[0]
        return [dim + (place <= dim) for dim in dims], ""
    more = len(after) - len(before)  # elementwise; to more dimensions it is repeated
    strange = kind in STRANGE or more < 0
    if kind == "Index" and more <= 0:  # by a mask of the dimensions before they become one
        strange = len(node._saved_indices) > min(dims) if more else any(before[dim] != after[dim] for dim in dims)
    return ([], UNKNOWN) if strange else ([dim + more for dim in dims], "")


def _viewed(dims: list[int], before: Shape, after: Shape) -> Iterator[int]:
    """The dimensions of a view that have entries of ``dims`` alone."""
    spans: list[tuple[int, int]] = []
    for dim in sorted(dims):
        begin = max(1, prod(before[:dim]))
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, max(1, prod(before[: dim + 1]))))
    for place, size in enumerate(after):
        begin, end = (max(1, prod(after[:upto])) for upto in (place, place + 1))
        if size and any(not begin % first and not last % end and (size > 1) == (last > first) for first, last in spans):
            yield place


def _saved(node: Any, name: str, ndim: int) -> list[int]:
    """Dimensions that a node has kept; all, where it has kept none."""
    value = getattr(node, name, None)
    values = value if isinstance(value, (tuple, list)) else [value]
    return [signed(each) % ndim for each in values if each is not None] or [*range(ndim)]


def last_product(prediction: Tensor) -> LastProduct | None:
    """The product that is nearest to a tensor in its graph; None: there is none."""
    return product_below(prediction.grad_fn, tuple(prediction.shape))


def product_below(node: Any, shape: Shape) -> LastProduct | None:
    """The product that is nearest to a node's result, of ``shape``, along the first of :func:`operands`; if that leads
    to none, as a residual stream to its embeddings, along the next. None: there is none."""
    seen, waiting = set[Any](), list[tuple[Any, Shape, Any]]([(node, shape, None)])
    while waiting:
        node, shape, steps = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (product := _product(node, shape)) is not None:
            made = list[tuple[Any, Shape, Shape]]()
            while steps is not None:
                step, steps = steps
                made.append(step)
            return product._replace(number=node._sequence_nr(), steps=tuple(made))
        below = reversed(operands(node, shape))
        waiting += [(operand, before, ((node, before, shape), steps)) for operand, before in below]
    return None


def _product(node: Any, shape: Shape) -> LastProduct | None:
    """The product that a node with a result of ``shape`` is; None: it is none."""
    name = node.name()
    if "Convolution" in name:
        return LastProduct(shape[1], shape, 1, convolution=True)
    if name.startswith("TrilinearBackward"):  # of nn.Bilinear, whose outputs are last
        return LastProduct(shape[-1], shape, len(shape) - 1, weighed=_is_parameter(node.next_functions[1][0]))
    if "mmBackward" in name or "MmBackward" in name or _is_linear(node, name):
        place = len(shape) - 1 - _from_the_left(node)
        weighed = _is_linear(node, name) or any(_is_parameter(below) for below, _ in node.next_functions)
        return LastProduct(shape[place], shape, place, weighed=weighed)
    if name.startswith("MvBackward"):  # a matrix and one row, or rows and one output
        matrix = _is_parameter(node.next_functions[0][0])
        return LastProduct(shape[0] if matrix else 1, shape, 0 if matrix else None)
    return None


def _is_linear(node: Any, name: str) -> bool:
    """Whether a node is torch's linear layer, or a custom autograd function with a linear layer's name and a weight
    beside its input, such as those of DeepSpeed's ZeRO-3, Megatron and TransformerEngine."""
    if kind_of(node):
        return name.startswith("LinearBackward")
    named = "linear" in name.lower() and not any(word in name.lower() for word in ("bilinear", "nonlinear"))
    return named and len(node.next_functions) > 1


def _from_the_left(product: Any) -> bool:
    """Whether a matrix product has its parameter on the left, W x: then outputs are rows of the result."""
    if _is_linear(product, product.name()):
        return False
    left, right = [None, *(below for below, _ in product.next_functions)][-2:]  # a custom function may have one operand
    return _is_parameter(left) and not _is_parameter(right)


def _is_parameter(node: Any) -> bool:
    """Whether a node's result is a parameter, maybe viewed or cast."""
    while node is not None and "AccumulateGrad" not in node.name():
        if len(node.next_functions) != 1 or "Embedding" in node.name():
            return False
        node = node.next_functions[0][0]
    return node is not None
