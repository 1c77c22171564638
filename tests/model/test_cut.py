"""Large heads become layers of a part of their outputs each."""

from dataclasses import replace

import pytest
from torch import nn

from ds_kfac.assignment.costs import factor_specs
from ds_kfac.curvature.factor import Side
from ds_kfac.estimate.subject import Subject
from ds_kfac.model import blocks as module
from ds_kfac.model.blocks import cut
from ds_kfac.model.layers import LayerSpec
from ds_kfac.plan.plan import rows_from
from ds_kfac.zero.shards import parts_of


def head(O: int = 12, I: int = 5, **changes) -> LayerSpec:  # noqa: E741
    A, G = Side.dense(I), changes.pop("G", Side.identity(O))
    kind, product = changes.pop("kind", "Linear"), changes.pop("product", False)
    return replace(LayerSpec("head", kind, "head", "head.w", "head.b", A, G, product), **changes)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 59)
    monkeypatch.setattr(module, "PART", 20)


def test_a_large_layer_is_cut_into_equal_parts_that_cover_it_and_have_one_A():
    layers = cut([head()], lambda layer: True)
    assert [layer.name for layer in layers] == ["head.0", "head.1", "head.2"]
    assert {layer.shape for layer in layers} == {(4, 5)} and sum(
        layer.numel for layer in layers
    ) == head().numel
    assert [layer.part for layer in layers] == [(0, 3), (1, 3), (2, 3)]
    assert {(layer.module, layer.parameters) for layer in layers} == {
        ("head", ("head.w", "head.b"))
    }
    factors = factor_specs(layers)
    assert [(f.key, f.layers) for f in factors] == [("head.0/A", ("head.0", "head.1", "head.2"))]
    assert rows_from(factors[0], {layer.name: layer for layer in layers}) == ("head.0",), (
        "a row is every part's"
    )
    spans = [part.span(60) for part in parts_of(layers) if part.param == 0]
    assert spans == [(0, 20), (20, 20), (40, 20)]


def test_outputs_that_do_not_divide_take_the_next_number_of_parts():
    assert len(cut([head(14)], lambda layer: True)) == 7, "4 parts would be enough"
    assert len(cut([head(13)], lambda layer: True)) == 13
    assert len(cut([head(11, 100)], lambda layer: True)) == 1, (
        "a single output is larger than a part"
    )


@pytest.mark.parametrize(
    "layer",
    [
        head(11),
        head(G=Side.dense(12)),
        head(G=Side.diagonal(12)),
        head(A=Side.identity(5)),
        head(kind="Conv1D"),
        head(kind="LinearLayer"),
        head(product=True),
        head(copies=2),
        head(cut=(2, 1)),
        head(part=(0, 2)),
    ],
)
def test_what_is_small_or_would_change_stays_whole(layer):
    assert cut([layer], lambda layer: True) == (layer,)


def test_what_the_rule_steps_as_a_whole_stays_whole():
    other = replace(head(), name="other")
    assert [layer.name for layer in cut([head(), other], lambda layer: layer.name != "head")] == [
        "head",
        *(f"other.{index}" for index in range(3)),
    ]


def test_only_heads_are_cut_and_only_by_KFACAdamW():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.lm_head = nn.Linear(11, 12, bias=False), nn.Linear(12, 12, bias=False)

    found = {}
    for optimizer in ("KFACAdamW", "AdamW"):
        ds_config = {
            "optimizer": {"type": optimizer},
            "kfac": {"factor": {"fisher": "activations_only"}},
        }
        found[optimizer] = [layer.name for layer in Subject(Net(), ds_config).layers]
    assert found["AdamW"] == ["first", "lm_head"], "relative damping is of a layer's mean"
    assert found["KFACAdamW"] == ["first", *(f"lm_head.{index}" for index in range(12))]
