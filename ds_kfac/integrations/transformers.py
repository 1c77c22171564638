"""K-FAC's numbers in the logs of transformers' Trainer, and so in wandb, tensorboard and the rest
of ``report_to``."""

from typing import Any

from transformers import Trainer, TrainerCallback

from ds_kfac.engine.attachment import Attachment, attached


class KFACCallback(TrainerCallback):
    """Adds ``kfac/step_to_weight`` and others to what the Trainer logs:
    ``KFACCallback.add_to(trainer)``. The first line has what stays as it is, too, and any line what
    went wrong; ``"report": "none"`` adds nothing.

    Given as ``callbacks=[KFACCallback()]`` it comes after the Trainer's own reporters, which then
    have not seen them; ``log_history`` and the console have them in both cases.
    """

    _begun: Attachment | None = None

    @classmethod
    def add_to(cls, trainer: Trainer) -> None:
        """In front of all other callbacks."""
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
