"""The ops that the other folders call: each runs on the backend chosen for the device of its tensors.

For each device type that is the requested backend, or the best one that can run. The choice holds for the process,
because callers of ops do not know the config. Contracts are in ``ops/reference.py``.

torch.compile sees registered ops, each with a fake kernel that returns shapes alone. Eager calls bypass the
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
"""torch.library schemas, arguments as in ``ops/reference.py``; a scalar that may be a tensor there is a tensor here."""
OPS = tuple(SCHEMAS)
Implementation = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """A set of implementations. ``device``: the type it is for; None: every type. ``load``: returns op ->
    implementation, or raises RuntimeError with the reason why the backend cannot run here."""

    device: str | None
    load: Callable[[], Mapping[str, Implementation]]


BACKENDS: dict[str, Backend] = {
    "triton": Backend("cuda", triton.load),
    "cuda": Backend("cuda", cuda.load),
    "torch": Backend(None, lambda: {op: getattr(functional, op) for op in OPS}),
}
"""By name, the best first. Triton has products and Adam, CUDA ops over many layers in one launch; they share none."""


@dataclass(frozen=True)
class BackendChoice:
    """The implementations chosen for one device type.

    Attributes:
        ops: op -> (backend, implementation); that of a compiled backend is guarded, see :func:`guarded`.
        missing: backend or op -> why it is not used here; plain torch computes such an op.
    """

    ops: Mapping[str, tuple[str, Implementation]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, str]:
        """Op -> what is wrong with a backend's implementation of it, here or on another rank."""
        return {name: why for name, why in self.missing.items() if name in OPS}

    def __str__(self) -> str:
        """For people: the ops of each backend, and why other backends or ops are not used."""
        names = dict.fromkeys(backend for backend, _ in self.ops.values())
        parts = [f"{name} ({', '.join(op for op in self.ops if self.ops[op][0] == name)})" for name in names]
        return "; ".join([*parts, *(f"not {name}: {why}" for name, why in self.missing.items())])


_lock = RLock()
_requested: str | None = None
_choices: dict[str, BackendChoice] = {}


def use(backend: str | None, device: str, without: Mapping[str, str] | None = None) -> BackendChoice:
    """Choose this process's backends, and build them if necessary.

    Args:
        backend: used for every op it has; None: the best backend for each op.
        without: backend or op -> why it must not be used.

    Raises:
        ValueError: ``backend`` cannot run on ``device``, and why.
    """
    global _requested
    with _lock:
        choice = _choose(backend, device, without or {})
        if backend is not None and backend in choice.missing:
            raise ValueError(
                f'kfac.ops.backend "{backend}" cannot run here: {choice.missing[backend]}; null chooses one that can'
            )
        _requested = backend
        _choices.clear()
        _choices[device] = choice
        return choice


def chosen(device: str) -> BackendChoice:
    """The choice for a device type, made at the first call."""
    if (choice := _choices.get(device)) is None:
        with _lock:
            choice = _choices.get(device) or _choices.setdefault(device, _choose(_requested, device, {}))
    return choice


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
            implementations = BACKENDS[name].load()
        except (RuntimeError, OSError, ImportError) as problem:
            missing[name] = str(problem)
            continue
        for op, implementation in implementations.items():
            if name == "torch" or op not in without:
                ops.setdefault(op, (name, implementation if name == "torch" else guarded(name, op, implementation)))
    compiled = {op: entry for op, entry in ops.items() if entry[0] != "torch"}
    for op, why in (faults(compiled, torch.device(device)) if compiled else {}).items():
        missing[op], ops[op] = why, ("torch", getattr(functional, op))
    return BackendChoice({op: ops[op] for op in OPS}, missing)


FAKES: dict[str, Callable[..., Any]] = {
    "symmetric_unpack_from": lambda packed, starts, dims: [packed.new_empty(n, n, dtype=torch.float32) for n in dims],
    "ema_update_": lambda averages_P, *_: averages_P[0].new_empty(len(averages_P), dtype=torch.bool),
}
"""Fake kernels of the ops that return something: results without values. The other registered ops return nothing."""
_ops = torch.ops.ds_kfac


def _registered(op: str) -> Callable[..., Any]:
    """Register an op. Returns a function with the op's signature that calls the registered op, for torch.compile."""
    parameters = inspect.signature(getattr(reference, op)).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}  # a schema has them at the end

    def run(*arguments):
        first, plain = arguments[0], len(arguments) - len(keywords)
        device = (first if isinstance(first, Tensor) else first[0]).device
        options = dict(zip(keywords, arguments[plain:], strict=True))
        result = chosen(device.type).ops[op][1](*arguments[:plain], **options)
        return result if op in FAKES else None

    torch.library.define(f"ds_kfac::{op}", SCHEMAS[op])
    torch.library.impl(f"ds_kfac::{op}", "default", run)
    torch.library.register_fake(f"ds_kfac::{op}", FAKES.get(op, lambda *_: None))
    tensors = [str(argument.type) == "Tensor" for argument in getattr(_ops, op).default._schema.arguments]

    def traced(*arguments, **options):
        values = [*arguments, *{**keywords, **options}.values()]
        for index, value in enumerate(values):
            if tensors[index] and not isinstance(value, Tensor):
                values[index] = torch.full((), value, device=values[0].device)
        result = getattr(_ops, op)(*values)
        return values[0] if op.endswith("syrk_accumulate_") else result

    return traced


TRACED = {op: _registered(op) for op in OPS}
Op = TypeVar("Op", bound=Callable[..., Any])


@cache  # torch builds the string at every access, which takes as long as the rest of a call
def _type_of(device: torch.device) -> str:
    return device.type


def _by_device(specification: Op) -> Op:
    """The op with the name, signature and docstring of ``specification``; it calls the implementation chosen for the
    device of its first argument, a tensor or a list of tensors."""
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
