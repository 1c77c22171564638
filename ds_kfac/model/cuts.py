"""Into which parts a module's code cuts the outputs of one of its projections. Its source is read, before training.

    q, k, v = self.qkv(x).chunk(3, -1)                      one after the other
    self.qkv(x).view(B, T, 3, heads, width).unbind(2)       the same
    self.qkv(x).view(B, T, heads, 3, width).unbind(3)       three of each head
    x = self.gate_up(x); x[..., ::2] * x[..., 1::2]         in turn

The output is followed through variables, reshapes and methods of the module. Other cuts in the class, such as the
halves of a rotary embedding, do not count.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from torch import nn

from ds_kfac.model.product_code import LINEAR, MAKES, RIGHT, child_of, functions_of, name_of, own_name

Sizes = tuple[int, ...]
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head")
KEEP = {
    "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "clamp", "unsqueeze",
    "squeeze"
}  # fmt: skip
"""Methods that leave the last dimension as it is."""


def cut_of(module: nn.Module | None, name: str, rows: int) -> Sizes | None:
    """Sizes of the parts into which a module's code cuts the ``rows`` outputs of its projection ``name``; they repeat
    down to the last row. None: the code does not show it, or cuts in several ways."""
    if module is None:
        return None
    kind: Any = type(module)
    reader = _Reader(module, name, rows, _methods(kind))
    for function in reader.methods.values():
        reader.read(function, {})
    cuts = set(reader.cuts)
    if reader.bounds:
        ends = sorted(reader.bounds | {0, rows})
        cuts.add(tuple(b - a for a, b in pairwise(ends)))
    sizes = cuts.pop() if len(cuts) == 1 else ()
    return sizes if len(sizes) > 1 and min(sizes) > 0 and rows % sum(sizes) == 0 else None


@cache
def _methods(kind: Any) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Method name -> its syntax tree, of a class and its bases; overridden ones once, as the class has them."""
    methods: dict[str, Any] = {}
    for function in functions_of(kind):
        if not function.name.startswith(MAKES):
            methods.setdefault(function.name, function)
    return methods


@dataclass(frozen=True)
class _Value:
    """A variable with all outputs of the projection. ``axis``: the dimension that they are in; ``dims``: the sizes in
    the code after a view, None without one."""

    axis: int = -1
    dims: tuple[ast.expr, ...] | None = None


class _Scope(NamedTuple):
    """The variables of a method. ``values``: those that are outputs; ``numbers``: every variable's last assignment."""

    self_name: str
    values: dict[str, _Value]
    numbers: dict[str, ast.expr]


class _Reader:
    """Follows the outputs through a module's methods.

    Attributes:
        cuts: sizes of the parts of each cut; () for a cut that is not understood.
        bounds: ends of slices of the outputs.
    """

    def __init__(self, module: nn.Module, name: str, rows: int, methods: dict[str, Any]) -> None:
        self.module, self.name, self.rows, self.methods = module, name, rows, methods
        self.cuts: list[Sizes] = []
        self.bounds = set[int]()
        self._entered: set[tuple[str, str]] = set()

    def read(self, function: Any, values: dict[str, _Value]) -> None:
        """Read a method; ``values``: its arguments that are outputs."""
        scope = _Scope(own_name(function), dict(values), {})
        for statement in self._live(function.body, scope.self_name):
            parts = [x for x in ast.iter_child_nodes(statement) if isinstance(x, ast.expr)]
            for part in parts:
                for node in ast.walk(part):
                    self._cut(node, scope)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
                value = self._value(statement.value, scope)
                single = len(targets) == 1 and isinstance(targets[0], ast.Name)
                for variable in names:
                    scope.values.pop(variable, None)
                    scope.numbers.pop(variable, None)
                    if single:
                        scope.numbers[variable] = statement.value
                        if value is not None:
                            scope.values[variable] = value

    def _live(self, body: Iterable[ast.stmt], self_name: str) -> Iterator[ast.stmt]:
        """Statements in their order, without branches that a flag of the module rules out."""
        for statement in body:
            if isinstance(statement, ast.If):
                flag = self._flag(statement.test, self_name)
                yield from self._live(statement.body if flag is not False else (), self_name)
                yield from self._live(statement.orelse if flag is not True else (), self_name)
            elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield statement
                for inner in ("body", "orelse", "finalbody"):
                    yield from self._live(getattr(statement, inner, ()), self_name)

    def _flag(self, test: ast.expr, self_name: str) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            flag = self._flag(test.operand, self_name)
            return None if flag is None else not flag
        value = self._attribute(test, self_name)
        return value if isinstance(value, bool) else None

    def _attribute(self, node: ast.expr, self_name: str) -> Any:
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name):
            return value_of(self.module, node.attr) if node.value.id == self_name else None
        config = isinstance(node.value, ast.Attribute) and node.value.attr == "config"
        return value_of(self._attribute(node.value, self_name), node.attr) if config else None

    def _number(self, node: ast.expr | None, scope: _Scope, depth: int = 0) -> int | None:
        if isinstance(node, ast.Name) and depth < 8:
            return self._number(scope.numbers.get(node.id), scope, depth + 1)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._number(node.operand, scope, depth)
            return None if value is None else -value
        if isinstance(node, ast.BinOp):
            left, right = (self._number(x, scope, depth) for x in (node.left, node.right))
            if left is None or right is None:
                return None
            if isinstance(node.op, ast.Add | ast.Sub):
                return left + right if isinstance(node.op, ast.Add) else left - right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
            return left * right if isinstance(node.op, ast.Mult) else None
        number: Any = node.value if isinstance(node, ast.Constant) else node and self._attribute(node, scope.self_name)
        return number if type(number) is int else None

    def _value(self, node: ast.AST, scope: _Scope) -> _Value | None:
        """The outputs, if an expression is all of them; else None."""
        if isinstance(node, ast.Name):
            return scope.values.get(node.id)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return _Value() if any(self._is_own(x, scope.self_name) for x in (node.right, node.left)) else None
            return self._value(node.left, scope) or self._value(node.right, scope)
        if isinstance(node, ast.IfExp):
            return self._value(node.body, scope)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
            return _Value() if self._called(node.value, scope.self_name) else None  # a call that returns (output, bias)
        if not isinstance(node, ast.Call):
            return None
        if self._called(node, scope.self_name):
            return _Value()
        name, function = name_of(node.func), node.func
        if isinstance(function, ast.Attribute) and name not in self.methods:
            value = self._value(function.value, scope)
            if value is not None:
                if name in ("view", "reshape"):
                    return replace(value, dims=self._dims(node.args, scope.numbers))
                if name == "transpose" and value.dims is None:
                    last = [self._number(x, scope) for x in node.args]
                    return replace(value, axis=-3 - value.axis) if set(last) == {-1, -2} else None
                if name == "transpose":
                    return value if {self._number(x, scope) for x in node.args} == {1, 2} else None
                return value if name in KEEP else None
        if name in LINEAR | RIGHT or name.endswith("linear"):
            return _Value() if any(self._is_own(x, scope.self_name) for x in node.args) else None
        return None

    def _called(self, node: ast.expr, self_name: str) -> bool:
        """Whether an expression is ``self.NAME(..)``, or such a call of an entry of it."""
        function = node.func if isinstance(node, ast.Call) else None
        function = function.value if isinstance(function, ast.Subscript) else function
        return function is not None and child_of(function, self_name) == self.name

    def _is_own(self, node: ast.expr, self_name: str) -> bool:
        """Whether an operand is ``self.NAME``, or an entry, a transposed view or the weight of it."""
        while isinstance(node, ast.Subscript | ast.Call | ast.Attribute):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self_name:
                return node.attr == self.name
            node = node.func if isinstance(node, ast.Call) else node.value
        return False

    def _dims(self, arguments: Sequence[ast.expr], numbers: dict[str, ast.expr]) -> tuple[ast.expr, ...]:
        """The sizes in a view's arguments; a starred one stands for several."""
        if len(arguments) == 1:
            (only,) = arguments
            if isinstance(only, ast.Name) and only.id in numbers:
                return self._dims([numbers[only.id]], {})
            if isinstance(only, ast.Tuple | ast.List):
                return tuple(only.elts)
            if isinstance(only, ast.BinOp) and isinstance(only.op, ast.Add):
                return (ast.Starred(only.left, ast.Load()), *self._dims([only.right], numbers))
        return tuple(arguments)

    def _cut(self, node: ast.AST, scope: _Scope) -> None:
        """Note how an expression cuts the outputs, or read the method that it passes them to."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            value = self._value(node.value, scope)
            if value == _Value():
                self._sliced(node.slice.elts, scope)
        if not isinstance(node, ast.Call):
            return
        name, arguments = name_of(node.func), list(node.args)
        words = {word.arg: word.value for word in node.keywords}
        if name in self.methods and isinstance(node.func, ast.Attribute):
            names = [x.arg for x in self.methods[name].args.args][1:]
            by_name = {**dict(zip(names, arguments, strict=False)), **words}
            outputs = {n: self._value(x, scope) for n, x in by_name.items() if n is not None}
            passed = {n: value for n, value in outputs.items() if value is not None}
            if passed and (name, str(passed)) not in self._entered:
                self._entered.add((name, str(passed)))
                self.read(self.methods[name], passed)
            return
        if name not in ("chunk", "split", "view", "reshape", "unflatten", "rearrange"):
            return
        on = self._value(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
        if on is None and arguments:  # torch.chunk(x, ..)
            on, arguments = self._value(arguments[0], scope), arguments[1:]
        if on is None:
            return
        if name in ("view", "reshape", "unflatten"):
            dims = self._dims(arguments[1:] if name == "unflatten" else arguments, scope.numbers)
            at = [i for i, x in enumerate(dims) if isinstance(x, ast.Constant) and x.value in (2, 3)]
            if at:
                self.cuts.append(self._viewed(dims, at, scope) if on == _Value() else ())
        elif name == "rearrange":
            self.cuts.append(self._rearranged(arguments, words, scope) if on == _Value() else ())
        else:
            dim = self._number(arguments[1] if len(arguments) > 1 else words.get("dim"), scope)
            of = self._last_size(on.dims, scope)
            if dim is None or of is None or (dim != on.axis and (dim < 2 or on.axis != -1)):
                self.cuts.append(())
                return
            how = arguments[0] if arguments else next(iter(words.values()))
            if (sizes := self._sizes(name, how, of, scope)) is None or sum(sizes) == of:
                self.cuts.append(sizes or ())

    def _last_size(self, dims: tuple[ast.expr, ...] | None, scope: _Scope) -> int | None:
        """Size of the last dimension, in rows; None: unknown."""
        if dims is None:
            return self.rows
        *_, before, last = [None, None, *(self._number(x, scope) for x in dims)]
        if last is not None and last > 0:
            return last if self.rows % last == 0 else None
        return self.rows // before if before is not None and before > 0 and self.rows % before == 0 else None

    def _sizes(self, name: str, how: ast.expr, of: int, scope: _Scope) -> Sizes | None:
        if isinstance(how, ast.Name) and isinstance(scope.numbers.get(how.id), ast.List | ast.Tuple | ast.BinOp):
            how = scope.numbers[how.id]
        times = 1
        if isinstance(how, ast.BinOp) and isinstance(how.op, ast.Mult):  # 3 * [width]
            for part, other in ((how.left, how.right), (how.right, how.left)):
                if isinstance(part, ast.List | ast.Tuple):
                    how, times = part, self._number(other, scope) or 0
                    break
        if isinstance(how, ast.List | ast.Tuple):
            sizes = [self._number(x, scope) for x in how.elts] * times
            return None if None in sizes else tuple(x for x in sizes if x is not None)
        number = self._number(how, scope)
        if number is None or number < 1:
            return None
        each = of // number if name == "chunk" else number
        return (each,) * (of // each) if each and of % each == 0 else None

    def _viewed(self, dims: Sequence[ast.expr], at: list[int], scope: _Scope) -> Sizes:
        """Sizes of the parts of a view with a dimension of 2 or 3 parts, at one of ``at``; () if there are several."""
        if len(at) > 1:
            return ()
        place = at[0]
        count: Any = getattr(dims[place], "value", 0)
        before, after = ([self._number(x, scope) for x in part] for part in (dims[:place], dims[place + 1 :]))
        inner = [x for x in after if x is not None and x > 0]
        if len(inner) == len(after):
            each = prod(inner)
        else:
            heads = [x for i, x in enumerate(before) if x is not None and (x > 1 or i > 0)]
            if heads and (prod(heads) not in self._heads() or self.rows % (count * prod(heads))):  # maybe positions
                return ()
            each = self.rows // (count * prod(heads))
        return (each,) * count if self.rows % (count * each) == 0 else ()

    def _heads(self) -> set[Any]:
        return {value_of(place, x) for place in (self.module, value_of(self.module, "config")) for x in HEADS}

    def _rearranged(self, arguments: Sequence[ast.expr], words: dict[str | None, ast.expr], scope: _Scope) -> Sizes:
        """Sizes of the parts of einops' pattern "b n (qkv h d) -> .."; () where they are not clear."""
        pattern = next((x.value for x in arguments if isinstance(x, ast.Constant) and isinstance(x.value, str)), "")
        left = pattern.partition("->")[0].strip()
        group = left[left.rfind("(") + 1 : -1].split() if left.endswith(")") else []
        sizes = {axis: self._number(words.get(axis), scope) for axis in group}
        at = [i for i, axis in enumerate(group) if sizes[axis] in (2, 3)]
        dims = [words.get(axis, ast.Name(axis, ast.Load())) for axis in group]
        if len(at) != 1:
            return ()
        if any(sizes[axis] is None for axis in group[: at[0]]) and any(sizes[x] is None for x in group[at[0] + 1 :]):
            return ()
        constants = [ast.Constant(sizes[x]) if sizes[x] else d for x, d in zip(group, dims, strict=True)]
        return self._viewed(constants, at, scope)

    def _sliced(self, parts: Sequence[ast.expr], scope: _Scope) -> None:
        """Note a slice ``x[..., a:b]``, or one of a tensor with three dimensions."""
        last, whole = parts[-1], len(parts) > 2 or any(isinstance(x, ast.Constant) and x.value is ... for x in parts)
        if not whole or not isinstance(last, ast.Slice):
            return
        if last.step is not None:
            self.cuts.append((1, 1) if self._number(last.step, scope) == 2 else ())
            return
        for end in (last.lower, last.upper):
            if end is not None:
                at = self._number(end, scope)
                if at is None or not -self.rows < at <= self.rows:
                    self.cuts.append(())
                    return
                self.bounds.add(at % self.rows if at < 0 else at)


def value_of(place: Any, name: str) -> Any:
    """An attribute, or None; also where a property raises because the model does not run yet."""
    try:
        return getattr(place, name, None)
    except Exception:
        return None
