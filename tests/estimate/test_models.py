"""The models of the benchmarks have the published sizes, and a forward tells which layers see one
input."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_kfac.estimate.models import build
from ds_kfac.estimate.subject import Subject
from ds_kfac.estimate.trace import Trace
from tests.deepspeed import expert_stacks

PUBLISHED = {  # parameters, groups of layers with one input; BERT: 335,141,888 without its heads
    "gpt2": (124_439_808, 0),
    "gpt2_xl": (1_557_611_200, 0),
    "bert_large": (336_226_108, 24),
    "llama_7b": (6_738_415_616, 64),
    "gpt_oss_20b": (20_914_757_184, 24),
    "qwen3_30b_a3b": (30_532_122_624, 48),
}
STACKED = {
    "gpt_oss_20b": (4, 32, 24, 2880 * (5760 + 2880)),
    "qwen3_30b_a3b": (8, 128, 48, 2048 * (1536 + 768)),
}
"""Experts of a token, experts, blocks, elements of an expert."""
HERE = "tests.estimate.test_models"
ADAMW = {"optimizer": {"type": "AdamW"}, "kfac": {}}


def numel(subject: Subject) -> int:
    return sum(numel for group in subject.groups for _, numel in group)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_size_and_layers_that_share_an_input_on_the_meta_device(name):
    model, example = build(f"benchmarks.models:{name}")
    numels, shared = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == numels
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *example))
    traced = Trace.of(model, example)
    subject = Subject(model, ADAMW, trace=traced)
    assert len(subject.shared) == shared and numel(subject) == numels
    if name == "llama_7b":
        attention, mlp = "layers.31.attention", "layers.31.mlp"
        expected = (
            (f"{attention}.query", f"{attention}.key", f"{attention}.value"),
            (f"{mlp}.gate", f"{mlp}.up"),
        )
        assert subject.shared[-2:] == expected
    if name == "gpt2_xl":  # all but positions, which are looked up
        assert subject.forward == numels - 1024 * 1600
    if name in STACKED:
        top, experts, blocks, expert = STACKED[name]
        assert len(traced.stacked) == 2 * blocks
        assert set(traced.stacked.values()) == {top / experts}
        idle = blocks * (experts - top) * expert + model.embed_tokens.weight.numel()
        active = subject.forward / (numels - idle)
        assert abs(active - 1) < 0.01  # multiplications are of these, but for biases and norms
        assert Subject(model, ADAMW).forward == 0, "not known without a forward"


def test_rows_of_a_token_and_of_an_image():
    rows = Trace.of(*build("benchmarks.models:bert_large")).rows
    assert rows["blocks.0.mlp.up"] == 1 and rows["pooler"] == 1 / 512
    model, example = build(f"{HERE}:convolutional")
    found = Trace.of(model, example)
    assert found.rows["0"] == found.rows["1"] == 16 * 16 and found.rows["3"] == 1
    # a product and a norm at every place, and the head
    forward = 16 * 16 * (3 * 8 * 9 + 2 * 8) + 8 * 5
    assert Subject(model, ADAMW, trace=found).forward == forward


@pytest.mark.parametrize("kind", ["Lying", "Upright", "Grouped", "Picked"])
def test_rows_of_stacked_experts_are_seen_in_every_form(kind):
    model = expert_stacks.make(getattr(expert_stacks, kind), bias=kind == "Lying")
    x = torch.randn(20, expert_stacks.WIDTH), torch.zeros(20, dtype=torch.long)
    rows = Trace.of(model, x).stacked
    assert rows.keys() == {f"experts.{name}" for name in ("gate_up_proj", "down_proj")}
    of_all = {round(20 * expert_stacks.EXPERTS * count) for count in rows.values()}
    assert of_all == {20 * expert_stacks.TOP}


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def convolutional():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        Mean(),
        nn.Linear(8, 5, bias=False),
    )
    return model, torch.zeros(2, 3, 16, 16)


def small() -> nn.Module:
    return nn.Linear(7, 5)


def no_module():
    return 3


def test_a_factory_may_give_no_example():
    model, example = build(f"{HERE}:small")
    assert example is None and next(model.parameters()).is_meta


def test_a_model_of_timm_comes_with_an_image_of_its_size(monkeypatch):
    made = convolutional()[0]
    made.default_cfg = {"input_size": (3, 24, 24)}
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda name: made))
    model, example = build("timm:resnet50")
    assert model is made and example[0].shape == (1, 3, 24, 24) and example[0].is_meta
