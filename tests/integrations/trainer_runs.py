"""What only transformers' own Trainer can show: labels counted over ranks, evaluation first, and
its reporters."""

import contextlib
import io
import json
import os
import struct
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
from ds_kfac.checkpoint.files import CheckpointError
from ds_kfac.integrations.transformers import KFACCallback
from ds_kfac.step import proving
from examples.integrations import tiny
from tests.deepspeed.runs import weights
from tests.integrations.runs import fresh

ROWS = 32
KFAC = {
    "factor": {"update_interval": 1, "fisher": "empirical", "rows": "all"},
    "eigenbasis": {"refresh_interval": 1},
    # corrected ones divide a first gradient by itself: signs
    "preconditioner": {"eigenvalues": "kronecker"},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": "auto", "torch_adam": True}}


def trainer_of(
    folder: str,
    *,
    accumulation: int,
    micro: int,
    kfac: Any = KFAC,
    stage: int = 2,
    more: Any = None,
    **given: Any,
) -> Trainer:
    fresh()
    options = tiny.options([])
    config = tiny.ds_config(
        options.deepspeed,
        kfac=KFAC,
        optimizer=ADAMW,
        zero_optimization={"stage": stage},
        **(more or {}),
    )
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        per_device_train_batch_size=micro,
        logging_steps=1,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        save_strategy="no",
        use_cpu=tiny.ON_CPU,
        **{"report_to": "none", "max_steps": 2, **given},
    )
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows = tiny.tokens(2 * ROWS)
    return Trainer(
        model=tiny.model(),
        args=arguments,
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=rows,
    )


def labels_worker(payload: tuple[str, int]) -> dict[str, Any]:
    """Two steps on the same 32 texts of one length, whatever the ranks; and the trace of every
    G."""
    folder, accumulation = payload
    ds_kfac.enable()
    micro = ROWS // (accumulation * dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(folder, accumulation=accumulation, micro=micro)
        trainer.train_dataset, trainer.data_collator = 4 * labelled_rows(), default_data_collator
        trainer.train()
    engine = trainer.model_wrapped
    return {"weights": weights(engine), "traces": traces_of(engine)}


LABELLED = [14, 2, 2, 1, 9, 1, 1, 1, 12, 12, 3, 1, 2, 5, 1, 1]
"""Tokens with a label in rows of 16: in micro-batches of two from 2 to 24."""


def labelled_rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 250, (len(LABELLED), 16), generator=generator).tolist()
    labels = [
        [-100] * (16 - count) + row[16 - count :] for row, count in zip(ids, LABELLED, strict=True)
    ]
    return [
        {"input_ids": x, "labels": y, "attention_mask": [1] * 16}
        for x, y in zip(ids, labels, strict=True)
    ]


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return (
        torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        / num_items_in_batch
    )


def outside_worker(payload: tuple[str, str, int]) -> dict[str, float]:
    """The trace of every G after a step on 16 rows, whose loss is made outside of the model."""
    folder, kind, accumulation = payload
    fresh()
    ds_kfac.enable()
    options = tiny.options([])
    config = tiny.ds_config(
        options.deepspeed, kfac=KFAC, optimizer=ADAMW, zero_optimization={"stage": 2}
    )
    given: dict[str, Any] = {
        "output_dir": folder,
        "deepspeed": config,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "per_device_train_batch_size": len(LABELLED) // (accumulation * dist.get_world_size()),
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": tiny.ON_CPU,
        "disable_tqdm": True,
    }
    made: dict[str, Any] = {"model": tiny.model(), "data_collator": default_data_collator}
    if kind == "SFTTrainer":
        proving.RAISES = False  # TRL's head has no rows
        given |= {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "bf16": False,
            "gradient_checkpointing": False,
        }
        arguments = SFTConfig(**given, remove_unused_columns=False)
        made |= {
            "train_dataset": Dataset.from_list(labelled_rows()),
            "processing_class": tiny.tokenizer(),
        }
        trainer = SFTTrainer(args=arguments, **made)
    else:
        if kind == "compute_loss_func":
            made["compute_loss_func"] = summed_loss
        else:
            given["label_smoothing_factor"] = 0.1
        trainer = Trainer(args=TrainingArguments(**given), train_dataset=labelled_rows(), **made)
    trainer._get_train_sampler = lambda *given: SequentialSampler(trainer.train_dataset)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return traces_of(trainer.model_wrapped)


def sequence_worker(payload: tuple[str, int, int]) -> dict[str, Any]:
    """The weights and the trace of every factor after a step on 16 rows, of which each rank has a
    part."""
    folder, stage, ranks = payload
    fresh()
    ds_kfac.enable()
    options, given = tiny.options([]), dict[str, Any]()
    config = tiny.ds_config(
        options.deepspeed, kfac=KFAC, optimizer=ADAMW, zero_optimization={"stage": stage}
    )
    if ranks > 1:
        config["seq_parallel_communication_data_type"] = "fp32"
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length=16, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        given["parallelism_config"] = ParallelismConfig(
            sp_backend="deepspeed", sp_size=ranks, sp_handler=handler
        )
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=1,
        per_device_train_batch_size=len(LABELLED),
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=tiny.ON_CPU,
        **given,
    )
    rows = [{**row, "position_ids": list(range(16))} for row in labelled_rows()]
    trainer = Trainer(
        model=tiny.model(), args=arguments, train_dataset=rows, data_collator=default_data_collator
    )
    trainer._get_train_sampler = lambda *given: SequentialSampler(rows)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    engine = trainer.model_wrapped
    return {"weights": weights(engine), "traces": traces_of(engine, "AG")}


def traces_of(engine: Any, sides: str = "G") -> dict[str, float]:
    factors = engine.kfac.preconditioner.curvature.factors
    held = {key: factor for key, factor in factors.items() if key[-1] in sides}
    traces = {
        key: float(factor.side.diagonal_of(factor.packed_P).sum()) for key, factor in held.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, traces)
    return {k: v for of_rank in everyone for k, v in of_rank.items()}


def evaluation_worker(folder: str) -> tuple[float, float, int]:
    """``evaluate()`` without an optimizer, which the Trainer has at stage 3 only; another trainer
    trains."""
    ds_kfac.enable()
    with contextlib.redirect_stdout(io.StringIO()):
        before = trainer_of(folder, accumulation=1, micro=4, stage=3).evaluate()["eval_loss"]
        trainer = trainer_of(folder, accumulation=1, micro=4, stage=3)
        trainer.train()
        return (
            before,
            trainer.evaluate()["eval_loss"],
            trainer.model_wrapped.kfac.preconditioner.steps,
        )


def object_worker(folder: str) -> str:
    """An optimizer given by ``optimizers=``, which the Trainer drops under DeepSpeed."""
    fresh()
    options = tiny.options([])
    config = tiny.ds_config(options.deepspeed)
    for block in ("optimizer", "kfac"):
        config.pop(block, None)
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=1,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        use_cpu=tiny.ON_CPU,
    )
    model = tiny.model()
    optimizers = ds_kfac.KFACAdamW(model.parameters(), lr=1e-3), None
    trainer = Trainer(
        model=model, args=arguments, train_dataset=tiny.tokens(8), optimizers=optimizers
    )
    del optimizers
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    except ValueError as error:
        return str(error)
    return "trained"


def reporter_worker(payload: tuple[str, bool]) -> list[str]:
    """Names that reach tensorboard."""
    folder, by_hand = payload
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ds_kfac.enable()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(folder, accumulation=1, micro=4, report_to="tensorboard")
        if by_hand:
            KFACCallback.add_to(trainer)
        trainer.train()
    assert (
        sum(isinstance(callback, KFACCallback) for callback in trainer.callback_handler.callbacks)
        == 1
    )
    directory = (
        next(Path(folder).rglob("events.out.tfevents*")).parent if dist.get_rank() == 0 else None
    )
    if directory is None:
        return []
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator.Tags()["scalars"]


MOVED_AT = 2
DECAYS = {"AdamW": 0.01, "KFACAdamW": 1.0}


class Seen(TrainerCallback):
    """Weights and step when training begins, after a checkpoint was loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.weights, self.step = weights(self.trainer.model_wrapped), state.global_step


def moving_worker(payload: tuple[str, int, str, bool, bool]) -> dict[str, Any]:
    """Train to step 2 and save, or go on from there with the other optimizer to step 4."""
    folder, stage, kind, resumes, universal = payload
    ds_kfac.enable()
    fresh()
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    blocks: dict[str, Any] = {"kfac": {"enabled": kind == "KFACAdamW"}}
    blocks["optimizer"] = {"type": kind, "params": {**auto, "torch_adam": True}}
    if universal:
        blocks["checkpoint"] = {"load_universal": True}
    config = tiny.ds_config(
        tiny.options([]).deepspeed, zero_optimization={"stage": stage}, **blocks
    )
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=2 * MOVED_AT if resumes else MOVED_AT,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        save_steps=MOVED_AT,
        use_cpu=tiny.ON_CPU,
        report_to="none",
        weight_decay=DECAYS[kind],
    )
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    trainer = Trainer(
        model=tiny.model(), args=arguments, data_collator=collator, train_dataset=tiny.tokens(64)
    )
    seen = Seen()
    seen.trainer = trainer
    trainer.add_callback(seen)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(
                resume_from_checkpoint=f"{folder}/checkpoint-{MOVED_AT}" if resumes else None
            )
    except CheckpointError as error:
        return {"error": str(error)}
    engine = trainer.model_wrapped
    attachment = getattr(engine, "kfac", None)
    return {
        "begun": seen.weights,
        "at": seen.step,
        "ended": weights(engine),
        "step": trainer.state.global_step,
        "kfac steps": attachment.counters()["steps"] if attachment else None,
        "decay": max(group["weight_decay"] for group in engine.basic_optimizer.param_groups),
    }


def logged_worker(payload: tuple[str, str, str]) -> dict[str, list[float]]:
    """Name -> values that have reached a reporter of the Trainer's, or DeepSpeed's monitor, in
    three logged steps."""
    folder, door, kind = payload
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": folder,
        "WANDB_SILENT": "true",
        "WANDB_PROJECT": "kfac",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/ml.db",
        "TENSORBOARD_LOGGING_DIR": f"{folder}/board",
    }
    ds_kfac.enable()
    place = (
        {"output_path": folder, "job_name": "board"}
        if kind == "tensorboard"
        else {"project": "kfac"}
    )
    blocks = {kind: {"enabled": True, **place}} if door == "monitor" else {}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(
            folder,
            accumulation=1,
            micro=4,
            more=blocks,
            max_steps=3,
            report_to="none" if blocks else kind,
        )
        trainer.train()
    if kind == "wandb":
        import wandb

        wandb.finish()
    return READERS[kind](Path(folder))


def of_tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(next(folder.rglob("events.out.tfevents*")).parent))
    accumulator.Reload()
    return {
        n: [event.value for event in accumulator.Scalars(n)] for n in accumulator.Tags()["scalars"]
    }


def of_mlflow(folder: Path) -> dict[str, list[float]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/ml.db")
    run = client.search_runs([each.experiment_id for each in client.search_experiments()])[0]
    return {
        n: [each.value for each in client.get_metric_history(run.info.run_id, n)]
        for n in run.data.metrics
    }


def of_wandb(folder: Path) -> dict[str, list[float]]:
    """An offline run's file: records in blocks of 32 kB, in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = (
        next(folder.rglob("*.wandb")).read_bytes(),
        7,
        b"",
        dict[str, list[float]](),
    )
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            for item in record.history.item:
                found.setdefault(item.key or "/".join(item.nested_key), []).append(
                    json.loads(item.value_json)
                )
    return found


READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
