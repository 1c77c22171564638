"""A plugin for Axolotl. Use it with a DeepSpeed config that has a "kfac" block or the optimizer
KFACAdamW, and add these lines to Axolotl's YAML:

plugins:
  - ds_kfac.integrations.axolotl.KFACPlugin
deepspeed: ds_config.json
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

from ds_kfac.engine.entry import enable
from ds_kfac.integrations.transformers import KFACCallback


class KFACPlugin(BasePlugin):
    """Enables K-FAC before the model is loaded, and adds K-FAC's counters to the logs."""

    def pre_model_load(self, cfg: Any) -> None:
        if not cfg.deepspeed:
            raise ValueError(
                "KFACPlugin: K-FAC works with DeepSpeed only: set deepspeed: ds_config.json in the "
                "YAML"
            )
        enable()

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        KFACCallback.add_to(trainer)
