"""K-FAC for DeepSpeed: add a "kfac" block to the DeepSpeed config and train in fewer steps.

    import ds_kfac
    engine, optimizer, _, _ = ds_kfac.initialize(model=model, model_parameters=params, config="ds_config.json")

or, where a framework calls ``deepspeed.initialize`` itself, ``ds_kfac.enable()`` before it does.
"""

from ds_kfac.attachment import Attachment
from ds_kfac.config import KFACConfig
from ds_kfac.engine import attach, disable, enable, initialize
from ds_kfac.estimate.mem_needs import estimate_kfac_mem_needs_all_cold, estimate_kfac_mem_needs_all_live

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "KFACConfig",
    "__version__",
    "attach",
    "disable",
    "enable",
    "estimate_kfac_mem_needs_all_cold",
    "estimate_kfac_mem_needs_all_live",
    "initialize",
]
