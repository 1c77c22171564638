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


def found(**inputs: torch.Tensor) -> dict[str, tuple]:
    """What a search makes of one call of every layer."""
    return found_in(*inputs.items())


def found_in(*calls: tuple[str, torch.Tensor]) -> dict[str, tuple]:
    shared = SharedInputs({name for name, _ in calls})
    for name, x in calls:
        shared.arrived(name, shared.number(name, x), torch.tensor(True))
    return shared.inputs_seen()


def groups_of(**inputs: torch.Tensor) -> tuple[tuple[str, ...], ...]:
    return agreed([found(**inputs)], dict.fromkeys(inputs, "side"))


@pytest.mark.parametrize(
    "same",
    [lambda x: x, lambda x: x.detach(), lambda x: x.view(3, 4), lambda x: x[:], lambda x: x.T.T],
    ids=range(5),
)
def test_the_same_memory_is_the_same_input(same):
    assert groups_of(a=X, b=same(X)) == (("a", "b"),)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.clone(),
        lambda x: x[:2],
        lambda x: x.view(4, 3),
        lambda x: x.t(),
        lambda x: x.flatten()[1:],
    ],
    ids=["equal values elsewhere", "part", "other shape", "other strides", "other start"],
)
def test_other_memory_or_another_view_of_it_is_another_input(other):
    assert groups_of(a=X, b=other(X)) == ()


def test_an_input_changed_in_place_in_between_is_another_one():
    x = X.clone()
    shared = SharedInputs("ab")
    first = shared.number("a", x)
    x.add_(1)
    assert shared.number("b", x) != first


def test_memory_that_was_freed_and_taken_again_is_not_the_same_input():
    shared, memory, numbers = SharedInputs("ab"), np.ones(1000, dtype=np.float32), []
    for name in "abababab":
        x = torch.from_numpy(memory)  # a storage of its own at the same place
        numbers.append(shared.number(name, x))
        del x
    assert numbers == [*range(8)]


def test_several_calls_must_all_be_shared():
    first, second = X, X.clone()
    calls = (("a", first), ("b", first), ("c", first), ("a", second), ("b", second), ("c", first))
    assert agreed([found_in(*calls)], dict.fromkeys("abc", 0)) == (("a", "b"),)


def test_a_call_whose_gradient_is_zero_or_did_not_come_is_told_apart():
    """As heads of several tasks on one trunk, each with losses in some batches."""
    shared = SharedInputs("abcd")
    numbers = {name: shared.number(name, X) for name in "abcd"}
    for name, alive in (("a", True), ("b", False), ("c", True)):
        shared.arrived(name, numbers[name], torch.tensor(alive))
    assert agreed([shared.inputs_seen()], dict.fromkeys("abcd", 0)) == (("a", "c"),)


def test_only_candidates_are_watched_and_none_means_no_search():
    shared = SharedInputs("ab")
    assert (
        shared.number("c", X) == UNWATCHED
        and shared.number("a", X) != UNWATCHED
        and shared.searching
    )
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
    for _ in range(2):  # a retained graph brings the rows again
        assert shared.complete(arrival(b, 0, False, True, False)) is None
        complete = shared.complete(arrival(a, 0, True, False, False))
        assert complete.with_gradient.tolist() == [True, True, False] and complete.alive
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
        inner = self._inner
        return self.out(
            checkpoint(inner, x, use_reentrant=False) if self.checkpointed else inner(x)
        ).sum()

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.q(x).softmax(-1) * self.k(x) * self.v(x.detach()) * self.gate(x.clone())


def searched(model: nn.Module, batch: torch.Tensor) -> tuple[Recorder, tuple]:
    """A recorder whose inputs were searched in a step, and the groups that it uses from now on."""
    inputs = SharedInputs(
        [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    )
    recorder = Recorder(model, inputs=inputs)
    recorder.backward(model(batch))
    groups = agreed([inputs.inputs_seen()], {layer.name: layer.A for layer in recorder.layers})
    inputs.use(groups)
    recorder.begin(1)
    return recorder, groups


@pytest.mark.parametrize("checkpointed", [False, True])
def test_projections_of_a_model_are_found_and_give_the_rows_once(checkpointed):
    recorder, groups = searched(Attention(checkpointed), torch.randn(3, 4))
    assert groups == (("v", "k", "q"),)
    x = torch.randn(2, 3, 4)
    for part in x:
        recorder.backward(recorder.model(part))
    assert set(recorder.capture.sums) == {"v/A", "gate/A", "out/A"} | {
        f"{name}/G" for name in ("v", "k", "q", "gate", "out")
    }
    found = recorder.factors()
    rows = torch.tanh(x).reshape(-1, 4).double()
    for name in ("v", "k", "q"):
        assert found[name].rows == 6
        close(found[name].A, symmetric_pack(rows.T @ rows / 6), sums=6)


class Tasks(nn.Module):
    """Heads on one trunk, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, task="both"):
        z = torch.tanh(self.trunk(x))
        heads = {"one": [self.one], "two": [self.two], "both": [self.one, self.two]}[task]
        return sum(head(z).square().mean() for head in heads)


@pytest.mark.parametrize("how", ["one pass", "two passes of one graph", "a head a batch"])
def test_heads_of_several_tasks_have_every_row_whichever_of_them_has_a_loss(how):
    recorder, groups = searched(Tasks(), torch.randn(5, 4))
    assert groups == (("one", "two"),)
    x, y = torch.randn(5, 4), torch.randn(7, 4)
    model = recorder.model
    if how == "one pass":
        recorder.backward(model(x))
        inputs = [x]
    elif how == "two passes of one graph":
        loss = model(x)
        recorder.backward(loss, retain_graph=True)
        recorder.backward(loss)
        inputs = [x, x]
    else:
        recorder.backward(model(x, "one"))
        recorder.backward(model(y, "two"))
        inputs = [x, y]
    with torch.no_grad():
        z = torch.tanh(model.trunk(torch.cat(inputs))).double()
    found = recorder.factors()
    rows = torch.cat([z, torch.ones(len(z), 1)], dim=1)
    for name in ("one", "two"):
        assert found[name].rows == len(rows) and found[name].G is not None
        close(found[name].A, symmetric_pack(rows.T @ rows / len(rows)), sums=20)


def test_layers_whose_inputs_are_the_same_no_more_still_give_all_rows():
    """Their common A is the mean over both layers' rows then."""
    recorder, _ = searched(Attention(), torch.randn(3, 4))
    recorder.model.k.register_forward_pre_hook(lambda module, arguments: arguments[0].clone())
    recorder.backward(recorder.model(torch.randn(3, 4)))
    assert recorder.rows()["v"] == 6
