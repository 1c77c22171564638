"""Which rows of a matrix are maps of their own: by the names in use, what the module around them
says, by patterns. And large heads that become layers of a part of their outputs each."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_kfac.config.keys import KFACConfig
from ds_kfac.curvature.factor import Side
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.estimate.subject import Subject
from ds_kfac.model import blocks as module
from ds_kfac.model.blocks import blocks_text, cut
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import LayerChoice, scan
from tests.model.written import written

WIDTH = 24
CONFIG = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)


class Holder(nn.Module):
    """A linear of that name, in a module that knows numbers."""

    def __init__(self, name: str, rows: int, **numbers) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(WIDTH, rows))
        for key, value in numbers.items():
            setattr(self, key, value)

    def forward(self, x):
        return x


def called(name: str) -> type[Holder]:
    """A class whose name says how its outputs lie."""
    return type(name, (Holder,), {})


def saved_by_peft(name: str, layer: nn.Module) -> nn.Module:
    """As PEFT holds a module that it trains whole."""
    copies = nn.ModuleDict({"default": layer})
    return nn.ModuleDict({name: nn.ModuleDict({"modules_to_save": copies})})


def blocks(model: nn.Module, **chosen) -> dict[str, tuple[int, ...]]:
    found = scan(model, LayerChoice(blocks=tuple(chosen.items())))
    return {layer.weight.removesuffix(".weight"): layer.blocks for layer in found.layers}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Holder("qkv", 72), (24, 24, 24)),
        (Holder("qkv", 50), ()),
        (Holder("qkv_proj", 48, config=CONFIG), (32, 8, 8)),
        (Holder("c_attn", 30, num_heads=3, kv_heads=1, multi_query=True), (18, 6, 6)),
        (Holder("c_attn", 54, num_heads=3, kv_heads=3, multi_query=False), (6, 6, 6)),
        (Holder("c_attn", 48, num_heads=3, q_attn=1), (24, 24)),
        (called("CodeGenAttention")("qkv_proj", 72), (6, 6, 6)),
        (called("MiniMaxLightningAttention")("qkv_proj", 72, num_attention_heads=4), (6, 6, 6)),
        (Holder("gate_up_proj", 48), (24, 24)),
        (called("GptOssExperts")("gate_up_proj", 48), (1, 1)),
        (Holder("kv_proj", 48, kv_projection_size=24), (24, 24)),
        (Holder("Wi", 48, Wo=nn.Linear(24, 3)), (24, 24)),
        (Holder("Wi", 48, Wo=nn.Linear(48, 3)), ()),
        (called("ShortConv")("in_proj", 72), (24, 24, 24)),
        (Holder("query_key_value", 72), ()),
        (Holder("query_key_value", 72, num_attention_heads=4), (6, 6, 6)),
        (Holder("query_key_value", 48, num_heads=4, num_kv_heads=2), (12, 6, 6)),
        (Holder("kv_a_proj_with_mqa", 20, kv_lora_rank=16), (16, 4)),
        (Holder("kv_b_proj", 56, qk_nope_head_dim=8, v_head_dim=6), (8, 6)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1), (48, 48)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1, n_mamba_heads=2), (1, 1)),
        (Holder("in_proj", 116, intermediate_size=48, num_heads=4, A_log=1), (48, 48, 8, 8, 4)),
        (Holder("x_proj", 20, ssm_state_size=8), (4, 8, 8)),
        (Holder("in_proj_qkv", 64, key_dim=16), (16, 16, 32)),
        (Holder("in_proj_qkvz", 96, num_k_heads=2, head_k_dim=8), (8, 8, 16, 16)),
        (Holder("in_proj_ba", 16, num_k_heads=2), (4, 4)),
        (Holder("out", 72, num_heads=4), ()),
        (nn.ModuleDict({"qkv": nn.ModuleList([nn.Linear(WIDTH, 72)])}), (24, 24, 24)),
        (saved_by_peft("qkv", nn.Linear(WIDTH, 72)), (24, 24, 24)),
    ],
)
def test_known_names_have_blocks_where_the_module_tells_them(model, expected):
    assert next(iter(blocks(model).values())) == expected


def test_blocks_of_a_stack_are_those_of_every_entry():
    code = (
        "return [F.silu(a) * b for w in (0, 1) for a, b in [(x @ self.gate_up_proj[w]).chunk(2)]]"
    )
    experts = written(code)()
    experts.gate_up_proj = nn.Parameter(torch.zeros(2, WIDTH, 48))
    assert [layer.blocks for layer in scan(experts).layers] == [(24, 24), (24, 24)]


def test_blocks_by_a_name_and_a_name_without_blocks_are_said():
    for holder, words in (
        (Holder("qkv", 50), "as one map: nothing shows its parts"),
        (Holder("query_key_value", 72, num_heads=4), "4 x (6 + 6 + 6) rows, by its name"),
    ):
        (layer,) = scan(holder).layers
        assert words in KFACAdamWFacts().choice(KFACConfig(), layer)


def test_a_pattern_goes_before_what_is_known():
    models = {"a": Holder("qkv", 72), "b": Holder("qkv", 72), "c": Holder("wide", 72)}
    model = nn.ModuleDict(models | {"d": nn.ModuleDict({"wide": nn.Conv2d(3, 12, 1)})})
    found = blocks(model, **{r"a\.qkv": 12, r"b\.qkv": 1, "wide": [2, 1]})
    assert found == {"a.qkv": (6,) * 12, "b.qkv": (), "c.wide": (2, 1), "d.wide": ()}
    assert blocks(model, ide=2)["c.wide"] == (), "not the end of a word"
    (layer,) = scan(Holder("q", 72), LayerChoice(blocks=(("q", 12),))).layers
    assert blocks_text(layer) == "12 of 6 rows"


@pytest.mark.parametrize(
    ("given", "said"), [(5, "5 equal blocks"), ([5, 2], r"blocks of \[5, 2\] rows")]
)
def test_blocks_that_do_not_fit_are_an_error_that_names_the_layer(given, said):
    message = rf"kfac.adam.blocks 'qkv': qkv has 72 rows, which cannot be cut into {said}"
    with pytest.raises(ValueError, match=message):
        blocks(Holder("qkv", 72), qkv=given)


# parts of large heads


def head(O: int = 12, I: int = 5, **changes) -> LayerSpec:  # noqa: E741
    A, G = Side.dense(I), Side.identity(O)
    return replace(LayerSpec("head", "Linear", "head", "head.w", "head.b", A, G), **changes)


def parts(*layers: LayerSpec, by_rows=lambda layer: True) -> tuple[LayerSpec, ...]:
    return cut(layers, by_rows)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 59)
    monkeypatch.setattr(module, "PART", 20)


def test_outputs_that_do_not_divide_take_the_next_number_of_parts(small):
    assert len(parts(head(14))) == 7, "4 parts would be enough"
    assert len(parts(head(15))) == 5, "3 would be larger than a part"
    assert len(parts(head(13))) == 13
    assert len(parts(head(11, 100))) == 1, "a single output is larger than a part"


WHOLE = [{"O": 11}, {"G": Side.dense(12)}, {"G": Side.diagonal(12)}, {"A": Side.identity(5)}]
WHOLE += [{"kind": "Conv1D"}, {"kind": "LinearLayer"}, {"product": True}, {"copies": 2}]
WHOLE += [{"cut": (2, 1)}, {"part": (0, 2)}]


@pytest.mark.parametrize("changes", WHOLE, ids=str)
def test_what_is_small_or_would_change_stays_whole(changes, small):
    layer = head(**changes)
    assert parts(layer) == (layer,)
    whole, other = head(), replace(head(), name="other")
    assert parts(whole, other, by_rows=lambda layer: layer is other)[0] is whole


def test_only_heads_are_cut_and_only_by_KFACAdamW(small):
    """For other optimizers relative damping is of a layer's mean."""
    model = nn.ModuleDict(
        {"first": nn.Linear(11, 12, bias=False), "lm_head": nn.Linear(12, 12, bias=False)}
    )
    cut_head = [f"lm_head.{index}" for index in range(12)]
    for optimizer, expected in (("KFACAdamW", cut_head), ("AdamW", ["lm_head"])):
        kfac = {"factor": {"fisher": "activations_only"}}
        subject = Subject(model, {"optimizer": {"type": optimizer}, "kfac": kfac})
        assert [layer.name for layer in subject.layers] == ["first", *expected]
