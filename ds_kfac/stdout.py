"""Standard output for what a command was asked for, as ``python -m ds_kfac schema > file`` needs it.

DeepSpeed logs to standard output, as soon as it is imported; so do compilers that it starts, and models of the user's.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_for_data() -> Iterator[None]:
    """What is written to standard output meanwhile, by Python, C or children, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def is_command() -> bool:
    """Whether this package is being imported for ``python -m ds_kfac``."""
    return sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __package__
