"""Engines one after another in a process."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator


@contextmanager
def freed(make: Callable[[], Any]) -> Iterator[Any]:
    """What ``make`` makes; its memory is free again afterwards."""
    engine = make()
    try:
        yield engine
    finally:
        engine.destroy()
        del engine
        gc.collect()
        get_accelerator().empty_cache()
