"""Products with a matrix that is a parameter, seen in a forward.

``product_code.py`` finds them in a module's code. In a forward whose statistics are captured :class:`Products` sees
every call of a torch function, and tells of those in which such a parameter, a view or rows picked out of it are the
matrix. It is a ``TorchFunctionMode``, on only while a captured forward or recomputation runs; other steps have none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ds_kfac.model.product_code import ADDED, CONVOLUTIONS, COPIES, LINEAR, RIGHT, Contraction, contraction


@dataclass(frozen=True)
class Product:
    """Rows x [N, I] times a matrix gave the rows [N, O] of ``output``.

    Attributes:
        x: [.., I], as it was given.
        output: whose gradient gives the rows of G.
        turned: whether the matrix lies [I, O] in the parameter.
        entries: of a stack: (its entry, its rows of x and of output), for each that was used; else (0, all rows).
        columns: which outputs of the whole matrix these are; None: all.
        lay: makes rows [.., O] of the gradient that arrives at ``output``; None: it has them.
        window: of a convolution: x and output are images, and this is its (stride, padding, dilation, groups).
    """

    param: nn.Parameter
    x: Tensor
    output: Tensor
    turned: bool
    entries: "tuple[tuple[int, slice | Tensor], ...]"
    columns: slice | None = None
    lay: Callable[[Tensor], Tensor] | None = None
    window: tuple[Any, ...] | None = None

    @property
    def picked(self) -> bool:
        """Whether each entry has rows of its own, as an expert its tokens."""
        return any(rows is not EVERY for _, rows in self.entries)

    @property
    def rows(self) -> slice:
        """Of all entries. Where a grouped product has rows behind those of its groups, they are no tokens, and what it
        puts there is undefined."""
        ends = [rows.stop for _, rows in self.entries if isinstance(rows, slice)]
        return slice(0, ends[-1]) if ends and len(ends) == len(self.entries) and None not in ends else EVERY


EVERY = slice(None)


class Products(TorchFunctionMode):
    """Tells ``see`` of products with some parameters, each a stack of so many equal matrices, while it is entered."""

    def __init__(self, params: Mapping[nn.Parameter, int], see: Callable[[Product], None]) -> None:
        super().__init__()
        self._params = {id(param): (param, count) for param, count in params.items()}
        self._see, self._quiet = see, False
        self.inside: list[tuple[int, bool]] = []  # ids of the modules that run, and whether the mode began there
        self._depth = 0
        self._picked: dict[int, tuple[Tensor, nn.Parameter, Tensor]] = {}  # rows of a stack, and which
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # in another dtype, and of what

    def enter(self, module: nn.Module) -> None:
        """Where the mode is not on it begins anew: a backward, and what reentrant checkpointing runs again in it, runs
        without the modes around it."""
        begins = all(mode is not self for mode in _get_current_function_mode_stack())
        self.inside.append((id(module), begins))
        if begins:
            self.__enter__()

    def leave(self, module: nn.Module | None) -> None:
        """None: all of them are left."""
        while self.inside and (module is None or self.inside[-1][0] == id(module)):
            if self.inside.pop()[1]:
                self.__exit__(None, None, None)
            if module is not None:
                return

    def __enter__(self) -> Any:
        # a Python function there is not seen: ZeRO-3's, which is no torch function, and what attention calls inside
        if not self._depth:
            self._plain, F.linear = F.linear, self._linear
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
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
        elif not isinstance(output, Tensor):
            return
        elif name in COPIES:
            if output is not args[0] and self._known(args[0]):
                self._copies[id(output)] = output, args[0]
        elif not output.requires_grad:
            return
        elif name in CONVOLUTIONS:
            self._convolved(int(name[-2]), args, kwargs, output)
        elif name == "einsum" and len(args) == 3:
            for place in (1, 2):
                operand = self._copies.get(id(args[place]), (None, args[place]))[1]
                found, sums = self._params.get(id(operand)), contraction(args[0], place - 1)
                if found is not None and sums is not None:
                    x, lay = args[3 - place].permute(sums.x).flatten(sums.rows), laid(output, sums)
                    self._see(Product(found[0], x, output, sums.lies.turned, ((0, EVERY),), lay=lay))
        elif name in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            if name in ADDED:
                args = args[1:]
            operands = [*args, *(kwargs[key] for key in ("input", "mat2", "mat_b", "weight", "other") if key in kwargs)]
            tensors = [x for x in operands[:2] if isinstance(x, Tensor)]
            product = (
                self._multiplied(name, tensors[0], tensors[1], args, kwargs, output) if len(tensors) == 2 else None
            )
            if product is not None:
                self._see(product)

    def _convolved(self, dims: int, args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> None:
        given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
        given |= kwargs
        weight = self._copies.get(id(given["weight"]), (None, given["weight"]))[1]
        found = self._params.get(id(weight))
        if found is not None and found[0].requires_grad:
            sizes = [given.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
            every = [(x,) * dims if isinstance(x, int) else x if isinstance(x, str) else tuple(x) for x in sizes]
            window = (*every, given.get("groups", 1))
            self._see(Product(found[0], given["input"], output, False, ((0, EVERY),), window=window))

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

    def _multiplied(
        self, name: str, x: Tensor, matrix: Tensor, args: tuple, kwargs: Mapping[str, Any], output: Tensor
    ) -> Product | None:
        lay, first = None, self._known(x) and not self._known(matrix) and name in RIGHT | {"__matmul__"}
        for rows, other in ((x, matrix), (matrix, x)) if name == "bmm" else ():
            if (picked := self._picked.get(id(other))) is not None:  # a matrix for every row, on either side
                _, param, index = picked
                order = index.argsort()
                ends = index.bincount(minlength=self._params[id(param)][1]).cumsum(0).tolist()
                # [S, 1, I] @ [S, I, O], or [S, O, I] @ [S, I, 1]
                return Product(param, rows.flatten(1), output, other is not x, _between(ends, order))
        if first and matrix.ndim > 1:  # W x = (x' W')'
            x, matrix, lay = matrix.mT, x, laid(output, columns=True)
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
            return None
        count, size = found[1], param.numel() // found[1]
        upright = matrix if name in LINEAR or lay is not None else matrix.mT  # [.., O, I]
        turned = upright.stride(-1) != 1 and upright.stride(-2) == 1
        bounds = kwargs.get("offs", args[2] if len(args) > 2 else None)
        if matrix.numel() == param.numel() and (count > 1 or (isinstance(bounds, Tensor) and matrix.ndim > 2)):
            # which rows each matrix of a whole stack multiplied: those between bounds, or its own of [E, .., I]
            if isinstance(bounds, Tensor) and x.ndim == 2:
                ends = bounds.tolist()  # the one wait of a captured forward for the device
            elif x.ndim >= 3 and len(x) == len(matrix) and prod(matrix.shape[1:-2]) == 1:
                ends = [(e + 1) * prod(x.shape[1:-1]) for e in range(len(x))]
            else:
                return None
            return Product(param, x, output, turned, _between(ends), lay=lay)
        if matrix.numel() == size:
            return Product(param, x, output, turned, ((offset // size, EVERY),), lay=lay)
        if count == 1 and lay is None and not turned and upright.shape[-1] == param.shape[-1] and matrix.ndim == 2:
            start = offset // upright.shape[-1]  # some of its rows, as torch's attention takes them
            return Product(param, x, output, False, ((0, EVERY),), slice(start, start + upright.shape[-2]))
        return None


def _between(ends: list[int], order: Tensor | None = None) -> tuple[tuple[int, Any], ...]:
    """Entries of a stack and their rows, those of ``order`` or in a row, of each up to its end."""
    rows = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return tuple((e, own if order is None else order[own]) for e, own in enumerate(rows) if own.stop > own.start)


def laid(output: Tensor, sums: Contraction | None = None, *, columns: bool = False) -> Callable[[Tensor], Tensor]:
    """Makes rows of a gradient that arrives at an output's node, which may be that of a base with its dimensions in
    another order; of an einsum, or of one that has columns."""
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
        return gradient.mT if columns else gradient

    return rows
