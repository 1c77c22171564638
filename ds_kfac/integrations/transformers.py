"""K-FAC's numbers in the logs of transformers' Trainer, and so in wandb, tensorboard and the rest of ``report_to``."""

from typing import Any

from transformers import Trainer, TrainerCallback

from ds_kfac.engine.attachment import attached


class KFACCallback(TrainerCallback):
    """Adds ``kfac/refreshes``, ``kfac/nu`` and others to what the Trainer logs: ``KFACCallback.add_to(trainer)``.

    Given as ``callbacks=[KFACCallback()]`` it comes after the Trainer's own reporters, which then have not seen them;
    ``log_history`` and the console have them in both cases.
    """

    @classmethod
    def add_to(cls, trainer: Trainer) -> None:
        """In front of all other callbacks."""
        trainer.callback_handler.callbacks.insert(0, cls())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **given: Any) -> None:
        attachment = attached(model)
        if attachment is None or logs is None or "loss" not in logs:
            return
        logs.update(attachment.log_line())
        state.log_history[-1].update(attachment.log_line())
