"""Which layers' directions are orthogonalized, by the names that well-known models give their
layers."""

from dataclasses import replace

import pytest
import torch

from ds_kfac.assignment.costs import BUILTIN
from ds_kfac.config.keys import AdamConfig, parse
from ds_kfac.curvature.factor import Side
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.directions.kfac_adamw.group_step import SIZE, adam_factor, keeps_direction, step_norm
from ds_kfac.directions.kfac_adamw.optimizer import build
from ds_kfac.directions.kfac_adamw.rule import KFACAdamWRule
from ds_kfac.model.blocks import named
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.plan.plan import EngineFacts, make_plan
from tests.close import close
from tests.models import linear_layer

BODY = {
    "GPT-2": [
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
        "transformer.h.11.mlp.c_fc",
    ],
    "Llama": [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.down_proj",
    ],
    "GPT-NeoX": [
        "gpt_neox.layers.0.attention.query_key_value",
        "gpt_neox.layers.0.mlp.dense_4h_to_h",
    ],
    "BERT": [
        "bert.encoder.layer.0.attention.self.query",
        "bert.pooler.dense",
        "cls.predictions.transform.dense",
    ],
    "RoBERTa": ["lm_head.dense", "classifier.dense", "roberta.encoder.layer.0.output.dense"],
    "DistilBERT": [
        "pre_classifier",
        "vocab_transform",
        "distilbert.transformer.layer.0.attention.out_lin",
    ],
    "T5": [
        "decoder.block.0.layer.1.EncDecAttention.o",
        "decoder.block.0.layer.2.DenseReluDense.wi_0",
    ],
    "BART": [
        "model.decoder.layers.0.encoder_attn.out_proj",
        "classification_head.dense",
        "model.decoder.layers.0.fc1",
    ],
    "ViT": ["vit.encoder.layer.0.attention.attention.query", "vit.pooler.dense"],
    "timm": ["blocks.0.attn.qkv", "blocks.0.mlp.fc2", "patch_embed.proj", "head.pre_logits"],
    "nanoGPT": [
        "transformer.h.0.attn.c_attn",
        "blocks.0.sa.heads.0.key",
        "blocks.0.sa.heads.3.value",
    ],
    "torch": [
        "decoder.layers.0.multihead_attn.out_proj",
        "layers.0.multihead_attn",
        "patch_embed",
        "encoder.0",
    ],
}
HEADS = {
    "GPT-2": ["lm_head", "score"],
    "Llama": ["lm_head", "score"],
    "GPT-NeoX": ["embed_out"],
    "BERT": ["cls.predictions.decoder", "classifier", "qa_outputs"],
    "RoBERTa": ["lm_head.decoder", "classifier.out_proj"],
    "DistilBERT": ["vocab_projector", "classifier"],
    "T5": ["lm_head", "classification_head.out_proj"],
    "BART": ["lm_head", "classification_head.out_proj"],
    "ViT": ["classifier"],
    "timm": ["head", "head_dist", "head.fc"],
    "nanoGPT": ["lm_head"],
    "torch": ["heads.head", "decoder"],
    "PEFT": ["score.modules_to_save.default", "lm_head.base_layer"],
    "torch.compile": ["lm_head._orig_mod"],
}


@pytest.mark.parametrize("model", BODY)
def test_bodies_are_orthogonalized_and_heads_are_not(model):
    for name in BODY[model]:
        assert keeps_direction(AdamConfig(), linear_layer(name, 5, 4)) is None, name
    for name in HEADS[model]:
        assert "kfac.adam.except_layers" in (
            keeps_direction(AdamConfig(), linear_layer(name, 5, 4)) or ""
        ), name


def test_a_pattern_is_the_end_of_a_name():
    for pattern, name in (
        ("head", "vit.head"),
        ("head", "head"),
        (r"mlp\.\d+", "blocks.0.mlp.12"),
        ("a|b", "x.b"),
    ):
        assert named(pattern, name), (pattern, name)
    for pattern, name in (
        ("head", "lm_head"),
        ("head", "head.dense"),
        ("head", "heads"),
        ("a|b", "a.c"),
        ("b", "ab"),
    ):
        assert not named(pattern, name), (pattern, name)


def layer(kind: str) -> LayerSpec:
    return LayerSpec("m0", kind, "m0", "m0.weight", None, Side.dense(4), Side.dense(4))


def test_the_reason_is_said():
    norm = replace(layer("LayerNorm"), keeps_direction="LayerNorm is no linear map's matrix")
    assert keeps_direction(AdamConfig(), norm) == "LayerNorm is no linear map's matrix"
    assert (
        keeps_direction(AdamConfig(except_layers=[".*"]), layer("Linear"))
        == "kfac.adam.except_layers '.*'"
    )
    for kind in ("Linear", "Conv1D", "ColumnParallelLinear", "RowParallelLinear"):
        assert keeps_direction(AdamConfig(), layer(kind)) is None, kind


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


@pytest.mark.parametrize(("outputs", "inputs"), [(12, 5), (5, 12), (8, 8)])
def test_a_step_has_singular_values_that_follow_the_sides(outputs, inputs):
    U, _, Vh = torch.linalg.svd(torch.randn(outputs, inputs), full_matrices=False)
    factor = U @ Vh
    layer = linear_layer("layer", inputs, outputs)
    step = factor * SIZE * step_norm(layer) / factor.norm()
    expected = 27 * (max(outputs, inputs) / min(outputs, inputs)) ** 0.5
    close(torch.linalg.svdvals(step).mean(), torch.tensor(expected), sums=4 * outputs * inputs)


@pytest.mark.parametrize(("outputs", "inputs"), [(12, 4), (4, 12), (8, 8)])
def test_shards_make_together_a_step_of_the_whole_layers_size(outputs, inputs):
    whole = step_norm(linear_layer("layer", inputs, outputs))
    for shard in (
        replace(linear_layer("layer", inputs, outputs // 4), cut=(4, 1)),
        replace(linear_layer("layer", inputs // 4, outputs), cut=(1, 4)),
    ):
        assert shard.whole_shape == (outputs, inputs)
        close(4 * step_norm(shard) ** 2, whole**2)
    head = replace(linear_layer("lm_head", 1024, 9), cut=(1, 4))
    assert adam_factor(AdamConfig(), head, 64.0) == 2


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


def test_a_group_of_its_own_rate_keeps_its_part_of_adam_lr():
    slow, fast, decaying = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [
        {"params": [slow], "lr": 0.25e-2},
        {"params": [fast]},
        {"params": [decaying], "weight_decay": 0.1},
    ]
    groups = [{**group, "kfac": False} for group in groups]
    optimizer = build(groups, {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}, offload=False)
    for parameter in (slow, fast, decaying):
        parameter.grad = torch.ones(2)
    optimizer.step()
    for parameter, moved in ((slow, 0.02), (fast, 0.08), (decaying, 0.08 + 1e-2 * 0.1)):
        close(parameter.data, torch.full((2,), 1 - moved))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25e-2, 1e-2, 1e-2], (
        "schedulers see their own"
    )


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


def test_a_layer_whose_a_is_the_identity_is_said_to_be_orthogonalized_alone():
    """As PEFT's lora_A with a long side is."""
    rule_facts = KFACAdamWFacts()
    config, _ = KFACAdamWRule().resolved(parse({}))
    layer = linear_layer("blocks.0.mlp.lora_A.default", 5, 4)
    assert rule_facts.choice(config, layer) == "whitened and orthogonalized"
    diagonal = replace(layer, A=Side.diagonal(5))  # which whitens, too
    assert rule_facts.choice(config, diagonal) == "whitened and orthogonalized"
    plain = replace(layer, A=Side.identity(5), G=Side.identity(4))
    assert rule_facts.choice(config, plain) == "orthogonalized"
    assert (
        rule_facts.choice(config, replace(plain, blocks=(2, 2)))
        == "orthogonalized in blocks of 2 + 2 rows"
    )
    layers = [
        layer,
        plain,
        replace(plain, name="blocks.1", module="blocks.1", weight="blocks.1.weight"),
    ]
    facts = EngineFacts(
        1, None, torch.float32, torch.float32, moments=2, device=torch.device("cpu")
    )
    plan = make_plan(layers, facts, config, BUILTIN["cpu"])
    said = rule_facts.described(plan, "KFACAdamW", 8.0)
    assert "3 layers orthogonalized at lr" in said and said.endswith(
        "; 2 have no factors: neither rotated nor whitened"
    )
    assert "no factors" not in rule_facts.described(
        make_plan([layer], facts, config, BUILTIN["cpu"]), "KFACAdamW", 8.0
    )
