"""What a call raises and what is logged meanwhile."""

import contextlib
import io
import logging

from deepspeed.utils import logger as of_deepspeed

from ds_kfac.log import logger


def error_of(action) -> str:
    """ "Type: text" of what ``action`` raises of the errors that are meant for a user, "" if it
    raises none."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def heard(level: str = "WARNING"):
    """What ds_kfac says on this rank. ``level``: of DeepSpeed's logger, which frameworks set to
    their own."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    before = of_deepspeed.level
    logger.addHandler(handler)
    of_deepspeed.setLevel(level)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            yield messages
    finally:
        logger.removeHandler(handler)
        of_deepspeed.setLevel(before)
    assert all(message in written.getvalue() for message in messages), (
        "it is on standard error, too"
    )
