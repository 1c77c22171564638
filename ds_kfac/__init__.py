"""K-FAC for DeepSpeed: add a "kfac" block to the DeepSpeed config and train in fewer steps.

    import ds_kfac

    engine, optimizer, _, _ = ds_kfac.initialize(
        model=model, model_parameters=params, config="ds_config.json"
    )

If a framework calls ``deepspeed.initialize`` for you, call ``ds_kfac.enable()`` before it does.
With DS_KFAC=1 in the environment, it is enough to import deepspeed or ds_kfac.

Raises:
    ImportError: DeepSpeed is older than 0.17. The message says what to install.
    ValueError: DS_KFAC is set to a word that means neither yes nor no.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any


@contextmanager
def only_for_data() -> Iterator[None]:
    """Redirect standard output to standard error inside the ``with`` block, also for C code and
    child processes.

    DeepSpeed writes to standard output as soon as it is imported, and compilers and models may also
    write to it. A command such as ``python -m ds_kfac schema > file`` must not mix these texts with
    its data.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


_is_command = (
    sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
) or os.path.basename(sys.argv[0]) == __name__
"""Whether this package is being imported for ``python -m ds_kfac`` or the script ``ds_kfac``. If
so, torch and DeepSpeed are not imported here, because some commands do not need them."""

if TYPE_CHECKING or not _is_command:
    from ds_kfac.zero.deepspeed_versions import check

    check()  # before the imports below, which fail with an old DeepSpeed
    from ds_kfac.public import *  # noqa: F403
    from ds_kfac.public import __all__ as __all__

__version__ = "0.2.0"


if not TYPE_CHECKING:  # a type checker accepts every attribute of a module with __getattr__

    def __getattr__(name: str) -> Any:
        """Return a public name while a command runs. The command may import a user's model, and the
        model may use ds_kfac."""
        if _is_command and not name.startswith("__"):
            with only_for_data():
                public = importlib.import_module("ds_kfac.public")
            if name in public.__all__:
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
