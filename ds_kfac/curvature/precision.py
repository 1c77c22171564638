"""In which precision the products of a step run: how torch's switch is set for them, and which precision is chosen.

torch has no precision of a single fp32 product, only a switch of the process. Ours is held around a few products and
given back, also after an error; what needs it exact at the same time, on another thread, holds the same lock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from threading import RLock
from typing import Any, ClassVar, Literal

import torch

SWITCH = RLock()
"""Held while the switch is not what the process set; hold it where products must not see ours."""
TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Precision:
    """Of the products that precondition a gradient.

    Attributes:
        name: "highest" or "tf32".
        products: fp32, or TF32, which rounds operands to 10 bits.
        why: for people, where it is not what was asked for, or was not asked for.
    """

    name: str = "highest"
    products: Literal["ieee", "tf32"] = "ieee"
    why: str = ""

    @cached_property
    def half_orthogonal(self) -> bool:
        """Whether orthogonalization runs in fp16, else as the products: it rounds as TF32 does, at twice the speed."""
        return self.products == "tf32"

    def __str__(self) -> str:
        kind = {"ieee": "fp32", "tf32": "TF32"}[self.products]
        return f"{self.name} ({kind}{'; ' + self.why if self.why else ''})"


HIGHEST = Precision()


def has_tf32(device: torch.device) -> bool:
    """Whether products of a device can run in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY


def choose(asked: str | None, device: torch.device) -> Precision:
    """The precision of a run.

    Args:
        asked: "highest", "tf32", or None: TF32 where the device has it.
    """
    able = has_tf32(device)
    if asked is None:
        return Precision("tf32", "tf32", why="chosen") if able else Precision(why="chosen: no TF32 here")
    if asked == "highest":
        return HIGHEST
    why = "" if able else f"WARNING: no TF32 on this {device.type}, fp32 in its place"
    return Precision(asked, "tf32" if able else "ieee", why)


@contextmanager
def fp32_products(how: Literal["ieee", "tf32"], device: torch.device) -> Iterator[None]:
    """Run products of fp32 operands on a device as "ieee" (fp32) or "tf32", whatever the process has set.

    What a process set for all backends at once is read, and given back, as set for products alone.
    """
    switch = _switch(device.type)
    if switch.fp32_precision == how or (how == "ieee" and switch.fp32_precision == "none"):
        yield
        return
    with SWITCH:
        before, switch.fp32_precision = switch.fp32_precision, how
        try:
            yield
        finally:
            switch.fp32_precision = before


class _OldSwitch:
    """torch's before 2.9."""

    NAMES: ClassVar = {"ieee": "highest", "tf32": "high"}

    @property
    def fp32_precision(self) -> str:
        value = torch.get_float32_matmul_precision()
        return {"highest": "ieee", "high": "tf32"}.get(value, value)

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(self.NAMES.get(value, value))


@cache
def _switch(kind: str) -> Any:
    backend: Any = torch.backends.cuda.matmul if kind == "cuda" else getattr(torch.backends.mkldnn, "matmul", None)
    return backend if hasattr(backend, "fp32_precision") else _OldSwitch()
