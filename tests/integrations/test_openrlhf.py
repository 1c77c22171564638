"""OpenRLHF by its interface as read in 0.11.2: the config and the call of deepspeed.initialize that
its strategy makes, with one word of it changed; the package needs a GPU to be imported."""

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
STEPS = 12


def config_of(stage: int) -> dict:
    """Of get_train_ds_config in fp32 what differs from DeepSpeed's defaults; the optimizer is
    KFACAdamW in place of AdamW."""
    autos = ["sub_group_size", "reduce_bucket_size", "stage3_param_persistence_threshold"]
    autos += ["stage3_max_live_parameters", "stage3_max_reuse_distance"]
    zero = {"stage": stage, **dict.fromkeys([*autos, "stage3_prefetch_bucket_size"], "auto")}
    zero["offload_param"] = {"device": "none"}
    zero["offload_optimizer"] = {"device": "none", "pin_memory": True}
    params = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
    params |= {"adam_lr": 1e-3, "torch_adam": True}
    return {
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "data_types": {"grad_accum_dtype": None},
        "tensor_parallel": {"autotp_size": 1},
        "optimizer": {"type": "KFACAdamW", "params": params},
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 8,
    }


def worker(stage: int) -> tuple[list[float], list[float], int]:
    """Losses, rates, and rows of a batch with padding that count."""
    from functools import partial

    import deepspeed
    import torch

    import ds_kfac
    from examples.gpt import GPT, GPTConfig

    class Causal(GPT):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids)

    ds_kfac.enable()
    torch.manual_seed(0)
    model = Causal(GPTConfig(width=16, blocks=1, heads=2, context=8))
    parts = [[p for p in model.parameters() if (p.ndim < 2) == vector] for vector in (False, True)]
    groups = [{"params": part} for part in parts]
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None,
        model_parameters=groups,
        lr_scheduler=cosine,
        config=config_of(stage),
        args={"local_rank": -1},
        dist_init_required=True,
    )
    tokens = torch.arange(4 * 8).view(4, 8) % 5
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, 5:] = 0
    losses, rates = [], []
    for _ in range(STEPS):
        logits = engine(tokens, attention_mask=mask, position_ids=None)
        found = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(found * mask[:, 1:]).sum() / mask[:, 1:].sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        rates.append(engine.get_lr()[0])
    (attended,) = engine.kfac.mask((tokens,), {"attention_mask": mask})
    assert engine.kfac.preconditioner.steps == STEPS
    return losses, rates, int(attended.sum())


@pytest.mark.parametrize("stage", [2, 3])
def test_its_call_of_initialize_trains_and_schedules(stage):
    losses, rates, rows = run_ranks(f"{__name__}:worker", world=2, payload=stage)[0]
    assert losses[-1] < losses[0] - 0.1 and rates[0] > rates[5] > rates[-1] >= 0
    assert rows == 4 * 8 - 3, "every row inside the mask counts, questions included"
