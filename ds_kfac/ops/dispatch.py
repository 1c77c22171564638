"""The op vocabulary that the other folders call: each op by the backend chosen for the device of its tensors.

Contracts are in ``ops/reference.py``. Several matrices [n, O, I] at once go to plain torch whatever was chosen: that is
for small ones, of which the launches cost more than the passes over memory. torch.compile sees registered ops.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ds_kfac.ops import functional, reference
from ds_kfac.ops.backends import chosen
from ds_kfac.ops.library import TRACED

Op = TypeVar("Op", bound=Callable[..., Any])


@cache  # torch builds the text every time, which takes as long as all else of a call
def _type_of(device: torch.device) -> str:
    return device.type


def _by_device(specification: Op, *, stacks: bool = False) -> Op:
    """The op as it was chosen for the device of its first argument, a tensor or a list of tensors.

    Args:
        specification: function of ``ops/reference.py``; its name is the op's, its signature and docstring stay.
        stacks: whether the op takes n matrices of one shape, too.
    """
    op, of_stacks = specification.__name__, getattr(functional, specification.__name__) if stacks else None

    @wraps(specification)
    def call(*arguments, **options):
        first = arguments[0]
        x = first if isinstance(first, Tensor) else first[0]
        if of_stacks is not None and x.ndim > 2:
            return of_stacks(*arguments, **options)
        if torch.compiler.is_compiling():
            return TRACED[op](*arguments, **options)
        return chosen(_type_of(x.device)).ops[op][1](*arguments, **options)

    return cast(Op, call)


syrk_accumulate_ = _by_device(reference.syrk_accumulate_)
block_syrk_accumulate_ = _by_device(reference.block_syrk_accumulate_)
symmetric_pack_into_ = _by_device(reference.symmetric_pack_into_)
symmetric_unpack_from = _by_device(reference.symmetric_unpack_from)
ema_update_ = _by_device(reference.ema_update_)
eigen_scale_dot = _by_device(reference.eigen_scale_dot, stacks=True)
corrected_scale_dot = _by_device(reference.corrected_scale_dot, stacks=True)
adam_scale = _by_device(reference.adam_scale, stacks=True)
