"""Which rows of a matrix are maps of their own: by the names in use, what the module around them says, by patterns."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.directions.kfac_adamw.direction import row_blocks
from ds_kfac.model.blocks import of_rows, rows_of
from ds_kfac.model.scan import Choice, scan

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


class Gated(Holder):
    def forward(self, x):
        gate, up = self.inner(x).chunk(2, dim=-1)
        return gate * up  # fmt: skip


class InTurn(Holder):
    def forward(self, x):
        x = self.inner(x)
        return x[..., ::2] * x[..., 1::2]


class ByFunction(Holder):
    def forward(self, x):
        gate, up = torch.chunk(self.inner(x), 2, dim=-1)
        return gate * up


class Rotary(Holder):
    def forward(self, x):
        keys, values = self.to_kv(x).chunk(2, dim=-1)
        return torch.stack([-keys[..., 1::2], keys[..., ::2]], -1), values


class NotReady(Holder):
    @property
    def num_heads(self):
        raise RuntimeError("before the first batch")


class Thirds(Holder):
    def forward(self, x):
        return sum(self.inner(x).chunk(3, dim=-1))


class CodeGen(Holder):
    def forward(self, x):
        mp_num = 4
        return x.view(mp_num, -1)


def blocks(model: nn.Module, **chosen) -> dict[str, tuple[int, ...]]:
    found = scan(model, Choice(blocks=tuple(chosen.items())))
    return {layer.weight.removesuffix(".weight"): layer.blocks for layer in found.layers}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Holder("qkv", 72), (24, 24, 24)),
        (Holder("c_attn", 72, num_heads=4, is_cross_attention=False), (24, 24, 24)),
        (Holder("c_attn", 48, num_heads=4, is_cross_attention=True), (24, 24)),
        (Holder("c_attn", 30, num_heads=4, multi_query=True, kv_dim=6), (18, 6, 6)),
        (Holder("c_attn", 72, num_heads=4, multi_query=False), (6, 6, 6)),
        (Holder("qkv_proj", 48, num_heads=4, num_key_value_heads=2), (24, 12, 12)),
        (Holder("Wqkv", 40), ()),
        (CodeGen("qkv_proj", 72, num_attention_heads=8), (6, 6, 6)),
        (Holder("query_key_value", 72, num_attention_heads=4), (6, 6, 6)),
        (Holder("query_key_value", 48, num_heads=4, num_kv_heads=2), (12, 6, 6)),
        (Holder("query_key_value", 36, num_heads=4, num_kv_heads=1), (24, 6, 6)),
        (Holder("query_key_value", 72), ()),
        (Holder("gate_up_proj", 48), ()),
        (Gated("gate_up_proj", 48), (24, 24)),
        (InTurn("gate_up_proj", 48), (1, 1)),
        (ByFunction("gate_up_proj", 48), (24, 24)),
        (Rotary("to_kv", 48), (24, 24)),
        (NotReady("qkv", 72), (24, 24, 24)),
        (Holder("qkv_proj", 96, n_heads=8, n_kv_heads=2), (64, 16, 16)),
        (Holder("qkv", 48, n_head=4, n_query_groups=1), (32, 8, 8)),
        (Holder("kv_a_proj_with_mqa", 20, kv_lora_rank=16), (16, 4)),
        (Holder("kv_b_proj", 56, qk_nope_head_dim=8, v_head_dim=6), (8, 6)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1), (48, 48)),
        (Holder("in_proj", 96, intermediate_size=48, A_log=1, n_mamba_heads=2), (1, 1)),
        (Holder("in_proj", 116, intermediate_size=48, num_heads=4, A_log=1), (48, 48, 8, 8, 4)),
        (Holder("in_proj", 96), ()),
        (Thirds("in_proj", 72), (24, 24, 24)),
        (Holder("x_proj", 20, ssm_state_size=8), (4, 8, 8)),
        (Holder("in_proj_qkv", 64, key_dim=16), (16, 16, 32)),
        (Holder("in_proj_qkvz", 96, num_k_heads=2, head_k_dim=8), (8, 8, 16, 16)),
        (Holder("in_proj_ba", 16, num_k_heads=2), (4, 4)),
        (Holder("out", 72, num_heads=4), ()),
    ],
)
def test_known_names_have_blocks_where_the_module_tells_them(model, expected):
    assert list(blocks(model).values()) == [expected]


def test_the_config_of_a_module_tells_them_too():
    attention = Holder("qkv_proj", 48)
    attention.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})()
    assert blocks(nn.ModuleDict({"attention": attention})) == {"attention.qkv_proj": (24, 12, 12)}


def test_a_module_of_a_list_has_the_lists_name():
    layers = nn.ModuleDict({"qkv": nn.ModuleList(nn.Linear(WIDTH, 72) for _ in range(2))})
    assert blocks(layers) == {"qkv.0": (24, 24, 24), "qkv.1": (24, 24, 24)}


def test_attention_of_torch_and_stacks_of_experts_are_known():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, WIDTH, 48))

        def forward(self, x):
            return [F.silu(a) * b for e in range(2) for a, b in [(x @ self.gate_up_proj[e]).chunk(2, -1)]]

    found = scan(nn.ModuleList([nn.MultiheadAttention(WIDTH, 4), Experts()]))
    assert {layer.name: layer.blocks for layer in found.layers} == {
        "0.in_proj_weight": (24, 24, 24), "0.out_proj": (), "1.gate_up_proj.0": (24, 24), "1.gate_up_proj.1": (24, 24),
    }  # fmt: skip


def test_a_pattern_goes_before_what_is_known():
    model = nn.ModuleDict({"a": Holder("qkv", 72), "b": Holder("qkv", 72), "c": Holder("wide", 72)})
    found = blocks(model, **{r"a\.qkv": 12, r"b\.qkv": 1, "wide": [2, 1]})
    assert found == {"a.qkv": (6,) * 12, "b.qkv": (), "c.wide": (2, 1)}
    assert blocks(model, ide=2)["c.wide"] == (), "not the end of a word"


@pytest.mark.parametrize(("given", "said"), [(5, "5 equal blocks"), ([5, 2], r"blocks of \[5, 2\] rows")])
def test_blocks_that_do_not_fit_are_an_error_that_names_the_layer(given, said):
    with pytest.raises(ValueError, match=rf"kfac.adam.blocks 'qkv': qkv has 72 rows, which are no {said}"):
        blocks(Holder("qkv", 72), qkv=given)


def test_one_block_is_none():
    assert of_rows(12, 1, "") == of_rows(12, [4], "") == ()


def test_convolutions_have_none():
    assert blocks(nn.ModuleDict({"qkv": nn.Conv2d(3, 12, 1)}), qkv=3) == {"qkv": ()}


def test_blocks_are_said_in_rows():
    (layer,) = scan(Holder("query_key_value", 72, num_heads=4)).layers
    assert rows_of(layer) == "4 x (6 + 6 + 6) rows"
    (layer,) = scan(Holder("q", 72), Choice(blocks=(("q", 12),))).layers
    assert rows_of(layer) == "12 of 6 rows"


def test_rows_of_blocks_are_those_of_their_maps():
    """Of one matrix and of two at once, one after the other and in turn."""
    for sizes, rows in (((2, 4), [[0, 1], [2, 3, 4, 5]]), ((1, 2), [[0, 3], [1, 2, 4, 5]]), ((), [list(range(6))])):
        (layer,) = scan(Holder("q", 6), Choice(blocks=(("q", list(sizes) or 1),))).layers
        for shape in ((6, 5), (2, 6, 5)):
            x = torch.arange(float(torch.Size(shape).numel())).view(shape)
            for block, of_block in zip(row_blocks(x, layer.blocks), rows, strict=True):
                assert torch.equal(block.flatten(-3, -2), x[..., of_block, :])
                assert block.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a view"
