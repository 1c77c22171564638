"""Which parameters are tables, in which rows are looked up; modules' source code is read for it, before training.

A table is stepped as an embedding is, even if it is also multiplied: by a head that shares it, or in a codebook, whose
product only selects the nearest row and gets no gradient.
"""

import ast
from functools import cache
from typing import Any

from torch import nn

from ds_kfac.model.layers import parameter_shape
from ds_kfac.model.product_code import (
    COPIES,
    MAKES,
    assigned,
    child_of,
    functions_of,
    indices,
    is_constant,
    name_of,
    own_name,
)

LOOK_UPS = {"embedding", "embedding_bag", "index_select"}


def tables(model: nn.Module) -> set[int]:
    """Ids of the parameters in which a module's code looks up rows: its own parameters, or those of its children."""
    ids = set()
    for module in model.modules():
        kind: Any = type(module)
        for path, dims in _look_ups(kind):
            parameter = _parameter_at(module, path.split("."))
            if parameter is not None and len(parameter_shape(parameter)) - dims < 2:  # a row or less is left
                ids.add(id(parameter))
    return ids


def _parameter_at(module: nn.Module, path: list[str]) -> Any:
    """The parameter at a path of names; None if there is none, or in TorchScript."""
    if len(path) > 1:
        child = module._modules.get(path[0]) if isinstance(module._modules, dict) else None
        return None if child is None else _parameter_at(child, path[1:])
    return module._parameters.get(path[0]) if isinstance(module._parameters, dict) else None


@cache
def _look_ups(kind: Any) -> frozenset[tuple[str, int]]:
    """The look-ups in a class's code: ("NAME" or "CHILD.NAME", number of dimensions that the index removes). In a stack
    of matrices one dimension leaves a matrix, two leave a row."""
    look_ups = set()
    for function in (x for x in functions_of(kind) if not x.name.startswith(MAKES)):
        self_name, nodes, local = own_name(function), list(ast.walk(function)), dict[str, tuple[str, int]]()

        def place(node: ast.expr, me: str = self_name, local: dict[str, tuple[str, int]] = local) -> Any:
            """(parameter that an expression is or indexes, dimensions that its indices remove), or None."""
            if isinstance(node, ast.Name):
                return local.get(node.id)
            if isinstance(node, ast.Subscript):
                inner = place(node.value)
                return inner and (inner[0], inner[1] + len(indices(node)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
                return place(node.func.value)
            path = _path(node, me)
            return (path, 0) if path else None

        for variable, value in assigned(nodes):
            if (at := place(value)) is not None:
                local[variable] = at
        for node in nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                if not all(map(is_constant, indices(node))) and (at := place(node)) is not None:
                    look_ups.add(at)
            elif isinstance(node, ast.Call) and (name := name_of(node.func)) in LOOK_UPS:
                operands = [*node.args, *(word.value for word in node.keywords)]
                operands += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                for path, dims in filter(None, map(place, operands)):
                    look_ups.add((path, dims + (1 if name == "index_select" else 2)))
    return frozenset(look_ups)


def _path(node: ast.expr, self_name: str) -> str:
    """ "NAME.NAME" of ``self.NAME.NAME``, else ""."""
    if child_of(node, self_name):
        return child_of(node, self_name)
    before = _path(node.value, self_name) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""
