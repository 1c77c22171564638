"""Triton kernels without a GPU: interpreted, or compiled for a device that is not there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "ds_kfac.ops.triton"


def _interpret(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call inside a launch. Triton's own leaves triton.language patched, and nothing compiles
    after it."""
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    finally:
        scope.restore()


@contextmanager
def interpreted(*names: str) -> Iterator[list[ModuleType]]:
    """Fresh copies of modules of ``ds_kfac.ops.triton`` ("": of itself) whose kernels are
    interpreted; others are left alone."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGE)}
    try:
        with knobs.runtime.scope(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "__call__", _interpret)
            # tl.sum and its like were made for compilation when triton was imported
            patch.setattr(
                JITFunction,
                "__call__",
                lambda self, *a, **k: _interpret(InterpretedFunction(self.fn), *a, **k),
            )
            knobs.runtime.interpret = True
            yield [import_module(f"{PACKAGE}.{name}".rstrip(".")) for name in names]
    finally:
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(kept)
        if PACKAGE in kept:
            import_module("ds_kfac.ops").triton = kept[PACKAGE]  # type: ignore[attr-defined]


@contextmanager
def interpreted_ops() -> Iterator[dict[str, Any]]:
    """Op -> its Triton implementation, interpreted; skips the test where Triton is missing."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
    with interpreted("") as (backend,):
        backend.unavailable = lambda: None
        yield dict(backend.load())


@dataclass(frozen=True)
class Compiled:
    """What became of one launch.

    Attributes:
        name: the kernel's.
        cubin: machine code.
        ptx: what it was assembled from; ptxas keeps these instructions, one for one, but for its
            choice of registers.
        shared: bytes of shared memory.
    """

    name: str
    cubin: bytes
    ptx: str
    shared: int

    def count(self, instruction: str) -> int:
        """How often an instruction, by its first parts, is in the code."""
        line = rf"^\s*(?:@!?%\w+\s+)?{re.escape(instruction)}\."
        return len(re.findall(line, self.ptx, re.MULTILINE))


class AbsentDevice:
    """What Triton asks a driver before it compiles. Caches are per device, so its number is the
    architecture's."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def compiling(arch: int, **options: Any) -> Iterator[list[Compiled]]:
    """Launches compile for sm_``arch`` and run nothing; a kernel that spills registers raises.
    Yields the results."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from ds_kfac.ops.triton import scale, syrk

    done: list[Compiled] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs |= {"ptx_options": "-warn-spills -Werror", **options}
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        done.append(
            Compiled(
                kernel.metadata.name, kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata.shared
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        for module in (scale, syrk):
            patch.setattr(module, "DEVICE_TYPE", "cpu")
        patch.setattr(driver, "_active", AbsentDevice(arch))
        yield done


def cuobjdump() -> str | None:
    """The one that triton brings, or the one on PATH."""
    import triton

    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump")


def usage(cubin: bytes, directory: Path) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory and stack."""
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.check_output(
        [str(cuobjdump()), "-res-usage", path], text=True, stderr=subprocess.STDOUT
    )
    (registers, stack, local), *others = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert not others
    return int(registers), int(stack) + int(local)
