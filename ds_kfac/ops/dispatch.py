"""The ops that other folders call. Each op runs on the backend that was chosen for the device of
its tensors: the requested backend, or the best backend that can run there.

The choice applies to the whole process, because callers of ops do not know the config.
``ops/functional.py`` defines what each op computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ds_kfac.ops import cuda, functional, triton
from ds_kfac.ops.check import faults, guarded

OPS = (
    "syrk_accumulate_",
    "block_syrk_accumulate_",
    "symmetric_pack_into_",
    "symmetric_unpack_from",
    "ema_update_",
    "adam_step_",
    "finish_direction_",
)
Implementation = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """A set of implementations.

    Attributes:
        device: type of the device that the backend is for; None: every type.
        load: returns a mapping from op to implementation, or raises RuntimeError with the reason
            why the backend cannot run here.
    """

    device: str | None
    load: Callable[[], Mapping[str, Implementation]]


BACKENDS: dict[str, Backend] = {
    "triton": Backend("cuda", triton.load),
    "cuda": Backend("cuda", cuda.load),
    "torch": Backend(None, lambda: {op: getattr(functional, op) for op in OPS}),
}
"""Backends by name, the best first. ``triton`` has the matrix products and Adam, and ``cuda`` has
the ops that process many layers in one launch. No op is in both of them."""


@dataclass(frozen=True)
class BackendChoice:
    """The implementations chosen for one device type.

    Attributes:
        ops: dict from op to (backend, implementation). Implementations of compiled backends are
            wrapped by :func:`guarded`.
        missing: backends and ops that are not used here, as a dict from name to reason. Plain torch
            computes the ops in this dict.
    """

    ops: Mapping[str, tuple[str, Implementation]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, str]:
        """dict from op to what is wrong with a backend's implementation of the op, on this rank or
        another rank."""
        return {name: why for name, why in self.missing.items() if name in OPS}

    def __str__(self) -> str:
        """List the ops of each backend, and say why other backends or ops are not used."""
        names = dict.fromkeys(backend for backend, _ in self.ops.values())
        parts = [
            f"{name} ({', '.join(op for op in self.ops if self.ops[op][0] == name)})"
            for name in names
        ]
        return "; ".join([*parts, *(f"not {name}: {why}" for name, why in self.missing.items())])


_lock = RLock()
_requested: str | None = None
_choices: dict[str, BackendChoice] = {}


def use(
    backend: str | None, device: str, without: Mapping[str, str] | None = None
) -> BackendChoice:
    """Choose this process's backends, and build them if necessary.

    Args:
        backend: name of the backend that runs every op that it has; None: each op runs on the best
            backend for it.
        device: device type for which the backends are chosen.
        without: backends and ops that must not be used, as a dict from name to reason.

    Raises:
        ValueError: ``backend`` cannot run on ``device``. The message says why.
    """
    global _requested
    with _lock:
        choice = _choose(backend, device, without or {})
        if backend is not None and backend in choice.missing:
            raise ValueError(
                f'kfac.ops.backend "{backend}" cannot run here: {choice.missing[backend]}. '
                "Set kfac.ops.backend to null to choose a backend that can"
            )
        _requested = backend
        _choices.clear()
        _choices[device] = choice
        return choice


def chosen(device: str) -> BackendChoice:
    """Return the choice for a device type. It is made at the first call."""
    choice = _choices.get(device)
    if choice is None:
        with _lock:
            choice = _choices.get(device) or _choices.setdefault(
                device, _choose(_requested, device, {})
            )
    return choice


def _choose(backend: str | None, device: str, without: Mapping[str, str]) -> BackendChoice:
    """Choose an implementation of each op. The backend ``torch`` has every op on every device."""
    ops: dict[str, tuple[str, Implementation]] = {}
    missing = {name: why for name, why in without.items() if name in OPS}
    for name in BACKENDS if backend is None else dict.fromkeys((backend, "torch")):
        made_for = BACKENDS[name].device
        if made_for not in (None, device):
            if name == backend:
                missing[name] = f"this backend is for {made_for}, not for {device}"
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
                ops.setdefault(
                    op,
                    (
                        name,
                        implementation if name == "torch" else guarded(name, op, implementation),
                    ),
                )
    compiled = {op: entry for op, entry in ops.items() if entry[0] != "torch"}
    for op, why in (faults(compiled, torch.device(device)) if compiled else {}).items():
        missing[op] = why
        ops[op] = ("torch", getattr(functional, op))
    return BackendChoice({op: ops[op] for op in OPS}, missing)


Op = TypeVar("Op", bound=Callable[..., Any])


@cache  # torch builds this string at every access, which takes as long as the rest of a call
def _type_of(device: torch.device) -> str:
    return device.type


def _by_device(plain: Op) -> Op:
    """Return an op with the name, signature and docstring of ``plain``. It calls the implementation
    chosen for the device of its first argument, which is a tensor or a list of tensors."""
    op = plain.__name__

    @wraps(plain)
    def call(*arguments, **options):
        first = arguments[0]
        x = first if isinstance(first, Tensor) else first[0]
        return chosen(_type_of(x.device)).ops[op][1](*arguments, **options)

    return cast(Op, call)


syrk_accumulate_ = _by_device(functional.syrk_accumulate_)
block_syrk_accumulate_ = _by_device(functional.block_syrk_accumulate_)
symmetric_pack_into_ = _by_device(functional.symmetric_pack_into_)
symmetric_unpack_from = _by_device(functional.symmetric_unpack_from)
ema_update_ = _by_device(functional.ema_update_)
adam_step_ = _by_device(functional.adam_step_)
finish_direction_ = _by_device(functional.finish_direction_)
