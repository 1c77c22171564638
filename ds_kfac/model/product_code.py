"""Which matrices a module multiplies rows by: read from its source code, before training.

:func:`multiplied` finds the parameters that a module's code multiplies something by, and the layout of the matrix in
them: [O, I] in ``linear(x, self.w)``, ``x @ self.w.T`` and ``self.w @ x``; [I, O] in ``x @ self.w``, ``bmm``, ``addmm``
and grouped products. In a stack [E, ..] each entry is a matrix (``linear(x, self.w[e])``). In ``einsum`` the dimensions
that are summed over are one side, those of the output the other. :func:`borrowed_weights` finds weights of its children
that a module multiplies by itself.
"""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from linecache import getlines
from math import prod
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from ds_kfac.model.layers import parameter_shape

MAKES = ("__init__", "_init", "init", "reset", "_reset", "_tie", "tie", "_load", "load", "extra_repr", "__repr__")
"""Beginnings of names of functions that set up a module, and do not run it."""
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
LINEAR, RIGHT = {"linear"}, {"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
ADDED = {"addmm", "baddbmm"}
TURNS = {"T", "mT", "t", "transpose", "swapaxes", "adjoint"}
BOUNDS = {"clamp", "clip"}
COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"} | BOUNDS
"""Methods whose result has the parameter's elements, maybe in another dtype. Some elements may be clamped; the others
have the gradient of the copy."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
KEEPS = COPIES | {"unsqueeze", "squeeze"}


class MatrixLayout(NamedTuple):
    """How a matrix lies in a parameter.

    Attributes:
        transposed: it is [I, O], not [O, I].
        first: number of leading dimensions that together are the first side; all others are the second. 0: the last two
            dimensions are the sides, and a third one before them numbers the matrices of a stack.
        stack: number of matrices that follow each other along the first dimension.
    """

    transposed: bool
    first: int = 0
    stack: int = 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Shape [first side, second side] of the matrix in such a parameter; [matrices, .., ..] of a stack."""
        if self.first:
            return prod(parameter[: self.first]), prod(parameter[self.first :])
        if self.stack > 1:
            return self.stack, parameter[0] // self.stack, *parameter[1:]
        return parameter


def multiplied(module: nn.Module) -> Mapping[str, MatrixLayout]:
    """Parameter that the module's code multiplies rows by -> layout of its matrix, in the order of the code."""
    kind: Any = type(module)
    count: Any = getattr(module, "moe_num_experts", None)
    layouts: dict[str, MatrixLayout]
    if isinstance(module, nn.MultiheadAttention):  # its products are in torch's functions
        layouts = dict.fromkeys(
            ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), MatrixLayout(False)
        )
    elif kind.__name__ == "DbrxExpertGLU" and isinstance(count, int):  # the module around it cuts them up
        layouts = {
            "w1": MatrixLayout(False, stack=count),
            "v1": MatrixLayout(False, stack=count),
            "w2": MatrixLayout(True, stack=count),
        }
    elif kind.__module__ == "deepspeed.moe.ep_experts":  # AutoEP's, in functions beside the class
        layouts = dict.fromkeys(("w1", "w3", "w2"), MatrixLayout(False))
    else:
        layouts = {}
        unclear: set[str] = set()
        parameters = {name for name, parameter in module._parameters.items() if parameter is not None}
        for name, layout, other, letters in _every_product(kind):
            if name not in parameters or other in parameters:  # two parameters, as in a penalty: no rows of a batch
                continue
            if letters and len(parameter_shape(module._parameters[name])) != letters:  # einsum with an entry of a stack
                layout = MatrixLayout(layout.transposed)
            if layouts.setdefault(name, layout).first != layout.first:
                unclear.add(name)  # the code uses the parameter as two different matrices
        return {name: layout for name, layout in layouts.items() if name not in unclear}
    return {name: layout for name, layout in layouts.items() if module._parameters.get(name) is not None}


def borrowed_weights(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Children whose weights a module's code multiplies, or passes to a function; and whether it calls them, too."""
    if isinstance(module, nn.MultiheadAttention):  # in torch's functions
        return [(module.out_proj, False)]
    kind: Any = type(module)
    if kind.__name__ == "TopKGate" and isinstance(gate := module._modules.get("wg"), nn.Linear):  # deepspeed.moe's
        return [(gate, False)]
    children = [(module._modules.get(name), called) for name, called in _borrowed(kind).items()]
    return [(child, called) for child, called in children if child is not None]


@cache
def _borrowed(kind: Any) -> Mapping[str, bool]:
    """Name of a child -> whether it is called, too."""
    taken: set[str] = set()
    called: set[str] = set()
    for function in functions_of(kind):
        own, nodes = own_name(function), list(ast.walk(function))
        local = dict(assigned(nodes))
        for node in nodes:
            operands: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                operands = [node.left, node.right]
            elif isinstance(node, ast.Call):
                called.add(child_of(node.func, own))
                if not name_of(node.func).endswith(("_", "attr", "isinstance")):  # init.normal_(..), hasattr(..)
                    operands = [*node.args, *(word.value for word in node.keywords)]
            operands = [local.get(x.id, x) if isinstance(x, ast.Name) else x for x in operands]
            taken |= {child_of(x.value, own) for x, _ in map(_viewed, operands) if _is_weight(x)}
    return {name: name in called for name in sorted(taken - {""})}


def convolves(module: nn.Module) -> bool:
    """Whether a convolution with a forward of its own convolves with the weight as it is, e.g. not standardized."""
    kinds = type(module).__mro__
    torchs = next(place for place, kind in enumerate(kinds) if kind.__module__ == nn.Conv2d.__module__)
    return any(map(_convolves, kinds[:torchs]))


@cache
def _convolves(kind: Any) -> bool:
    for function in functions_of(kind, alone=True):
        nodes = list(ast.walk(function))
        set_here = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        given = {argument.arg for argument in _arguments(function)} - set_here
        for node in nodes:
            if isinstance(node, ast.Call) and name_of(node.func) == "forward":
                return True  # super().forward(..)
            if isinstance(node, ast.Call) and "conv" in name_of(node.func):
                for x, _ in map(_viewed, [*node.args, *(word.value for word in node.keywords)]):
                    if _is_weight(x) or (isinstance(x, ast.Name) and x.id in given & {"weight"}):
                        return True
    return False


def functions_of(kind: Any, *, alone: bool = False) -> Iterator[Function]:
    """Functions of a class and its bases below nn.Module, or of the class ``alone``, where source code is found."""
    for base in (kind,) if alone else kind.__mro__:
        if base is nn.Module:
            return
        try:
            tree = classes_of(str(inspect.getsourcefile(base)), base.__module__).get(base.__qualname__)
        except (KeyError, OSError, TypeError, SyntaxError):  # made in a shell, or by a program
            continue
        nodes = ast.walk(tree) if tree is not None else ()
        yield from (node for node in nodes if isinstance(node, Function))


@lru_cache(maxsize=8)
def classes_of(file: str, module: str) -> Mapping[str, ast.ClassDef]:
    """Qualified name -> code of a file's classes. Cached, as inspect would read the file again for each class."""
    by_name: dict[str, ast.ClassDef] = {}
    waiting: list[tuple[ast.AST, str]] = [(ast.parse("".join(getlines(file, vars(sys.modules[module])))), "")]
    while waiting:
        node, path = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            by_name.setdefault(path + node.name, node)
            path += f"{node.name}."
        elif isinstance(node, Function):
            path += f"{node.name}.<locals>."
        waiting += [(x, path) for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler)]
    return by_name


def _viewed(node: ast.expr, own: str = "") -> tuple[ast.expr, bool]:
    """The expression that a view, or a copy in another dtype, is taken of, and whether it is transposed: ``self.w`` and
    True for ``self.w[e].T``."""
    transposed = False
    while not child_of(node, own):
        how = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(how, ast.Attribute) and how.attr in TURNS | KEEPS:
            node, transposed = how.value, transposed != (how.attr in TURNS)
        else:
            break
    return node, transposed


def assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(variable, expression) of simple assignments."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _is_weight(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "weight"


def _arguments(function: Function) -> list[ast.arg]:
    """Arguments that can be given by position."""
    return [*function.args.posonlyargs, *function.args.args]


def own_name(function: Function) -> str:
    """Name of a method's first argument, usually "self"."""
    return next((argument.arg for argument in _arguments(function)), "")


def child_of(node: ast.expr, own: str) -> str:
    """NAME of ``self.NAME``, else ""."""
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own
    return node.attr if of_self and isinstance(node, ast.Attribute) else ""


@cache
def _every_product(kind: Any) -> tuple[tuple[str, MatrixLayout, str, int], ...]:
    return tuple(product for function in functions_of(kind) for product in _products(function))


def _products(function: Function) -> Iterator[tuple[str, MatrixLayout, str, int]]:
    """Products in a function's code, in its order: (attribute, its layout, the other operand if that is an attribute,
    too, else "", number of its dimensions in an einsum, else 0)."""
    own, local = own_name(function), dict[str, tuple[str, bool]]()  # variable -> parameter, whether transposed

    def parameter(node: ast.expr | None) -> tuple[str, bool] | None:
        if node is None:
            return None
        node, transposed = _viewed(node, own)
        name, before = local.get(node.id, ("", False)) if isinstance(node, ast.Name) else (child_of(node, own), False)
        return (name, before != transposed) if name else None

    def other(node: ast.expr | None) -> str:
        """The attribute that an operand is; "" for a row looked up in a table, or a variable with several values."""
        if node is None or (weight := parameter(node)) is None or looks_up(node):
            return ""
        held, _ = _viewed(node, own)
        return "" if isinstance(held, ast.Name) and set_here[held.id] != once[held.id] else weight[0]

    def looks_up(node: ast.expr) -> bool:
        inside = ast.walk(node)
        return any(isinstance(x, ast.Subscript) and not all(map(is_constant, indices(x))) for x in inside)

    nodes = sorted(ast.walk(function), key=lambda x: (getattr(x, "lineno", 0), getattr(x, "end_col_offset", 0)))
    once = Counter[str]()
    for variable, value in assigned(nodes):
        if (weight := parameter(value)) is not None:
            local[variable] = weight
            once[variable] += not looks_up(value)
    set_here = Counter(x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    set_here.update(x.arg for x in nodes if isinstance(x, ast.arg))
    for node in nodes:
        left, right, linear = None, None, False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            left, right = node.left, node.right
        elif isinstance(node, ast.Call):
            name, arguments = name_of(node.func), list(node.args)
            if name == "einsum" and len(arguments) == 3 and isinstance(arguments[0], ast.Constant):
                for place, operand in enumerate(arguments[1:]):
                    weight, sums = parameter(operand), contraction(str(arguments[0].value), place)
                    if weight is not None and not weight[1] and sums is not None:
                        yield weight[0], sums.layout, other(arguments[2 - place]), sums.dims
            elif name in RIGHT and isinstance(node.func, ast.Attribute) and len(arguments) == 1:  # x.matmul(w)
                left, right = node.func.value, arguments[0]
            elif name in LINEAR | RIGHT and len(arguments) > 1:
                left, right, linear = arguments[0], arguments[1], name in LINEAR
            elif name in LINEAR:
                right = next((word.value for word in node.keywords if word.arg == "weight"), None)
                linear = True
            elif name in ADDED and len(arguments) > 2:
                left, right = arguments[1:3]
        if (weight := parameter(right)) is not None:
            yield weight[0], MatrixLayout(weight[1] == linear), other(left), 0
        if not linear and (weight := parameter(left)) is not None:
            yield weight[0], MatrixLayout(weight[1]), other(right), 0


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


def is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def name_of(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


class Contraction(NamedTuple):
    """A product of rows with a matrix, written as an einsum.

    Attributes:
        x: permutation that brings the other operand into [rows.., I..], with I.. in the matrix's order.
        output: permutation that brings the output into [rows.., O..].
        rows: number of dimensions of the rows.
        dims: number of dimensions of the matrix.
    """

    layout: MatrixLayout
    x: tuple[int, ...]
    output: tuple[int, ...]
    rows: int
    dims: int


@cache
def contraction(equation: str, place: int) -> Contraction | None:
    """The product that an einsum's equation is if its operand ``place`` is the matrix; None if it is none."""
    operands, arrow, output = equation.replace(" ", "").partition("->")
    letters = operands.split(",")
    if not arrow or len(letters) != 2 or any(len(set(part)) < len(part) for part in (*letters, output)):
        return None  # "..." counts as letters that repeat
    matrix, x = letters[place], letters[1 - place]
    inner = "".join(letter for letter in matrix if letter in x)
    outer = "".join(letter for letter in matrix if letter not in x)
    rows = "".join(letter for letter in x if letter not in inner)
    if not inner or not outer or matrix not in (inner + outer, outer + inner) or set(output) != set(rows + outer):
        return None
    transposed = matrix == inner + outer
    return Contraction(
        MatrixLayout(transposed, len(inner) if transposed else len(outer)),
        tuple(map(x.index, rows + inner)),
        tuple(map(output.index, rows + outer)),
        len(rows),
        len(matrix),
    )
