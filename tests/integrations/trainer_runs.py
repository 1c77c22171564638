"""What only transformers' own Trainer can show: labels counted over ranks, evaluation first, other
optimizers, and its reporters."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer

import ds_kfac
from ds_kfac.integrations.transformers import KFACCallback
from ds_kfac.step import proving
from examples.integrations import tiny
from tests.deepspeed.runs import weights
from tests.integrations.runs import fresh
from tests.ranks import of_ranks

KFAC = {
    "factor": {"update_interval": 1, "fisher": "empirical", "rows": "all"},
    "eigenbasis": {"refresh_interval": 1},
    # corrected ones divide a first gradient by itself: signs
    "preconditioner": {"eigenvalues": "kronecker"},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": "auto", "torch_adam": True}}
PRECISION = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def arguments_of(folder: str, *, stage: int = 2, blocks: Any = None, **given: Any) -> dict:
    """Of the Trainer: AdamW and K-FAC unless ``blocks`` of the DeepSpeed config say otherwise."""
    fresh()
    ds_kfac.enable()
    config = {"kfac": KFAC, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    return {
        "output_dir": folder,
        "deepspeed": tiny.ds_config(tiny.options([]).deepspeed, **config | (blocks or {})),
        "max_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": tiny.ON_CPU,
        **given,
    }


def trainer_of(folder: str, **given: Any) -> Trainer:
    """Of texts, in micro-batches of 4."""
    made = arguments_of(folder, **{"per_device_train_batch_size": 4, **given})
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows, arguments = tiny.tokens(64), TrainingArguments(**made)
    data = {"train_dataset": rows, "eval_dataset": rows}
    return Trainer(model=tiny.model(), args=arguments, data_collator=collator, **data)


def trained(trainer: Trainer, *, resume: str | None = None) -> Any:
    """The engine after training, without the Trainer's prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)
    return trainer.model_wrapped


def traces_of(engine: Any) -> dict[str, float]:
    """The trace of every factor of all ranks."""
    traces = {
        key: float(factor.side.diagonal_of(factor.packed_P).sum())
        for key, factor in engine.kfac.preconditioner.curvature.factors.items()
    }
    return {key: trace for of_rank in of_ranks(traces) for key, trace in of_rank.items()}


LABELLED = [14, 2, 2, 1, 9, 1, 1, 1, 12, 12, 3, 1, 2, 5, 1, 1]
"""Tokens with a label in rows of 16: in micro-batches of two from 2 to 24."""


def labelled_rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 250, (len(LABELLED), 16), generator=generator).tolist()
    return [
        {
            "input_ids": row,
            "labels": [-100] * (16 - count) + row[16 - count :],
            "attention_mask": [1] * 16,
        }
        for row, count in zip(ids, LABELLED, strict=True)
    ]


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    return loss / num_items_in_batch


def parts_worker(payload: tuple[str, str, int, dict[str, Any]]) -> dict[str, Any]:
    """Weights and traces of all factors after two steps on the same 16 texts of one length,
    whatever the ranks and micro-batches.

    Args:
        payload: a folder, how the loss is made or cut, the number of micro-batches, and further
            options of :func:`arguments_of`.
    """
    folder, kind, accumulation, given = payload
    world = dist.get_world_size()
    micro = len(LABELLED) // (accumulation * (1 if kind == "sequence" else world))
    sizes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": micro}
    options = arguments_of(folder, **sizes, **given)
    rows, made = 2 * labelled_rows(), {"data_collator": default_data_collator}
    if kind == "compute_loss_func":
        made["compute_loss_func"] = summed_loss
    elif kind == "label_smoothing_factor":
        options["label_smoothing_factor"] = 0.1
    elif kind == "sequence":
        rows = [{**row, "position_ids": list(range(16))} for row in rows]
        if world > 1:
            options["deepspeed"]["seq_parallel_communication_data_type"] = "fp32"
            handler = DeepSpeedSequenceParallelConfig(
                sp_seq_length=16, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
            )
            options["parallelism_config"] = ParallelismConfig(
                sp_backend="deepspeed", sp_size=world, sp_handler=handler
            )
    if kind == "SFTTrainer":
        proving.RAISES = False  # TRL's head has no rows
        options |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        options |= {"remove_unused_columns": False}
        arguments = SFTConfig(**options, bf16=False, gradient_checkpointing=False)
        trains, made["processing_class"] = SFTTrainer, tiny.tokenizer()
        rows = Dataset.from_list(rows)
    else:
        trains, arguments = Trainer, TrainingArguments(**options)
    trainer = trains(model=tiny.model(), args=arguments, train_dataset=rows, **made)
    trainer._get_train_sampler = lambda *given: SequentialSampler(trainer.train_dataset)
    engine = trained(trainer)
    steps = engine.kfac.counters()["steps"]
    return {"weights": weights(engine), "traces": traces_of(engine), "steps": steps}


def evaluation_worker(folder: str) -> tuple[float, float, int]:
    """``evaluate()`` without an optimizer, which the Trainer has at stage 3 only; another trainer
    trains."""
    with contextlib.redirect_stdout(io.StringIO()):
        before = trainer_of(folder, stage=3).evaluate()["eval_loss"]
        trainer = trainer_of(folder, stage=3)
        engine = trained(trainer)
        return before, trainer.evaluate()["eval_loss"], engine.kfac.preconditioner.steps


MOVED_AT = 2
DECAYS = {"AdamW": 0.01, "KFACAdamW": 1.0}


class Seen(TrainerCallback):
    """Weights and step when training begins, after a checkpoint was loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.weights, self.step = weights(self.trainer.model_wrapped), state.global_step


def moving_worker(payload: tuple[str, int, str, bool, bool]) -> dict[str, Any]:
    """Train to step 2 and save, or go on from there with the other optimizer to step 4."""
    folder, stage, kind, resumes, universal = payload
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    blocks: dict[str, Any] = {"kfac": {"enabled": kind == "KFACAdamW"}}
    blocks["optimizer"] = {"type": kind, "params": {**auto, "torch_adam": True}}
    if universal:
        blocks["checkpoint"] = {"load_universal": True}
    saves = {"save_strategy": "steps", "save_steps": MOVED_AT}
    steps = {"max_steps": 2 * MOVED_AT if resumes else MOVED_AT, "learning_rate": 1e-3}
    trainer = trainer_of(
        folder, stage=stage, blocks=blocks, weight_decay=DECAYS[kind], **saves, **steps
    )
    seen = Seen()
    seen.trainer = trainer
    trainer.add_callback(seen)
    engine = trained(trainer, resume=f"{folder}/checkpoint-{MOVED_AT}" if resumes else None)
    attachment = getattr(engine, "kfac", None)
    return {
        "begun": seen.weights,
        "at": seen.step,
        "ended": weights(engine),
        "step": trainer.state.global_step,
        "kfac steps": attachment.counters()["steps"] if attachment else None,
        "decay": max(group["weight_decay"] for group in engine.basic_optimizer.param_groups),
    }


def logged_worker(payload: tuple[str, str]) -> dict[str, list[float]]:
    """Name -> values that have reached tensorboard in three logged steps, through the Trainer's
    reporter (with the callback by hand that the Trainer has anyway) or DeepSpeed's monitor."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, door = payload
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/board"
    board = {"tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"}}
    own = {"blocks": board} if door == "monitor" else {"report_to": "tensorboard"}
    trainer = trainer_of(folder, max_steps=3, **own)
    if door == "by hand":
        KFACCallback.add_to(trainer)
    trained(trainer)
    callbacks = trainer.callback_handler.callbacks
    assert sum(isinstance(callback, KFACCallback) for callback in callbacks) == 1
    events = EventAccumulator(str(next(Path(folder).rglob("events.out.tfevents*")).parent))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [event.value for event in events.Scalars(name)] for name in names}
