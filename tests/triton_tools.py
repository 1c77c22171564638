"""Triton kernels without a GPU: interpreted, or compiled for a device that is not there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import pytest

PACKAGE = "ds_kfac.ops.triton"


@contextmanager
def interpreted(*names: str) -> Iterator[list[ModuleType]]:
    """Fresh copies of modules of ``ds_kfac.ops.triton`` whose kernels are interpreted; others are left alone."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGE)}
    try:
        with knobs.runtime.scope(), pytest.MonkeyPatch.context() as patch:
            # tl.sum and its like were made for compilation when triton was imported
            patch.setattr(JITFunction, "__call__", lambda self, *a, **k: InterpretedFunction(self.fn)(*a, **k))
            knobs.runtime.interpret = True
            yield [import_module(f"{PACKAGE}.{name}") for name in names]
    finally:
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(kept)
