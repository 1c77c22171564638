"""The op vocabulary that the other folders call: each op by the backend chosen for the device of its tensors.

Per device type that is the best backend that can run, or the one that was asked for; the choice is the process's, as
ops are called from below everything that knows a config. Contracts are in ``ops/reference.py``.

torch.compile sees registered ops, each with a fake kernel that gives shapes alone. Eager calls go past the
registration, which would cost more than a small op.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ds_kfac.ops import cuda, functional, reference, triton
from ds_kfac.ops.check import faults, guarded

SCHEMAS = {
    "syrk_accumulate_": "(Tensor(a!) sum_P, Tensor x_ND, Tensor? ones_column, Tensor scale) -> ()",
    "block_syrk_accumulate_": "(Tensor(a!) sum_P, Tensor x_ND, int block, Tensor scale) -> ()",
    "symmetric_pack_into_": "(Tensor(a!) out, int[] starts, Tensor[] matrices_DD) -> ()",
    "symmetric_unpack_from": "(Tensor packed, int[] starts, int[] dims) -> Tensor[]",
    "ema_update_": "(Tensor(a!)[] averages_P, Tensor[] sums_P, Tensor[] counts, Tensor(b!)[] updates, float[] decays)"
    " -> Tensor",
    "adam_scale_": "(Tensor(a!) direction_nOI, Tensor(b!) waiting_nOI, Tensor x_nOI, Tensor first_nOI, "
    "Tensor second_nOI, Tensor updates_n, Tensor usable_n, Tensor scale, float[] betas, float eps) -> ()",
    "adam_fold_": "(Tensor(a!) first_nOI, Tensor(b!) second_nOI, Tensor(c!) updates_n, Tensor waiting_nOI, "
    "Tensor usable_n, float[] betas) -> ()",
    "finish_direction_": "(Tensor(a!) x_nOI, Tensor norm_n, Tensor? size_n, Tensor target_n, Tensor full_n, "
    "Tensor bound_n, Tensor replacement_n, float shift) -> ()",
}
"""Arguments in the order of ``ops/reference.py``; what may be a number there is a tensor here."""
OPS = tuple(SCHEMAS)
Implementation = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """A set of implementations, for a type of device (None: every one). ``load`` gives op -> implementation, or raises
    RuntimeError with the reason why it cannot run here."""

    device: str | None
    load: Callable[[], Mapping[str, Implementation]]


BACKENDS: dict[str, Backend] = {
    "triton": Backend("cuda", triton.load),
    "cuda": Backend("cuda", cuda.load),
    "torch": Backend(None, lambda: {op: getattr(functional, op) for op in OPS}),
}
"""By name; best first. Those of a GPU share no op: products and Adam in Triton, many layers in one CUDA launch."""


@dataclass(frozen=True)
class BackendChoice:
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
_choices: dict[str, BackendChoice] = {}


def use(backend: str | None, device: str, without: Mapping[str, str] | None = None) -> BackendChoice:
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


def chosen(device: str) -> BackendChoice:
    """What runs on a device type; decided at the first call."""
    if (found := _choices.get(device)) is None:
        with _lock:
            found = _choices.get(device) or _choices.setdefault(device, _choose(_asked, device, {}))
    return found


def _choose(backend: str | None, device: str, without: Mapping[str, str]) -> BackendChoice:
    """``torch`` has every op, on every device."""
    ops: dict[str, tuple[str, Implementation]] = {}
    missing = {name: why for name, why in without.items() if name in OPS}
    for name in BACKENDS if backend is None else dict.fromkeys((backend, "torch")):
        made_for = BACKENDS[name].device
        if made_for not in (None, device):
            if name == backend:
                missing[name] = f"it is for {made_for}, not for {device}"
            continue
        try:
            if name in without:
                raise RuntimeError(without[name])
            found = BACKENDS[name].load()
        except (RuntimeError, OSError, ImportError) as problem:
            missing[name] = str(problem)
            continue
        for op, implementation in found.items():
            if name == "torch" or op not in without:
                ops.setdefault(op, (name, implementation if name == "torch" else guarded(name, op, implementation)))
    compiled = {op: found for op, found in ops.items() if found[0] != "torch"}
    for op, why in (faults(compiled, torch.device(device)) if compiled else {}).items():
        missing[op], ops[op] = why, ("torch", getattr(functional, op))
    return BackendChoice({op: ops[op] for op in OPS}, missing)


FAKES: dict[str, Callable[..., Any]] = {
    "symmetric_unpack_from": lambda packed, starts, dims: [packed.new_empty(n, n, dtype=torch.float32) for n in dims],
    "ema_update_": lambda averages_P, *_: averages_P[0].new_empty(len(averages_P), dtype=torch.bool),
}
"""What an op returns, without values; the registered others return nothing."""
_ops = torch.ops.ds_kfac


def _registered(op: str) -> Callable[..., Any]:
    """Registers an op. Returns what calls the registered one with the op's own signature, for torch.compile."""
    parameters = inspect.signature(getattr(reference, op)).parameters.values()
    named = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    def run(*arguments):
        first, plain = arguments[0], len(arguments) - len(named)
        device = (first if isinstance(first, Tensor) else first[0]).device
        options = dict(zip(named, arguments[plain:], strict=True))
        found = chosen(device.type).ops[op][1](*arguments[:plain], **options)
        return found if op in FAKES else None

    torch.library.define(f"ds_kfac::{op}", SCHEMAS[op])
    torch.library.impl(f"ds_kfac::{op}", "default", run)
    torch.library.register_fake(f"ds_kfac::{op}", FAKES.get(op, lambda *_: None))
    tensors = [str(argument.type) == "Tensor" for argument in getattr(_ops, op).default._schema.arguments]

    def traced(*arguments, **options):
        given = [*arguments, *{**named, **options}.values()]
        for place, value in enumerate(given):
            if tensors[place] and not isinstance(value, Tensor):
                given[place] = torch.full((), value, device=given[0].device)
        found = getattr(_ops, op)(*given)
        return given[0] if op.endswith("syrk_accumulate_") else found

    return traced


TRACED = {op: _registered(op) for op in OPS}
Op = TypeVar("Op", bound=Callable[..., Any])


@cache  # torch builds the text every time, which takes as long as all else of a call
def _type_of(device: torch.device) -> str:
    return device.type


def _by_device(specification: Op) -> Op:
    """The op as it was chosen for the device of its first argument, a tensor or a list of tensors.

    Args:
        specification: its name is the op's; its signature and docstring stay.
    """
    op = specification.__name__

    @wraps(specification)
    def call(*arguments, **options):
        if torch.compiler.is_compiling():
            return TRACED[op](*arguments, **options)
        first = arguments[0]
        x = first if isinstance(first, Tensor) else first[0]
        return chosen(_type_of(x.device)).ops[op][1](*arguments, **options)

    return cast(Op, call)


syrk_accumulate_ = _by_device(reference.syrk_accumulate_)
block_syrk_accumulate_ = _by_device(reference.block_syrk_accumulate_)
symmetric_pack_into_ = _by_device(reference.symmetric_pack_into_)
symmetric_unpack_from = _by_device(reference.symmetric_unpack_from)
ema_update_ = _by_device(reference.ema_update_)
adam_scale_ = _by_device(reference.adam_scale_)
adam_fold_ = _by_device(reference.adam_fold_)
finish_direction_ = _by_device(reference.finish_direction_)
