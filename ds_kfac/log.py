"""What ds_kfac says while a program runs, all of it by one logger, "ds_kfac", to standard error.

The logger has a handler of its own and hands nothing on: DeepSpeed's stands at WARNING, and
frameworks mute it and others. What a rank has to say of itself goes to :data:`logger` as to any; a
program may change it as any.
"""

import logging
import os
import sys


class _StandardError(logging.Handler):
    """Writes to what ``sys.stderr`` is at that time: notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


logger = logging.getLogger("ds_kfac")
logger.setLevel("INFO")
logger.propagate = False
logger.addHandler(_StandardError())


def _is_first() -> bool:
    """Whether this is rank 0, by the process group, else by what launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK") or 0) == 0


def say(text: str, level: int = logging.INFO, *, here: bool | None = None) -> None:
    """Say something on rank 0 alone. ``here``: whether this rank says it; None: if it is rank 0."""
    if _is_first() if here is None else here:
        # logging.config disables all loggers that there are, unless it is told not to
        logger.disabled = False
        logger.log(level, text)


def warn(text: str, *, here: bool | None = None) -> None:
    """Warn on rank 0, or as :func:`say` does."""
    say(f"ds_kfac: WARNING: {text}", logging.WARNING, here=here)
