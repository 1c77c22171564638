"""Layers that see the same tensor, and what merely looks like it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.calls import SharedInputs, agreed
from ds_kfac.model.capture import Capture
from ds_kfac.model.scan import LayerChoice, scan

X = torch.arange(12.0).view(3, 4)


def found(**inputs: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """What a search makes of one call of every layer."""
    shared = SharedInputs(inputs)
    for name, x in inputs.items():
        shared.see(name, x)
    return dict(shared.found)


def groups_of(**inputs: torch.Tensor) -> tuple[tuple[str, ...], ...]:
    return agreed([found(**inputs)], dict.fromkeys(inputs, "side"))


@pytest.mark.parametrize(
    "same", [lambda x: x, lambda x: x.detach(), lambda x: x.view(3, 4), lambda x: x[:], lambda x: x.T.T], ids=range(5)
)
def test_the_same_memory_is_the_same_input(same):
    assert groups_of(a=X, b=same(X)) == (("a", "b"),)


@pytest.mark.parametrize(
    "other",
    [lambda x: x.clone(), lambda x: x[:2], lambda x: x.view(4, 3), lambda x: x.t(), lambda x: x.flatten()[1:]],
    ids=["equal values elsewhere", "part", "other shape", "other strides", "other start"],
)
def test_other_memory_or_another_view_of_it_is_another_input(other):
    assert groups_of(a=X, b=other(X)) == ()


def test_an_input_changed_in_place_in_between_is_another_one():
    x = X.clone()
    shared = SharedInputs("ab")
    shared.see("a", x)
    x.add_(1)
    shared.see("b", x)
    assert agreed([shared.found], dict.fromkeys("ab", 0)) == ()


def test_memory_that_was_freed_and_taken_again_is_not_the_same_input():
    shared, memory = SharedInputs("ab"), np.ones(1000, dtype=np.float32)
    for name in "abababab":
        x = torch.from_numpy(memory)  # a storage of its own at the same place
        shared.see(name, x)
        del x
    assert sorted(number for numbers in shared.found.values() for number in numbers) == [*range(8)]


def test_several_calls_must_all_be_shared():
    shared = SharedInputs("abc")
    first, second = X, X.clone()
    for name, x in (("a", first), ("b", first), ("c", first), ("a", second), ("b", second), ("c", first)):
        shared.see(name, x)
    assert agreed([shared.found], dict.fromkeys("abc", 0)) == (("a", "b"),)


def test_micro_batches_are_told_apart_even_if_they_are_one_tensor():
    shared = SharedInputs("ab")
    shared.see("a", X)
    shared.end_batch()
    shared.see("b", X)
    assert agreed([shared.found], dict.fromkeys("ab", 0)) == ()


def test_only_candidates_are_watched_and_none_means_no_search():
    shared = SharedInputs("ab")
    for name in "abc":
        shared.see(name, X)
    assert set(shared.found) == {"a", "b"} and shared.searching
    assert not SharedInputs().searching


# over ranks


def test_groups_are_those_that_every_rank_has_seen():
    ranks = [{"a": (0,), "b": (0,), "c": (0,)}, {"a": (0,), "b": (0,), "c": (1,)}]
    assert agreed(ranks, dict.fromkeys("abc", 0)) == (("a", "b"),)
    assert agreed(ranks[::-1], dict.fromkeys("abc", 0)) == (("a", "b"),)


def test_a_rank_that_called_neither_has_no_say_but_one_that_called_half_of_them_has():
    assert agreed([{"a": (0,), "b": (0,)}, {}], dict.fromkeys("ab", 0)) == (("a", "b"),)
    assert agreed([{"a": (0,), "b": (0,)}, {"a": (0,)}], dict.fromkeys("ab", 0)) == ()


def test_layers_that_nobody_called_are_not_a_group():
    assert agreed([{"c": (0,)}, {}], dict.fromkeys("abcd", 0)) == ()


def test_layers_of_different_kinds_are_apart_and_groups_come_in_module_order():
    seen = [dict.fromkeys("dcba", (0,)) | {"f": (1,), "e": (1,)}]
    kinds = {"a": 1, "b": 2, "e": 1, "c": 1, "d": 2, "f": 1}
    assert agreed(seen, kinds) == (("a", "c"), ("b", "d"), ("e", "f"))


# in use


def used(*groups: str, candidates: str = "abcd") -> SharedInputs:
    shared = SharedInputs(candidates)
    shared.use([tuple(group) for group in groups])
    return shared


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_a_group_that_holds_is_silent_in_any_order_of_calls(order):
    """The order of a group is that of the modules, which need not be called in it."""
    shared = used("abc")
    for _ in range(3):
        for x in (X, X.clone()):
            for name in order:
                shared.see(name, x)
        shared.see("d", X.clone())
        shared.end_batch()
        assert not shared.broken


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_violation_breaks_the_group_and_no_other(order):
    shared = used("ab", "cd")
    for name in (*order, *"cd"):
        shared.see(name, X.clone() if name == order[1] else X)
    shared.begin_batch()  # another forward before the backward
    assert shared.broken == {("a", "b")}
    shared.end_batch()
    assert shared.broken == {("a", "b")}, "until others are in use"
    shared.use([("c", "d")])
    assert not shared.broken


@pytest.mark.parametrize(
    "reached, broken", [(("ab", "ab"), set()), (("a", "b"), {("a", "b")}), (("ab", "a"), {("a", "b")})]
)
def test_gradients_of_other_forwards_break_a_group(reached, broken):
    """Heads on one trunk are called together, and have losses in turn."""
    shared = used("ab", "cd")
    shared.begin_step()
    for names in reached:
        forward = object()
        for name in "abcd":
            shared.see(name, X)
        for name in (*names, *"cd"):
            call = SimpleNamespace(layer=SimpleNamespace(name=name), forward=forward, arrived=False)
            shared.arrived(call, torch.tensor(True))
        shared.end_batch()
    shared.end_step()
    assert shared.broken == broken


def test_a_second_call_is_compared_with_the_second_call():
    shared = used("ab")
    second = X.clone()
    for last, broken in ((second, set()), (X, {("a", "b")})):
        for name, x in (("a", X), ("a", second), ("b", X), ("b", last)):
            shared.see(name, x)
        shared.end_batch()
        assert shared.broken == broken


def test_whoever_is_called_first_in_a_forward_gives_the_rows_of_its_group():
    """Also where the first of the group is used no more."""
    shared = used("ab")
    a, b = (SimpleNamespace(name=name, shares=None) for name in "ab")
    for first, second in ((a, b), (b, a)):
        for layer in (first, second, first):
            shared.see(layer.name, X)
            assert shared.key(layer) == "a/A" and shared.gives(layer) == (layer is first)
        shared.see(second.name, X)
        shared.end_batch()
    shared.see("b", X)
    assert shared.gives(b)
    shared.end_batch()
    assert not shared.broken


@pytest.mark.parametrize("often", "ab")
def test_layers_that_were_not_called_equally_often_break_their_group(often):
    """The rows of the common factor would not be of both."""
    shared = used("ab")
    for name in ("a", "b", often):
        shared.see(name, X)
    assert not shared.broken
    shared.end_batch()
    assert shared.broken == {("a", "b")}


@pytest.mark.parametrize("order", ["aab", "aba", "baa"])
def test_a_layer_that_captures_and_is_called_more_often_breaks_its_group(order):
    """The common factor would have rows that b has not seen."""
    shared, second = used("ab"), X.clone()
    calls = {"a": iter((X, second)), "b": iter((X,))}
    for name in order:
        shared.see(name, next(calls[name]))
    shared.end_batch()
    assert shared.broken == {("a", "b")}


def test_a_forward_that_was_given_up_half_way_breaks_nothing():
    shared = used("ab")
    for name in "bab":
        shared.see(name, X)
    shared.begin_batch()
    for name in "ba":
        shared.see(name, X)
    shared.end_batch()
    assert not shared.broken


def test_without_groups_nothing_is_watched():
    shared = used()
    assert not shared.searching
    shared.see("a", X)
    shared.see("b", X.clone())
    shared.end_batch()


# in a model


class Attention(nn.Module):
    """Its projections are registered in another order than they are called in; gate sees a copy."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.v, self.k, self.q = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._inner
        return self.out(checkpoint(inner, x, use_reentrant=False) if self.checkpointed else inner(x)).sum()

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.q(x).softmax(-1) * self.k(x) * self.v(x.detach()) * self.gate(x.clone())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_projections_of_a_model_are_found_and_keep_holding(checkpointed):
    model = Attention(checkpointed)
    layers = scan(model, LayerChoice(types=("Linear",))).layers

    inputs = SharedInputs([layer.name for layer in layers])
    capture = Capture(model, layers, lambda: 1.0, inputs=inputs)
    capture.begin_step(frozenset(f"{layer.name}/A" for layer in layers), 0)
    for step in range(3):
        for _ in range(2):
            model(torch.randn(3, 4)).backward()
            capture.end_backward()
        if step == 0:
            groups = agreed([inputs.found], {layer.name: layer.A for layer in layers})
            assert groups == (("v", "k", "q"),)
            inputs.use(groups)
    model.k.register_forward_pre_hook(lambda module, arguments: arguments[0].clone())
    assert not inputs.broken
    model(torch.randn(3, 4)).backward()
    capture.end_backward()
    assert inputs.broken == {("v", "k", "q")}
