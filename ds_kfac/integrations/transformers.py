"""K-FAC's numbers in the logs of transformers' Trainer, and therefore in wandb, tensorboard and
every other reporter in ``report_to``."""

from typing import Any

from transformers import Trainer, TrainerCallback

from ds_kfac.engine.attachment import Attachment, attached


class KFACCallback(TrainerCallback):
    """Adds ``kfac/step_to_weight`` and other numbers to what the Trainer logs. The first line also
    has the numbers that never change, and every line has the counters of failures that are not 0.
    If the config says ``"report": "none"``, it adds nothing.

    Use it as ``KFACCallback.add_to(trainer)``. If you pass ``callbacks=[KFACCallback()]`` instead,
    the Trainer calls its own reporters first, and they miss the numbers. ``log_history`` and the
    console have the numbers in both cases.
    """

    _begun: Attachment | None = None

    @classmethod
    def add_to(cls, trainer: Trainer) -> None:
        """Add the callback to a Trainer, in front of all other callbacks."""
        trainer.callback_handler.callbacks.insert(0, cls())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **given: Any
    ) -> None:
        attachment = attached(model)
        if attachment is None or logs is None or "loss" not in logs:
            return
        added = attachment.log_line() | (
            {} if attachment is self._begun else attachment.log_constants()
        )
        self._begun = attachment
        logs.update(added)
        state.log_history[-1].update(added)
