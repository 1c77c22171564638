"""Which matrices a module multiplies rows by: read from its code, before training.

:func:`multiplied` reads which of its parameters a module's class multiplies something by, and how the matrix lies:
[O, I] in ``linear(x, self.w)``, ``x @ self.w.T`` and ``self.w @ x``, [I, O] in ``x @ self.w``, ``bmm``, ``addmm`` and
grouped products; of a stack [E, ..] every entry by itself (``linear(x, self.w[e])``); in ``einsum`` dimensions that are
summed over are one side, those of the output the other. :func:`lent` reads which weights of modules inside it takes.
"""

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from linecache import getlines
from math import prod
from typing import Any, NamedTuple, TypeGuard

from torch import nn

MAKES = ("__init__", "_init", "init", "reset", "_reset", "_tie", "tie", "_load", "load", "extra_repr", "__repr__")
"""How functions begin that make a module, and do not run it."""
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
LINEAR, RIGHT = {"linear"}, {"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
ADDED = {"addmm", "baddbmm"}
TURNS = {"T", "mT", "t", "transpose", "swapaxes", "adjoint"}
BOUNDS = {"clamp", "clip"}
COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"} | BOUNDS
"""Some in another dtype, or with some elements bounded: those that are not have the gradient of the copy."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
KEEPS = COPIES | {"unsqueeze", "squeeze"}


class Lies(NamedTuple):
    """How a matrix lies in a parameter.

    Attributes:
        turned: [I, O], not [O, I].
        first: how many of the parameter's dimensions are the first of these sides, the others are the second; 0: the
            last two are the sides, and a third one before them counts a stack.
        stack: how many matrices follow each other along the first dimension.
    """

    turned: bool
    first: int = 0
    stack: int = 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Sides of the matrix, or the number of a stack and its sides, of a parameter of that shape."""
        if self.first:
            return prod(parameter[: self.first]), prod(parameter[self.first :])
        if self.stack > 1:
            return self.stack, parameter[0] // self.stack, *parameter[1:]
        return parameter


def multiplied(module: nn.Module) -> Mapping[str, Lies]:
    """Names of a module's own parameters that its code multiplies rows by, in the order of the code."""
    kind: Any = type(module)
    count: Any = getattr(module, "moe_num_experts", None)
    found: Mapping[str, Lies]
    if isinstance(module, nn.MultiheadAttention):  # its products are in torch's functions
        found = dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), Lies(False))
    elif kind.__name__ == "DbrxExpertGLU" and isinstance(count, int):  # the module around it cuts them up
        found = {"w1": Lies(False, stack=count), "v1": Lies(False, stack=count), "w2": Lies(True, stack=count)}
    elif kind.__module__ == "deepspeed.moe.ep_experts":  # AutoEP's, in functions beside the class
        found = dict.fromkeys(("w1", "w3", "w2"), Lies(False))
    else:
        found = _multiplied(kind)
    return {name: lies for name, lies in found.items() if module._parameters.get(name) is not None}


@cache
def _multiplied(kind: Any) -> Mapping[str, Lies]:
    found: dict[str, Lies] = {}
    unclear: set[str] = set()
    for function in _functions(kind):
        for name, lies in _products(function):
            if found.setdefault(name, lies).first != lies.first:
                unclear.add(name)  # one matrix here, another one there
    return {name: lies for name, lies in found.items() if name not in unclear}


def lent(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Modules inside of one whose weights its code multiplies by itself, or hands to a function; and whether each is
    called, too, as modules are."""
    if isinstance(module, nn.MultiheadAttention):  # in torch's functions
        return [(module.out_proj, False)]
    kind: Any = type(module)
    if kind.__name__ == "TopKGate" and isinstance(gate := module._modules.get("wg"), nn.Linear):  # deepspeed.moe's
        return [(gate, False)]
    children = [(module._modules.get(name), called) for name, called in _lent(kind).items()]
    return [(child, called) for child, called in children if child is not None]


@cache
def _lent(kind: Any) -> Mapping[str, bool]:
    """Name of a child -> whether it is called, too."""
    taken: set[str] = set()
    called: set[str] = set()
    for function in _functions(kind):
        own, nodes = _own(function), list(ast.walk(function))
        local = dict(_assigned(nodes))
        for node in nodes:
            operands: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                operands = [node.left, node.right]
            elif isinstance(node, ast.Call):
                called.add(_child(node.func, own))
                if not _name(node.func).endswith(("_", "attr", "isinstance")):  # init.normal_(..), hasattr(..)
                    operands = [*node.args, *(word.value for word in node.keywords)]
            operands = [local.get(x.id, x) if isinstance(x, ast.Name) else x for x in operands]
            taken |= {_child(x.value, own) for x, _ in map(_viewed, operands) if _is_weight(x)}
    return {name: name in called for name in sorted(taken - {""})}


def convolves(module: nn.Module) -> bool:
    """Whether the code of a convolution that has a forward of its own convolves with its weight itself, and not with a
    standardized one."""
    kinds = type(module).__mro__
    known = next(place for place, kind in enumerate(kinds) if kind.__module__ == nn.Conv2d.__module__)
    return any(map(_convolves, kinds[:known]))


@cache
def _convolves(kind: Any) -> bool:
    for function in _functions(kind, alone=True):
        nodes = list(ast.walk(function))
        set_here = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        given = {argument.arg for argument in _arguments(function)} - set_here
        for node in nodes:
            if isinstance(node, ast.Call) and _name(node.func) == "forward":
                return True  # super().forward(..)
            if isinstance(node, ast.Call) and "conv" in _name(node.func):
                for x, _ in map(_viewed, [*node.args, *(word.value for word in node.keywords)]):
                    if _is_weight(x) or (isinstance(x, ast.Name) and x.id in given & {"weight"}):
                        return True
    return False


def reads(module: nn.Module, parameter: str) -> bool:
    """Whether the code of a module does something with a parameter that it holds, as far as there is code."""
    functions = list(_functions(type(module)))
    return not functions or any(name == parameter for function in functions for name, _ in _reads(function))


def looked_up(module: nn.Module, parameter: str) -> bool:
    """Whether a parameter is a table by the code: rows are looked up in it, and nothing is multiplied by it."""
    if parameter in multiplied(module):
        return False
    read = [use for function in _functions(type(module)) for name, use in _reads(function) if name == parameter]
    return any(isinstance(use, ast.Call) and _name(use.func) == "embedding" for use in read)


def _reads(function: Function) -> Iterator[tuple[str, ast.AST]]:
    """(NAME, what has it as its part) of every ``self.NAME`` that a function reads."""
    own = _own(function)
    if function.name.startswith(MAKES):
        return
    for node in ast.walk(function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load) and _child(child, own):
                yield child.attr, node


def _functions(kind: Any, *, alone: bool = False) -> Iterator[Function]:
    """The code of a class and of those that it comes from, or of it ``alone``, as far as there is a source."""
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
    """Qualified name -> code, of a file's classes: read once, where inspect reads the file again for each."""
    found: dict[str, ast.ClassDef] = {}
    waiting: list[tuple[ast.AST, str]] = [(ast.parse("".join(getlines(file, vars(sys.modules[module])))), "")]
    while waiting:
        node, path = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            found.setdefault(path + node.name, node)
            path += f"{node.name}."
        elif isinstance(node, Function):
            path += f"{node.name}.<locals>."
        waiting += [(x, path) for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt | ast.excepthandler)]
    return found


def _viewed(node: ast.expr, own: str = "") -> tuple[ast.expr, bool]:
    """What a piece of code is a view of, or a copy in another dtype, and whether it is turned: ``self.w[e].T`` is
    ``self.w``, turned."""
    turned = False
    while not _child(node, own):
        how = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(how, ast.Attribute) and how.attr in TURNS | KEEPS:
            node, turned = how.value, turned != (how.attr in TURNS)
        else:
            break
    return node, turned


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(variable, what it is set to)."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _is_weight(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "weight"


def _arguments(function: Function) -> list[ast.arg]:
    """Those that are given by their place."""
    return [*function.args.posonlyargs, *function.args.args]


def _own(function: Function) -> str:
    """What a method calls its module."""
    return next((argument.arg for argument in _arguments(function)), "")


def _child(node: ast.expr, own: str) -> str:
    """NAME of ``self.NAME``, else ""."""
    known = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own
    return node.attr if known and isinstance(node, ast.Attribute) else ""


def _products(function: Function) -> Iterator[tuple[str, Lies]]:
    """(parameter, how it lies) of the products in a function's code, in its order."""
    own, local = _own(function), dict[str, tuple[str, bool]]()  # variable -> parameter, whether turned

    def parameter(node: ast.expr) -> tuple[str, bool] | None:
        node, turned = _viewed(node, own)
        name, before = local.get(node.id, ("", False)) if isinstance(node, ast.Name) else (_child(node, own), False)
        return (name, before != turned) if name else None

    nodes = sorted(ast.walk(function), key=lambda x: (getattr(x, "lineno", 0), getattr(x, "end_col_offset", 0)))
    for variable, value in _assigned(nodes):
        if (found := parameter(value)) is not None:
            local[variable] = found
    for node in nodes:
        left, right, linear = None, None, False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            left, right = node.left, node.right
        elif isinstance(node, ast.Call):
            name, arguments = _name(node.func), list(node.args)
            if name == "einsum" and len(arguments) == 3 and isinstance(arguments[0], ast.Constant):
                for place, operand in enumerate(arguments[1:]):
                    found, sums = parameter(operand), contraction(str(arguments[0].value), place)
                    if found is not None and not found[1] and sums is not None:
                        yield found[0], sums.lies
            elif name in RIGHT and isinstance(node.func, ast.Attribute) and len(arguments) == 1:  # x.matmul(w)
                left, right = node.func.value, arguments[0]
            elif name in LINEAR | RIGHT and len(arguments) > 1:
                left, right, linear = arguments[0], arguments[1], name in LINEAR
            elif name in LINEAR:
                right = next((word.value for word in node.keywords if word.arg == "weight"), None)
                linear = True
            elif name in ADDED and len(arguments) > 2:
                right = arguments[2]
        if right is not None and (found := parameter(right)) is not None:
            yield found[0], Lies(found[1] == linear)
        elif left is not None and not linear and (found := parameter(left)) is not None:
            yield found[0], Lies(found[1])


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


class Contraction(NamedTuple):
    """A product of rows with a matrix, as einsum has it.

    Attributes:
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
