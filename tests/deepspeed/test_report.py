"""The attach report: what matters first, equal layers in one row, short for a large model."""

import pytest
from torch import nn

import ds_kfac
from ds_kfac.engine.layer_tables import folded
from tests.deepspeed.test_not_attached import said
from tests.ranks import run_ranks

WIDTH, BLOCKS = 8, 32


def test_equal_rows_become_one():
    rows = [(f"blocks.{i}.mlp.up", "Linear", "8") for i in range(32)]
    rows += [("head", "Linear", "9"), *((f"blocks.{i}.norm{j}", "Norm", "1") for i in (0, 2) for j in (1, 2))]
    rows += [("blocks.7.mlp.up", "Linear", "99")]
    assert folded(rows) == [
        ("blocks.[0-31].mlp.up x 32", "Linear", "8"),
        ("head", "Linear", "9"),
        ("blocks.[0-2].norm[1-2] x 4", "Norm", "1"),
        ("blocks.7.mlp.up", "Linear", "99"),
    ]


class Block(nn.Module):
    """As many layers as a Llama's, with its names."""

    def __init__(self) -> None:
        super().__init__()
        attention = {f"{name}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for name in "qkvo"}
        mlp = {f"{name}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for name in ("gate", "up", "down")}
        self.self_attn, self.mlp = nn.ModuleDict(attention), nn.ModuleDict(mlp)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16, bias=False)


def worker(_) -> dict:
    import deepspeed.accelerator.cpu_accelerator as accelerator

    found = {}

    def attach(name: str, **kfac) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "KFACAdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "kfac": kfac,
        }
        engines = []
        text = said(lambda: engines.append(ds_kfac.initialize(model=Model(), config=config)[0]))
        found[name] = text, engines[0].kfac.report
        engines[0].destroy()

    attach("summary")
    attach("full", report="full")
    attach("idle", damping={"value": 2.0})
    accelerator.CPU_Accelerator.available_memory = lambda self, device_index=None: 500_000
    attach("little memory")
    return found


@pytest.mark.distributed
def test_a_llama_of_32_blocks_has_a_short_report():
    found = run_ranks("tests.deepspeed.test_report:worker", world=1)[0]
    logged, report = found["summary"]
    lines = report.splitlines()
    assert report in logged and len(lines) <= 40, report
    assert "attached" in lines[0] and "(96%) in 225 K-FAC layers" in lines[1] and "WARNING" not in report
    assert any("layers.[0-31].mlp.up_proj x 32" in line for line in lines)
    assert any("layers.[0-31].input_layernorm x 32" in line for line in lines)
    assert len(found["full"][1].splitlines()) > 290 and "layers.31.mlp.up_proj " in found["full"][1]
    assert "without effect with KFACAdamW: kfac.damping.value" in found["idle"][1].splitlines()[2]
    warned = found["little memory"][1].splitlines()[2]
    parts = "K-FAC needs", "in a step that updates all factors", "of the 0.0 GB that are free"
    assert "WARNING" in warned and all(part in warned for part in parts), warned
