"""KFACAdamW for ms-swift, which accepts no "optimizer" in a DeepSpeed config. Importing this module
adds KFACAdamW to ms-swift's own list of optimizers.

Write a file, here kfac.py, with the line ``import ds_kfac.integrations.swift``, and use a DeepSpeed
config without an optimizer:

    swift sft --external_plugins kfac.py --optimizer kfac_adamw --deepspeed ds_config.json ..
"""

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map

from ds_kfac.directions.kfac_adamw.user_optimizer import KFACAdamW
from ds_kfac.engine.entry import enable

NAME = "kfac_adamw"
"""Value of ``--optimizer`` that selects KFACAdamW."""


class KFACOptimizerCallback(OptimizerCallback):
    """Makes a :class:`ds_kfac.KFACAdamW` with the learning rate, betas, eps and weight decay from
    swift's arguments."""

    def create_optimizer(self, model: Any = None) -> KFACAdamW:
        args = self.args
        model = self.trainer.model if model is None else model
        decays = set(self.trainer.get_decay_parameter_names(model))
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        groups = [
            {
                "params": [p for name, p in trained.items() if (name in decays) == decay],
                "weight_decay": amount,
            }
            for decay, amount in ((True, args.weight_decay), (False, 0.0))
        ]
        betas = args.adam_beta1, args.adam_beta2
        groups = [group for group in groups if group["params"]]
        return KFACAdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


enable()
optimizers_map[NAME] = KFACOptimizerCallback
