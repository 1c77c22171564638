"""Layers that see the same tensor, what merely looks like it, and who of them gives the rows."""

import numpy as np
import pytest
import torch

from ds_kfac.model.shared import UNWATCHED, SharedInputs, agreed

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
