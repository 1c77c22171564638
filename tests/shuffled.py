"""The same sums in another order: what another processor, library or number of threads does, on
this one.

With SHUFFLED_SUMS set to a seed, tests/conftest.py runs every test inside :class:`ShuffledSums`:
the dimension that a product, a sum, a mean, a norm or a convolution adds up is permuted before it
is taken, in forward and in backward. The permutation depends on the length only, so that the same
code on the same data stays equal bit by bit.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Where the two factors are among the arguments; of any of them the last dimension of the first is
summed with the last but one of the second, or its only one."""
REDUCTIONS = {"sum", "mean", "linalg_vector_norm", "norm"}


class ShuffledSums(TorchDispatchMode):
    """Permutes what is summed over; see the head of this file.

    Args:
        seed: of the permutations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.order = cache(
            lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(seed + n))
        )

    def permuted(self, x: Tensor, dim: int) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return x.index_select(dim, self.order(x.shape[dim]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **kwargs)
        if name in PRODUCTS:
            args = self.product(PRODUCTS[name], args)
        elif name in REDUCTIONS:
            args = self.reduction(name, args, kwargs)
        elif name == "convolution" and not args[6] and args[8] == 1:
            args = (self.permuted(args[0], 1), self.permuted(args[1], 1), *args[2:])
        else:
            return func(*args, **kwargs)
        return func(*args, **kwargs)

    def product(self, first: int, args: tuple) -> tuple:
        a, b = args[first : first + 2]
        return (
            *args[:first],
            self.permuted(a, -1),
            self.permuted(b, max(b.ndim - 2, 0)),
            *args[first + 2 :],
        )

    def reduction(self, name: str, args: tuple, kwargs: dict) -> tuple:
        x, *rest = args
        where = 0 if name in ("sum", "mean") else 1
        dims = kwargs.get("dim", rest[where] if len(rest) > where else None)
        if not x.is_floating_point() or not x.ndim:
            return args
        if isinstance(dims, int):
            dims = [dims]
        for dim in dims or range(x.ndim):
            x = self.permuted(x, dim)
        return (x, *rest)
