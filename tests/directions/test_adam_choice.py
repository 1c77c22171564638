"""Which layers' directions are orthogonalized, by the names that well-known models give their
layers."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.config.keys import AdamConfig, parse
from ds_kfac.curvature.factor import Side
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.directions.kfac_adamw.group_step import adam_factor, keeps_direction
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.model.blocks import named
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.plan.plan import EngineFacts, make_plan
from tests.models import linear_layer

BODY = """
transformer.h.0.attn.c_attn transformer.h.0.attn.c_proj transformer.h.11.mlp.c_fc
model.layers.0.self_attn.q_proj model.layers.0.mlp.gate_proj model.layers.0.mlp.down_proj
gpt_neox.layers.0.attention.query_key_value gpt_neox.layers.0.mlp.dense_4h_to_h
bert.encoder.layer.0.attention.self.query bert.pooler.dense cls.predictions.transform.dense
lm_head.dense classifier.dense roberta.encoder.layer.0.output.dense
pre_classifier vocab_transform distilbert.transformer.layer.0.attention.out_lin
decoder.block.0.layer.1.EncDecAttention.o decoder.block.0.layer.2.DenseReluDense.wi_0
model.decoder.layers.0.encoder_attn.out_proj classification_head.dense
vit.encoder.layer.0.attention.attention.query vit.pooler.dense
blocks.0.attn.qkv blocks.0.mlp.fc2 patch_embed.proj head.pre_logits
blocks.0.sa.heads.0.key blocks.0.sa.heads.3.value
decoder.layers.0.multihead_attn.out_proj layers.0.multihead_attn patch_embed encoder.0
"""
"""Names in GPT-2, Llama, GPT-NeoX, BERT, RoBERTa, DistilBERT, T5, BART, ViT, timm, nanoGPT, torch,
by lines; and of heads there, and as PEFT and torch.compile wrap them."""
HEADS = """
lm_head score embed_out cls.predictions.decoder classifier qa_outputs
lm_head.decoder classifier.out_proj vocab_projector classification_head.out_proj
head head_dist head.fc heads.head decoder
score.modules_to_save.default lm_head.base_layer lm_head._orig_mod
"""


def kept(name: str) -> str | None:
    return keeps_direction(AdamConfig(), linear_layer(name, 5, 4))


def test_bodies_are_orthogonalized_and_heads_are_not():
    assert not [name for name in BODY.split() if kept(name)]
    heads = [name for name in HEADS.split() if "kfac.adam.except_layers" in (kept(name) or "")]
    assert heads == HEADS.split()


def test_a_pattern_is_the_end_of_a_name():
    for pattern, name in (
        ("head", "vit.head"),
        ("head", "head"),
        (r"mlp\.\d+", "blocks.0.mlp.12"),
        ("a|b", "x.b"),
    ):
        assert named(pattern, name), (pattern, name)
    for pattern, name in (("head", "lm_head"), ("head", "head.dense"), ("a|b", "a.c"), ("b", "ab")):
        assert not named(pattern, name), (pattern, name)


def test_the_reason_is_said():
    layer = linear_layer("blocks.0", 4, 4)
    norm = replace(layer, keeps_direction="LayerNorm is no linear map's matrix")
    assert keeps_direction(AdamConfig(), norm) == "LayerNorm is no linear map's matrix"
    none = AdamConfig(except_layers=[".*"])
    assert keeps_direction(none, layer) == "kfac.adam.except_layers '.*'"
    for kind in ("Linear", "Conv1D", "ColumnParallelLinear", "RowParallelLinear"):
        assert keeps_direction(AdamConfig(), replace(layer, kind=kind)) is None, kind


def test_without_rotation_there_are_no_factors():
    model = torch.nn.Sequential(torch.nn.Linear(7, 20), torch.nn.Linear(20, 3, bias=False))
    for factor in ({}, {"dense_max": 4}):
        rule, block = KFACAdamWRule(), {"adam": {"rotate": False}, "factor": factor}
        config, _ = rule.resolved(parse(block))
        layers = scan(model, rule.scanned(config)).layers
        assert [(layer.A.block, layer.G.block) for layer in layers] == [(0, 0), (0, 0)]
        assert config == rule.resolved(parse({**block, "adam": {}}))[0].having(
            "adam", rotate=False
        ), "nothing else changes"


def test_heads_rates_fall_with_the_width_to_lr():
    options = AdamConfig()
    factors = [
        adam_factor(options, linear_layer("lm_head", width, 9), 8.0)
        for width in (64, 128, 1024, 4096)
    ]
    assert factors == [16, 8, 1, 1]
    assert adam_factor(options, linear_layer("blocks.0.mlp.up", 64, 9), 8.0) == 1
    norm = replace(
        linear_layer("norm", 64, 9), keeps_direction="LayerNorm is no linear map's matrix"
    )
    assert adam_factor(options, norm, 8.0) == 8
    shard = replace(linear_layer("lm_head", 1024, 9), cut=(1, 4))
    assert adam_factor(options, shard, 64.0) == 2


def test_blocks_of_layers_that_keep_adams_direction_are_said_to_have_no_effect():
    """A head, and one among layers that have them."""
    body = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(4, 6), "up": torch.nn.Linear(4, 6)})
    config = parse({"adam": {"blocks": {"lm_head": 2, "up|lm_head": 2, "gone": 2}}})
    said = KFACAdamWFacts().idle(
        config, scan(body, LayerChoice(blocks=tuple(config.adam.blocks.items()))).layers
    )
    assert said == [
        "kfac.adam.blocks 'gone', which no layer's name ends with",
        "kfac.adam.blocks 'lm_head', whose layers keep Adam's direction "
        "(kfac.adam.except_layers '([^.]*_)?head(_dist)?')",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "whitened and orthogonalized"),
        ({"A": Side.diagonal(5)}, "whitened and orthogonalized"),
        # as PEFT's lora_A with a long side is
        ({"A": Side.identity(5)}, "orthogonalized"),
        (
            {"A": Side.identity(5), "blocks": (2, 2)},
            "orthogonalized in blocks of 2 + 2 rows",
        ),
    ],
)
def test_what_is_made_of_a_layer_is_said(changes, said):
    config, _ = KFACAdamWRule().resolved(parse({}))
    layer = replace(linear_layer("blocks.0.mlp.up", 5, 4), G=Side.identity(4), **changes)
    assert KFACAdamWFacts().choice(config, layer) == said
    facts = EngineFacts(1, None, torch.float32, torch.float32, 2, device=torch.device("cpu"))
    plan = make_plan([layer], facts, config, BUILTIN["cpu"])
    described = KFACAdamWFacts().described(plan, "KFACAdamW", 8.0)
    bare = layer.A.block == 0
    assert ("1 have no factors: neither rotated nor whitened" in described) == bare
