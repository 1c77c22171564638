"""The op vocabulary that the other folders call: each op by the backend chosen for the device of its tensors.

Per device type that is the best backend that can run, or the one that was asked for; the choice is the process's, as
ops are called from below everything that knows a config. Contracts are in ``ops/reference.py``. Several matrices
[n, O, I] at once go to plain torch whatever was chosen: that is for small ones, of which the launches cost more than
the passes over memory.

torch.compile sees registered ops, each with a fake kernel that gives shapes alone. Eager calls go past the
registration, which would cost more than a small op.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ds_kfac.ops import cuda, functional, reference
from ds_kfac.ops.check import faults, guarded
from ds_kfac.ops.triton import backend

OPS = (
    "syrk_accumulate_",
    "block_syrk_accumulate_",
    "symmetric_pack_into_",
    "symmetric_unpack_from",
    "ema_update_",
    "eigen_scale_dot",
    "corrected_scale_dot",
    "adam_scale",
)
Implementation = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """A set of implementations.

    Attributes:
        device: type that it is for; None: every one.
        load: gives op -> implementation, or raises RuntimeError with the reason why it cannot run here.
    """

    device: str | None
    load: Callable[[], Mapping[str, Implementation]]


BACKENDS: dict[str, Backend] = {
    "triton": Backend("cuda", backend.load),
    "cuda": Backend("cuda", cuda.load),
    "torch": Backend(None, lambda: {op: getattr(functional, op) for op in OPS}),
}
"""By name; best first. Those of a GPU share no op: products and divisions in Triton, many layers in one CUDA launch."""


@dataclass(frozen=True)
class Choice:
    """Of one device type.

    Attributes:
        ops: op -> (backend, implementation, guarded).
        missing: backend for this device, or op of one -> why it is not used here; such an op is torch's.
    """

    ops: Mapping[str, tuple[str, Implementation]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, str]:
        """Op that a backend has and that is wrong or fails, here or on another rank -> how."""
        return {name: why for name, why in self.missing.items() if name in OPS}

    def __str__(self) -> str:
        """For people: ops by backend, and why others are not used."""
        names = dict.fromkeys(backend for backend, _ in self.ops.values())
        parts = [f"{name} ({', '.join(op for op in self.ops if self.ops[op][0] == name)})" for name in names]
        return "; ".join([*parts, *(f"not {name}: {why}" for name, why in self.missing.items())])


_lock = RLock()
_asked: str | None = None
_choices: dict[str, Choice] = {}


def use(backend: str | None, device: str, without: Mapping[str, str] | None = None) -> Choice:
    """Choose for this process: null the best per op, a name that backend for every op it has. Builds what is needed.

    Args:
        without: backends, and ops of backends, that are not to be taken, and why.

    Raises:
        ValueError: the one that was asked for cannot run on ``device``, and why.
    """
    global _asked
    with _lock:
        choice = _choose(backend, device, without or {})
        if backend is not None and backend in choice.missing:
            raise ValueError(
                f'kfac.ops.backend "{backend}" cannot run here: {choice.missing[backend]}; null chooses one that can'
            )
        _asked = backend
        _choices.clear()
        _choices[device] = choice
        return choice


def chosen(device: str) -> Choice:
    """What runs on a device type; decided at the first call."""
    found = _choices.get(device)
    if found is None:
        with _lock:
            found = _choices.get(device) or _choices.setdefault(device, _choose(_asked, device, {}))
    return found


def _choose(backend: str | None, device: str, without: Mapping[str, str]) -> Choice:
    """``torch`` has every op, on every device."""
    ops: dict[str, tuple[str, Implementation]] = {}
    missing: dict[str, str] = {}
    for name in BACKENDS if backend is None else dict.fromkeys((backend, "torch")):
        made_for = BACKENDS[name].device
        if made_for not in (None, device):
            if name == backend:
                missing[name] = f"it is for {made_for}, not for {device}"
            continue
        if name in without:
            missing[name] = without[name]
            continue
        try:
            found = BACKENDS[name].load()
        except (RuntimeError, OSError, ImportError) as problem:
            missing[name] = str(problem)
            continue
        for op, implementation in found.items():
            if name == "torch" or op not in without:
                ops.setdefault(op, (name, implementation if name == "torch" else guarded(name, op, implementation)))
    missing |= {op: why for op, why in without.items() if op in OPS}
    compiled = {op: found for op, found in ops.items() if found[0] != "torch"}
    for op, why in (faults(compiled, torch.device(device)) if compiled else {}).items():
        missing[op], ops[op] = why, ("torch", getattr(functional, op))
    return Choice({op: ops[op] for op in OPS}, missing)


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
    "float eps) -> (Tensor, Tensor, Tensor)",
}
KEYWORDS = {
    "syrk_accumulate_": ("ones_column", "scale"),
    "block_syrk_accumulate_": ("block", "scale"),
    "adam_scale": ("betas", "eps"),
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


def _adam(x_OI, first_OI, second_OI, updates, usable, *, betas, eps):
    return _ops.adam_scale(x_OI, first_OI, second_OI, updates, usable, list(betas), eps)


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
