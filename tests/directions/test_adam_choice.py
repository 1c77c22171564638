"""Which layers' directions are orthogonalized, by the names that well-known models give their
layers."""

from dataclasses import replace

from ds_kfac.config.keys import AdamConfig
from ds_kfac.directions.kfac_adamw.group_step import adam_factor, keeps_direction
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
    for width, factor in ((64, 16), (128, 8), (1024, 1), (4096, 1)):
        assert adam_factor(options, linear_layer("lm_head", width, 9), 8.0) == factor
    assert adam_factor(options, linear_layer("blocks.0.mlp.up", 64, 9), 8.0) == 1
    norm = replace(linear_layer("norm", 64, 9), keeps_direction="it is no linear map's matrix")
    assert adam_factor(options, norm, 8.0) == 8
    shard = replace(linear_layer("lm_head", 1024, 9), cut=(1, 4))
    assert adam_factor(options, shard, 64.0) == 2
