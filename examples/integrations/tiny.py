"""A tiny random Llama, a byte tokenizer and sentences, so that the examples run without a download;
and their options.

In a script of your own these are your model, tokenizer and data.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import tokenizers
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

ON_CPU = not torch.cuda.is_available()


def options(argv: Sequence[str] | None, flags: Sequence[str] = ()) -> argparse.Namespace:
    """What all examples take, and an example's own flags; on a CPU it also starts gloo, which they
    would not by themselves."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--deepspeed", type=Path, default=Path(__file__).with_name("ds_config.json")
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/integrations"))
    parser.add_argument("--resume", help="checkpoint to continue from")
    parser.add_argument("--local_rank", type=int, default=0)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    if ON_CPU and not deepspeed.comm.is_initialized():
        # compiled for minutes, and no faster
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
    set_seed(0)
    return parser.parse_args(argv)


def ds_config(path: Path, **changes: Any) -> dict[str, Any]:
    return json.loads(path.read_text()) | changes


def arguments(options: argparse.Namespace, *, evaluates: bool = True) -> dict[str, Any]:
    """What all examples tell their Trainer: nothing here is about K-FAC. On a CPU there is no bf16
    to begin with, and a model this small recomputes nothing."""
    run = {
        "output_dir": str(options.out),
        "max_steps": options.steps,
        "save_steps": max(1, options.steps // 2),
    }
    logs = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    memory = {"use_cpu": ON_CPU, "bf16": False, "gradient_checkpointing": False}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": options.steps}
    return run | logs | memory | (batch | evaluation if evaluates else {})


def model() -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=258, max_position_embeddings=128, pad_token_id=257, **sizes)
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    vocabulary = {
        byte: number
        for number, byte in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    bytes_only = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary | {"<eos>": 256, "<pad>": 257}, [])
    )
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<eos>", pad_token="<pad>"
    )


def texts(count: int = 256) -> Dataset:
    """Sums to learn, of different lengths."""
    return Dataset.from_dict(
        {"text": [f"{i} + {i * i % 37} = {i + i * i % 37}." for i in range(count)]}
    )


def tokens(count: int = 256) -> Dataset:
    encode = tokenizer()
    return texts(count).map(lambda row: encode(row["text"]), remove_columns=["text"])
