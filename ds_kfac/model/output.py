"""What a model returned: which of its tensors are losses, which a loss outside of it may be made of, and how many terms
such a loss has. Shape suffixes: N examples, T positions, C outputs.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.graph import is_scalar, under
from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.prediction import Place, class_place, last_product
from ds_kfac.model.slices import counted, fit

COLLECTING, MOST_LOSSES = ("StackBackward", "CatBackward"), 64
VECTORS = *COLLECTING, "MulBackward", "DivBackward", "WhereBackward", "IndexBackward", "ToCopyBackward"
"""Nodes that collect losses in a vector, the most in it; these and those that may weigh, cast or choose from it."""
LEVELS = (
    "the model returned predictions of several sizes, and the number of loss terms is taken to be that of the first. "
    "If the loss is a mean over all of them"
)
EACH = "each is taken to be a term of the loss. If the loss has one for each example, as a softmax over positions"
OPAQUE = (
    "a function that the graph does not show the inside of, as torch.compile's, makes the loss of the prediction: "
    "it is taken for a mean over all terms. If it leaves some out, or divides by another number (BatchInfo(divisor=..))"
)
ONE = "each example is taken to be a term of the loss, as of a softmax over positions. If each number is one"


def logits_of(output: Any, name: str = "logits") -> Tensor | None:
    """``logits`` of a model's output, as Hugging Face's have."""
    logits = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return logits if isinstance(logits, Tensor) else None


def floats_of(output: Any) -> Iterator[Tensor]:
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
            yield from floats_of(value)


def predictions_in(output: Any) -> list[Tensor]:
    """The tensors that a loss may be computed from, the likeliest first: ``logits``, any [N, .., C], any [N]. Of
    several those with a graph, but for a target; and with rows, but for a task that has none in this batch. A vector
    without a graph beside a loss that has one are numbers to look at, such as the parts of a loss."""
    tensors = [value for value in floats_of(output) if value.ndim > 0 and not is_scalar(value)]
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


def losses_of(output: Any) -> Iterator[Tensor]:
    """The scalars that may be losses: the only tensor returned, or one that is not computed from scalars alone."""
    values = [*floats_of(output)]
    for value in values:
        alone = len(values) == 1 or value.grad_fn is None
        if (value.ndim == 0 or is_scalar(value)) and (alone or not of_scalars(value.grad_fn)):
            yield value


def returned_loss(output: Any) -> Tensor | None:
    """The first scalar of a model's output that may be a loss, or None."""
    return next(losses_of(output), None)


def of_levels(output: Any) -> bool:
    """Whether a model without ``logits`` returned predictions of several resolutions, such as a feature pyramid's: the
    loss may then be one mean over all of them, or a sum of means."""
    if logits_of(output) is not None:
        return False
    wide = [value for value in floats_of(output) if value.ndim > 2 and value.grad_fn is not None]
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


class Terms(NamedTuple):
    """``number``: M, of a loss outside of the model; None: no prediction. ``doubt``: why it may be another one,
    and for which loss, or ""."""

    number: Tensor | int | None = None
    doubt: str = ""


def terms_of(output: Any, info: BatchInfo, *, weight_sharing: str, prediction: Tensor | None = None) -> Terms:
    """A term for each entry of ``prediction`` that the mask does not leave out; None: of the likeliest prediction."""
    if (prediction := returned_prediction(output) if prediction is None else prediction) is None:
        return Terms()
    shape, doubt = list(prediction.shape), ""
    if len(shape) > 1:
        place = _place(output, prediction)
        if place.doubt:
            doubt = f"the model returned {shape}, a number for each position, and {EACH if place.dim is None else ONE}"
        if place.dim is not None:
            del shape[place.dim]
    elif (product := last_product(prediction)) is not None and product.outputs == product.numel == shape[0]:
        shape = [1]  # [C], the outputs of a single row
    rows = fit(info.rows, tuple(shape))
    if rows.mask is not None:
        return Terms(counted(rows.mask, weight_sharing, rows.examples), doubt)
    return Terms(shape[0] if weight_sharing == "reduce" else prod(shape), doubt)


def of_scalars(node: Any) -> bool:
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
