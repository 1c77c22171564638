"""Observes products of rows with a matrix that is a parameter, while a forward runs.

``product_code.py`` finds such parameters in a module's code. In a captured forward
:class:`Products` sees every call of a torch function, and reports those whose matrix is such a
parameter, a view of it, or entries picked out of it. It is a ``TorchFunctionMode``, active only
while a captured forward or recomputation runs; other steps have none.

A reported product is exact: the sum of g a^T over its rows is the parameter's gradient through the
product. Therefore the matrix must have all inputs of one matrix of the parameter, or of several of
a stack, as they lie in memory (``places.py``), and the rows must be a batch's: a product of two
parameters has none.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ds_kfac.model.layers import LayerSpec, tensors_of
from ds_kfac.model.places import Place, Places, base_of
from ds_kfac.model.product_code import ADDED, CONVOLUTIONS, LINEAR, RIGHT, Contraction, contraction
from ds_kfac.model.registry import LAYERS

LEFT_NAMES, RIGHT_NAMES = (
    ("input", "self", "mat_a", "mat1", "batch1"),
    ("weight", "other", "mat2", "mat_b", "batch2"),
)
"""Names of the two operands in torch's functions."""


@dataclass(frozen=True)
class Product:
    """Rows x [N, I] times a matrix gave rows [N, O] of ``output``.

    Attributes:
        x: [.., I]; for a stack [matrices, .., I].
        output: its gradient gives the rows of G.
        transposed: whether the matrix lies [I, O] in the parameter.
        entries: (number of a matrix in the stack, its rows of x and output) if used; else ((0, all
            rows),).
        columns: which outputs of the whole matrix were computed; None: all.
        to_rows: turns the gradient that arrives at ``output`` into rows [.., O]; None: it is in
            rows.
        window: (stride, padding, dilation, groups) of a convolution, whose x and output are images;
            else None.
        biased: whether the gradient of a bias that was added is the sum of the rows of G.
    """

    param: nn.Parameter
    x: Tensor
    output: Tensor
    transposed: bool
    entries: "tuple[tuple[int, slice | Tensor], ...]"
    columns: slice | None = None
    to_rows: Callable[[Tensor], Tensor] | None = None
    window: tuple[Any, ...] | None = None
    biased: bool = True

    @property
    def picked(self) -> bool:
        """Whether each entry has rows of its own, as an expert its tokens."""
        return any(rows is not EVERY for _, rows in self.entries)

    @property
    def rows(self) -> slice:
        """The rows of all entries. A grouped product may have rows after those of its last group:
        they are no tokens, and its output there is undefined."""
        ends = [rows.stop for _, rows in self.entries if isinstance(rows, slice)]
        return (
            slice(0, ends[-1])
            if ends and len(ends) == len(self.entries) and None not in ends
            else EVERY
        )


EVERY = slice(None)


class Part(NamedTuple):
    """What a product means for one of the layers whose matrices are in the parameter.

    Attributes:
        picked: which rows of the product are the layer's; None: all, of a matrix by itself.
        number: of these rows.
        sides: which factors they are for, "AG", "A" or "G".
    """

    layer: LayerSpec
    picked: "slice | Tensor | None"
    number: int
    sides: str


def parts_of(product: Product, layers: Sequence[LayerSpec]) -> list[Part]:
    """The parts of a product. Of a stack with one A, all rows are the first layer's for A, and each
    layer's own for G. There is none if the sum of g a^T over the rows would not be the gradient of
    the layers as they are.

    Args:
        layers: those of the parameter, in order.
    """
    first = layers[0]
    # the bias's gradient is not the sum of these rows
    if first.bias is not None and not product.biased:
        return []
    is_turned = product.transposed != LAYERS[first.kind].transposed and min(first.shape) > 1
    # not what was read from the code
    if is_turned or product.x.shape[-1] != first.A.dim - (first.bias is not None):
        return []
    is_stack = len(layers) > 1
    total = product.x.shape[:-1].numel()
    shares = is_stack and layers[-1].shares is not None
    parts = []
    if shares and first.shares is None:
        parts.append(Part(first, product.rows, _length(product.rows, total), "A"))
    for entry, rows in product.entries:
        picked = rows if is_stack or rows is not EVERY else None
        number = total if picked is None else _length(picked, total)
        parts.append(Part(layers[entry], picked, number, "G" if shares else "AG"))
    return parts


def _length(rows: "slice | Tensor", total: int) -> int:
    return len(range(total)[rows]) if isinstance(rows, slice) else len(rows)


class _OfThread(threading.local):
    """What a thread has of a mode: how often it entered, and whether it runs a function that was
    seen as a whole."""

    depth = 0
    is_quiet = False


class Products(TorchFunctionMode):
    """While entered, calls ``see`` for each product with one of some parameters. Other threads than
    those that entered are not watched.

    Args:
        params: parameter -> number of equal matrices in it.

    Attributes:
        inside: modules that run, innermost last, and whether the mode was entered for that one.
    """

    def __init__(self, params: Mapping[nn.Parameter, int], see: Callable[[Product], None]) -> None:
        super().__init__()
        self.places = Places(params)
        self._see = see
        self._thread = _OfThread()
        self.inside: list[tuple[nn.Module, bool]] = []
        self._depth = 0

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins. Enters the mode unless it is active: autograd runs a backward,
        and what reentrant checkpointing recomputes in it, without the modes around it."""
        begins = all(mode is not self for mode in _get_current_function_mode_stack())
        self.inside.append((module, begins))
        if begins:
            self.__enter__()

    def leave(self, module: nn.Module | None) -> None:
        """A module's forward ends; None: all do."""
        while self.inside and (module is None or self.inside[-1][0] is module):
            if self.inside.pop()[1]:
                self.__exit__(None, None, None)
            if module is not None:
                return

    def __enter__(self) -> Any:
        # F.linear may be ZeRO-3's Python function, which no mode sees, nor calls of it inside of
        # attention: patch it
        if not self._depth:
            self._plain, F.linear = F.linear, self._linear
        self._depth += 1
        self._thread.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        self._thread.depth -= 1
        if not self._depth:
            F.linear = self._plain
            self.places.clear()
        super().__exit__(*error)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps a backward pass, in which checkpointing may recompute functions outside of any
        module's call.

        Autograd runs everything with the modes that are active when its engine begins. To enter the
        mode around ``loss.backward()`` is not enough: that is a function of torch's itself, which
        runs without the mode that sees it.
        """
        plain = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return plain(*args, **kwargs)

        torch.autograd._engine_run_backward = run
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = plain

    def _linear(self, *args: Any, **kwargs: Any) -> Tensor:
        thread = self._thread
        if not thread.depth and all(
            mode is not self for mode in _get_current_function_mode_stack()
        ):
            return self._plain(*args, **kwargs)  # another thread
        outer, thread.is_quiet = thread.is_quiet, True
        try:
            output = self._plain(*args, **kwargs)
            self._on_call("linear", args, kwargs, output)
        finally:
            thread.is_quiet = outer
        return output

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if not self._thread.is_quiet:
            self._on_call(getattr(function, "__name__", ""), args, kwargs or {}, output)
        return output

    def _on_call(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        followed = self.places.follow(name, args, kwargs, output)
        outputs = [x for x in tensors_of(output) if x.requires_grad]
        if followed or not outputs:
            return
        product = self._product(name, args, kwargs, outputs[0])
        if product is not None:
            self._see(product)

    def _product(
        self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Product | None:
        if not is_plain(output) or torch._C._functorch.is_functorch_wrapped_tensor(output):
            return None
        if name in CONVOLUTIONS:
            return self._convolved(int(name[-2]), args, kwargs, output)
        if name == "einsum":
            return self._summed(args, output) if len(args) == 3 else None
        if name not in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            return None
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        if name in ADDED:
            # alpha and beta by position, torch's old signature
            if not all(isinstance(x, Tensor) for x in args):
                return None
            args = args[1:]
        operands = list(args[:2])
        for names in (LEFT_NAMES, RIGHT_NAMES)[len(operands) :]:
            operands += [
                kwargs[key]
                for key in names
                if key in kwargs and (name not in ADDED or key != "input")
            ]
        if len(operands) != 2 or not all(isinstance(x, Tensor) and is_plain(x) for x in operands):
            return None
        bounds = (
            kwargs.get("offs", args[2] if len(args) > 2 else None) if "grouped" in name else None
        )
        left, right = operands
        if (place := self.places.find(right)) is not None:
            x, first = left, False
        elif name not in LINEAR and (place := self.places.find(left)) is not None:
            x, first = right, True
        if place is None or self.places.is_weight(x) or x.is_complex():
            return None
        return self._multiplied(
            x, place, first, first or name in LINEAR, output, bounds, alpha, beta == alpha
        )

    def _convolved(
        self, dims: int, args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Product | None:
        given = dict(
            zip(
                ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
                args,
                strict=False,
            )
        )
        given |= kwargs
        place = self.places.find(given.get("weight"))
        if (
            place is None
            or place[1:] != Place(place.param, place.param.shape, place.param.stride())[1:]
        ):
            return None
        sizes = [
            given.get(name, default)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        ]
        every = [
            (x,) * dims if isinstance(x, int) else x if isinstance(x, str) else tuple(x)
            for x in sizes
        ]
        window = (*every, given.get("groups", 1))
        entries = ((0, EVERY),)
        return Product(place.param, given["input"], output, False, entries, window=window)

    def _summed(self, args: tuple, output: Tensor) -> Product | None:
        """An einsum of rows with one whole matrix, or a whole stack, that is contiguous in
        memory."""
        equation, *operands = args
        for at in (1, 0):
            place, x = self.places.find(operands[at]), operands[1 - at]
            sums = contraction(equation, at, x.ndim) if isinstance(equation, str) else None
            if place is None or sums is None:
                continue
            param, count = place.param, self.places.count(place.param)
            entry, rest = divmod(place.offset, param.numel() // count)
            inner = [prod(place.shape[d + 1 :]) for d in range(len(place.shape))]
            whole = place.shape[0] == count if sums.stacked else not rest and place.chosen is None
            whole &= prod(place.shape) * (1 if sums.stacked else count) == param.numel()
            flat = all(
                n == 1 or a == b for n, a, b in zip(place.shape, place.stride, inner, strict=True)
            )
            if not (whole and flat and param.is_contiguous()) or self.places.is_weight(x):
                return None
            x, to_rows = x.permute(sums.x).flatten(sums.rows), gradient_to_rows(output, sums)
            entries: tuple[tuple[int, slice], ...] = ((entry, EVERY),)
            if sums.stacked:
                x = x.reshape(count, -1, x.shape[-1])
                entries = (*_between([(k + 1) * x.shape[1] for k in range(count)]),)
            return Product(param, x, output, sums.layout.transposed, entries, to_rows=to_rows)
        return None

    def _multiplied(
        self,
        x: Tensor,
        place: Place,
        first: bool,
        upright: bool,
        output: Tensor,
        bounds: Any,
        alpha: float,
        biased: bool,
    ) -> Product | None:
        """A product by matmul, linear or their kin.

        Args:
            first: the matrix is the left operand: W x = (x' W')'.
            upright: the operand has the shape [.., O, I].
            bounds: last row + 1 of each group of a grouped product, an int tensor; else None.
        """
        param, count = place.param, self.places.count(place.param)
        size, dims = param.numel() // count, len(place.shape) - 2
        if dims < 0 or not param.is_contiguous() or (x.ndim < 2 and dims):
            return None
        order = 1 if upright else -1
        (O, I), (of_O, of_I) = place.shape[dims:][::order], place.stride[dims:][::order]  # noqa: E741
        # outputs of the whole matrix, first of this view
        whole, start, inside = size // I, place.offset % size, 0
        if (I == 1 or of_I == 1) and (O == 1 or of_O == I):
            transposed, (start, inside) = False, divmod(start, I)
        elif (O == 1 or of_O == 1) and (I == 1 or of_I == whole):
            transposed = True
        else:
            return None
        stack = [d for d in range(dims) if place.shape[d] > 1 and place.stride[d]]
        if (
            inside
            or size % I
            or start + O > whole
            or len(stack) > 1
            or any(place.stride[d] % size for d in stack)
        ):
            return None
        columns = None if whole == O else slice(start, start + O)
        if columns is not None and count > 1:
            return None
        at, step = place.offset // size, place.stride[stack[0]] // size if stack else 0
        made = partial(Product, param, output=output, transposed=transposed, biased=biased)
        if isinstance(bounds, Tensor):  # a group's rows are those between two bounds
            if (
                x.ndim != 2
                or dims != 1
                or first
                or place.chosen is not None
                or len(bounds) != place.shape[0]
            ):
                return None
            entries = _between(bounds.tolist())  # the only host sync of a captured forward
            return made(x, entries=tuple((at + step * e, rows) for e, rows in entries))
        columned, to_rows = first and x.ndim > 1, None
        x, shape = (x.mT, output.mT.shape) if columned else (x, output.shape)
        if x.shape[:-1] != shape[:-1]:
            x = x.detach().expand(*shape[:-1], I)
        if not stack:
            if columned or alpha != 1 or not output.is_contiguous():
                to_rows = gradient_to_rows(output, columns=columned, scale=alpha)
            entry = at if place.chosen is None else int(place.chosen[at])
            return made(x, entries=((entry, EVERY),), columns=columns, to_rows=to_rows)
        # batch dimensions are aligned from the right
        front = output.ndim - len(place.shape) + stack[0]
        matrices = place.shape[stack[0]]
        x, each = x.detach().movedim(front, 0).flatten(1, -2), shape[:-1].numel() // matrices
        to_rows = gradient_to_rows(output, columns=columned, front=front, scale=alpha)
        if place.chosen is None:
            parts = _between([(k + 1) * each for k in range(matrices)])
            return made(
                x, entries=tuple((at + step * k, rows) for k, rows in parts), to_rows=to_rows
            )
        index = place.chosen[at + step * torch.arange(matrices, device=place.chosen.device)]
        sorted_ = (
            index.argsort()[:, None] * each + torch.arange(each, device=index.device)
        ).flatten()
        ends = (index.bincount(minlength=count).cumsum(0) * each).tolist()
        return made(
            x.flatten(0, 1),
            entries=tuple((e, sorted_[rows]) for e, rows in _between(ends)),
            to_rows=to_rows,
        )


def is_plain(x: Tensor) -> bool:
    """Whether it has sizes and strides: sparse and nested tensors have not."""
    return x.layout is torch.strided and not x.is_nested


def _between(ends: list[int]) -> list[tuple[int, slice]]:
    """(number of a matrix, its rows) for matrices whose rows follow each other up to these ends, if
    it has any."""
    rows = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [(k, part) for k, part in enumerate(rows) if part.stop > part.start]


def gradient_to_rows(
    output: Tensor,
    sums: Contraction | None = None,
    *,
    columns: bool = False,
    front: int = 0,
    scale: float = 1,
) -> Callable[[Tensor], Tensor]:
    """A function that turns the gradient arriving at an output's autograd node into rows [.., O].

    If the output is a view the node is its base's, whose dimensions may have another order.

    Args:
        sums: the einsum that made the output, if one did.
        columns: whether the output has rows as columns, as W x.
        front: dimension of the output that numbers a stack's matrices; moved to the front.
        scale: factor on the gradient, such as addmm's alpha.
    """
    shape, stride, base = output.shape, output.stride(), output._base
    whole = base if base is not None and base.numel() == output.numel() else output
    memory, offset = (whole.shape, whole.stride()), output.storage_offset() - whole.storage_offset()
    viewed = whole is not output

    def rows(gradient: Tensor) -> Tensor:
        gradient = gradient.reshape(memory[0])
        if viewed:
            in_memory = gradient.new_empty_strided(*memory).copy_(gradient)
            gradient = in_memory.as_strided(shape, stride, offset)
        if sums is not None:
            return gradient.permute(sums.output).flatten(sums.rows)
        gradient = gradient.mT if columns else gradient
        gradient = gradient.movedim(front, 0) if front else gradient
        return gradient if scale == 1 else gradient * scale

    return rows


SKIPPED_FOLDERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path("deepspeed", "runtime")),
)
MOST = 4
"""Lines that the message names for a weight, at most."""


class Uses(TorchFunctionMode):
    """While it is entered, notes every torch function with one of ``weights``, or a view of one, as
    an argument.

    Attributes:
        places: id of a weight -> {"model.py:41 (matmul)": None}, with the line of the user's code
            that led to the call.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        # a stack's layers have one
        self._weights = {name: id(weight) for name, weight in weights.items()}
        self.places: dict[int, dict[str, None]] = {key: {} for key in self._weights.values()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        with suppress(Exception):  # tensors inside of vmap and the like have no storage to compare
            if isinstance(output, Tensor) and output.requires_grad:
                self._note(getattr(function, "__name__", str(function)), (args, kwargs))
        return output

    def _note(self, function: str, arguments: Any) -> None:
        for tensor in tensors_of(arguments):
            if (places := self.places.get(id(base_of(tensor)))) is not None:
                places[f"{_line()} ({function})"] = None

    def of(self, layer: str) -> str:
        """Words about a layer's places; "" if there are none."""
        places = list(self.places[self._weights[layer]])
        more = ", .." if len(places) > MOST else ""
        return f"; its weight is used in {', '.join(places[:MOST])}{more}" if places else ""


def _line() -> str:
    """ "FILE:LINE" of the innermost frame that is neither torch's nor ours, nor of ZeRO-3's
    F.linear."""
    frame = sys._getframe(3)
    while frame.f_back is not None and any(
        folder in frame.f_code.co_filename for folder in SKIPPED_FOLDERS
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
