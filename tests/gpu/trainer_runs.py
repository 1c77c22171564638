"""transformers' Trainer with KFACAdamW on one device, in 16 bits; without the package datasets."""

import contextlib
import io
import math
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import ds_kfac

ROWS, TOKENS, STEPS = 16, 24, 12
VOCABULARY = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """Sums that repeat, with unequally many labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(ROWS * STEPS):
        start, by = torch.randint(1, 5, (2,), generator=generator).tolist()
        ids = (start + by * torch.arange(TOKENS)) % VOCABULARY
        labels = ids.clone()
        labels[TOKENS - index % (TOKENS // 2) :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def train(payload: tuple[str, str, int]) -> dict[str, Any]:
    """Payload: output folder, "bf16" or "fp16", micro-batches of a step. Returns losses and the
    trace of every A."""
    folder, precision, accumulation = payload
    on_cpu = get_accelerator().device_name() == "cpu"
    ds_kfac.enable()
    set_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **sizes)
    )
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "KFACAdamW", "params": {"lr": "auto", "torch_adam": True}},
        "kfac": {
            "factor": {"update_interval": 1, "rows": "all"},
            "eigenbasis": {"refresh_interval": 4},
        },
    }
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=on_cpu,
        **{precision: True},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows(), data_collator=default_data_collator
        )
        trainer.train()
    engine = trainer.model_wrapped
    factors = engine.kfac.preconditioner.curvature.factors
    traces = {
        name: float(factor.side.diagonal_of(factor.packed_P).sum())
        for name, factor in factors.items()
    }
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(value) for value in (*losses, *traces.values()))
    counts = dict(engine.kfac.preconditioner.metrics.counts)
    return {
        "losses": losses,
        "traces": traces,
        "counts": counts,
        "dtype": str(next(engine.module.parameters()).dtype),
    }
