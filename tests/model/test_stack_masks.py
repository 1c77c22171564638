"""Stacks of weights that are no experts have the mask, and weight_sharing "reduce", as any layer; experts have not."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.scan import LayerChoice
from ds_kfac.step.messages import rows_in
from tests.close import close
from tests.model.test_capture import Recorder
from tests.ops.specification import symmetric_pack

N, T, I, O, HEADS = 3, 4, 5, 6, 2  # noqa: E741
SUMS = HEADS * N * T + I + O
MASK = torch.arange(T) < torch.tensor([4, 1, 2])[:, None]


class Heads(nn.Module):
    """Every head multiplies every row."""

    own = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(HEADS, O, I))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x, self.w[h]) for h in range(HEADS)], 1)


class Turned(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HEADS, I, O))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.w[h] for h in range(HEADS)], 1)


class Own(Turned):
    """Each head has inputs of its own."""

    own = True

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.bmm(x.view(N * T, HEADS, I).transpose(0, 1), self.w)
        return rows.view(HEADS, N, T, O).transpose(0, 1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shares", [False, True], ids=["an A each", "one A"])
@pytest.mark.parametrize("kind", [Heads, Turned, Own])
def test_heads_have_the_rows_that_count(kind, shares, sharing, caplog):
    model = nn.Sequential(kind())
    x = torch.randn(N, T, HEADS * I if kind.own else I, generator=torch.Generator().manual_seed(1))
    weights, probe = torch.randn(N, HEADS, T, O), torch.zeros(N, HEADS, T, O, requires_grad=True)
    ((model(x) + probe).tanh() * weights).sum().backward()
    inputs = x.view(N, T, HEADS, I) if kind.own else x[:, :, None].expand(N, T, HEADS, I)
    recorder = Recorder(model, LayerChoice(shares=shares), sharing=sharing)
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=MASK)
    with caplog.at_level(logging.WARNING):
        (model(x).tanh() * weights).sum().backward()
    assert not caplog.records
    counted, rows = MASK[..., None].float(), int(MASK.sum())
    for head in range(HEADS):
        a, g = inputs[:, :, head] * counted, probe.grad[:, head] * counted
        if sharing == "reduce":
            a, g = a.sum(1) / counted.sum(1), g.sum(1)
        else:
            a, g = a[MASK], g[MASK]
        sums = recorder.sums(f"0.w.{head}")
        close(sums.G.sum_P / sums.G.count**2, symmetric_pack(g.T @ g), sums=SUMS, what=f"G of {head}")
        if not shares:
            close(sums.A.sum_P / sums.A.count, symmetric_pack(a.T @ a / len(a)), sums=SUMS, what=f"A of {head}")
            assert sums.A.count == (N if sharing == "reduce" else rows)
    if shares:
        sums = recorder.sums("0.w.0")
        a = inputs * counted[..., None]
        a = (a.sum(1) / counted.sum(1)[..., None]).flatten(0, 1) if sharing == "reduce" else inputs[MASK].flatten(0, 1)
        close(sums.A.sum_P / sums.A.count, symmetric_pack(a.T @ a / len(a)), sums=SUMS)


class Picked(Heads):
    """Experts: a token's own matrix, as many rows as tokens, in another order; or dispatched to places."""

    way = "bmm"

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        index = torch.arange(N * T).flip(0) % HEADS
        if self.way == "bmm":
            return torch.bmm(self.w[index], flat.flip(0)[..., None]).flip(0)
        places = torch.zeros(HEADS, N * T, I)
        for expert in range(HEADS):
            places[expert, : N * T // HEADS] = flat.flip(0)[index == expert]
        return torch.bmm(places, self.w.mT)[:, : N * T // HEADS]


@pytest.mark.parametrize("way", ["bmm", "places"])
def test_tokens_of_experts_lie_in_another_order_and_all_count(way):
    model = nn.Sequential(Picked())
    model[0].way = way
    x = torch.randn(N, T, I, generator=torch.Generator().manual_seed(1))
    recorder = Recorder(model, LayerChoice(shares=False))
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=MASK)
    model(x).tanh().sum().backward()
    index = torch.arange(N * T).flip(0) % HEADS
    for expert in range(HEADS):
        a = x.flatten(0, 1).flip(0)[index == expert]
        sums = recorder.sums(f"0.w.{expert}").A
        assert sums.count == N * T // HEADS
        close(sums.sum_P, symmetric_pack(a.T @ a), sums=SUMS)


class Loop(nn.Module):
    """Experts one by one, each with every token, which lie in the order of its choices; or one expert alone, whose
    tokens a sort that is not stable has put in an order of its own."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(experts, O, I)), nn.Parameter(torch.randn(experts, I, O))

    def forward(self, x: Tensor) -> Tensor:
        flat, order = x.reshape(-1, I), torch.arange(N * T).flip(0)
        if len(self.up) == 1:
            index = torch.zeros(N * T, dtype=torch.int64)
            up = torch.bmm(self.up[index], flat[order][..., None])
            return torch.bmm(self.down[index], torch.tanh(up)).squeeze(-1)
        found = torch.zeros_like(flat)
        for e in range(len(self.up)):
            rows = torch.tanh(F.linear(flat[order], self.up[e]))
            found = found.index_add(0, order, F.linear(rows, self.down[e]))
        return found


class Dense(Loop):
    """Every matrix takes the batch as it is."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, I)
        return sum(F.linear(torch.tanh(F.linear(flat, self.up[e])), self.down[e]) for e in range(len(self.up)))


@pytest.mark.parametrize("kind, experts, counted", [(Loop, 1, N * T), (Loop, 2, N * T), (Dense, 2, int(MASK.sum()))])
def test_as_many_tokens_as_the_batch_has_are_not_in_its_order_if_they_were_picked(kind, experts, counted):
    model, x = nn.Sequential(kind(experts)), torch.randn(N, T, I, generator=torch.Generator().manual_seed(1))
    recorder = Recorder(model, LayerChoice(shares=False))
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=MASK)
    model(x).tanh().sum().backward()
    rows = x.reshape(-1, I) if counted == N * T else x[MASK]
    for expert in range(experts):
        up, down = (recorder.sums(f"0.{name}.{expert}").A for name in ("up", "down"))
        assert up.count == down.count == counted
        close(up.sum_P, symmetric_pack(rows.T @ rows), sums=SUMS)
        inner = torch.tanh(F.linear(rows, model[0].up[expert])).detach()
        close(down.sum_P, symmetric_pack(inner.T @ inner), sums=SUMS)


def test_measured_rows_are_those_that_count():
    model = nn.Sequential(nn.Linear(I, I), Heads())
    recorder = Recorder(model, read_batch=lambda arguments, keywords: BatchInfo(rows=MASK))
    recorder.begin(measure=True)
    model(torch.randn(N, T, I))  # a look, without a backward
    model(torch.randn(N, T, I)).square().mean().backward()
    found = rows_in(recorder.capture.measured)
    assert found == dict.fromkeys(["0", *(f"1.w.{head}" for head in range(HEADS))], int(MASK.sum()))
