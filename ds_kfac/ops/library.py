"""The ops as torch.compile sees them: registered with torch, each with a fake kernel that gives shapes alone.

Eager calls go past the registration, which would cost more than a small op; ``ops/dispatch.py`` takes ``TRACED`` while
something is being compiled. Numbers that may be tensors on the device are tensors here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_kfac.ops.backends import chosen

SCHEMAS = {
    "syrk_accumulate_": "(Tensor(a!) sum_P, Tensor x_ND, Tensor? ones_column, Tensor scale) -> ()",
    "block_syrk_accumulate_": "(Tensor(a!) sum_P, Tensor x_ND, int block, Tensor scale) -> ()",
    "symmetric_pack_into_": "(Tensor(a!) out, int[] starts, Tensor[] matrices_DD) -> ()",
    "symmetric_unpack_from": "(Tensor packed, int[] starts, int[] dims) -> Tensor[]",
    "ema_update_": "(Tensor(a!)[] averages_P, Tensor[] sums_P, Tensor[] counts, Tensor(b!)[] updates, float[] decays)"
    " -> Tensor",
    "eigen_scale_dot": "(Tensor x_OI, Tensor values_O, Tensor values_I, Tensor damping) -> (Tensor, Tensor)",
    "corrected_scale_dot": "(Tensor x_OI, Tensor second_OI, Tensor decay, Tensor terms, Tensor damping)"
    " -> (Tensor, Tensor, Tensor)",
    "adam_scale": "(Tensor x_OI, Tensor first_OI, Tensor second_OI, Tensor updates, Tensor usable, float[] betas, "
    "float eps, bool nesterov) -> (Tensor, Tensor, Tensor)",
}
KEYWORDS = {
    "syrk_accumulate_": ("ones_column", "scale"),
    "block_syrk_accumulate_": ("block", "scale"),
    "adam_scale": ("betas", "eps", "nesterov"),
}
"""The last arguments of an op that are given by name."""
FAKES: dict[str, Callable[..., Any]] = {
    "symmetric_unpack_from": lambda packed, starts, dims: [packed.new_empty(n, n, dtype=torch.float32) for n in dims],
    "ema_update_": lambda averages_P, *_: averages_P[0].new_empty(len(averages_P), dtype=torch.bool),
    "eigen_scale_dot": lambda x_OI, *_: (torch.empty_like(x_OI), x_OI.new_empty(())),
    "corrected_scale_dot": lambda x_OI, *_: (torch.empty_like(x_OI), torch.empty_like(x_OI), x_OI.new_empty(())),
    "adam_scale": lambda x_OI, *_: tuple(torch.empty_like(x_OI) for _ in range(3)),
}
"""What an op returns, without values; the others return nothing."""


def _run(op: str) -> Callable[..., Any]:
    """The chosen implementation with the arguments of the schema."""
    names = KEYWORDS.get(op, ())

    def run(*arguments: Any) -> Any:
        first = arguments[0]
        device = (first if isinstance(first, Tensor) else first[0]).device
        plain = arguments[: len(arguments) - len(names)]
        found = chosen(device.type).ops[op][1](*plain, **dict(zip(names, arguments[len(plain) :], strict=True)))
        return found if op in FAKES else None

    return run


def _tensor(value: Tensor | float, of: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, device=of.device)


_ops = torch.ops.ds_kfac


def _syrk(sum_P, x_ND, *, ones_column=None, scale=1.0):
    _ops.syrk_accumulate_(sum_P, x_ND, ones_column, _tensor(scale, sum_P))
    return sum_P


def _block_syrk(sum_P, x_ND, *, block, scale=1.0):
    _ops.block_syrk_accumulate_(sum_P, x_ND, block, _tensor(scale, sum_P))
    return sum_P


def _eigen(x_OI, values_O, values_I, damping):
    return _ops.eigen_scale_dot(x_OI, values_O, values_I, _tensor(damping, x_OI))


def _corrected(x_OI, second_OI, decay, terms, damping):
    numbers = (_tensor(value, x_OI) for value in (decay, terms, damping))
    return _ops.corrected_scale_dot(x_OI, second_OI, *numbers)


def _adam(x_OI, first_OI, second_OI, updates, usable, *, betas, eps, nesterov=False):
    return _ops.adam_scale(x_OI, first_OI, second_OI, updates, usable, list(betas), eps, nesterov)


TRACED: dict[str, Callable[..., Any]] = {
    "syrk_accumulate_": _syrk,
    "block_syrk_accumulate_": _block_syrk,
    "symmetric_pack_into_": lambda out, starts, matrices_DD: _ops.symmetric_pack_into_(out, starts, matrices_DD),
    "symmetric_unpack_from": lambda packed, starts, dims: _ops.symmetric_unpack_from(packed, starts, dims),
    "ema_update_": lambda *arguments: _ops.ema_update_(*arguments),
    "eigen_scale_dot": _eigen,
    "corrected_scale_dot": _corrected,
    "adam_scale": _adam,
}
"""Op -> the registered one behind the op's own signature (``ops/reference.py``)."""

for _op, _schema in SCHEMAS.items():
    torch.library.define(f"ds_kfac::{_op}", _schema)
    torch.library.impl(f"ds_kfac::{_op}", "default", _run(_op))
    torch.library.register_fake(f"ds_kfac::{_op}", FAKES.get(_op, lambda *_: None))
