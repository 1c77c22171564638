"""What a call raises and what is logged meanwhile."""

import contextlib
import io
import logging

from deepspeed.utils import logger


def error_of(action) -> str:
    """ "Type: text" of what ``action`` raises of the errors that are meant for a user, "" if it raises none."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def heard(level: str = "WARNING"):
    """What DeepSpeed's logger says on this rank, and at the end what was written to stderr."""
    messages: list[str] = []
    handler, before = logging.Handler(), logger.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    messages += written.getvalue().splitlines()
