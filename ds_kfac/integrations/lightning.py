"""K-FAC's numbers in the logs of Lightning's Trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ds_kfac.engine.attachment import HANDLE


class KFACCallback(Callback):
    """Logs ``kfac/refreshes``, ``kfac/nu`` and others of rank 0 with every ``log_every_n_steps``-th step:
    ``Trainer(callbacks=[KFACCallback()])``."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *given: Any) -> None:
        attachment = getattr(trainer.strategy.model, HANDLE, None)
        if attachment is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(attachment.log_line(), rank_zero_only=True)
