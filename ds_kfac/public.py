"""All public names of ``import ds_kfac``. The import also replaces ``deepspeed.initialize`` by
ds_kfac's function, and enables K-FAC if the environment variable DS_KFAC says so."""

import os

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.kfac_adamw.user_optimizer import KFACAdamW
from ds_kfac.engine.attachment import Attachment
from ds_kfac.engine.entry import asked_for, attach, disable, enable, initialize, on_attached
from ds_kfac.estimate.command import (
    estimate_kfac_mem_needs_all_cold,
    estimate_kfac_mem_needs_all_live,
)
from ds_kfac.factors.files import Factors, FactorsError
from ds_kfac.factors.fitting import fit
from ds_kfac.integrations import log_in_trainer
from ds_kfac.lr_schedulers.batch_ramp import BatchRamp

__all__ = [
    "Attachment",
    "BatchRamp",
    "Factors",
    "FactorsError",
    "KFACAdamW",
    "KFACConfig",
    "attach",
    "disable",
    "enable",
    "estimate_kfac_mem_needs_all_cold",
    "estimate_kfac_mem_needs_all_live",
    "fit",
    "initialize",
]

on_attached.append(log_in_trainer)
if asked_for(os.environ.get("DS_KFAC", "")):
    enable()
