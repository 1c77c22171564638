"""Integrations with frameworks that build the engine themselves. The rest of ds_kfac imports only
:func:`log_in_trainer`, which adds K-FAC's numbers to the logs of transformers' Trainer without any
change to the user's script."""

import importlib
import sys
from types import FrameType
from typing import Any


def log_in_trainer() -> None:
    """Add a :class:`~ds_kfac.integrations.transformers.KFACCallback` to the Trainer that is
    building an engine, unless the Trainer has one. The engine has no reference to its Trainer. But
    the Trainer is on the call stack, because it calls ``deepspeed.initialize`` through
    Accelerate."""
    frame: FrameType | None = sys._getframe()
    module = sys.modules.get("transformers.trainer")
    kind: Any = getattr(module, "Trainer", None)
    while frame is not None and kind is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, kind):
            door = importlib.import_module("ds_kfac.integrations.transformers").KFACCallback
            if not any(
                isinstance(callback, door) for callback in trainer.callback_handler.callbacks
            ):
                door.add_to(trainer)
            return
        frame = frame.f_back
