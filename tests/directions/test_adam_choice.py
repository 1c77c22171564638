"""Which layers' directions are orthogonalized, by the names that well-known models give their
layers."""

from dataclasses import replace

import torch

from ds_kfac.config.keys import AdamConfig, parse
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.directions.kfac_adamw.group_step import adam_factor, keeps_direction
from ds_kfac.model.scan import LayerChoice, scan
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
        "kfac.adam.blocks 'gone': no layer's name ends with it",
        "kfac.adam.blocks 'lm_head', whose layers keep Adam's direction "
        "(kfac.adam.except_layers '([^.]*_)?head(_dist)?')",
    ]
