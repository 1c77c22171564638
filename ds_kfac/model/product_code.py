"""Find out what a module does with its parameters by reading its source code, before training.

:func:`multiplied` finds the parameters by which the code multiplies, and the layout of the matrix
in each of them. The matrix is [O, I] in ``linear(x, self.w)``, ``x @ self.w.T`` and ``self.w @ x``.
It is [I, O] in ``x @ self.w``, ``bmm``, ``addmm`` and grouped products. In a stack [E, ..] each
entry is a matrix, as in ``linear(x, self.w[e])``. ``self.w.view(self.E, ..)`` is also such a stack.
In an ``einsum``, the dimensions that are summed over form one side of the matrix, and the matrix's
other dimensions form the other side.

:func:`borrowed_weights` finds child modules whose weights the parent module's own code uses
directly. :func:`tables` finds parameters in which rows are looked up, as in an embedding.
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
"""Prefixes of the names of functions that set up a module and do not run it."""
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
LINEAR = {"linear"}
"""Functions that multiply by their transposed right operand."""
RIGHT = {"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"}
"""Functions that multiply by their right operand."""
ADDED = {"addmm", "baddbmm"}
"""Functions that add a product to their first argument."""
TURNS = {"T", "mT", "t", "transpose", "swapaxes", "adjoint"}
"""Methods and attributes that transpose a matrix."""
BOUNDS = {"clamp", "clip"}
"""Methods that limit the values of elements."""
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
"""Methods whose result has the parameter's elements, possibly in another dtype. A method in BOUNDS
may change some elements; every other element has the same gradient as its copy."""
KEEPS = COPIES | {"unsqueeze", "squeeze"}
"""Methods whose result is the same matrix."""
LOOK_UPS = {"embedding", "embedding_bag", "index_select"}
"""Functions that look up rows."""


class MatrixLayout(NamedTuple):
    """How a matrix, or a stack of matrices, is stored in a parameter.

    Attributes:
        transposed: whether the matrix is [I, O], not [O, I].
        first: number of leading dimensions that together form the first side; all other dimensions
            form the second side. If it is 0, the last two dimensions are the sides, and a dimension
            before them, if any, indexes the matrices of a stack.
        stack: number of matrices that a parameter of two dimensions holds, one after the other
            along its first dimension.
    """

    transposed: bool
    first: int = 0
    stack: int = 1

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape [first side, second side] of the matrix, or [matrices, .., ..] of the
        stack, in a parameter of the shape ``parameter``."""
        if self.first:
            return prod(parameter[: self.first]), prod(parameter[self.first :])
        if self.stack > 1:
            return self.stack, parameter[0] // self.stack, *parameter[1:]
        return parameter


def multiplied(module: nn.Module) -> Mapping[str, MatrixLayout]:
    """Return the parameters by which a module's code multiplies rows, in the order of the code. The
    dict maps a parameter's name to the layout of its matrix or matrices."""
    layouts = _special_layouts(module)
    if layouts is None:
        return _layouts_in_code(module)
    return {
        name: layout for name, layout in layouts.items() if module._parameters.get(name) is not None
    }


def _special_layouts(module: nn.Module) -> dict[str, MatrixLayout] | None:
    """Return the layouts for a module whose products are not in its own code; None for any other
    module."""
    kind: Any = type(module)
    if isinstance(module, nn.MultiheadAttention):  # its products are in torch's functions
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return dict.fromkeys(names, MatrixLayout(False))
    # AutoEP's products are in functions beside the class
    if kind.__module__ == "deepspeed.moe.ep_experts":
        return dict.fromkeys(("w1", "w3", "w2"), MatrixLayout(False))
    if kind.__name__ == "DbrxExpertGLU":  # the module around it cuts the parameters up
        experts: Any = getattr(module, "moe_num_experts", None)
        if isinstance(experts, int):
            return {name: MatrixLayout(name == "w2", stack=experts) for name in ("w1", "v1", "w2")}
    return None


def _layouts_in_code(module: nn.Module) -> dict[str, MatrixLayout]:
    """Return the layouts that a module's own code shows."""
    parameters = {name for name, parameter in module._parameters.items() if parameter is not None}
    layouts: dict[str, MatrixLayout] = {}
    unclear = set[str]()  # parameters that the code uses as two different matrices
    kind: Any = type(module)
    for product in _products(kind):
        name = product.weight.path
        # a product of two parameters, as in a penalty, has no rows of a batch
        if name not in parameters or product.other in parameters:
            continue
        layout = product.layout
        if product.weight.cut:
            matrices = _stack(module, module, name, product.weight.cut)
            if matrices == 1:
                continue
            layout = MatrixLayout(layout.transposed, stack=matrices)
        elif product.dims and len(parameter_shape(module._parameters[name])) != product.dims:
            # the einsum's operand is an entry of a stack
            layout = MatrixLayout(layout.transposed)
        if layouts.setdefault(name, layout).first != layout.first:
            unclear.add(name)
    return {name: layout for name, layout in layouts.items() if name not in unclear}


def _stack(module: nn.Module, holder: nn.Module, name: str, cut: str | int) -> int:
    """Return the number of matrices into which a module's code cuts the rows of a parameter; 1 if
    the cut does not fit the parameter.

    Args:
        module: the module with the code.
        holder: the module that holds the parameter.
        name: name of the parameter in ``holder``.
        cut: see :attr:`Operand.cut`.
    """
    count = value_of(module, cut) if isinstance(cut, str) else cut
    parameter = holder._parameters.get(name)
    shape = () if parameter is None else parameter_shape(parameter)
    if type(count) is not int or count <= 1 or len(shape) != 2:
        return 1
    return count if shape[0] % count == 0 else 1


class BorrowedWeight(NamedTuple):
    """A module whose weight is used directly by its parent's code. The code multiplies by the
    weight, or passes it to a function.

    Attributes:
        module: the module that holds the weight.
        is_called: whether the parent's code also calls the module.
        matrices: number of matrices, with equally many rows, into which the parent's code cuts the
            weight.
    """

    module: nn.Module
    is_called: bool
    matrices: int


def borrowed_weights(module: nn.Module) -> list[BorrowedWeight]:
    """Return the children of a module whose weights the module's own code uses directly."""
    if isinstance(module, nn.MultiheadAttention):  # in torch's functions
        return [BorrowedWeight(module.out_proj, False, 1)]
    kind: Any = type(module)
    if kind.__name__ == "TopKGate":  # the gate of deepspeed.moe
        gate = module._modules.get("wg")
        if isinstance(gate, nn.Linear):
            return [BorrowedWeight(gate, False, 1)]
    weights = []
    for name, (is_called, cut) in _borrowed(kind).items():
        child = module._modules.get(name)
        if child is None:
            continue
        matrices = _stack(module, child, "weight", cut)
        # if the cut does not fit the weight, the code is not understood
        if matrices > 1 or not cut:
            weights.append(BorrowedWeight(child, is_called, matrices))
    return weights


def tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters in which the code of any module looks up rows. A module's code may look
    up rows in the module's own parameters or in those of its children.

    A table is treated like an embedding, even if some code also multiplies by it. Two examples are
    a head that shares the table, and a codebook, where the product only selects the nearest row and
    gets no gradient.
    """
    parameters = set()
    for module in model.modules():
        kind: Any = type(module)
        for path, removed_dims in _look_ups(kind):
            parameter = _parameter_at(module, path.split("."))
            # the result of the look-up is a row or a single element
            if parameter is not None and len(parameter_shape(parameter)) - removed_dims < 2:
                parameters.add(parameter)
    return parameters


def _parameter_at(module: nn.Module, path: list[str]) -> Any:
    """Return the parameter at a path of names; None if there is no such parameter, or if the module
    is TorchScript."""
    if len(path) > 1:
        child = module._modules.get(path[0]) if isinstance(module._modules, dict) else None
        return None if child is None else _parameter_at(child, path[1:])
    return module._parameters.get(path[0]) if isinstance(module._parameters, dict) else None


def kernels(module: nn.Module) -> frozenset[str]:
    """Return the names of the module's own parameters that its code passes to a convolution as the
    weight, either directly or after other operations."""
    kind: Any = type(module)
    return _kernels(kind) & module._parameters.keys()


def convolves(module: nn.Module) -> bool:
    """Return whether a convolution module that overrides torch's methods convolves with its
    unchanged weight, and not, for example, with a standardized weight."""
    for kind in type(module).__mro__:
        if kind.__module__ == nn.Conv2d.__module__:
            return False
        if _convolves(kind):
            return True
    return False


class Operand(NamedTuple):
    """A parameter as it occurs in an expression such as ``self.experts.w[e].T``. The expression may
    also view the parameter or convert its dtype.

    Attributes:
        path: name of the parameter, such as "experts.w".
        transposed: whether the expression transposes the parameter.
        dims: number of dimensions that the expression indexes with something other than a slice.
        varies: whether the value may be rows of a batch, because rows are looked up in the
            parameter, or because the variable may also hold other values.
        cut: number of matrices into which a view in the expression cuts the parameter's rows. It is
            a number, or the name of an attribute, such as "n" for ``self.w.view(self.n, ..)``.
            Empty if there is no such view.
    """

    path: str
    transposed: bool = False
    dims: int = 0
    varies: bool = False
    cut: str | int = ""


def _end(node: ast.AST) -> tuple[int, int]:
    """Return (line, column) where the code of a node ends. An inner call ends before the outer
    call, however many lines they have."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0


class Code:
    """A function's code.

    Attributes:
        name: name of the function.
        arguments: names of its positional arguments.
        nodes: the nodes of its syntax tree, in the order in which they are evaluated.
        set_here: variable -> number of assignments to it.
        held: variable -> the parameter assigned to it; the last one if there are several.
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
        # variable -> number of assignments of a value that is not a parameter
        others = Counter(x.arg for x in self.nodes if isinstance(x, ast.arg)) + self.set_here
        for node in self.nodes:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target = node.targets[0]
            operand = self.operand(node.value)
            if isinstance(target, ast.Name) and operand is not None:
                if not operand.varies:
                    others[target.id] -= 1
                self.held[target.id] = operand
        self.held = {
            name: operand._replace(varies=others[name] > 0) for name, operand in self.held.items()
        }

    def attribute(self, node: ast.AST) -> str:
        """Return NAME of an expression ``self.NAME``; "" for any other expression."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == self._self:
                return node.attr
        return ""

    def operand(self, node: ast.AST | None) -> Operand | None:
        """Return the parameter that an expression names; None if the expression has another
        value."""
        if node is None:
            return None
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        name = self.attribute(node)
        if name:
            return Operand(name)
        if isinstance(node, ast.Subscript):
            return self._indexed(node)
        # "value.attribute", or "value.attribute(..)"
        attribute = node.func if isinstance(node, ast.Call) else node
        if not isinstance(attribute, ast.Attribute):
            return None
        inner = self.operand(attribute.value)
        if inner is None:
            return None
        if attribute.attr in TURNS:
            return inner._replace(transposed=not inner.transposed)
        if attribute.attr in KEEPS:
            return inner
        if isinstance(node, ast.Call):
            is_view = attribute.attr in ("view", "reshape")
            return self._viewed(node, inner) if is_view else None
        # an attribute of a plain "self.child"
        return Operand(f"{inner.path}.{attribute.attr}") if inner == Operand(inner.path) else None

    def _indexed(self, node: ast.Subscript) -> Operand | None:
        """Return the parameter that an expression ``value[index]`` names."""
        inner = self.operand(node.value)
        if inner is None:
            return None
        dims = inner.dims + len(indices(node))
        return inner._replace(dims=dims, varies=inner.varies or is_computed(node))

    def _viewed(self, call: ast.Call, inner: Operand) -> Operand | None:
        """Return the stack of matrices that a call of ``inner.view`` or ``inner.reshape`` with
        three sizes makes of a parameter; None for any other call."""
        if inner.cut or inner.transposed:
            return None
        sizes = call.args
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple):
            sizes = sizes[0].elts
        if len(sizes) != 3:
            return None
        first = sizes[0]
        cut: Any = first.value if isinstance(first, ast.Constant) else self.attribute(first)
        return inner._replace(cut=cut) if cut else None


def codes_of(kind: Any, *, alone: bool = False) -> Iterator[Code]:
    """Yield the code of the functions of a class and of its bases, except nn.Module and nn.Module's
    bases.

    Functions whose source code is not found are left out.

    Args:
        kind: the class.
        alone: whether to leave out the code of the bases.
    """
    bases = (kind,) if alone else kind.__mro__[: kind.__mro__.index(nn.Module)]
    for base in bases:
        try:
            tree = _class_tree(base)
        except (KeyError, OSError, TypeError, SyntaxError, ValueError):
            # there is no source if the class was made in a shell or by a program
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Code(node)


def _class_tree(kind: Any) -> ast.ClassDef:
    """Return the syntax tree of a class.

    A file may define several classes of one name, for example in both branches of an if. The right
    definition is the one that contains most of the class's functions.
    """
    candidates = classes_of(str(inspect.getsourcefile(kind)), kind.__module__)[kind.__qualname__]
    functions = [inspect.unwrap(x) for x in vars(kind).values() if inspect.isfunction(x)]
    codes = [getattr(function, "__code__", None) for function in functions]
    lines = [code.co_firstlineno for code in codes if code is not None]

    def functions_in(tree: ast.ClassDef) -> int:
        return sum(tree.lineno <= line <= (tree.end_lineno or 0) for line in lines)

    return max(candidates, key=functions_in)


@lru_cache(maxsize=8)
def classes_of(file: str, module: str) -> Mapping[str, list[ast.ClassDef]]:
    """Return the syntax trees of a file's classes: qualified name -> all classes of that name.

    The result is cached, because inspect would read the file again for each class.
    """
    by_name: dict[str, list[ast.ClassDef]] = {}
    tree = ast.parse("".join(getlines(file, vars(sys.modules[module]))))
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]  # nodes, and the prefix of names inside them
    while waiting:
        node, prefix = waiting.pop(0)
        if isinstance(node, ast.ClassDef):
            by_name.setdefault(prefix + node.name, []).append(node)
            prefix += f"{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            prefix += f"{node.name}.<locals>."
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                waiting.append((child, prefix))
    return by_name


def name_of(function: ast.AST) -> str:
    """Return the last name of an expression such as ``torch.matmul``; "" if it has none."""
    return getattr(function, "attr", getattr(function, "id", ""))


def given(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def indices(node: ast.Subscript) -> list[ast.expr]:
    """Return all indices except slices, None and "...". Each of these indices removes a dimension,
    or picks entries along it."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [x.operand if isinstance(x, ast.UnaryOp) else x for x in parts]  # the 1 in -1
    return [
        x
        for x in parts
        if not isinstance(x, ast.Slice)
        and not (isinstance(x, ast.Constant) and x.value in (None, ...))
        and not (isinstance(x, ast.Call) and name_of(x.func) == "slice")
    ]


def is_computed(node: ast.Subscript) -> bool:
    """Return whether an index is not constant, so that it may look up a row."""
    return not all(isinstance(index, ast.Constant) for index in indices(node))


@cache
def _borrowed(kind: Any) -> Mapping[str, tuple[bool, str | int]]:
    """Return a dict with an entry for each child module whose weight a class's code uses. The key
    is the child's name. The value is a pair (whether the code also calls the child,
    :attr:`Operand.cut` of the child's weight)."""
    taken = dict[str, str | int]()
    called = set[str]()
    for code in codes_of(kind):
        for node in code.nodes:
            arguments: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                arguments = [node.left, node.right]
            elif isinstance(node, ast.Call):
                called.add(code.attribute(node.func))
                # not init.normal_(..), hasattr(..)
                if not name_of(node.func).endswith(("_", "attr", "isinstance")):
                    arguments = given(node)
            for argument in arguments:
                operand = code.operand(argument)
                if operand is None:
                    continue
                child, _, name = operand.path.rpartition(".")
                if child and name == "weight":
                    taken[child] = operand.cut
    return {name: (name in called, cut) for name, cut in taken.items()}


@cache
def _convolves(kind: Any) -> bool:
    """Return whether the code of a class, without its bases, convolves with ``weight``."""
    for code in codes_of(kind, alone=True):
        # Forget all variables except an argument "weight": a variable that holds the weight may
        # also hold a standardized weight
        code.held = dict.fromkeys(
            {"weight"} & {*code.arguments} - set(code.set_here), Operand("weight")
        )
        for node in code.nodes:
            if not isinstance(node, ast.Call):
                continue
            if name_of(node.func) == "forward":
                return True  # super().forward(..)
            if "conv" in name_of(node.func):
                operands = [code.operand(argument) for argument in given(node)]
                if any(x is not None and x.path == "weight" for x in operands):
                    return True
    return False


@cache
def _kernels(kind: Any) -> frozenset[str]:
    """Return the attributes from which a class's code computes weights of convolutions."""
    found = set[str]()
    for code in codes_of(kind):
        # variable -> the attributes of self from which its values are computed
        sources: dict[str, set[str]] = {}
        for node in code.nodes:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        sources.setdefault(target.id, set()).update(
                            _attributes_in(node.value, code, sources)
                        )
            elif isinstance(node, ast.Call):
                weight = _weight_of_convolution(node, code)
                if weight is not None:
                    found |= _attributes_in(weight, code, sources)
    return frozenset(found)


def _weight_of_convolution(call: ast.Call, code: Code) -> ast.expr | None:
    """Return the weight that a call passes to a convolution; None if it is a call of another
    function."""
    name = name_of(call.func)
    # self.conv(x, y) calls a child module, but self._conv_forward(x, weight, bias) calls a method
    if "conv" not in name or (code.attribute(call.func) and not name.endswith("forward")):
        return None
    for word in call.keywords:
        if word.arg == "weight":
            return word.value
    return call.args[1] if len(call.args) > 1 else None


def _attributes_in(node: ast.AST, code: Code, sources: Mapping[str, set[str]]) -> set[str]:
    """Return the attributes of self from which an expression is computed.

    Args:
        sources: variable of the code so far -> the attributes of self from which its values are
            computed.
    """
    found = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found |= sources.get(inner.id, set())
        else:
            found |= {code.attribute(inner)} - {""}
    return found


@cache
def _look_ups(kind: Any) -> frozenset[tuple[str, int]]:
    """Return the look-ups in a class's code. Each look-up is a pair (attribute that is indexed,
    number of dimensions that the index removes). The attribute is "NAME" for ``self.NAME``, and
    "CHILD.NAME" for ``self.CHILD.NAME``.

    In a stack of matrices, one removed dimension leaves a matrix, and two leave a row. Weights of
    children count only in code that ``forward`` runs, because other methods, such as a method that
    prunes a layer, may read rows of any weight.
    """
    look_ups = set[tuple[str, int]]()
    run_by_forward = _run_by_forward(kind)
    for code in codes_of(kind):
        if code.name.startswith(MAKES):
            continue
        for node in code.nodes:
            arguments: list[ast.expr] = []
            removed_dims = 0
            if isinstance(node, ast.Subscript):
                if isinstance(node.ctx, ast.Load) and is_computed(node):
                    arguments = [node]
            elif isinstance(node, ast.Call) and name_of(node.func) in LOOK_UPS:
                arguments = given(node)
                removed_dims = 1 if name_of(node.func) == "index_select" else 2
                if isinstance(node.func, ast.Attribute):
                    arguments.append(node.func.value)
            for operand in map(code.operand, arguments):
                if operand is None:
                    continue
                is_of_child = "." in operand.path
                if is_of_child and code.name not in run_by_forward:
                    continue
                look_ups.add((operand.path, operand.dims + removed_dims))
    return frozenset(look_ups)


def _run_by_forward(kind: Any) -> set[str]:
    """Return the names of the methods that the ``forward`` of a class mentions, and of the methods
    that these methods mention, and so on."""
    mentioned: dict[str, set[str]] = {}
    for code in codes_of(kind):
        mentioned.setdefault(code.name, set()).update(map(code.attribute, code.nodes))
    found = set[str]()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in mentioned and name not in found:
            found.add(name)
            waiting += mentioned[name]
    return found


class CodeProduct(NamedTuple):
    """A place in a class's source code where something is multiplied by a parameter.

    Attributes:
        weight: the parameter.
        layout: how the matrix is stored in the parameter.
        other: name of the other operand if it is also a parameter; else "".
        dims: for an einsum, the number of dimensions of the parameter; else 0.
    """

    weight: Operand
    layout: MatrixLayout
    other: str
    dims: int = 0


@cache
def _products(kind: Any) -> tuple[CodeProduct, ...]:
    """Return the products in a class's code, in the order of the code."""
    return tuple(product for code in codes_of(kind) for product in _products_in(code))


def _products_in(code: Code) -> Iterator[CodeProduct]:
    for node in code.nodes:
        if isinstance(node, ast.Call) and _is_einsum(node):
            yield from _einsum_products(code, node)
            continue
        left, right, is_linear = _factors(node)
        weight = code.operand(right)
        if weight is not None:
            layout = MatrixLayout(weight.transposed == is_linear)
            yield CodeProduct(weight, layout, _fixed(code, left))
        weight = None if is_linear else code.operand(left)
        if weight is not None:
            yield CodeProduct(weight, MatrixLayout(weight.transposed), _fixed(code, right))


def _fixed(code: Code, node: ast.expr | None) -> str:
    """Return the parameter's name if an operand of a product is a parameter. "" if it is not a
    parameter, or may be rows of a batch."""
    operand = code.operand(node)
    return "" if operand is None or operand.varies else operand.path


def _is_einsum(node: ast.Call) -> bool:
    is_of_two = name_of(node.func) == "einsum" and len(node.args) == 3
    return is_of_two and isinstance(node.args[0], ast.Constant)


def _einsum_products(code: Code, node: ast.Call) -> Iterator[CodeProduct]:
    equation, *operands = node.args
    for index, operand in enumerate(operands):
        weight = code.operand(operand)
        sums = contraction(str(equation.value), index)  # type: ignore[attr-defined]
        if weight is not None and not weight.transposed and sums is not None:
            other = _fixed(code, operands[1 - index])
            yield CodeProduct(weight, sums.layout, other, sums.dims)


def _factors(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None, bool]:
    """Return (left operand, right operand, whether the right operand is transposed first, as in
    ``F.linear``) of a matrix product. An operand that is not found is None."""
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
    """An einsum that multiplies rows by a matrix, or separate rows by each matrix of a stack.

    Attributes:
        layout: how the matrix is stored in the operand that holds it.
        x: permutation that brings the other operand into [rows.., I..], with I.. in the order of
            the matrix.
        output: permutation that brings the output into [rows.., O..].
        rows: number of leading dimensions that index the rows.
        dims: number of dimensions of the operand that holds the matrix.
        stacked: whether the first dimension of the rows indexes the matrices of a stack.
    """

    layout: MatrixLayout
    x: tuple[int, ...]
    output: tuple[int, ...]
    rows: int
    dims: int
    stacked: bool = False


@cache
def contraction(equation: str, index: int, dims: int = 0) -> Contraction | None:
    """Return the product that an einsum of two operands computes. None if it is not a product with
    a matrix.

    Args:
        equation: the einsum's equation.
        index: which operand is the matrix, or the stack of matrices.
        dims: number of dimensions of the other operand, including those that "..." stands for; 0 if
            the number is unknown.
    """
    operands, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    letters = operands.split(",")
    if not arrow or len(letters) != 2:
        return None
    if any(len(set(part)) < len(part) for part in (*letters, output)):
        return None
    matrix = letters[index]
    x = letters[1 - index]
    # a digit for each dimension that "..." stands for
    dots = "0123456789"[: dims - len(x) + 1] if dims else "0"
    x = x.replace(".", dots)
    output = output.replace(".", dots)
    stack = "".join(letter for letter in matrix if letter in x and letter in output)
    inner = "".join(letter for letter in matrix if letter in x and letter not in stack)
    outer = "".join(letter for letter in matrix if letter not in x)
    rows = stack + "".join(letter for letter in x if letter not in stack + inner)
    if not inner or not outer or set(output) != set(rows + outer):
        return None
    if stack and (len(stack), len(matrix)) != (1, 3):
        return None
    transposed = matrix == stack + inner + outer
    if not transposed and matrix != stack + outer + inner:
        return None
    first_side = inner if transposed else outer
    return Contraction(
        layout=MatrixLayout(transposed, first=0 if stack else len(first_side)),
        x=tuple(map(x.index, rows + inner)),
        output=tuple(map(output.index, rows + outer)),
        rows=len(rows),
        dims=len(matrix),
        stacked=bool(stack),
    )
