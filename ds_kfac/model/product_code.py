"""What a module does with its parameters: read from its source code, before training.

:func:`multiplied` finds the parameters that a module's code multiplies something by, and the layout
of the matrix in them: [O, I] in ``linear(x, self.w)``, ``x @ self.w.T`` and ``self.w @ x``; [I, O]
in ``x @ self.w``, ``bmm``, ``addmm`` and grouped products. In a stack [E, ..] each entry is a
matrix (``linear(x, self.w[e])``), also where ``self.w.view(self.E, ..)`` is one. In ``einsum`` the
dimensions that are summed over are one side, those of the output the other.
:func:`borrowed_weights` finds weights of its children that a module multiplies by itself,
:func:`tables` the parameters in which rows are looked up.
"""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from linecache import getlines
from math import prod
from typing import Any, NamedTuple

from torch import nn

from ds_kfac.model.layers import parameter_shape, value_of

MAKES = (
    "__init__",
    "_init",
    "init",
    "reset",
    "_reset",
    "_tie",
    "tie",
    "_load",
    "load",
    "extra_repr",
    "__repr__",
)
"""Beginnings of names of functions that set up a module, and do not run it."""
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
LINEAR, RIGHT = (
    {"linear"},
    {"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"},
)
ADDED = {"addmm", "baddbmm"}
TURNS = {"T", "mT", "t", "transpose", "swapaxes", "adjoint"}
BOUNDS = {"clamp", "clip"}
COPIES = {
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "contiguous",
    "clone",
} | BOUNDS
"""Methods whose result has the parameter's elements, maybe in another dtype. Some elements may be
clamped; the others have the gradient of the copy."""
KEEPS = COPIES | {"unsqueeze", "squeeze"}
LOOK_UPS = {"embedding", "embedding_bag", "index_select"}


class MatrixLayout(NamedTuple):
    """How a matrix lies in a parameter.

    Attributes:
        transposed: it is [I, O], not [O, I].
        first: number of leading dimensions that together are the first side; all others are the
            second. 0: the last two dimensions are the sides, and a third one before them numbers
            the matrices of a stack.
        stack: number of matrices that follow each other along the first of two dimensions.
    """

    transposed: bool
    first: int = 0
    stack: int = 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Shape [first side, second side] of the matrix in such a parameter; [matrices, .., ..] of
        a stack."""
        if self.first:
            return prod(parameter[: self.first]), prod(parameter[self.first :])
        if self.stack > 1:
            return self.stack, parameter[0] // self.stack, *parameter[1:]
        return parameter


def multiplied(module: nn.Module) -> Mapping[str, MatrixLayout]:
    """Parameter that the module's code multiplies rows by -> layout of its matrix, in the order of
    the code."""
    kind: Any = type(module)
    count: Any = getattr(module, "moe_num_experts", None)
    if isinstance(module, nn.MultiheadAttention):  # its products are in torch's functions
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        layouts = dict.fromkeys(names, MatrixLayout(False))
    elif kind.__name__ == "DbrxExpertGLU" and isinstance(count, int):
        # the module around it cuts them up
        layouts = {name: MatrixLayout(name == "w2", stack=count) for name in ("w1", "v1", "w2")}
    elif kind.__module__ == "deepspeed.moe.ep_experts":  # AutoEP's, in functions beside the class
        layouts = dict.fromkeys(("w1", "w3", "w2"), MatrixLayout(False))
    else:
        layouts, unclear = {}, set[str]()
        parameters = {
            name for name, parameter in module._parameters.items() if parameter is not None
        }
        for weight, layout, other, letters in _products(kind):
            name = weight.path
            # two parameters, as in a penalty: no rows of a batch
            if name not in parameters or other in parameters:
                continue
            if weight.cut and (stack := _stack(module, module, name, weight.cut)) == 1:
                continue
            if weight.cut:
                layout = MatrixLayout(layout.transposed, stack=stack)
            elif letters and len(parameter_shape(module._parameters[name])) != letters:
                # einsum with a stack's entry
                layout = MatrixLayout(layout.transposed)
            if layouts.setdefault(name, layout).first != layout.first:
                unclear.add(name)  # the code uses the parameter as two different matrices
        return {name: layout for name, layout in layouts.items() if name not in unclear}
    return {
        name: layout for name, layout in layouts.items() if module._parameters.get(name) is not None
    }


def _stack(module: nn.Module, holder: nn.Module, name: str, cut: str | int) -> int:
    """Into how many matrices a module's code, by :attr:`Operand.cut`, cuts the rows of a
    ``holder``'s parameter."""
    count, parameter = (
        value_of(module, cut) if isinstance(cut, str) else cut,
        holder._parameters.get(name),
    )
    shape = () if parameter is None else parameter_shape(parameter)
    return (
        count
        if type(count) is int and count > 1 and len(shape) == 2 and shape[0] % count == 0
        else 1
    )


class BorrowedWeight(NamedTuple):
    """A module whose weight other code multiplies by, or passes to a function.

    Attributes:
        module: the module that holds the weight.
        is_called: whether that code calls the module, too.
        matrices: number of matrices, of equally many rows each, that it cuts the weight into.
    """

    module: nn.Module
    is_called: bool
    matrices: int


def borrowed_weights(module: nn.Module) -> list[BorrowedWeight]:
    """Return the children of a module whose weights its code multiplies by itself."""
    if isinstance(module, nn.MultiheadAttention):  # in torch's functions
        return [BorrowedWeight(module.out_proj, False, 1)]
    kind: Any = type(module)
    if kind.__name__ == "TopKGate":  # deepspeed.moe's
        gate = module._modules.get("wg")
        if isinstance(gate, nn.Linear):
            return [BorrowedWeight(gate, False, 1)]
    weights = []
    for name, (is_called, cut) in _borrowed(kind).items():
        child = module._modules.get(name)
        if child is None:
            continue
        matrices = _stack(module, child, "weight", cut)
        # a cut that does not fit the weight is not understood
        if matrices > 1 or not cut:
            weights.append(BorrowedWeight(child, is_called, matrices))
    return weights


def tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters in which a module's code looks up rows: the module's own parameters, or
    those of its children.

    A table is stepped as an embedding is, even if it is also multiplied. It may be multiplied by a
    head that shares it, or in a codebook, whose product only selects the nearest row and gets no
    gradient.
    """
    parameters = set()
    for module in model.modules():
        kind: Any = type(module)
        for path, removed_dims in _look_ups(kind):
            parameter = _parameter_at(module, path.split("."))
            # at most a row is left
            if parameter is not None and len(parameter_shape(parameter)) - removed_dims < 2:
                parameters.add(parameter)
    return parameters


def _parameter_at(module: nn.Module, path: list[str]) -> Any:
    """The parameter at a path of names; None if there is none, or in TorchScript."""
    if len(path) > 1:
        child = module._modules.get(path[0]) if isinstance(module._modules, dict) else None
        return None if child is None else _parameter_at(child, path[1:])
    return module._parameters.get(path[0]) if isinstance(module._parameters, dict) else None


def convolves(module: nn.Module) -> bool:
    """Whether a convolution with a forward of its own convolves with the weight as it is, e.g. not
    standardized."""
    kinds = type(module).__mro__
    torchs = next(
        place for place, kind in enumerate(kinds) if kind.__module__ == nn.Conv2d.__module__
    )
    return any(map(_convolves, kinds[:torchs]))


class Operand(NamedTuple):
    """A parameter as an expression names it, maybe viewed or in another dtype:
    ``self.experts.w[e].T``.

    Attributes:
        path: "experts.w".
        transposed: whether it is transposed.
        dims: number of dimensions that indices remove, or pick along.
        varies: whether it may be rows of a batch: it is looked up, or held by a variable that has
            other values, too.
        cut: into how many matrices its rows are viewed, ``self.w.view(self.n, ..)``: "n", or a
            number; "" if not.
    """

    path: str
    transposed: bool = False
    dims: int = 0
    varies: bool = False
    cut: str | int = ""


def _end(node: ast.AST) -> tuple[int, int]:
    """Where the code of a node ends: that of an inner call ends before that of the outer one, over
    however many lines they are written."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


class Code:
    """A function's code.

    Attributes:
        nodes: of its syntax tree, in the order in which they are evaluated.
        set_here: variable -> how often it is set.
        held: variable -> the parameter that it holds, the last one of several.
    """

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.name = function.name
        self.arguments = [
            argument.arg for argument in (*function.args.posonlyargs, *function.args.args)
        ]
        self._self = self.arguments[0] if self.arguments else ""
        self.nodes = sorted(ast.walk(function), key=_end)
        self.set_here = Counter(
            x.id for x in self.nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        )
        self.held = dict[str, Operand]()
        others = Counter(x.arg for x in self.nodes if isinstance(x, ast.arg)) + self.set_here
        for node in self.nodes:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                variable = node.targets[0].id
                if (operand := self.operand(node.value)) is not None:
                    others[variable] -= not operand.varies
                    self.held[variable] = operand
        self.held = {
            name: held._replace(varies=others[name] > 0) for name, held in self.held.items()
        }

    def attribute(self, node: ast.AST) -> str:
        """NAME of ``self.NAME``, else ""."""
        of_self = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self._self
        )
        return node.attr if of_self and isinstance(node, ast.Attribute) else ""

    def operand(self, node: ast.AST | None) -> Operand | None:
        """The parameter that an expression names; None: another value."""
        if node is None or isinstance(node, ast.Name):
            return None if node is None else self.held.get(node.id)
        if name := self.attribute(node):
            return Operand(name)
        if isinstance(node, ast.Subscript):
            inner, places = self.operand(node.value), indices(node)
            varies = inner is not None and (inner.varies or is_computed(node))
            return inner and inner._replace(dims=inner.dims + len(places), varies=varies)
        how = node.func if isinstance(node, ast.Call) else node
        if not isinstance(how, ast.Attribute) or (inner := self.operand(how.value)) is None:
            return None
        if how.attr in TURNS | KEEPS:
            return inner._replace(transposed=inner.transposed != (how.attr in TURNS))
        if (
            how.attr in ("view", "reshape")
            and isinstance(node, ast.Call)
            and not (inner.cut or inner.transposed)
        ):
            sizes = (
                node.args[0].elts
                if len(node.args) == 1 and isinstance(node.args[0], ast.Tuple)
                else node.args
            )
            first = sizes[0] if len(sizes) == 3 else None
            cut: Any = (
                first.value if isinstance(first, ast.Constant) else first and self.attribute(first)
            )
            return inner._replace(cut=cut) if cut else None
        return (
            Operand(f"{inner.path}.{how.attr}")
            if how is node and inner == Operand(inner.path)
            else None
        )


def codes_of(kind: Any, *, alone: bool = False) -> Iterator[Code]:
    """Code of the functions of a class and its bases below nn.Module, or of the class ``alone``,
    where source code is found."""
    for base in (kind,) if alone else kind.__mro__[: kind.__mro__.index(nn.Module)]:
        try:
            named = classes_of(str(inspect.getsourcefile(base)), base.__module__)[base.__qualname__]
            functions = map(inspect.unwrap, filter(inspect.isfunction, vars(base).values()))
            lines = [
                code.co_firstlineno
                for x in functions
                if (code := getattr(x, "__code__", None)) is not None
            ]
        except (KeyError, OSError, TypeError, SyntaxError, ValueError):
            # made in a shell or by a program; odd wrappers
            continue
        tree = max(
            named,
            key=lambda tree: sum(tree.lineno <= line <= (tree.end_lineno or 0) for line in lines),
        )
        yield from (
            Code(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )


@lru_cache(maxsize=8)
def classes_of(file: str, module: str) -> Mapping[str, list[ast.ClassDef]]:
    """Qualified name -> code of a file's classes of that name, as in if and else. Cached: inspect
    would read the file again for each class."""
    by_name: dict[str, list[ast.ClassDef]] = {}
    waiting: list[tuple[ast.AST, str]] = [
        (ast.parse("".join(getlines(file, vars(sys.modules[module])))), "")
    ]
    while waiting:
        node, path = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            by_name.setdefault(path + node.name, []).append(node)
            path += f"{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            path += f"{node.name}.<locals>."
        waiting += [
            (x, path)
            for x in ast.iter_child_nodes(node)
            if isinstance(x, ast.stmt | ast.excepthandler)
        ]
    return by_name


def name_of(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def given(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def indices(node: ast.Subscript) -> list[ast.expr]:
    """Indices that remove a dimension, or pick along it: all but slices, None and "..."."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [x.operand if isinstance(x, ast.UnaryOp) else x for x in parts]  # -1
    return [
        x
        for x in parts
        if not isinstance(x, ast.Slice)
        and not (isinstance(x, ast.Constant) and x.value in (None, ...))
        and not (isinstance(x, ast.Call) and name_of(x.func) == "slice")
    ]


def is_computed(node: ast.Subscript) -> bool:
    """Whether an index is no constant, so that it may look up a row."""
    return not all(isinstance(index, ast.Constant) for index in indices(node))


@cache
def _borrowed(kind: Any) -> Mapping[str, tuple[bool, str | int]]:
    """Name of a child -> whether it is called, too, and :attr:`Operand.cut` of its weight."""
    taken, called = dict[str, str | int](), set[str]()
    for code in codes_of(kind):
        for node in code.nodes:
            operands: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                operands = [node.left, node.right]
            elif isinstance(node, ast.Call):
                called.add(code.attribute(node.func))
                # init.normal_(..), hasattr(..)
                if not name_of(node.func).endswith(("_", "attr", "isinstance")):
                    operands = given(node)
            for operand in filter(None, map(code.operand, operands)):
                child, _, name = operand.path.rpartition(".")
                taken |= {child: operand.cut} if name == "weight" and child else {}
    return {name: (name in called, cut) for name, cut in taken.items()}


@cache
def _convolves(kind: Any) -> bool:
    for code in codes_of(kind, alone=True):
        # no other variables: what holds a weight may hold a standardized one, too
        code.held = dict.fromkeys(
            {"weight"} & {*code.arguments} - set(code.set_here), Operand("weight")
        )
        for node in code.nodes:
            if isinstance(node, ast.Call) and name_of(node.func) == "forward":
                return True  # super().forward(..)
            if isinstance(node, ast.Call) and "conv" in name_of(node.func):
                if any(
                    x is not None and x.path == "weight" for x in map(code.operand, given(node))
                ):
                    return True
    return False


@cache
def _look_ups(kind: Any) -> frozenset[tuple[str, int]]:
    """The look-ups in a class's code: ("NAME" or "CHILD.NAME", number of dimensions that the index
    removes). In a stack of matrices one dimension leaves a matrix, two leave a row."""
    look_ups = set[tuple[str, int]]()
    for code in codes_of(kind):
        for node in () if code.name.startswith(MAKES) else code.nodes:
            operands, removed = list[ast.expr](), 0
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and is_computed(node)
            ):
                operands = [node]
            elif isinstance(node, ast.Call) and (name := name_of(node.func)) in LOOK_UPS:
                operands, removed = given(node), 1 if name == "index_select" else 2
                operands += [node.func.value] if isinstance(node.func, ast.Attribute) else []
            look_ups.update(
                (x.path, x.dims + removed) for x in map(code.operand, operands) if x is not None
            )
    return frozenset(look_ups)


@cache
def _products(kind: Any) -> tuple["Product", ...]:
    """Products in a class's code, in its order: (parameter, its layout, the other operand if that
    is a parameter, too, else "", number of its dimensions in an einsum, else 0)."""
    return tuple(product for code in codes_of(kind) for product in _products_in(code))


Product = tuple[Operand, MatrixLayout, str, int]


def _products_in(code: Code) -> Iterator[Product]:
    for node in code.nodes:
        if isinstance(node, ast.Call) and _is_einsum(node):
            yield from _einsum_products(code, node)
            continue
        left, right, linear = _factors(node)
        weight = code.operand(right)
        if weight is not None:
            yield weight, MatrixLayout(weight.transposed == linear), _fixed(code, left), 0
        weight = None if linear else code.operand(left)
        if weight is not None:
            yield weight, MatrixLayout(weight.transposed), _fixed(code, right), 0


def _fixed(code: Code, node: ast.expr | None) -> str:
    """Return the name of the parameter that an operand is; "" if it is none, or a changing one."""
    operand = code.operand(node)
    return "" if operand is None or operand.varies else operand.path


def _is_einsum(node: ast.Call) -> bool:
    is_of_two = name_of(node.func) == "einsum" and len(node.args) == 3
    return is_of_two and isinstance(node.args[0], ast.Constant)


def _einsum_products(code: Code, node: ast.Call) -> Iterator[Product]:
    equation, *operands = node.args
    for place, operand in enumerate(operands):
        weight = code.operand(operand)
        sums = contraction(str(equation.value), place)  # type: ignore[attr-defined]
        if weight is not None and not weight.transposed and sums is not None:
            yield weight, sums.layout, _fixed(code, operands[1 - place]), sums.dims


def _factors(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None, bool]:
    """Return the two operands of a matrix product, None for those that are not in the code, and
    whether it multiplies by the transposed right one, as ``F.linear`` does."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right, False
    if not isinstance(node, ast.Call):
        return None, None, False
    name = name_of(node.func)
    arguments = list(node.args)
    if name in RIGHT and isinstance(node.func, ast.Attribute) and len(arguments) == 1:
        return node.func.value, arguments[0], False  # x.matmul(w)
    if name in LINEAR | RIGHT and len(arguments) > 1:
        return arguments[0], arguments[1], name in LINEAR
    if name in LINEAR:
        by_name = (word.value for word in node.keywords if word.arg == "weight")
        return None, next(by_name, None), True
    if name in ADDED and len(arguments) > 2:
        return arguments[1], arguments[2], False
    return None, None, False


class Contraction(NamedTuple):
    """A product of rows with a matrix, or of rows for each of a stack with that one, written as an
    einsum.

    Attributes:
        x, output: permutations that bring the other operand into [rows.., I..], with I.. in the
            matrix's order, and the output into [rows.., O..].
        rows: number of dimensions of the rows.
        dims: number of dimensions of the matrix.
        stacked: whether the first dimension of the rows numbers the matrices of a stack.
    """

    layout: MatrixLayout
    x: tuple[int, ...]
    output: tuple[int, ...]
    rows: int
    dims: int
    stacked: bool = False


@cache
def contraction(equation: str, place: int, dims: int = 0) -> Contraction | None:
    """The product that an einsum is if its operand ``place`` is the matrix, or a stack; None: it is
    none. ``dims``: the other operand's dimensions, of which "..." are some; 0: unknown."""
    operands, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    letters = operands.split(",")
    if (
        not arrow
        or len(letters) != 2
        or any(len(set(part)) < len(part) for part in (*letters, output))
    ):
        return None
    matrix, x = letters[place], letters[1 - place]
    x, output = (
        part.replace(".", "0123456789"[: dims - len(x) + 1] if dims else "0")
        for part in (x, output)
    )
    stack = "".join(letter for letter in matrix if letter in x and letter in output)
    inner = "".join(letter for letter in matrix if letter in x and letter not in stack)
    outer = "".join(letter for letter in matrix if letter not in x)
    rows = stack + "".join(letter for letter in x if letter not in stack + inner)
    transposed = matrix == stack + inner + outer
    if not inner or not outer or (stack and (len(stack), len(matrix)) != (1, 3)):
        return None
    if set(output) != set(rows + outer) or not (transposed or matrix == stack + outer + inner):
        return None
    layout = MatrixLayout(transposed, 0 if stack else len(inner if transposed else outer))
    x_order, output_order = (
        tuple(map(x.index, rows + inner)),
        tuple(map(output.index, rows + outer)),
    )
    return Contraction(layout, x_order, output_order, len(rows), len(matrix), bool(stack))
