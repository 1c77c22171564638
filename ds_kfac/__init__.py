"""K-FAC for DeepSpeed: add a "kfac" block to the DeepSpeed config and train in fewer steps.

    import ds_kfac
    engine, optimizer, _, _ = ds_kfac.initialize(model=model, model_parameters=params, config="ds_config.json")

or, where a framework calls ``deepspeed.initialize`` itself, ``ds_kfac.enable()`` before it does. With DS_KFAC=1 in the
environment importing deepspeed or ds_kfac is enough.

Raises:
    ValueError: DS_KFAC is neither yes nor no.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


@contextmanager
def only_for_data() -> Iterator[None]:
    """What is written to standard output meanwhile, by Python, C or children, goes to standard error: DeepSpeed logs to
    it as soon as it is imported, and so do compilers and models, but ``python -m ds_kfac schema > file`` needs it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


_is_command = sys.argv[0] == "-m" and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == __name__
"""Whether this package is being imported for ``python -m ds_kfac``."""

with only_for_data() if _is_command else nullcontext():
    from ds_kfac.config.keys import KFACConfig
    from ds_kfac.directions.kfac_adamw.user_optimizer import KFACAdamW
    from ds_kfac.engine.attachment import Attachment
    from ds_kfac.engine.batch_ramp import BatchRamp
    from ds_kfac.engine.entry import asked_for, attach, disable, enable, initialize
    from ds_kfac.estimate.command import estimate_kfac_mem_needs_all_cold, estimate_kfac_mem_needs_all_live
    from ds_kfac.factors.files import Factors, FactorsError
    from ds_kfac.factors.fitting import fit
    from ds_kfac.model.batch import BatchInfo

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "BatchInfo",
    "BatchRamp",
    "Factors",
    "FactorsError",
    "KFACAdamW",
    "KFACConfig",
    "__version__",
    "attach",
    "disable",
    "enable",
    "estimate_kfac_mem_needs_all_cold",
    "estimate_kfac_mem_needs_all_live",
    "fit",
    "initialize",
]

if asked_for(os.environ.get("DS_KFAC", "")):
    enable()
