"""Products with a matrix that is a parameter: found in a module's code before training, and seen in its forward.

Before training, :func:`multiplied` reads which of its parameters a module's class multiplies something by, and how the
matrix lies: [O, I] in ``linear(x, self.w)``, ``x @ self.w.T`` and ``self.w @ x``, [I, O] in ``x @ self.w``, ``bmm``,
``addmm`` and grouped products; of a stack [E, ..] every entry by itself (``linear(x, self.w[e])``); in ``einsum`` the
dimensions that are summed over are one side, those of the output the other.

In a forward whose statistics are captured :class:`Products` sees every call of a torch function, and tells of those in
which such a parameter, a view or rows picked out of it are the matrix. It is a ``TorchFunctionMode``, on only while
a captured forward or recomputation runs; other steps have none.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LINEAR, RIGHT = {"linear"}, {"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
ADDED = {"addmm", "baddbmm"}
TURNS = {"T", "mT", "t", "transpose", "swapaxes", "adjoint"}
COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}
KEEPS = COPIES | {"unsqueeze", "squeeze"}


class Lies(NamedTuple):
    """How a matrix lies in a parameter.

    Attributes:
        turned: [I, O], not [O, I].
        first: how many of the parameter's dimensions are the first of these sides, the others are the second; 0: the
            last two are the sides, and a third one before them counts a stack.
        count: of matrices that follow each other along the first dimension.
    """

    turned: bool
    first: int = 0
    count: int = 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Sides of the matrix, or the number of a stack and its sides, of a parameter of that shape."""
        if self.first:
            return prod(parameter[: self.first]), prod(parameter[self.first :])
        if self.count > 1:
            return self.count, parameter[0] // self.count, *parameter[1:]
        return parameter


def multiplied(module: nn.Module) -> Mapping[str, Lies]:
    """Names of a module's own parameters that its code multiplies rows by, in the order of the code."""
    if isinstance(module, nn.MultiheadAttention):  # its products are in torch's functions
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return dict.fromkeys((name for name in names if module._parameters.get(name) is not None), Lies(False))
    if type(module).__name__ == "DbrxExpertGLU":  # the module around it cuts them up
        count = int(module.moe_num_experts)  # type: ignore[arg-type]
        return {"w1": Lies(False, count=count), "v1": Lies(False, count=count), "w2": Lies(True, count=count)}
    kind: Any = type(module)
    found = _multiplied(kind)
    return {name: lies for name, lies in found.items() if module._parameters.get(name) is not None}


@cache
def _multiplied(kind: Any) -> Mapping[str, Lies]:
    found: dict[str, Lies] = {}
    unclear: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made in a shell, or by a program
            continue
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name, lies in _Reader(function).products():
                    if found.setdefault(name, lies).first != lies.first:
                        unclear.add(name)  # one matrix here, another one there
    return {name: lies for name, lies in found.items() if name not in unclear}


class _Reader:
    """Of one function's code."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.function, self.own = function, next((a.arg for a in function.args.args), "")
        self.local: dict[str, tuple[str, bool]] = {}  # variable -> parameter, whether turned

    def products(self) -> Iterator[tuple[str, Lies]]:
        """(parameter, how it lies), in the order of the code."""
        nodes = sorted(
            ast.walk(self.function), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "end_col_offset", 0))
        )
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found = self._parameter(node.value)
                if found is not None:
                    self.local[node.targets[0].id] = found
        for node in nodes:
            left, right, linear = None, None, False
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                left, right = node.left, node.right
            elif isinstance(node, ast.Call):
                name, arguments = _name(node.func), list(node.args)
                if name == "einsum":
                    yield from self._einsum(arguments)
                elif name in RIGHT and isinstance(node.func, ast.Attribute) and len(arguments) == 1:  # x.matmul(w)
                    left, right = node.func.value, arguments[0]
                elif name in LINEAR | RIGHT and len(arguments) > 1:
                    left, right, linear = arguments[0], arguments[1], name in LINEAR
                elif name in LINEAR:
                    right = next((word.value for word in node.keywords if word.arg == "weight"), None)
                    linear = True
                elif name in ADDED and len(arguments) > 2:
                    right = arguments[2]
            found = None if right is None else self._parameter(right)
            if found is not None:
                yield found[0], Lies(found[1] == linear)
            elif left is not None and not linear and (found := self._parameter(left)) is not None:
                yield found[0], Lies(found[1])

    def _einsum(self, arguments: list[ast.expr]) -> Iterator[tuple[str, Lies]]:
        if len(arguments) != 3 or not isinstance(arguments[0], ast.Constant):
            return
        for place, operand in enumerate(arguments[1:]):
            found, sums = self._parameter(operand), contraction(str(arguments[0].value), place)
            if found is not None and not found[1] and sums is not None:
                yield found[0], sums.lies

    def _parameter(self, node: ast.AST) -> tuple[str, bool] | None:
        """What a piece of code is a view of: ``self.w[e].T`` of w, turned."""
        if isinstance(node, ast.Name):
            return self.local.get(node.id)
        if isinstance(node, ast.Subscript):
            return self._parameter(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._changed(node.func.attr, self._parameter(node.func.value))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self.own:
                return node.attr, False
            return self._changed(node.attr, self._parameter(node.value))
        return None

    @staticmethod
    def _changed(how: str, found: tuple[str, bool] | None) -> tuple[str, bool] | None:
        if found is None or how not in TURNS | KEEPS:
            return None
        return found[0], found[1] != (how in TURNS)


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


class Contraction(NamedTuple):
    """A product of rows with a matrix, as einsum has it.

    Attributes:
        lies: how the matrix lies in its operand.
        x: order of the other operand's dimensions that makes it [.., I..], I.. as they lie in the matrix.
        output: of the output's, that makes it [.., O..].
        rows: how many dimensions the rows have.
    """

    lies: Lies
    x: tuple[int, ...]
    output: tuple[int, ...]
    rows: int


@cache
def contraction(equation: str, place: int) -> Contraction | None:
    """What ``equation`` does if its operand ``place`` of two is a matrix, or None if that is no product of rows with
    it."""
    operands, arrow, output = equation.replace(" ", "").partition("->")
    letters = operands.split(",")
    if not arrow or len(letters) != 2 or any(len(set(part)) < len(part) for part in (*letters, output)):
        return None  # "..." is letters that repeat
    matrix, x = letters[place], letters[1 - place]
    inner = "".join(letter for letter in matrix if letter in x)
    outer = "".join(letter for letter in matrix if letter not in x)
    rows = "".join(letter for letter in x if letter not in inner)
    if not inner or not outer or matrix not in (inner + outer, outer + inner) or set(output) != set(rows + outer):
        return None
    turned = matrix == inner + outer
    return Contraction(
        Lies(turned, len(inner) if turned else len(outer)),
        tuple(map(x.index, rows + inner)),
        tuple(map(output.index, rows + outer)),
        len(rows),
    )


@dataclass(frozen=True)
class Product:
    """Rows x [N, I] times a matrix gave the rows [N, O] of ``output``.

    Attributes:
        param: the parameter.
        x: [.., I], as it was given.
        output: whose gradient gives the rows of G.
        turned: whether the matrix lies [I, O] in the parameter.
        entries: of a stack: (its entry, its rows of x and of output), for each that was used; else (0, all rows).
        columns: which outputs of the whole matrix these are; None: all.
        lay: makes rows [.., O] of the gradient that arrives at ``output``; None: it has them.
    """

    param: nn.Parameter
    x: Tensor
    output: Tensor
    turned: bool
    entries: "tuple[tuple[int, slice | Tensor], ...]"
    columns: slice | None = None
    lay: Callable[[Tensor], Tensor] | None = None


EVERY = slice(None)


class Products(TorchFunctionMode):
    """Tells of products with some parameters while it is entered.

    Args:
        params: those parameters -> how many equal matrices each is a stack of.
        see: is told.
    """

    def __init__(self, params: Mapping[nn.Parameter, int], see: Callable[[Product], None]) -> None:
        super().__init__()
        self._params = {id(param): (param, count) for param, count in params.items()}
        self._see, self._quiet = see, False
        self._picked: dict[int, tuple[Tensor, nn.Parameter, Tensor]] = {}  # rows of a stack, and which
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # in another dtype, and of what

    def __enter__(self) -> Any:
        # a Python function there is not seen: ZeRO-3's, which is no torch function, and what attention calls inside
        self._plain, F.linear = F.linear, self._linear
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        F.linear = self._plain
        self._picked.clear()
        self._copies.clear()
        super().__exit__(*error)

    def _linear(self, *args: Any, **kwargs: Any) -> Tensor:
        outer, self._quiet = self._quiet, True
        try:
            output = self._plain(*args, **kwargs)
        finally:
            self._quiet = outer
        self._told("linear", args, kwargs, output)
        return output

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if not self._quiet:
            self._told(getattr(function, "__name__", ""), args, kwargs or {}, output)
        return output

    def _told(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        if name in ("__getitem__", "index_select") and isinstance(args[0], Tensor):
            self._pick(args, output)
        elif name in COPIES and isinstance(output, Tensor) and output is not args[0] and self._known(args[0]):
            self._copies[id(output)] = output, args[0]
        elif name == "einsum" and isinstance(output, Tensor) and output.requires_grad and len(args) == 3:
            for place in (1, 2):
                found, sums = self._params.get(id(args[place])), contraction(args[0], place - 1)
                if found is not None and sums is not None:
                    self._see(_summed(found[0], args[3 - place], output, sums))
        elif name in LINEAR | RIGHT | ADDED | {"__matmul__"} and isinstance(output, Tensor) and output.requires_grad:
            if name in ADDED:
                args = args[1:]
            operands = [*args, *(kwargs[key] for key in ("input", "mat2", "mat_b", "weight", "other") if key in kwargs)]
            tensors = [x for x in operands[:2] if isinstance(x, Tensor)]
            for product in self._products(name, tensors, args, kwargs, output) if len(tensors) == 2 else ():
                self._see(product)

    def _known(self, tensor: Any) -> bool:
        base = tensor if tensor._base is None else tensor._base
        return id(base) in self._params or id(base) in self._copies

    def _pick(self, args: tuple, output: Tensor) -> None:
        """``stack[indices]`` with a vector of indices is a copy that knows nothing of the stack."""
        found = self._params.get(id(args[0]))
        index = args[-1]
        if found is not None and isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point():
            if output._base is None and index.dtype is not torch.bool:
                self._picked[id(output)] = output, found[0], index

    def _products(
        self, name: str, operands: list[Tensor], args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Iterable[Product]:
        x, matrix = operands
        lay, left_one = None, self._known(x) and not self._known(matrix) and name in RIGHT | {"__matmul__"}
        for left, right in ((x, matrix), (matrix, x)):
            picked = self._picked.get(id(right))
            if picked is not None and name == "bmm":  # a matrix for every row, on either side
                yield from self._of_rows(picked, left, right, output, transposed=right is x)
                return
        if left_one and matrix.ndim > 1:  # W x = (x' W')'
            x, matrix, upright_lay = matrix.mT, x, laid(output)
            lay = lambda gradient: upright_lay(gradient).mT  # noqa: E731
        base = matrix if matrix._base is None else matrix._base
        offset = matrix.storage_offset() - base.storage_offset()
        if id(base) in self._copies:
            source = self._copies[id(base)][1]
            if matrix is base:
                matrix = source  # lies as it does
            base = source if source._base is None else source._base
            offset += source.storage_offset() - base.storage_offset()
        found = self._params.get(id(base))
        if found is None or matrix.ndim < 2 or (param := found[0]).requires_grad is False:
            return
        count, size = found[1], param.numel() // found[1]
        upright = matrix if name in LINEAR or lay is not None else matrix.mT  # [.., O, I]
        turned = upright.stride(-1) != 1 and upright.stride(-2) == 1
        if matrix.numel() == param.numel() and count > 1:
            entries = _entries(x, output, matrix, kwargs.get("offs", args[2] if len(args) > 2 else None))
            if entries is not None:
                yield Product(param, x, output, turned, entries, lay=lay)
            return
        if matrix.numel() == size:
            yield Product(param, x, output, turned, ((offset // size, EVERY),), lay=lay)
        elif count == 1 and lay is None and not turned and upright.shape[-1] == param.shape[-1] and matrix.ndim == 2:
            start = offset // upright.shape[-1]  # some of its rows, as torch's attention takes them
            yield Product(param, x, output, False, ((0, EVERY),), slice(start, start + upright.shape[-2]))

    def _of_rows(
        self, picked: tuple[Tensor, nn.Parameter, Tensor], x: Tensor, matrices: Tensor, output: Tensor, transposed: bool
    ) -> Iterable[Product]:
        _, param, index = picked
        order = index.argsort()
        bounds = index.bincount(minlength=self._params[id(param)][1]).cumsum(0).tolist()
        starts = [0, *bounds[:-1]]
        entries = tuple((e, order[a:b]) for e, (a, b) in enumerate(zip(starts, bounds, strict=True)) if b > a)
        # [S, 1, I] @ [S, I, O], or [S, O, I] @ [S, I, 1]
        yield Product(param, x.flatten(1), output, not transposed, entries)


def laid(output: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes a gradient that arrives at :func:`ds_kfac.model.calls.edge_of` ``output`` one of ``output`` itself, of which
    that may be a base with its dimensions in another order."""
    shape, stride, base = output.shape, output.stride(), output._base
    if base is None or base.numel() != output.numel() or not base.is_contiguous():
        return lambda gradient: gradient.reshape(shape)
    offset = output.storage_offset() - base.storage_offset()
    return lambda gradient: gradient.contiguous().as_strided(shape, stride, offset)


def _summed(param: nn.Parameter, x: Tensor, output: Tensor, sums: Contraction) -> Product:
    """Of an einsum."""
    own, order, rows = laid(output), sums.output, sums.rows
    x = x.permute(sums.x).flatten(rows)
    lay = lambda gradient: own(gradient).permute(order).flatten(rows)  # noqa: E731
    return Product(param, x, output, sums.lies.turned, ((0, EVERY),), lay=lay)


def _entries(x: Tensor, output: Tensor, matrices: Tensor, bounds: Any) -> tuple[tuple[int, slice], ...] | None:
    """Which rows each matrix of a whole stack multiplied: those between ``bounds``, or its own [.., I] of [E, .., I]."""
    if isinstance(bounds, Tensor) and x.ndim == 2:
        ends = bounds.tolist()  # the one wait of a captured forward for the device
    elif x.ndim >= 3 and len(x) == len(matrices) and prod(matrices.shape[1:-2]) == 1:
        ends = [(e + 1) * prod(x.shape[1:-1]) for e in range(len(x))]
    else:
        return None
    return tuple((e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if b > a)
