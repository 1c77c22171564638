"""The logger "ds_kfac", with which ds_kfac writes all its messages to standard error.

The logger has its own handler and does not propagate messages to other loggers, because DeepSpeed
sets its logger to WARNING, and frameworks mute other loggers. Messages that every rank should print
go to :data:`logger` directly. A program may configure it like any other logger.
"""

import logging
import os
import sys


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


logger = logging.getLogger("ds_kfac")
logger.setLevel("INFO")
logger.propagate = False
logger.addHandler(_StandardError())


def _is_first() -> bool:
    """Return whether this is rank 0. The rank comes from the process group, or, if there is none,
    from the environment variables that launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK") or 0) == 0


def say(text: str, level: int = logging.INFO, *, here: bool | None = None) -> None:
    """Log a message.

    Args:
        text: the message.
        level: the message's level in :mod:`logging`.
        here: whether this rank logs the message. None: rank 0 logs it.
    """
    if _is_first() if here is None else here:
        # logging.config disables all existing loggers by default
        logger.disabled = False
        logger.log(level, text)


def warn(text: str, *, here: bool | None = None) -> None:
    """Log a warning. The arguments are those of :func:`say`."""
    say(f"ds_kfac: WARNING: {text}", logging.WARNING, here=here)
