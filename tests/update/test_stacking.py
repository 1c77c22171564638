"""Which layers are preconditioned together."""

from dataclasses import replace

import torch

from ds_kfac.curvature.factor import Side
from ds_kfac.update.groups import basis_bytes, evenly_spaced, group_by_shape
from tests.close import exact
from tests.models import linear_layer


def names(found) -> list[list[str]]:
    return [[layer.name for layer in layers] for layers in found]


LAYERS = [
    linear_layer("a", 7, 5),
    linear_layer("b", 13, 5),
    linear_layer("c", 7, 5),
    linear_layer("d", 5, 7),
    linear_layer("e", 13, 5),
    linear_layer("f", 7, 5),
]


def test_layers_of_equal_shape_are_together_and_every_layer_is_there_once():
    assert names(group_by_shape(LAYERS, key=lambda layer: None)) == [
        ["a", "c", "f"],
        ["b", "e"],
        ["d"],
    ]
    assert names(group_by_shape(LAYERS, key=None)) == [[name] for name in "abcdef"]
    assert names(group_by_shape(LAYERS, key=lambda layer: layer.name in "af")) == [
        ["a", "f"],
        ["b", "e"],
        ["c"],
        ["d"],
    ]


def test_sides_must_be_of_one_kind_and_without_blocks():
    identity = [replace(layer, G=Side.identity(layer.G.dim)) for layer in LAYERS[:3:2]]
    blocks = [replace(layer, A=Side(7, 4)) for layer in LAYERS[:3:2]]
    assert names(group_by_shape([*identity, LAYERS[5]], key=lambda layer: None)) == [
        ["a", "c"],
        ["f"],
    ]
    assert names(group_by_shape(blocks, key=lambda layer: None)) == [["a"], ["c"]]


def test_large_layers_stay_alone_and_copies_have_a_limit(monkeypatch):
    def grouped(layers=LAYERS, **limits):
        with monkeypatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(f"ds_kfac.update.{name.replace('__', '.')}", limit)
            return names(group_by_shape(layers, key=lambda layer: None))

    assert grouped(rotation__BATCHED=8 * 35) == [["a", "c", "f"], ["b"], ["d"], ["e"]]
    assert grouped(rotation__BATCHED=8 * 35 - 1) == [[name] for name in "abcdef"]
    many = [linear_layer(f"l{index}", 7, 5) for index in range(13)]
    assert [len(some) for some in grouped(many, rotation__BATCHED=12 * 35)] == [7, 6]
    large = [linear_layer(name, 4096, 1024) for name in "abcde"]
    assert grouped(large) == [["a", "b", "c"], ["d"], ["e"]], "256 MiB of eigenvectors"
    assert grouped([linear_layer(name, 2049, 2048) for name in "abc"]) == [["a"], ["b"], ["c"]]
    small = basis_bytes(LAYERS[:1])
    assert small == 4 * (7 + 49 + 5 + 25)
    assert grouped(groups__BATCHED_BYTES=2 * small) == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert grouped(groups__BATCHED_BYTES=small) == [[name] for name in "abcdef"]
    both = 3 * small + 2 * basis_bytes(LAYERS[1:2])
    assert grouped(groups__BATCHED_BYTES=both)[:2] == [["a", "c", "f"], ["b", "e"]]
    assert grouped(groups__BATCHED_BYTES=both - 1)[:2] == [["a", "c", "f"], ["b"]]


def test_matrices_at_equal_distances_in_one_memory_are_a_view_and_no_others_are():
    memory = torch.arange(60.0)
    parts = [memory[start : start + 6].view(2, 3) for start in (4, 24, 44)]
    exact(evenly_spaced(parts), torch.stack(parts))
    assert evenly_spaced(parts).data_ptr() == parts[0].data_ptr() and evenly_spaced(
        parts[1:2]
    ).shape == (1, 2, 3)
    others = [
        parts[::-1],
        [*parts[:2], memory[45:51].view(2, 3)],
        [x.mT for x in parts],
        [parts[0], parts[0]],
        [memory[2 * k :][:6].view(2, 3) for k in range(3)],
        [*parts[:2], parts[2].clone()],
        [torch.zeros(6).view(2, 3) for _ in range(2)],
    ]
    assert [evenly_spaced(each) for each in others] == [None] * 7
