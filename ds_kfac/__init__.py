"""K-FAC for DeepSpeed: add a "kfac" block to the DeepSpeed config and train in fewer steps.

    import ds_kfac
    engine, optimizer, _, _ = ds_kfac.initialize(model=model, model_parameters=params, config="ds_config.json")

or, where a framework calls ``deepspeed.initialize`` itself, ``ds_kfac.enable()`` before it does. With DS_KFAC=1 in the
environment importing deepspeed or ds_kfac is enough.

Raises:
    ValueError: DS_KFAC is neither yes nor no.
"""

import os
from contextlib import nullcontext

from ds_kfac.text import is_command, only_for_data

with only_for_data() if is_command() else nullcontext():
    from ds_kfac.config.keys import KFACConfig
    from ds_kfac.directions.kfac_adamw.user_optimizer import KFACAdamW
    from ds_kfac.engine.attachment import Attachment
    from ds_kfac.engine.entry import asked_for, attach, disable, enable, initialize
    from ds_kfac.estimate.command import estimate_kfac_mem_needs_all_cold, estimate_kfac_mem_needs_all_live
    from ds_kfac.model.batch import BatchInfo

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "BatchInfo",
    "KFACAdamW",
    "KFACConfig",
    "__version__",
    "attach",
    "disable",
    "enable",
    "estimate_kfac_mem_needs_all_cold",
    "estimate_kfac_mem_needs_all_live",
    "initialize",
]

if asked_for(os.environ.get("DS_KFAC", "")):
    enable()
