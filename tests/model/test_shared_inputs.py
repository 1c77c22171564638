"""Layers that see the same tensor, what merely looks like it, and who of them gives the rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.shared import UNWATCHED, Input, SharedInputs, agreed
from tests.close import close
from tests.model.recorder import Recorder
from tests.ops.specification import symmetric_pack

X = torch.arange(12.0).view(3, 4)


def groups_of(*calls: tuple) -> tuple[tuple[str, ...], ...]:
    """What a search makes of these (layer, input) or (layer, input, has a gradient)."""
    shared = SharedInputs({name for name, *_ in calls})
    for name, x, *alive in calls:
        shared.arrived(name, shared.number(name, x), torch.tensor(all(alive)))
    return agreed([shared.inputs_seen()], dict.fromkeys("abcd", "side"))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda x: x, True),
        (lambda x: x.detach(), True),
        (lambda x: x.view(3, 4), True),
        (lambda x: x[:], True),
        (lambda x: x.T.T, True),
        (lambda x: x.clone(), False),
        (lambda x: x[:2], False),
        (lambda x: x.view(4, 3), False),
        (lambda x: x.T.contiguous().T, False),
        (lambda x: x.as_strided((3, 4), (1, 3)), False),
        (lambda x: x.flatten()[1:], False),
    ],
)
def test_the_same_memory_seen_in_one_way_is_the_same_input(other, same):
    assert groups_of(("a", X), ("b", other(X))) == ((("a", "b"),) if same else ())


def test_an_input_changed_in_place_in_between_is_another_one():
    x, shared = X.clone(), SharedInputs("ab")
    first = shared.number("a", x)
    assert shared.number("b", x.add_(0)) != first


def test_memory_that_was_freed_and_taken_again_is_not_the_same_input():
    shared, memory, numbers = SharedInputs("ab"), np.ones(1000, dtype=np.float32), []
    for name in "abababab":
        x = torch.from_numpy(memory)  # a storage of its own at the same place
        numbers.append(shared.number(name, x))
        del x
    assert numbers == [*range(8)]


def test_all_calls_must_be_shared_also_in_whether_their_gradient_is_zero():
    """As heads of several tasks on one trunk, each with losses in some batches."""
    first, second = X, X.clone()
    calls = [(name, first) for name in "abc"] + [("a", second), ("b", second), ("c", first)]
    assert groups_of(*calls) == (("a", "b"),)
    assert groups_of(("a", X, True), ("b", X, False), ("c", X, True)) == (("a", "c"),)


def test_only_candidates_are_watched_and_none_means_no_search():
    shared = SharedInputs("ab")
    assert shared.number("c", X) == UNWATCHED != shared.number("a", X)
    assert shared.searching and not SharedInputs().searching


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([{"a": (0,), "b": (0,), "c": (0,)}, {"a": (0,), "b": (0,), "c": (1,)}], (("a", "b"),)),
        ([{"a": (0,), "b": (0,), "c": (1,)}, {"a": (0,), "b": (0,), "c": (0,)}], (("a", "b"),)),
        # a rank that called neither has no say, but one that called half of them has
        ([{"a": (0,), "b": (0,)}, {}], (("a", "b"),)),
        ([{"a": (0,), "b": (0,)}, {"a": (0,)}], ()),
        # layers that nobody called are not a group
        ([{"c": (0,)}, {}], ()),
        # layers of different kinds are apart, and groups come in module order
        ([dict.fromkeys("dCBa", (0,)) | {"E": (1,), "e": (1,)}], (("a", "d"), ("B", "C"))),
    ],
)
def test_groups_are_those_that_every_rank_has_seen(ranks, expected):
    kinds = {name: "capital" if name.isupper() else "small" for name in "abBcCdEe"}
    assert agreed(ranks, kinds) == expected


def arrival(layer: SimpleNamespace, number: int, *with_gradient: bool) -> Input:
    rows = torch.tensor(with_gradient)
    call = SimpleNamespace(layer=layer, input=number, rows=SimpleNamespace(recomputed=False))
    return Input(call, X, rows, rows.any())


def test_an_input_is_complete_when_all_its_calls_have_a_gradient_or_the_pass_ends():
    shared = SharedInputs("abc")
    shared.use([("a", "b")])
    a, b, c = (SimpleNamespace(name=name, shares=None) for name in "abc")
    assert shared.key(a) == shared.key(b) == "a/A" and shared.key(c) == "c/A"
    for x in (X, X.clone()):
        for layer in (a, b):
            shared.called(arrival(layer, shared.number(layer.name, x), True).call)
    assert shared.complete(arrival(c, UNWATCHED, True)) is not None
    for second in (True, False):  # a retained graph brings the rows again
        assert shared.complete(arrival(b, 0, False, second, False)) is None
        complete = shared.complete(arrival(a, 0, True, False, False))
        assert complete.with_gradient.tolist() == [True, second, False] and complete.alive
    assert shared.complete(arrival(b, 1, False, True, False)) is None
    (rest,) = shared.end_pass()
    assert rest.with_gradient.tolist() == [False, True, False] and not shared.end_pass()


# in a model


class Attention(nn.Module):
    """Its projections are registered in another order than they are called in; gate sees a copy."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.v, self.k, self.q = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return self.out(checkpoint(self.inner, x, use_reentrant=False)).sum()
        return self.out(self.inner(x)).sum()

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.q(x).softmax(-1) * self.k(x) * self.v(x.detach()) * self.gate(x.clone())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_projections_of_a_model_are_found_and_give_the_rows_once(checkpointed):
    inputs, x = SharedInputs(["v", "k", "q", "gate", "out"]), torch.randn(2, 3, 4)
    recorder = Recorder(Attention(checkpointed), inputs=inputs)
    recorder.backward(recorder.model(torch.randn(3, 4)))
    groups = agreed([inputs.inputs_seen()], {layer.name: layer.A for layer in recorder.layers})
    assert groups == (("v", "k", "q"),)
    inputs.use(groups)
    recorder.begin(1)
    for part in x:
        recorder.backward(recorder.model(part))
    A = {key for key in recorder.capture.sums if key.endswith("/A")}
    assert A == {"v/A", "gate/A", "out/A"} and len(recorder.capture.sums) == 8
    rows = torch.tanh(x).reshape(-1, 4).double()
    for name, factors in recorder.factors().items():
        assert factors.rows == 6
        if name in "vkq":
            close(factors.A, symmetric_pack(rows.T @ rows / 6), sums=6)
