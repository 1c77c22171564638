"""Factors of engines on several ranks; what the tests of this folder run."""

from pathlib import Path

import torch

import ds_kfac
from ds_kfac.factors.files import FactorsError
from ds_kfac.factors.fitting import fit
from examples.gpt import GPT, GPTConfig
from tests.ranks import init_deepspeed

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
    zero: dict = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 1000,
    }
    if offload:
        zero["offload_param" if not optimizer else "offload_optimizer"] = {"device": "cpu"}
    found = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
        "zero_force_ds_cpu_optimizer": False,
    }
    if optimizer:
        found["optimizer"] = OPTIMIZER
    if dtype != "fp32":
        found[dtype] = {"enabled": True}
    return found


def spoilt(at: int, rank: int, how: str):
    """A loss that is no number in one batch of rank 1, no scalar, none of the layers', or
    raises."""
    calls = iter(range(1 << 30))

    def loss(own, batch):
        bad, value = rank == 1 and next(calls) == at, own(*batch)
        if bad and how == "raises":
            raise RuntimeError("no memory")
        if not bad:
            return value
        return {
            "nan": value * float("nan"),
            "vector": value[None, None].expand(2, 1),
            "apart": value.detach(),
        }[how]

    return loss


def main(payload: dict):
    """Fit on this rank's share of the batches; engines of ``payload["modes"]``, or the bare model
    where None.

    ``out``: None: engines train without it.
    ``spoils``: how the loss of rank 1's second batch is wrong (:func:`spoilt`), or "number": that
        batch is one.
    ``idle``: rank 0 has all batches.
    """
    init_deepspeed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # ranks have different numbers of batches
    data = batches(payload["batches"])[rank::world]
    if payload.get("idle"):
        data = batches(payload["batches"]) if rank == 0 else []
    said = {}
    for name, mode in payload["modes"].items():
        own = model()
        if mode is not None:
            own = ds_kfac.engine.entry._plain_initialize(model=own, config=mode)[0]
        before = [p.detach().clone() for p in getattr(own, "module", own).parameters()]
        if how := payload.get("spoils"):
            if how == "number" and rank == 1:
                data[1] = 1
            try:
                fit(
                    own, data, spoilt(1, rank, how), out=Path(payload["out"]) / name, progress=False
                )
            except FactorsError as problem:
                said[name] = str(problem)
            continue
        if payload["out"] is not None:
            fit(own, data, out=Path(payload["out"]) / name, progress=False)
        after = list(getattr(own, "module", own).parameters())
        said[name] = {
            "grads": sum(p.grad is not None for p in after),
            "moved": sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "training": getattr(own, "module", own).training,
        }
        if mode is not None and "optimizer" in mode:
            # the engine goes on training
            for batch in batches(2):
                loss = own(*batch)
                own.backward(loss)
                own.step()
            said[name]["loss"] = float(own(*batch))
        if mode is not None:
            own.destroy()
    return said
