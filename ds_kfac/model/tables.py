"""Which parameters are tables, whose rows are looked up: read from the code, before training.

A table is stepped as an embedding is, also where something is multiplied by it: a head that shares it, or a codebook
whose product picks the nearest row and gets no gradient.
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
    """Ids of the parameters that code of some module looks rows up in: its own, or of modules inside of it."""
    found = set()
    for module in model.modules():
        kind: Any = type(module)
        for path, dims in _tables(kind):
            parameter = _held(module, path.split("."))
            if parameter is not None and len(parameter_shape(parameter)) - dims < 2:
                found.add(id(parameter))
    return found


def _held(module: nn.Module, path: list[str]) -> Any:
    """The parameter at a path; None if there is none, or in TorchScript."""
    if len(path) > 1:
        child = module._modules.get(path[0]) if isinstance(module._modules, dict) else None
        return None if child is None else _held(child, path[1:])
    return module._parameters.get(path[0]) if isinstance(module._parameters, dict) else None


@cache
def _tables(kind: Any) -> frozenset[tuple[str, int]]:
    """("NAME" or "CHILD.NAME", how many dimensions an index takes away) of each look-up: of a stack, one leaves a
    matrix, two leave a row."""
    found = set()
    for function in (x for x in functions_of(kind) if not x.name.startswith(MAKES)):
        own, nodes, local = own_name(function), list(ast.walk(function)), dict[str, tuple[str, int]]()

        def place(node: ast.expr, own: str = own, local: dict[str, tuple[str, int]] = local) -> tuple[str, int] | None:
            if isinstance(node, ast.Name):
                return local.get(node.id)
            if isinstance(node, ast.Subscript):
                inner = place(node.value)
                return inner and (inner[0], inner[1] + len(indices(node)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
                return place(node.func.value)
            path = _path(node, own)
            return (path, 0) if path else None

        for variable, value in assigned(nodes):
            if (found_here := place(value)) is not None:
                local[variable] = found_here
        for node in nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                if not all(map(is_constant, indices(node))) and (at := place(node)) is not None:
                    found.add(at)
            elif isinstance(node, ast.Call) and (name := name_of(node.func)) in LOOK_UPS:
                given = [*node.args, *(word.value for word in node.keywords)]
                given += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                for path, dims in filter(None, map(place, given)):
                    found.add((path, dims + (1 if name == "index_select" else 2)))
    return frozenset(found)


def _path(node: ast.expr, own: str) -> str:
    """ "NAME.NAME" of ``self.NAME.NAME``, else ""."""
    if child_of(node, own):
        return child_of(node, own)
    before = _path(node.value, own) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""
