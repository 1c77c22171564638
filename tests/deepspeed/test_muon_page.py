"""What docs/migrate/muon.md says of DeepSpeed's Muon: at which stages it steps, and what clipping bounds there."""

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.close import near
from tests.ranks import run_ranks

MUON = {"type": "Muon", "params": {"muon_lr": 0.1, "adam_lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}}


def worker(_) -> dict:
    """(stage, clipping) -> largest and a middle singular value of each weight's first step."""
    found = {}
    for stage in range(4):
        for clipping in (0.0, 1.0):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))
            zero = {"stage": stage, **({"reduce_scatter": False} if stage == 3 else {})}
            config = {"train_micro_batch_size_per_gpu": 8, "optimizer": MUON, "zero_optimization": zero}
            engine, *_ = deepspeed.initialize(model=model, config={**config, "gradient_clipping": clipping})
            before = weights(engine, stage)
            loss = engine(torch.randn(8, 16, generator=torch.Generator().manual_seed(1))).square().mean()
            engine.backward(loss)
            engine.step()
            steps = [new - old for new, old in zip(weights(engine, stage), before, strict=True)]
            found[stage, clipping] = [torch.linalg.svdvals(step)[:8].tolist() for step in steps]
    return found


def weights(engine, stage: int) -> list:
    return [(safe_get_full_fp32_param(p) if stage else p).detach().clone() for p in engine.module.parameters()]


@pytest.mark.distributed
@pytest.mark.skipif(deepspeed.__version__.split("+")[0] != "0.19.8", reason="the page is of this version")
def test_muon_steps_at_every_stage_and_clipping_bounds_its_updates_from_stage_1_on():
    found = run_ranks("tests.deepspeed.test_muon_page:worker", world=1)[0]
    for stage in range(4):
        for values, plain in zip(found[stage, 0.0], found[0, 0.0], strict=True):
            assert 0.05 < min(values) and max(values) < 0.2, "orthogonalized, at muon_lr"
            near(values, plain, 0.02 * max(plain), "Newton-Schulz in bf16")
        clipped = [x for layer in found[stage, 1.0] for x in layer]
        assert max(clipped) > 0.1 if stage == 0 else max(clipped) < 0.05, (stage, clipped)
