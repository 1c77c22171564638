"""A model, its data, and configs of engines that factors are computed with."""

import torch

from examples.gpt import GPT, GPTConfig

MODEL = GPTConfig(width=16, blocks=2, heads=2, context=8)
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(MODEL)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x, y = (torch.randint(0, 256, (3, 8), generator=generator) for _ in range(2))
        y[0, 5:] = -100
        made.append((x, y))
    return made


def config(stage: int, *, optimizer: bool, dtype: str = "fp32", offload: bool = False) -> dict:
    """Of an engine with the model's own AdamW, or without any optimizer."""
    whole = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000}
    zero = {"stage": stage, **whole, **({"offload_param": {"device": "cpu"}} if offload else {})}
    found = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    return {**found, "optimizer": OPTIMIZER} if optimizer else found
