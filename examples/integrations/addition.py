"""A task for learning from rewards: sums of two numbers, and a model that was taught a little of
it."""

import random

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from examples.integrations import tiny

LARGEST, STEPS = 50, 200


def sums(seed: int, count: int) -> Dataset:
    source = random.Random(seed)
    pairs = [(source.randrange(LARGEST), source.randrange(LARGEST)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a, b in pairs]
    )


def rewards(completions: list[str], answer: list[str], **_) -> list[float]:
    return [
        float(completion == right) for completion, right in zip(completions, answer, strict=True)
    ]


def taught(steps: int = STEPS) -> LlamaForCausalLM:
    """A model after so many supervised steps: in a script of your own this is a checkpoint."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=258, max_position_embeddings=32, pad_token_id=257, **sizes)
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    tokenizer = tiny.tokenizer()
    for step in range(steps):
        rows = sums(step + 1, 128)
        texts = [f"{row['prompt']}{row['answer']}<eos>" for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :6] = -100  # of the question
        model(batch["input_ids"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model
