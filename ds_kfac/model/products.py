"""Watch, during a forward pass, the products of rows with a matrix that is a parameter.

``product_code.py`` finds such parameters in a module's code. In a captured forward pass
:class:`Products` sees every call of a torch function. It reports the matrix products in which the
matrix is such a parameter, a view of it, or entries picked out of it. It is a ``TorchFunctionMode``
that is active only in captured forward passes and in recomputations of them.

A reported product is exact: the sum of g a^T over its rows is the parameter's gradient through that
product. Therefore two things are required. First, the operand must hold one matrix of the
parameter, or several matrices of a stack. It must hold all inputs of these matrices, in the
parameter's order in memory (``places.py``). Second, the rows must come from a batch. This excludes
products of two parameters.

Shape suffixes: O and I, the outputs and inputs of a matrix.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ds_kfac.model.layers import LayerSpec, tensors_of
from ds_kfac.model.places import Place, Places, base_of, same_strides
from ds_kfac.model.product_code import ADDED, CONVOLUTIONS, LINEAR, RIGHT, Contraction, contraction
from ds_kfac.model.registry import LAYERS

LEFT_NAMES = ("input", "self", "mat_a", "mat1", "batch1")
"""Names of the left operand in torch's functions."""
RIGHT_NAMES = ("weight", "other", "mat2", "mat_b", "batch2")
"""Names of the right operand in torch's functions."""
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
EVERY = slice(None)
"""All rows of a product."""

Entry = tuple[int, slice | Tensor]
"""(index of a matrix in its stack, the rows of the product that belong to this matrix)."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of rows x [.., I] with a matrix. Its result is ``output``, with rows [.., O].

    Attributes:
        param: the parameter that holds the matrix, or the stack of matrices.
        x: the rows, [.., I]; for a stack [matrices, .., I].
        output: the result of the torch function. The gradient that arrives here gives the rows of
            G.
        transposed: whether the parameter stores the matrix as [I, O].
        entries: one (matrix, rows) pair for each matrix of the stack that was used, for example
            ``((3, slice(0, 17)),)``. The rows index x and the output, flattened to [rows, ..]. A
            plain matrix has one entry, ``((0, slice(None)),)``.
        columns: which outputs of the matrix were computed; None: all.
        to_rows: turns the gradient that arrives at ``output`` into rows [.., O]; None: the gradient
            has this form already.
        window: (stride, padding, dilation, groups) of a convolution, whose x and output are images;
            None for other products.
        biased: whether the gradient of an added bias is the sum of the rows of G.
    """

    param: nn.Parameter
    x: Tensor
    output: Tensor
    transposed: bool
    entries: tuple[Entry, ...]
    columns: slice | None = None
    to_rows: Callable[[Tensor], Tensor] | None = None
    window: tuple[Any, ...] | None = None
    biased: bool = True

    @property
    def picked(self) -> bool:
        """Whether each matrix has rows of its own, as an expert has tokens of its own."""
        return any(rows is not EVERY for _, rows in self.entries)

    @property
    def rows(self) -> slice:
        """The rows of the product up to the last row that belongs to an entry.

        A grouped product may have rows after its last group. These rows are not tokens, and the
        product's output has undefined values in them.
        """
        ends = []
        for _, rows in self.entries:
            if not isinstance(rows, slice) or rows.stop is None:
                return EVERY
            ends.append(rows.stop)
        return slice(0, ends[-1]) if ends else EVERY


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a product that belongs to one layer. The product's parameter may hold the
    matrices of several layers.

    Attributes:
        layer: the layer.
        picked: which rows of the product belong to the layer. None if all rows belong to it,
            because the matrix is not in a stack.
        number: number of rows of the product that belong to the layer.
        sides: the factors to which the rows are added: "AG" (both), "A" or "G".
    """

    layer: LayerSpec
    picked: slice | Tensor | None
    number: int
    sides: str


def parts_of(product: Product, layers: Sequence[LayerSpec]) -> list[Part]:
    """Return the parts of a product that belong to the layers of its parameter.

    If the layers of a stack share one A, all rows go to the A of the first layer, and each layer's
    own rows go to its G. The list is empty if the sum of g a^T over the rows would not be the
    gradient of the layers' matrices.

    Args:
        product: the product.
        layers: the layers of the parameter, in the order of the stack.
    """
    first = layers[0]
    # the bias's gradient is not the sum of these rows
    if first.bias is not None and not product.biased:
        return []
    # the product differs from the one that was found in the code
    is_turned = product.transposed != LAYERS[first.kind].transposed and min(first.shape) > 1
    if is_turned or product.x.shape[-1] != first.A.dim - (first.bias is not None):
        return []
    is_stack = len(layers) > 1
    total = product.x.shape[:-1].numel()
    share_A = is_stack and layers[-1].shares is not None
    parts = []
    if share_A and first.shares is None:
        parts.append(Part(first, product.rows, _length(product.rows, total), "A"))
    for index, rows in product.entries:
        picked = rows if is_stack or rows is not EVERY else None
        number = total if picked is None else _length(picked, total)
        parts.append(Part(layers[index], picked, number, "G" if share_A else "AG"))
    return parts


def _length(rows: slice | Tensor, total: int) -> int:
    """Return how many of ``total`` rows are picked."""
    return len(range(total)[rows]) if isinstance(rows, slice) else len(rows)


@dataclass(frozen=True, eq=False)
class _Operand:
    """An operand of a product. It holds a matrix of a parameter, or a stack of such matrices.

    Attributes:
        place: where its elements are in the parameter.
        outputs, inputs: number of outputs and number of inputs of each matrix in the operand.
        transposed: whether the parameter stores the matrix as [I, O].
        columns: which outputs of the parameter's matrix the operand holds; None: all.
        start: index of the operand's first matrix in the parameter's stack.
        step: difference between the indices of successive matrices of the operand.
        stack_dim: the dimension of the operand that indexes the matrices. None if the operand is a
            single matrix.
    """

    place: Place
    outputs: int
    inputs: int
    transposed: bool
    columns: slice | None
    start: int
    step: int
    stack_dim: int | None


@dataclass(frozen=True, kw_only=True)
class _How:
    """How a product was computed from its operands.

    Attributes:
        is_left: whether the matrix is the left operand, as in W x.
        scale: factor by which the product is multiplied, such as addmm's alpha.
        biased: see :class:`Product`.
        group_ends: int [matrices], the end (last row + 1) of each group of a grouped product. None
            for other products.
    """

    is_left: bool
    scale: float
    biased: bool
    group_ends: Tensor | None


_in_backward = WeakSet["Products"]()
"""The modes that are entered in every backward pass."""


@cache
def _enter_in_backward() -> None:
    """Let torch enter the modes of :data:`_in_backward` in backward passes.

    In a backward pass, checkpointing may recompute functions outside of any module's call. Autograd
    runs everything with the modes that are active when its engine starts. It is not enough to enter
    a mode around ``loss.backward()``, because this call is itself a torch function. Torch would
    pass the call to the mode, and then run it without the mode. So this function replaces the torch
    function that ``backward`` calls by a function that first enters the modes. The replacement is
    never undone, because other code may have replaced the function again.
    """
    plain = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as modes:
            for products in list(_in_backward):
                modes.enter_context(products)
            return plain(*args, **kwargs)

    torch.autograd._engine_run_backward = run


class _OfThread(threading.local):
    """The part of a mode's state that is separate for each thread.

    Attributes:
        depth: how often the thread has entered the mode.
        is_quiet: whether the thread runs a function that is reported as one product. Functions that
            run inside it are then not reported.
    """

    depth = 0
    is_quiet = False


class Products(TorchFunctionMode):
    """A mode that calls ``see`` for each product with one of the given parameters.

    Threads that have not entered the mode are not watched.

    Args:
        params: parameter -> number of matrices of equal shape that it holds; 1 if it is not a
            stack.
        see: function that is called with each product.

    Attributes:
        inside: a pair (module, whether the mode was entered for the module) for each module whose
            forward runs. The innermost module is the last.
    """

    def __init__(self, params: Mapping[nn.Parameter, int], see: Callable[[Product], None]) -> None:
        super().__init__()
        self.places = Places(params)
        self._see = see
        self._thread = _OfThread()
        self.inside: list[tuple[nn.Module, bool]] = []
        self._depth = 0  # summed over all threads
        self._lock = threading.Lock()

    def watch_backward(self, watched: bool) -> None:
        """Set whether the mode is also entered in backward passes."""
        if watched:
            _enter_in_backward()
            _in_backward.add(self)
        else:
            _in_backward.discard(self)

    def enter(self, module: nn.Module) -> None:
        """Record that a module's forward begins, and enter the mode unless it is active.

        The mode may be inactive although an outer module's forward has entered it. Autograd runs a
        backward pass without the surrounding modes, and reentrant checkpointing recomputes
        functions there.
        """
        begins = all(mode is not self for mode in _get_current_function_mode_stack())
        self.inside.append((module, begins))
        if begins:
            self.__enter__()

    def leave(self, module: nn.Module | None) -> None:
        """Record that a module's forward ends; None: the forwards of all modules end."""
        while self.inside and (module is None or self.inside[-1][0] is module):
            _, was_entered = self.inside.pop()
            if was_entered:
                self.__exit__(None, None, None)
            if module is not None:
                return

    def __enter__(self) -> Any:
        # Replace F.linear. A mode does not see calls of F.linear if ZeRO-3 has replaced F.linear by
        # a Python function, or if torch's attention makes the call
        with self._lock:
            if not self._depth:
                self._plain = F.linear
                F.linear = self._linear
            self._depth += 1
        self._thread.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                F.linear = self._plain
                self.places.clear()
        self._thread.depth -= 1
        super().__exit__(*error)

    def _linear(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replacement of ``F.linear`` that also reports the product."""
        thread = self._thread
        is_inactive = all(mode is not self for mode in _get_current_function_mode_stack())
        if is_inactive and not thread.depth:
            return self._plain(*args, **kwargs)  # another thread calls it
        outer = thread.is_quiet
        thread.is_quiet = True
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
        """Report a call of a torch function, if it is a product with one of the parameters."""
        is_copy = self.places.follow(name, args, kwargs, output)
        outputs = [x for x in tensors_of(output) if x.requires_grad]
        if is_copy or not outputs:
            return
        product = self._product(name, args, kwargs, outputs[0])
        if product is not None:
            self._see(product)

    def _product(
        self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Product | None:
        """Return the product that a call of a torch function computes; None if it computes none."""
        if not is_plain(output) or torch._C._functorch.is_functorch_wrapped_tensor(output):
            return None
        if name in CONVOLUTIONS:
            dims = int(name[-2])  # "conv2d"
            return self._convolution(dims, args, kwargs, output)
        if name == "einsum":
            return self._einsum(args, output) if len(args) == 3 else None
        if name not in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            return None
        operands = _operands(name, args, kwargs)
        if operands is None:
            return None
        left, right = operands
        x = left
        place = self.places.find(right)
        is_left = False
        if place is None and name not in LINEAR:
            x = right
            place = self.places.find(left)
            is_left = True
        if place is None or self.places.is_weight(x) or x.is_complex():
            return None
        group_ends = None
        if "grouped" in name:
            group_ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
        alpha = kwargs.get("alpha", 1)
        beta = kwargs.get("beta", 1)
        how = _How(
            is_left=is_left,
            scale=alpha,
            biased=beta == alpha,
            group_ends=group_ends if isinstance(group_ends, Tensor) else None,
        )
        operand = self._operand(place, is_upright=is_left or name in LINEAR)
        if operand is None:
            return None
        # a vector has no dimension that could index matrices
        if x.ndim < 2 and len(place.shape) > 2:
            return None
        if how.group_ends is not None:
            return self._grouped_product(x, operand, output, how, how.group_ends)
        return self._matrix_product(x, operand, output, how)

    def _convolution(
        self, dims: int, args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Product | None:
        """Return the product of a convolution in ``dims`` dimensions."""
        arguments = {**dict(zip(CONVOLUTION_ARGUMENTS, args, strict=False)), **kwargs}
        place = self.places.find(arguments.get("weight"))
        if place is None or not place.is_all:
            return None
        window = [
            _for_each_dim(arguments.get("stride", 1), dims),
            _for_each_dim(arguments.get("padding", 0), dims),
            _for_each_dim(arguments.get("dilation", 1), dims),
            arguments.get("groups", 1),
        ]
        return Product(
            param=place.param,
            x=arguments["input"],
            output=output,
            transposed=False,
            entries=((0, EVERY),),
            window=tuple(window),
        )

    def _einsum(self, args: tuple, output: Tensor) -> Product | None:
        """Return the product that an einsum computes from rows and one whole matrix, or a whole
        stack. None if the einsum computes anything else, or the matrix or stack is not contiguous
        in memory."""
        equation, *operands = args
        if not isinstance(equation, str):
            return None
        for index in (1, 0):
            place = self.places.find(operands[index])
            x = operands[1 - index]
            sums = contraction(equation, index, x.ndim)
            if place is None or sums is None:
                continue
            if not self._is_whole(place, sums) or self.places.is_weight(x):
                return None
            count = self.places.count(place.param)
            x = x.permute(sums.x).flatten(sums.rows)
            entry = place.offset // (place.param.numel() // count)
            entries: tuple[Entry, ...] = ((entry, EVERY),)
            if sums.stacked:
                x = x.reshape(count, -1, x.shape[-1])
                entries = tuple(_equal_parts(count, x.shape[1]))
            return Product(
                param=place.param,
                x=x,
                output=output,
                transposed=sums.layout.transposed,
                entries=entries,
                to_rows=gradient_to_rows(output, sums),
            )
        return None

    def _is_whole(self, place: Place, sums: Contraction) -> bool:
        """Return whether an einsum's operand is contiguous in memory and complete. Complete means
        the whole stack if the einsum works on a stack, else one whole matrix."""
        count = self.places.count(place.param)
        contiguous = [prod(place.shape[dim + 1 :]) for dim in range(len(place.shape))]
        if not place.param.is_contiguous():
            return False
        if not same_strides(place.shape, place.stride, contiguous):
            return False
        if sums.stacked:
            return place.shape[0] == count and prod(place.shape) == place.param.numel()
        numel = place.param.numel() // count
        is_aligned = place.offset % numel == 0 and place.chosen is None
        return is_aligned and prod(place.shape) * count == place.param.numel()

    def _operand(self, place: Place, *, is_upright: bool) -> _Operand | None:
        """Return what an operand of a matrix product holds; None if it does not hold all inputs of
        the parameter's matrices.

        Args:
            place: the operand's place.
            is_upright: whether the operand is [.., O, I]; else it is [.., I, O].
        """
        param = place.param
        stack_dims = len(place.shape) - 2
        if stack_dims < 0 or not param.is_contiguous():
            return None
        O, I = place.shape[-2:]  # noqa: E741
        stride_O, stride_I = place.stride[-2:]
        if not is_upright:
            O, I = I, O  # noqa: E741
            stride_O, stride_I = stride_I, stride_O
        count = self.places.count(param)
        numel = param.numel() // count  # elements of one matrix
        all_outputs = numel // I
        start = place.offset % numel  # of the operand's first matrix, in elements
        if (I == 1 or stride_I == 1) and (O == 1 or stride_O == I):
            transposed = False
            first_output, first_input = divmod(start, I)
        elif (O == 1 or stride_O == 1) and (I == 1 or stride_I == all_outputs):
            transposed = True
            first_output = start
            first_input = 0
        else:
            return None
        if numel % I or first_input or first_output + O > all_outputs:
            return None
        columns = None
        if O != all_outputs:
            columns = slice(first_output, first_output + O)
            if count > 1:
                return None
        numbering = [d for d in range(stack_dims) if place.shape[d] > 1 and place.stride[d]]
        if len(numbering) > 1 or any(place.stride[d] % numel for d in numbering):
            return None
        return _Operand(
            place=place,
            outputs=O,
            inputs=I,
            transposed=transposed,
            columns=columns,
            start=place.offset // numel,
            step=place.stride[numbering[0]] // numel if numbering else 0,
            stack_dim=numbering[0] if numbering else None,
        )

    def _grouped_product(
        self, x: Tensor, operand: _Operand, output: Tensor, how: _How, group_ends: Tensor
    ) -> Product | None:
        """Return a grouped product, in which the rows between two successive ``group_ends`` belong
        to one matrix of a stack. None if the operands do not fit."""
        place = operand.place
        if x.ndim != 2 or len(place.shape) != 3 or how.is_left or place.chosen is not None:
            return None
        if len(group_ends) != place.shape[0]:
            return None
        # tolist is the only point at which a captured forward waits for the device
        groups = _between(group_ends.tolist())
        return Product(
            param=place.param,
            x=x,
            output=output,
            transposed=operand.transposed,
            entries=tuple((operand.start + operand.step * k, rows) for k, rows in groups),
            biased=how.biased,
        )

    def _matrix_product(self, x: Tensor, operand: _Operand, output: Tensor, how: _How) -> Product:
        """Return the product of a call of matmul, linear or a similar function."""
        output_shape = output.shape
        has_columns = how.is_left and x.ndim > 1  # W x, whose rows are the columns of x
        if has_columns:
            x = x.mT
            output_shape = output.mT.shape
        if x.shape[:-1] != output_shape[:-1]:
            x = x.detach().expand(*output_shape[:-1], operand.inputs)
        if operand.stack_dim is not None:
            rows = output_shape[:-1].numel()
            return self._stack_product(
                x, operand, operand.stack_dim, output, rows, has_columns, how
            )
        to_rows = None
        if has_columns or how.scale != 1 or not output.is_contiguous():
            to_rows = gradient_to_rows(output, columns=has_columns, scale=how.scale)
        chosen = operand.place.chosen
        entry = operand.start if chosen is None else int(chosen[operand.start])
        return Product(
            param=operand.place.param,
            x=x,
            output=output,
            transposed=operand.transposed,
            entries=((entry, EVERY),),
            columns=operand.columns,
            to_rows=to_rows,
            biased=how.biased,
        )

    def _stack_product(
        self,
        x: Tensor,
        operand: _Operand,
        stack_dim: int,
        output: Tensor,
        rows: int,
        has_columns: bool,
        how: _How,
    ) -> Product:
        """Return a product in which all matrices of a stack have equally many rows.

        Args:
            x: [.., I], where .. are all dimensions of the output but the last.
            operand: the stack.
            stack_dim: the dimension of the operand that indexes the matrices.
            output: the product.
            rows: number of rows of all matrices together.
            has_columns: whether the rows of the product are columns of the output, as in W x.
            how: how the product was computed.
        """
        place = operand.place
        matrices = place.shape[stack_dim]
        each = rows // matrices
        # batch dimensions are aligned from the right
        front = output.ndim - len(place.shape) + stack_dim
        x = x.detach().movedim(front, 0).flatten(1, -2)
        if place.chosen is None:
            parts = _equal_parts(matrices, each)
            entries: list[Entry] = [(operand.start + operand.step * k, part) for k, part in parts]
        else:
            x = x.flatten(0, 1)
            numbers = torch.arange(matrices, device=place.chosen.device)
            chosen = place.chosen[operand.start + operand.step * numbers]
            entries = _rows_by_matrix(chosen, each, self.places.count(place.param))
        return Product(
            param=place.param,
            x=x,
            output=output,
            transposed=operand.transposed,
            entries=tuple(entries),
            to_rows=gradient_to_rows(output, columns=has_columns, front=front, scale=how.scale),
            biased=how.biased,
        )


def _operands(name: str, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the two operands of the matrix product that a torch function computes; None if they
    are not plain tensors."""
    adds = name in ADDED
    if adds:
        # torch's old signature has alpha and beta by position
        if not all(isinstance(x, Tensor) for x in args):
            return None
        args = args[1:]
    operands = list(args[:2])
    for names in (LEFT_NAMES, RIGHT_NAMES)[len(operands) :]:
        for key in names:
            # addmm's "input" is what the product is added to
            if key in kwargs and not (adds and key == "input"):
                operands.append(kwargs[key])
    if len(operands) != 2 or not all(isinstance(x, Tensor) and is_plain(x) for x in operands):
        return None
    left, right = operands
    return left, right


def _for_each_dim(size: Any, dims: int) -> Any:
    """Return an argument of a convolution as a tuple with a number for each dimension; a string,
    such as "same", stays as it is."""
    if isinstance(size, int):
        return (size,) * dims
    return size if isinstance(size, str) else tuple(size)


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor has sizes and strides. Sparse and nested tensors have neither."""
    return x.layout is torch.strided and not x.is_nested


def _between(ends: Sequence[int]) -> list[tuple[int, slice]]:
    """Return a pair (index of a matrix, slice of its rows) for each matrix that has rows. The rows
    of a matrix begin where the rows of the previous matrix end."""
    starts = [0, *ends[:-1]]
    pairs = enumerate(zip(starts, ends, strict=True))
    return [(k, slice(start, end)) for k, (start, end) in pairs if end > start]


def _equal_parts(matrices: int, each: int) -> list[tuple[int, slice]]:
    """Return a pair (index of a matrix, slice of its rows) for each of ``matrices`` matrices. Every
    matrix has ``each`` rows."""
    return _between([(k + 1) * each for k in range(matrices)])


def _rows_by_matrix(chosen: Tensor, each: int, count: int) -> list[Entry]:
    """Return a pair (index of a matrix, its rows) for each matrix that was picked out of a stack.

    A matrix may have been picked several times. It then has the rows of all its copies.

    Args:
        chosen: int64, the indices of the picked matrices. Each picked matrix has ``each`` rows of
            the product, in the order of ``chosen``.
        count: number of matrices in the stack.
    """
    of_each = torch.arange(each, device=chosen.device)
    sorted_rows = (chosen.argsort()[:, None] * each + of_each).flatten()
    ends = chosen.bincount(minlength=count).cumsum(0) * each
    return [(matrix, sorted_rows[part]) for matrix, part in _between(ends.tolist())]


def gradient_to_rows(
    output: Tensor,
    sums: Contraction | None = None,
    *,
    columns: bool = False,
    front: int = 0,
    scale: float = 1,
) -> Callable[[Tensor], Tensor]:
    """Return a function that turns the gradient of an output into rows [.., O].

    The gradient arrives at the output's autograd node. If the output is a view, its gradient
    arrives at the node of the view's base, whose dimensions may have another order.

    Args:
        output: the result of a product. The returned function does not keep it alive.
        sums: the einsum that made the output; None if another function made it.
        columns: whether the rows of the product are columns of the output, as in W x.
        front: dimension of the output that indexes a stack's matrices. It is moved to the front.
        scale: factor by which the gradient is multiplied, such as addmm's alpha.
    """
    shape = output.shape
    stride = output.stride()
    base = output._base
    node_output = base if base is not None and base.numel() == output.numel() else output
    node_shape = node_output.shape
    node_stride = node_output.stride()
    offset = output.storage_offset() - node_output.storage_offset()
    is_view = node_output is not output

    def rows(gradient: Tensor) -> Tensor:
        gradient = gradient.reshape(node_shape)
        if is_view:
            in_memory = gradient.new_empty_strided(node_shape, node_stride).copy_(gradient)
            gradient = in_memory.as_strided(shape, stride, offset)
        if sums is not None:
            return gradient.permute(sums.output).flatten(sums.rows)
        if columns:
            gradient = gradient.mT
        if front:
            gradient = gradient.movedim(front, 0)
        return gradient if scale == 1 else gradient * scale

    return rows


SKIPPED_FOLDERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path("deepspeed", "runtime")),
)
MOST = 4
"""Largest number of lines of code that a message names for one weight."""


class Uses(TorchFunctionMode):
    """A mode that notes every torch function that gets a weight, or a view of one, as an argument.

    Args:
        weights: layer name -> its weight. The layers of a stack have the same weight.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._weights = dict(weights)
        # weight -> texts such as "model.py:41 (matmul)", with the line of the user's code that led
        # to the call; a dict in place of a set, to keep their order
        self._places: dict[nn.Parameter, dict[str, None]] = {
            weight: {} for weight in self._weights.values()
        }

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
            base = base_of(tensor)
            if isinstance(base, nn.Parameter) and base in self._places:
                self._places[base][f"{_line()} ({function})"] = None

    def of(self, layer: str) -> str:
        """Return text that says where a layer's weight is used; "" if that is unknown."""
        places = list(self._places[self._weights[layer]])
        if not places:
            return ""
        more = ", .." if len(places) > MOST else ""
        return f"; its weight is used in {', '.join(places[:MOST])}{more}"


def _line() -> str:
    """Return "FILE:LINE" of the innermost frame that belongs neither to torch nor to ds_kfac nor to
    ZeRO-3's F.linear."""
    # above this function, _note and __torch_function__
    frame = sys._getframe(3)
    while frame.f_back is not None and any(
        folder in frame.f_code.co_filename for folder in SKIPPED_FOLDERS
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
