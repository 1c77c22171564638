"""Which implementation of an op runs: per device type, the best backend that can, or the one that was asked for.

The choice is the process's: ops are called from below everything that knows a config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch

from ds_kfac.ops import cuda, functional
from ds_kfac.ops.check import faults
from ds_kfac.ops.guarded import guarded
from ds_kfac.ops.triton import backend as triton

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
    "triton": Backend("cuda", triton.load),
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
    for op, why in faults(compiled, torch.device(device)).items():
        missing[op], ops[op] = why, ("torch", getattr(functional, op))
    return Choice({op: ops[op] for op in OPS}, missing)
