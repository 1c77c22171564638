"""Loss terms of experts: of every micro-batch that used one of them. Heads and blocks in turns have their own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder

WIDTH, ROWS, CLASSES = 6, 8, 5
SOME, ALL, EVEN = [0, 0, 0, 1, 0, 1, 0, 0], [0] * ROWS, [0, 1] * (ROWS // 2)


class Mixture(nn.Module):
    """Two experts; ``skips``: one without a token is not called."""

    def __init__(self, kind: str, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.skips, self.head = kind, skips, nn.Linear(WIDTH, CLASSES)
        weights = torch.randn(2, WIDTH, WIDTH)
        if kind == "stack":
            self.w = nn.Parameter(weights)
        else:
            each = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights]
            self.e = nn.ModuleList(each) if kind == "list" else nn.ModuleDict({str(k): e for k, e in enumerate(each)})
            for expert, weight in zip(each, weights, strict=True):
                expert.weight.data.copy_(weight)

    def expert(self, k: int, x):
        return F.linear(x, self.w[k]) if self.kind == "stack" else self.e[k if self.kind == "list" else str(k)](x)

    def forward(self, x, route):
        out = x
        for k in range(2):
            chosen = (route == k).nonzero()[:, 0]
            if len(chosen) or not self.skips:
                out = out.index_add(0, chosen, self.expert(k, x[chosen]))
        return self.head(out)


def seen(model, micro_batches, *, keys=None) -> Recorder:
    """After a step of these; ``micro_batches``: arguments for the model, but the input."""
    recorder = Recorder(model, LayerChoice(shares=False))
    if keys is not None:
        recorder.capture.begin_step(frozenset(keys), 0)
    for number, argument in enumerate(micro_batches):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(len(argument) if isinstance(argument, torch.Tensor) else ROWS, WIDTH, generator=generator)
        loss = F.cross_entropy(model(rows, argument), torch.arange(len(rows)) % CLASSES)
        with recorder.capture.own_backward():
            loss.backward()
    recorder.capture.end_backward(last=True)
    return recorder


def terms(recorder: Recorder, side: str = "G") -> dict[str, int]:
    return {key[:-2]: int(batch.count) for key, batch in recorder.capture.sums.items() if key.endswith(side)}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind, names", [("list", "e.0 e.1"), ("dict", "e.0 e.1"), ("stack", "w.0 w.1")])
@pytest.mark.parametrize("routes", [(SOME, ALL), (SOME, ALL, SOME), (EVEN, SOME, ALL)])
def test_an_expert_has_the_loss_terms_of_micro_batches_without_a_token_for_it(kind, names, skips, routes):
    routes = [torch.tensor(route) for route in routes]
    recorder = seen(Mixture(kind, skips), routes)
    assert terms(recorder) == dict.fromkeys((*names.split(), "head"), ROWS * len(routes))
    counts = [batch.count.data_ptr() for batch in recorder.capture.sums.values()]
    assert len(set(counts)) == len(counts), "reduced in place, each by itself"


def test_an_expert_that_the_list_does_not_call_has_them_though_its_sibling_gets_the_whole_batch_later():
    recorder = seen(Mixture("list"), [torch.tensor(EVEN), torch.tensor(ALL)])
    assert terms(recorder) == {"e.0": 2 * ROWS, "e.1": 2 * ROWS, "head": 2 * ROWS}


@pytest.mark.parametrize("kind", ["list", "stack"])
def test_G_does_not_depend_on_accumulation(kind):
    """Rows that do not depend on each other, in one micro-batch of 16 and in two of 8."""
    model, found = Mixture(kind), {}
    x, route = torch.randn(2 * ROWS, WIDTH), torch.tensor(SOME + ALL)
    for parts in (1, 2):
        recorder = Recorder(model, LayerChoice(shares=False))
        for some, way in zip(x.chunk(parts), route.chunk(parts), strict=True):
            with recorder.capture.own_backward():
                F.cross_entropy(model(some, way), torch.arange(len(some)) % ROWS % CLASSES).backward()
        recorder.capture.end_backward(last=True)
        found[parts] = recorder.means()
        recorder.capture.remove()
    assert found[1].keys() == found[2].keys()
    for name in found[1]:
        close(found[2][name][1], found[1][name][1], sums=2 * ROWS)


@pytest.mark.parametrize("kind, name", [("list", "e"), ("stack", "w")])
def test_a_rank_that_sums_one_expert_counts_the_terms_that_use_another(kind, name):
    recorder = seen(Mixture(kind), [torch.tensor(SOME), torch.tensor(ALL)], keys=[f"{name}.1/G"])
    assert terms(recorder) == {f"{name}.1": 2 * ROWS} and terms(recorder, "A") == {}
    assert recorder.capture.sums[f"{name}.1/G"].sum_P.any()


def test_an_expert_without_a_token_on_any_rank_has_no_terms():
    recorder = seen(Mixture("stack"), [torch.tensor(ALL)])
    assert terms(recorder) == {"w.0": ROWS, "w.1": ROWS, "head": ROWS}
    recorder.capture.siblings.used(recorder.capture.sums)
    assert terms(recorder) == {"w.0": ROWS, "w.1": 0, "head": ROWS}


class Layers(nn.Module):
    """An expert that is a list of layers, as wide as they are told to be."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.net:
            x = torch.tanh(layer(x))
        return x


class Nested(nn.Module):
    """Blocks of a list, each with a mixture of two experts; each block has its own part of the routes."""

    def __init__(self, *widths: int, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList(Layers(*widths) for _ in range(2)) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, routes):
        for experts, route in zip(self.blocks, routes.T, strict=True):
            out = x
            for k, expert in enumerate(experts):
                if len(chosen := (route == k).nonzero()[:, 0]):
                    out = out.index_add(0, chosen, expert(x[chosen]))
            x = out
        return self.head(x)


@pytest.mark.parametrize("widths", [(WIDTH, WIDTH, WIDTH), (WIDTH, 9, WIDTH), (WIDTH, WIDTH)])
def test_an_expert_that_is_a_list_of_layers_has_the_terms_of_micro_batches_without_a_token_for_it(widths):
    recorder = seen(Nested(*widths), [torch.tensor(route)[:, None] for route in (SOME, ALL, EVEN)])
    names = [f"blocks.0.{k}.net.{at}" for k in range(2) for at in range(len(widths) - 1)]
    assert terms(recorder) == dict.fromkeys((*names, "head"), 3 * ROWS)


def test_blocks_with_a_mixture_each_are_no_experts_of_one():
    """Though its first routes are even, so that only blocks have different numbers of rows."""
    model = Nested(WIDTH, WIDTH, WIDTH, blocks=2)
    even, two = torch.tensor(EVEN), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    recorder = seen(model, [torch.stack([even, two], 1), torch.stack([two, even], 1)])
    known = recorder.capture.siblings.known
    for block in range(2):
        for at in range(2):
            assert {known[f"blocks.{block}.{k}.net.{at}"] for k in range(2)} == {
                f"blocks.{block}.*.net.{at} weight [{WIDTH}, {WIDTH}]"
            }


class Turns(nn.Module):
    """A head for each task, or blocks of which some are dropped; ``both``: all heads are computed."""

    def __init__(self, both: bool = False, drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.drops = both, drops
        self.each = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x, task):
        if self.drops:
            for k, block in enumerate(self.each):
                x = x if k == task else block(x)
            return x
        return [head(x) if self.both or k == task else None for k, head in enumerate(self.each)][task]


@pytest.mark.parametrize("kind", [Turns(), Turns(both=True), Turns(drops=True)])
def test_heads_and_blocks_in_turns_have_their_own_terms(kind):
    used = [0, 1, 1]
    recorder = seen(kind, used)
    expected = [used.count(0), used.count(1)][:: -1 if kind.drops else 1]
    assert terms(recorder) == {f"each.{k}": ROWS * n for k, n in enumerate(expected)}
    assert not recorder.capture.siblings.known
