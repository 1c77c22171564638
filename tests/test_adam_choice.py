"""Which layers' directions are orthogonalized, by the names that well-known models give their layers."""

import pytest

from ds_kfac.adam_choice import excepted, keeps_direction
from ds_kfac.config_blocks import AdamConfig
from ds_kfac.layers.base import LayerSpec, Use
from ds_kfac.layers.row_blocks import row_blocks
from ds_kfac.side import Side
from tests.models import linear_layer

BODY = {
    "GPT-2": ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", "transformer.h.11.mlp.c_fc"],
    "Llama": ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"],
    "GPT-NeoX": ["gpt_neox.layers.0.attention.query_key_value", "gpt_neox.layers.0.mlp.dense_4h_to_h"],
    "BERT": ["bert.encoder.layer.0.attention.self.query", "bert.pooler.dense", "cls.predictions.transform.dense"],
    "RoBERTa": ["lm_head.dense", "classifier.dense", "roberta.encoder.layer.0.output.dense"],
    "DistilBERT": ["pre_classifier", "vocab_transform", "distilbert.transformer.layer.0.attention.out_lin"],
    "T5": ["decoder.block.0.layer.1.EncDecAttention.o", "decoder.block.0.layer.2.DenseReluDense.wi_0"],
    "BART": ["model.decoder.layers.0.encoder_attn.out_proj", "classification_head.dense", "model.decoder.layers.0.fc1"],
    "ViT": ["vit.encoder.layer.0.attention.attention.query", "vit.pooler.dense"],
    "timm": ["blocks.0.attn.qkv", "blocks.0.mlp.fc2", "patch_embed.proj", "head.pre_logits"],
    "nanoGPT": ["transformer.h.0.attn.c_attn", "blocks.0.sa.heads.0.key", "blocks.0.sa.heads.3.value"],
    "torch": ["decoder.layers.0.multihead_attn.out_proj", "layers.0.multihead_attn", "patch_embed", "encoder.0"],
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
}


@pytest.mark.parametrize("model", BODY)
def test_bodies_are_orthogonalized_and_heads_are_not(model):
    for name in BODY[model]:
        assert keeps_direction(AdamConfig(), linear_layer(name, 5, 4)) is None, name
    for name in HEADS[model]:
        assert "kfac.adam.except_layers" in (keeps_direction(AdamConfig(), linear_layer(name, 5, 4)) or ""), name


def test_a_pattern_is_the_end_of_a_name():
    for pattern, name in (("head", "vit.head"), ("head", "head"), (r"mlp\.\d+", "blocks.0.mlp.12"), ("a|b", "x.b")):
        assert excepted(pattern, name), (pattern, name)
    for pattern, name in (("head", "lm_head"), ("head", "head.dense"), ("head", "heads"), ("a|b", "a.c"), ("b", "ab")):
        assert not excepted(pattern, name), (pattern, name)


def test_blocks_of_a_head_are_excepted_by_its_name():
    blocks = row_blocks(linear_layer("lm_head", 5, 40), 16)
    assert len(blocks) == 3 and all(keeps_direction(AdamConfig(), block) for block in blocks)


def layer(*kinds: str) -> LayerSpec:
    side = Side.dense(4)
    uses = tuple(Use(f"m{i}", kind, side, side, False) for i, kind in enumerate(kinds))
    return LayerSpec("m0", "m0.weight", None, side, side, uses)


def test_the_reason_is_said():
    assert keeps_direction(AdamConfig(), layer("LayerNorm")) == "LayerNorm is no linear map's matrix"
    assert keeps_direction(AdamConfig(), layer("Linear", "Embedding")) == "its weight is an embedding's too"
    assert keeps_direction(AdamConfig(orthogonalize=False), layer("Linear")) == "kfac.adam.orthogonalize is false"
    for kind in ("Linear", "Conv1D", "ColumnParallelLinear", "RowParallelLinear"):
        assert keeps_direction(AdamConfig(), layer(kind)) is None, kind
