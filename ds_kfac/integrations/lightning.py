"""K-FAC's numbers in the logs of Lightning's Trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ds_kfac.engine.attachment import HANDLE, Attachment


class KFACCallback(Callback):
    """Logs ``kfac/step_to_weight`` and other numbers of rank 0 every ``log_every_n_steps`` steps.
    The first time it also logs the numbers that never change. If the config says
    ``"report": "none"``, it logs nothing. Use it as ``Trainer(callbacks=[KFACCallback()])``."""

    _begun: Attachment | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *given: Any) -> None:
        attachment = getattr(trainer.strategy.model, HANDLE, None)
        if attachment is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            logged = attachment.log_line() | (
                {} if attachment is self._begun else attachment.log_constants()
            )
            self._begun = attachment
            pl_module.log_dict(logged, rank_zero_only=True)
