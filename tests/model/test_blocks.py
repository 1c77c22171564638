"""Which rows of a matrix are maps of their own: by the names in use, what the module around them
says, by patterns."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.config.keys import KFACConfig
from ds_kfac.directions.kfac_adamw.facts import KFACAdamWFacts
from ds_kfac.directions.kfac_adamw.group_step import row_blocks
from ds_kfac.model.blocks import block_sizes, blocks_text
from ds_kfac.model.scan import LayerChoice, scan

WIDTH = 24


class Holder(nn.Module):
    """A linear of that name, in a module that knows numbers."""

    def __init__(self, name: str, rows: int, **numbers) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(WIDTH, rows))
        for key, value in numbers.items():
            setattr(self, key, value)

    def forward(self, x):
        return x


class CodeGenAttention(Holder):
    """The name says how its outputs lie, as those of the next ones."""


class MiniMaxLightningAttention(Holder):
    pass


class GptOssExperts(Holder):
    pass


class ShortConv(Holder):
    pass


class NotReady(Holder):
    @property
    def num_heads(self):
        raise RuntimeError("before the first batch")


def blocks(model: nn.Module, **chosen) -> dict[str, tuple[int, ...]]:
    found = scan(model, LayerChoice(blocks=tuple(chosen.items())))
    return {layer.weight.removesuffix(".weight"): layer.blocks for layer in found.layers}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Holder("qkv", 72), (24, 24, 24)),
        (NotReady("qkv", 72), (24, 24, 24)),
        (
            Holder(
                "qkv_proj", 48, config=SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
            ),
            (32, 8, 8),
        ),
        (Holder("c_attn", 30, num_heads=3, kv_heads=1, multi_query=True), (18, 6, 6)),
        (Holder("c_attn", 54, num_heads=3, kv_heads=3, multi_query=False), (6, 6, 6)),
        (Holder("c_attn", 48, num_heads=3, q_attn=1), (24, 24)),
        (CodeGenAttention("qkv_proj", 72), (6, 6, 6)),
        (MiniMaxLightningAttention("qkv_proj", 72, num_attention_heads=4), (6, 6, 6)),
        (Holder("gate_up_proj", 48), (24, 24)),
        (GptOssExperts("gate_up_proj", 48), (1, 1)),
        (Holder("kv_proj", 48, kv_projection_size=24), (24, 24)),
        (Holder("kv_proj", 48), ()),
        (Holder("Wi", 48, Wo=nn.Linear(24, 3)), (24, 24)),
        (Holder("Wi", 48, Wo=nn.Linear(48, 3)), ()),
        (ShortConv("in_proj", 72), (24, 24, 24)),
        (Holder("query_key_value", 72, num_attention_heads=4), (6, 6, 6)),
        (Holder("query_key_value", 48, num_heads=4, num_kv_heads=2), (12, 6, 6)),
        (Holder("query_key_value", 36, num_heads=4, num_kv_heads=1), (24, 6, 6)),
        (Holder("kv_a_proj_with_mqa", 20, kv_lora_rank=16), (16, 4)),
        (Holder("kv_b_proj", 56, qk_nope_head_dim=8, v_head_dim=6), (8, 6)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1), (48, 48)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1, n_mamba_heads=2), (1, 1)),
        (Holder("in_proj", 116, intermediate_size=48, num_heads=4, A_log=1), (48, 48, 8, 8, 4)),
        (Holder("in_proj", 96), ()),
        (Holder("x_proj", 20, ssm_state_size=8), (4, 8, 8)),
        (Holder("in_proj_qkv", 64, key_dim=16), (16, 16, 32)),
        (Holder("in_proj_qkvz", 96, num_k_heads=2, head_k_dim=8), (8, 8, 16, 16)),
        (Holder("in_proj_ba", 16, num_k_heads=2), (4, 4)),
        (Holder("out", 72, num_heads=4), ()),
    ],
)
def test_known_names_have_blocks_where_the_module_tells_them(model, expected):
    assert next(iter(blocks(model).values())) == expected


@pytest.mark.parametrize(
    "model",
    [
        Holder("qkv", 50),
        Holder("qkv", 48, num_heads=5, num_kv_heads=2),
        Holder("gate_up_proj", 49),
        Holder("query_key_value", 72),
    ],
)
def test_where_nothing_shows_the_parts_the_matrix_is_one_map_and_that_is_said(model):
    (layer,) = scan(model).layers
    assert layer.blocks == ()
    assert "orthogonalized, as one map: nothing shows its parts" in KFACAdamWFacts().choice(
        KFACConfig(), layer
    )


def test_what_was_taken_by_its_name_is_said():
    (layer,) = scan(Holder("query_key_value", 72, num_heads=4)).layers
    assert "4 x (6 + 6 + 6) rows, by its name" in KFACAdamWFacts().choice(KFACConfig(), layer)


def test_a_module_of_a_list_has_the_lists_name():
    model = Holder("none", 3)
    model.qkv = nn.ModuleList(nn.Linear(WIDTH, 72) for _ in range(2))
    assert {n: b for n, b in blocks(model).items() if "qkv" in n} == {
        "qkv.0": (24, 24, 24),
        "qkv.1": (24, 24, 24),
    }


def test_attention_of_torch_and_stacks_of_experts_are_known():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, WIDTH, 48))

        def forward(self, x):
            return [
                F.silu(a) * b
                for e in range(2)
                for a, b in [(x @ self.gate_up_proj[e]).chunk(2, -1)]
            ]

    found = scan(nn.ModuleList([nn.MultiheadAttention(WIDTH, 4), Experts()]))
    assert {layer.name: layer.blocks for layer in found.layers} == {
        "0.in_proj_weight": (24, 24, 24),
        "0.out_proj": (),
        "1.gate_up_proj.0": (24, 24),
        "1.gate_up_proj.1": (24, 24),
    }


def test_a_pattern_goes_before_what_is_known():
    model = nn.ModuleDict({"a": Holder("qkv", 72), "b": Holder("qkv", 72), "c": Holder("wide", 72)})
    found = blocks(model, **{r"a\.qkv": 12, r"b\.qkv": 1, "wide": [2, 1]})
    assert found == {"a.qkv": (6,) * 12, "b.qkv": (), "c.wide": (2, 1)}
    assert blocks(model, ide=2)["c.wide"] == (), "not the end of a word"


@pytest.mark.parametrize(
    ("given", "said"), [(5, "5 equal blocks"), ([5, 2], r"blocks of \[5, 2\] rows")]
)
def test_blocks_that_do_not_fit_are_an_error_that_names_the_layer(given, said):
    with pytest.raises(
        ValueError,
        match=rf"kfac.adam.blocks 'qkv': qkv has 72 rows, which cannot be cut into {said}",
    ):
        blocks(Holder("qkv", 72), qkv=given)


def test_one_block_is_none():
    assert block_sizes(12, 1, "") == block_sizes(12, [4], "") == ()


def test_convolutions_have_none():
    assert blocks(nn.ModuleDict({"qkv": nn.Conv2d(3, 12, 1)}), qkv=3) == {"qkv": ()}


def test_blocks_are_said_in_rows():
    (layer,) = scan(Holder("query_key_value", 72, num_heads=4)).layers
    assert blocks_text(layer) == "4 x (6 + 6 + 6) rows"
    (layer,) = scan(Holder("q", 72), LayerChoice(blocks=(("q", 12),))).layers
    assert blocks_text(layer) == "12 of 6 rows"


def test_rows_of_blocks_are_those_of_their_maps():
    """Of one matrix and of two at once, one after the other and in turn."""
    for sizes, rows in (
        ((2, 4), [[0, 1], [2, 3, 4, 5]]),
        ((1, 2), [[0, 3], [1, 2, 4, 5]]),
        ((), [list(range(6))]),
    ):
        (layer,) = scan(Holder("q", 6), LayerChoice(blocks=(("q", list(sizes) or 1),))).layers
        for shape in ((6, 5), (2, 6, 5)):
            x = torch.arange(float(torch.Size(shape).numel())).view(shape)
            for block, of_block in zip(row_blocks(x, layer.blocks), rows, strict=True):
                assert torch.equal(block.flatten(-3, -2), x[..., of_block, :])
                assert block.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), (
                    "a view"
                )
