"""G's scale where token losses are summed and divided by any number: against the whole batch by plain torch."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ds_kfac.model import loss as of_loss
from ds_kfac.model.batch import ArgumentReader, BatchInfo
from tests.close import close
from tests.model.test_capture import Recorder
from tests.ops.specification import symmetric_pack

N, T, D, C = 6, 5, 7, 4
SCALE = 64.0
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, T, D, generator=GENERATOR), torch.randint(C, (N, T), generator=GENERATOR)
Y = torch.stack([Y[n].where(torch.arange(T) < count, -100) for n, count in enumerate((5, 1, 2, 3, 1, 2))])
ONES = torch.ones(N)
TOTAL = int((Y >= 0).sum())
PARTS = slice(0, 1), slice(1, 4), slice(4, 6)
"""Micro-batches with 5, 6 and 3 of 14 labels."""


class Net(nn.Module):
    """Returns logits, or what ``loss`` makes of them, maybe beside another loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block, self.head, self.router = nn.Linear(D, D), nn.Linear(D, C), nn.Linear(D, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, loss: Callable[[Tensor], Tensor] | None = None):
        h = torch.tanh(self.block(x))
        aux, z = self.router(h).logsumexp(-1).square().mean(), self.head(h)
        return {"logits": z, "aux_loss": aux} if loss is None else {"loss": loss(z), "logits": z}


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.mT, y, reduction="none")


def picked(z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)


def total(z: Tensor, y: Tensor, **how: float) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum", **how)


def sums_of(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([total(a[None], b[None]) for a, b in zip(z, y, strict=True)])


def transformers_smoother(z: Tensor, y: Tensor) -> Tensor:
    """transformers' LabelSmoother with ``num_items_in_batch``, times that number."""
    logs, padding = -z.log_softmax(-1), (y < 0)[..., None]
    label = logs.gather(-1, y.clamp(min=0)[..., None]).masked_fill_(padding, 0.0)
    smoothed = logs.sum(-1, keepdim=True, dtype=torch.float32).masked_fill_(padding, 0.0)
    return 0.9 * label.sum() + 0.1 * (smoothed.sum() / C)


SUMS = {
    "a summed cross entropy": total,
    "of images": lambda z, y: F.cross_entropy(z.mT, y, reduction="sum"),
    "divided each": lambda z, y: (each(z, y) / 7).sum() * 7,
    "over a learned number": lambda z, y: total(z, y) / torch.zeros((), requires_grad=True).exp(),
    "masked": lambda z, y: (picked(z, y) * (y >= 0)).sum(),
    "masked by floats": lambda z, y: ((y >= 0).float() * picked(z, y)).sum(),
    "picked": lambda z, y: picked(z, y)[y >= 0].sum(),
    "filled": lambda z, y: picked(z, y).masked_fill(y < 0, 0.0).sum(),
    "where": lambda z, y: torch.where(y >= 0, picked(z, y), 0.0).sum(),
    "where not": lambda z, y: torch.where(y < 0, 0.0, picked(z, y)).sum(),
    "sequences first": lambda z, y: (picked(z, y) * (y >= 0)).sum(-1).sum(),
    "a mean of examples' sums": lambda z, y: (picked(z, y) * (y >= 0)).sum(-1).mean() * len(z),
    "a sum of sums": lambda z, y: sum(total(a[None], b[None]) for a, b in zip(z, y, strict=True)),
    "a sum of a vector of sums": lambda z, y: sums_of(z, y).sum(),
    "of weighed and chosen sums": lambda z, y: (
        torch.where(sums_of(z, y) < 99, sums_of(z, y), 0.0).mul(ONES[: len(z)]).sum()
    ),
    "of labelled logits": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0], reduction="sum"),
    "of one-hot labels": lambda z, y: -((z.log_softmax(-1) * F.one_hot(y.clamp(min=0), C)).sum(-1) * (y >= 0)).sum(),
    "in chunks": lambda z, y: torch.cat([each(a[None], b[None])[0] for a, b in zip(z, y, strict=True)]).sum(),
    "smoothed": lambda z, y: total(z, y, label_smoothing=0.1),
    "of images, smoothed": lambda z, y: F.cross_entropy(z.mT, y, reduction="sum", label_smoothing=0.1),
    "smoothed by transformers": transformers_smoother,
    "with a z-loss": lambda z, y: total(z, y) + 0.5 * (z.logsumexp(-1).square() * (y >= 0)).sum(),
    "with one of picked logits": lambda z, y: total(z, y) + 0.5 * z[y >= 0].logsumexp(-1).square().sum(),
}
UNKNOWN = {"in chunks"}
"""Where only labels say how many terms there are."""


def expected(make: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Of the whole batch: mean over its terms of g g^T."""
    model, found = Net(), dict[str, Tensor]()
    for name in ("block", "head"):

        def see(module, inputs, output, name=name) -> None:
            output.register_hook(lambda g: found.update({name: g.flatten(0, 1)}))

        getattr(model, name).register_forward_hook(see)
    make(model(X)["logits"], Y).backward()
    return {name: symmetric_pack(g.T @ g / TOTAL) for name, g in found.items()}


def captured(make, divisor: float | Tensor, place: str, *, labels: bool, **options) -> Recorder:
    """The batch in micro-batches, each loss a sum over ``divisor``: made outside, inside, or divided outside alone."""
    recorder = Recorder(Net(), **options)
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    for part in PARTS:
        x, y = X[part], Y[part]
        known, within = {"labels": y} if labels else {}, divisor if place == "inside" else 1.0
        if place == "outside":
            output = recorder.model(x, **known)
            loss = make(output["logits"], y) / divisor + 0.01 * output["aux_loss"]
        else:
            loss = recorder.model(x, loss=lambda z, y=y, within=within: make(z, y) / within, **known)["loss"]
            loss = loss if place == "inside" else loss / divisor
        recorder.backward(loss, SCALE)
    return recorder


@pytest.mark.parametrize("place", ["outside", "inside", "divided outside"])
@pytest.mark.parametrize("name", SUMS)
def test_whatever_a_sum_of_terms_is_divided_by_G_is_that_of_the_whole_batch(name, place):
    make = SUMS[name]
    G = expected(make)
    for divisor, labels in ((TOTAL, True), (torch.tensor(1000.0), False)):
        if name in UNKNOWN and not labels:
            continue
        with FlopCounterMode(display=False) if labels else nullcontext():  # under which numbers are no tensors
            recorder = captured(make, divisor, place, labels=labels)
        for layer in ("block", "head") if place != "outside" else ("head",):  # the other loss is in the block's, too
            found = recorder.sums(layer).G
            assert float(found.count) == TOTAL
            close(found.sum_P / found.count, G[layer], sums=N * T + 2 * D, what=f"{layer}, labels {labels}")


class Recurrent(Net):
    """Each step's loss is made in the step: their gradients come between those of the layers."""

    def forward(self, x: Tensor, y: Tensor, steps: int):  # type: ignore[override]
        loss: float | Tensor = 0.0
        for _ in range(steps):
            x = torch.tanh(self.block(x))
            loss = loss + total(self.head(x), y)
        return loss / 1000


def test_sums_of_many_steps_are_not_measured_anew_at_each(monkeypatch):
    looked = []
    weigh = of_loss.term_weight
    monkeypatch.setattr(of_loss, "term_weight", lambda mine, *more: looked.append(len(mine)) or weigh(mine, *more))
    recorder, steps = Recorder(Recurrent()), 100
    made = recorder.model(X, Y.clamp(min=0), steps)
    with recorder.capture.own_backward(made):
        recorder.capture.begin_backward(torch.tensor(1.0))
        made.backward()
    assert recorder.counts("head") == [steps * N * T, N * T * steps]
    assert len(looked) <= 8 * 5


def test_where_labels_alone_say_that_each_number_is_a_term_they_are_asked():
    """As TRL's head, a function of its own, makes them: of the positions that have a next one."""

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z, y):
            with torch.enable_grad():
                ctx.z = z.detach().requires_grad_()
                ctx.out = picked(ctx.z, y)
            return ctx.out.detach()

        @staticmethod
        def backward(ctx, gradient):
            return torch.autograd.grad(ctx.out, ctx.z, gradient)[0], None

    def make(z: Tensor, y: Tensor) -> Tensor:
        return Head.apply(z, y).masked_fill(y < 0, 0.0).sum()

    G = expected(make)["head"]
    found = captured(make, TOTAL, "outside", labels=True).sums("head").G
    close(found.sum_P / found.count, G, sums=N * T + 2 * D)


def means_of(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(z, y, strict=True)])


def squares_of(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([a[b >= 0].square().mean() for a, b in zip(z.flip(0), y.flip(0), strict=True)])


def log_sums(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(-1) * (y >= 0)).sum()


def dice(z: Tensor, y: Tensor) -> Tensor:
    p = (-picked(z, y)).exp() * (y >= 0)
    return 1 - 2 * (p * (y > 2)).sum() / (p + (y > 2)).sum()


OTHERS = {
    "a mean": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "a mean of sequences": lambda z, y: ((picked(z, y) * (y >= 0)).sum(-1) / (y >= 0).sum(-1)).mean(),
    "a sum of means": lambda z, y: ((picked(z, y) * (y >= 0)).sum(-1) / (y >= 0).sum(-1)).sum() / len(y),
    "weights": lambda z, y: (each(z, y) * torch.linspace(0.1, 0.9, T)).sum() / 8,
    "weights of classes": lambda z, y: F.cross_entropy(z.mT, y, weight=torch.rand(C), reduction="sum") / 8,
    "squares": lambda z, y: (z.square() * (y >= 0)[..., None]).sum() / 8,
    "means of a vector": lambda z, y: (means_of(z, y) + 1).sum() / 8,
    "means of squares": lambda z, y: (squares_of(z, y) + 1).sum() / 8,
    "a sum and a mean": lambda z, y: total(z, y) / 8 + z[y >= 0].square().mean(),
    "a smoothed mean": lambda z, y: total(z, y, label_smoothing=0.1) / (y >= 0).sum() + 1e-4 * log_sums(z, y),
    "a torch smoothed mean": lambda z, y: F.cross_entropy(z.mT, y, label_smoothing=0.1) + 1e-4 * log_sums(z, y),
    "weights of classes and a small sum": lambda z, y: (
        F.cross_entropy(z.mT, y, weight=torch.rand(C), reduction="sum") / 8 + 1e-4 * log_sums(z, y)
    ),
    "squares and a small sum": lambda z, y: (z.square() * (y >= 0)[..., None]).sum() / 8 + 1e-4 * log_sums(z, y),
    "a ratio of sums": lambda z, y: dice(z, y),
    "a ratio of sums beside a mean": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + dice(z, y),
    "a ratio of sums beside a sum": lambda z, y: total(z, y) / (y >= 0).sum() + dice(z, y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_of_terms_has_the_scale_of_a_mean(name):
    """Where terms have weights, or are not known, rows are those of a mean over this forward's labels."""
    make = OTHERS[name]
    logits = Net()(X[1:4])["logits"]
    logits.retain_grad()
    torch.manual_seed(2)
    make(logits, Y[1:4]).backward()
    recorder = Recorder(Net())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    logits_of = recorder.model(X[1:4], labels=Y[1:4])["logits"]
    torch.manual_seed(2)
    loss = make(logits_of, Y[1:4])
    recorder.backward(loss)
    g, M = logits.grad.flatten(0, 1), int((Y[1:4] >= 0).sum())
    sums = recorder.sums("head").G
    close(sums.sum_P / sums.count, symmetric_pack(M * g.T @ g), sums=N * T + 2 * D)


COUNTS = {
    "labels that are smoothed": (lambda z, y: F.cross_entropy(z.mT, y, label_smoothing=0.1), TOTAL),
    "probabilities": (lambda z, y: F.cross_entropy(z.flatten(0, 1), torch.full((N * T, C), 1 / C)), N * T),
    "the examples' means": (lambda z, y: (means_of(z, y) + 1).sum() / 8, N * T),
    "some of the examples' means": (lambda z, y: means_of(z, y)[y[:, 0] >= 0].sum() / 8, N * T),
    "a part of the losses, of which some are ignored": (lambda z, y: each(z, y)[:, :-1].sum() / 8, TOTAL),
    "probabilities of some": (lambda z, y: (-z.log_softmax(-1) / C)[y >= 0].sum() / 8, N * T),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_graph_shows_how_many_terms_there_are_or_each_prediction_is_one(name):
    make, terms = COUNTS[name]
    recorder = Recorder(Net())
    loss = make(recorder.model(X)["logits"], Y)
    recorder.backward(loss)
    assert recorder.counts("head")[1] == terms


def test_a_batch_that_says_its_divisor_is_believed():
    recorder = Recorder(Net())
    recorder.capture.read_batch = lambda *given: BatchInfo(divisor=3.0, labelled=Y >= 0)
    loss = total(recorder.model(X)["logits"], Y)
    recorder.backward(loss)
    G = expected(total)["head"]
    close(recorder.sums("head").G.sum_P / TOTAL, 9 * G, sums=N * T + 2 * D)


def test_a_loss_that_the_model_returns_beside_its_prediction_is_not_the_scale_of_one_made_outside():
    """As a mixture's, which the caller adds with a small weight."""
    recorder = captured(lambda z, y: F.cross_entropy(z.mT, y), 1.0, "outside", labels=True)
    sums, G = recorder.sums("head").G, 0
    for part in PARTS:
        model, found = Net(), []
        model.head.register_forward_hook(
            lambda module, inputs, output, f=found: output.register_hook(f.append) and None
        )
        F.cross_entropy(model(X[part])["logits"].mT, Y[part]).backward()
        g, M = found[0].flatten(0, 1), int((Y[part] >= 0).sum())
        G = G + M**2 * symmetric_pack(g.T @ g)
    close(sums.sum_P, G, sums=N * T + 2 * D)


class Parts(Net):
    """Returns a tuple: another prediction with more terms, the prediction, and an auxiliary loss."""

    def forward(self, x: Tensor, labels: Tensor | None = None):  # type: ignore[override]
        h = torch.tanh(self.block(x))
        other, z = self.router(h.repeat(1, 2, 1)), self.head(h)
        return other, z, other.logsumexp(-1).square().mean()


def of_micro_batches(model: nn.Module, loss_of, parts=PARTS, *, labels: bool = False) -> Recorder:
    """``loss_of(outputs, y)`` of a list of forwards, each a part of the batch."""
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    for several in parts:
        several = several if isinstance(several, tuple) else (several,)
        outputs = [recorder.model(X[part], **({"labels": Y[part]} if labels else {})) for part in several]
        loss = loss_of(outputs, [Y[part] for part in several])
        recorder.backward(loss, SCALE)
    return recorder


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("parts", [PARTS, [PARTS[:2], PARTS[2:]]], ids=["a forward each", "two forwards in one loss"])
def test_a_sum_over_what_one_returned_tensor_has_is_measured_beside_a_returned_loss(parts, labels):
    """Which of the tensors the loss is made of decides whose terms are counted; the sum, what each of them weighs."""

    def loss_of(outputs, labels):
        return sum(total(z, y) / 1000 + 0.01 * aux for (_, z, aux), y in zip(outputs, labels, strict=True))

    recorder = of_micro_batches(Parts(), loss_of, parts, labels=labels)
    found = recorder.sums("head").G
    assert float(found.count) == TOTAL and not recorder.capture.several
    close(found.sum_P / found.count, expected(total)["head"], sums=N * T + 2 * D)


@pytest.mark.parametrize("alone", [False, True])
def test_of_a_returned_sum_with_an_auxiliary_loss_the_sum_is_measured(alone):
    """As a mixture's loss, which its model divides by what it was told, and adds a balance of its experts."""

    class Mixture(Net):
        def forward(self, x: Tensor, labels: Tensor):  # type: ignore[override]
            output = super().forward(x)
            balance = self.router(x).logsumexp(-1).square().mean()  # behind the head: its gradient comes before
            return {"loss": total(output["logits"], labels) / 1000 + balance, **({} if alone else output)}

    recorder = Recorder(Mixture())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    for part in PARTS:
        loss = recorder.model(X[part], labels=Y[part])["loss"] / 7
        recorder.backward(loss, SCALE)
    found = recorder.sums("head").G
    close(found.sum_P / found.count, expected(total)["head"], sums=N * T + 2 * D)


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_of_sums_over_different_terms_the_root_mean_square_weight_counts(place):
    """As of the means of a batch's sequences, made in a loop, of which the shortest has the largest weight."""

    def make(z: Tensor, y: Tensor) -> Tensor:
        return sum(total(a[None], b[None]) / (b >= 0).sum() for a, b in zip(z, y, strict=True)) / len(z)

    G: Tensor | float = 0.0
    for part in PARTS:
        z = Net()(X[part])["logits"].detach().requires_grad_()
        (g,) = torch.autograd.grad(make(z, Y[part]), z)
        counts = (Y[part] >= 0).sum(-1)
        square = (1 / counts / len(counts) ** 2).sum() / counts.sum()
        G = G + symmetric_pack(g.flatten(0, 1).T @ g.flatten(0, 1)) / square
    found = captured(make, 1.0, place, labels=True).sums("head").G
    close(found.sum_P, G, sums=N * T + 2 * D)


@pytest.mark.parametrize(("weight", "mean"), [(1.0, False), (0.1, False), (0.1, True), (3.0, True)])
def test_a_sum_of_one_prediction_in_the_model_is_measured_beside_a_loss_outside(weight, mean):
    """As a loss that the model returned, and a distillation of its logits, summed or a mean."""
    teacher = ((Y + 1) % C).where(Y >= 0, -100)

    def other(z: Tensor, t: Tensor) -> Tensor:
        return weight * total(z, t) / ((t >= 0).sum() if mean else 1)

    def both(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return total(z, y) + other(z, t)

    recorder = Recorder(Net())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    G: Tensor | float = 0.0
    for part in PARTS:
        y, t = Y[part], teacher[part]
        output = recorder.model(X[part], labels=y, loss=lambda z, y=y: total(z, y))
        loss = (output["loss"] + other(output["logits"], t)) / 8
        recorder.backward(loss, SCALE)
        z = Net()(X[part])["logits"].detach().requires_grad_()
        (g,) = torch.autograd.grad(both(z, y, t), z)
        G = G + symmetric_pack(g.flatten(0, 1).T @ g.flatten(0, 1))
    found = recorder.sums("head").G
    close(found.sum_P, G, sums=N * T + 2 * D)


def test_a_loss_that_a_function_makes_whose_inside_is_not_seen_is_said(caplog):
    recorder = Recorder(Net())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    loss = torch.compile(total, backend="aot_eager")(recorder.model(X)["logits"], Y) / 1000
    with recorder.capture.own_backward(loss):
        loss.backward()
    assert sum("torch.compile's, makes the loss" in record.message for record in caplog.records) == 1
