"""What tests/integrations/test_trl.py runs on a rank: TRL's trainers of a whole model, whose head
is a function's."""

import contextlib
import io
from typing import Any

from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import ds_kfac
from ds_kfac.step import proving
from examples.integrations import tiny
from examples.integrations.trl_dpo import pairs
from tests.integrations.runs import fresh

KFAC = {
    "factor": {"update_interval": 1},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}


def head_worker(payload: tuple[str, str, str]) -> dict[str, Any]:
    """Three steps; what is said of the head."""
    folder, trainer, optimizer = payload
    fresh()
    proving.RAISES = False  # the head has no rows
    ds_kfac.enable()
    options = tiny.options([])
    block = {"type": optimizer, "params": {"lr": 1e-3, "torch_adam": True}}
    config = tiny.ds_config(options.deepspeed, kfac=KFAC, optimizer=block)
    kind, arguments, data = {
        "SFT": (SFTTrainer, SFTConfig, {"train_dataset": tiny.texts(64)}),
        "DPO": (DPOTrainer, DPOConfig, {"train_dataset": pairs(), "ref_model": tiny.model()}),
    }[trainer]
    given = arguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        adam_epsilon=1e-8,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=tiny.ON_CPU,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        made = kind(model=tiny.model(), args=given, processing_class=tiny.tokenizer(), **data)
        made.train()
    kfac = made.model_wrapped.kfac
    return {"report": kfac.report, **kfac.counters()}
