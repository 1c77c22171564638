"""The noise scale against gradients of single samples and of 64 micro-batches, taken by autograd."""

import math

import pytest
import torch

from ds_kfac.model import noise
from ds_kfac.model.capture import Capture
from ds_kfac.model.noise import NoiseScale, squared_norms
from ds_kfac.model.scan import scan
from tests.close import close
from tests.models import FEATURES, Net, cross_entropy, make_batch, make_net

EPS = torch.finfo(torch.float32).eps


def of_samples(model, params, x, y) -> torch.Tensor:
    """Each sample's own gradient, flat, float64 [N, parameters]."""
    losses = [cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
    return torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]).double() for loss in losses]
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 17, 19), (5, 1, 17, 19), (3, 40, 7, 5), (1, 2, 1, 1)])  # N, T, I, O
def test_squared_norms_are_those_of_the_products(shape, bias, monkeypatch):
    N, T, I, O = shape  # noqa: E741
    monkeypatch.setattr(noise, "CHUNK", 2 * I * O)  # several chunks
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(N, T, D, generator=generator) for D in (I, O))
    exact = (g.double().mT @ x.double()).square().sum()
    if bias:
        exact += g.double().sum(dim=1).square().sum()
    # Gram matrices may cancel: what is summed is bounded by their entries' sizes
    sizes = ((x.double() @ x.double().mT).abs() * (g.double() @ g.double().mT).abs()).sum()
    assert abs(squared_norms(x, g, bias=bias) - exact) <= (T * T + I + O) * EPS * (sizes + exact)


def test_both_ways_are_taken():
    """Few positions of wide layers by Gram matrices, many of narrow ones by products."""
    assert 3 * (17 + 19) < 17 * 19 and 40 * (7 + 5) > 7 * 5  # as in the shapes above


def of_layers(layers, samples: int = 4) -> NoiseScale:
    return NoiseScale(layers, lambda: samples, 1, torch.device("cpu"))


def captured(model, x, y) -> NoiseScale:
    """What hooks of a capture see of one batch."""
    layers = scan(model).layers
    capture = Capture(model, layers, lambda: 1.0)
    capture.noise = of_layers(layers, len(x))
    capture.begin_step(frozenset(), 0)
    with capture.own_backward():
        cross_entropy(model(x), y).backward()
    capture.remove()
    return capture.noise


def test_it_is_the_estimate_from_gradients_of_samples():
    model = make_net()
    x, y = make_batch(0, 8)
    found = captured(model, x, y)
    names = found.counted
    assert names == ["head", "middle", "first"]
    params = [p for name in names for p in model.get_submodule(name).parameters()]
    h = of_samples(model, params, x, y)
    mean = h.mean(dim=0)
    squared_norm = sum(p.grad.double().square().sum() for p in params)
    close(squared_norm, mean.square().sum(), sums=8 * 3 + sum(p.numel() for p in params), dtype=torch.float32)
    record(found, found.sums(squared_norm.float(), 1.0))
    variance = (h - mean).square().sum() / (len(h) - 1)
    # both estimators without bias: variance by its definition, and |mean|^2 less its part
    signal = mean.square().sum() - variance / len(h)
    expected = torch.stack([variance, signal])
    # differences of B Q and P
    size, sums = float(h.square().sum(dim=1).mean() + mean.square().sum()), 8 * 3 * (13 + 17 + 19)
    close(found.average[:2], expected, sums=sums, scale=size, dtype=torch.float32)
    condition = size / abs(signal) + size / variance
    close(found.value, float(variance / signal), sums=sums, condition=float(condition), dtype=torch.float32)


def test_it_is_within_30_percent_of_64_micro_batches():
    """Variance between gradients of 64 micro-batches of 8 samples, at a point where the signal is seen."""
    torch.manual_seed(0)
    model = make_net()
    teacher = torch.randn(FEATURES, 5)
    x = torch.randn(512, 3, FEATURES)
    y = (x @ teacher + torch.randn(512, 3, 5)).argmax(-1)
    found = captured(model, x, y)
    params = [p for name in found.counted for p in model.get_submodule(name).parameters()]
    parts = []
    for a, b in zip(x.split(8), y.split(8), strict=True):
        gradients = torch.autograd.grad(cross_entropy(model(a), b), params)
        parts.append(torch.cat([g.flatten() for g in gradients]).double())
    h = torch.stack(parts)
    variance = (h - h.mean(dim=0)).square().sum() / (len(h) - 1)
    direct = float(8 * variance / (h.mean(dim=0).square().sum() - variance / len(h)))
    record(found, found.sums(sum(p.grad.square().sum() for p in params), 1.0))
    assert 0.7 * direct < found.value < 1.3 * direct, (found.value, direct)


class Flat(Net):
    """A router that sees tokens in a flat list, and a head that has a part of its samples twice."""

    def forward(self, x, y=None):
        z = self.norm(self.silu(self.first(x)))
        z = self.middle(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        return self.head(torch.tanh(torch.cat([z, z[:2]])))[: len(x)]


def test_layers_that_do_not_see_each_sample_once_are_left_out():
    assert captured(make_net(Flat), *make_batch(0, 4)).counted == ["first"]


class SequencesFirst(Net):
    """``batch_first``: what its module around a layer says, as torch's do."""

    batch_first: bool | None = False

    def forward(self, x, y=None):
        x = x.transpose(0, 1)
        z = self.norm(self.silu(self.first(x)))
        return self.head(torch.tanh(self.middle(z)).transpose(0, 1))


class SaysNothing(SequencesFirst):
    batch_first = None


def test_as_many_samples_as_positions_are_told_apart_by_the_order_of_their_module(caplog):
    torch.manual_seed(0)
    model, (x, y) = make_net(SequencesFirst), make_batch(0, 4, 4)
    found = captured(model, x, y)
    assert "first" in found.counted and not caplog.records
    params = list(model.first.parameters())
    expected = of_samples(model, params, x, y).div(len(x)).square().sum()
    close(found._sums["first"], expected, sums=4 * 4 + sum(p.numel() for p in params), dtype=torch.float32)
    captured(make_net(SaysNothing), x, y)
    assert len(caplog.records) == 1 and "as many examples as positions; taken as examples first" in caplog.text


@pytest.mark.parametrize("none", [(slice(0, 0),), (slice(None), slice(0, 0))])
def test_empty_batches_raise_nothing(none):
    model = make_net()
    x, y = make_batch(0, 4)
    assert captured(model, x[none], y[none]).counted == []


def test_many_layers_are_sampled_evenly():
    layers = scan(torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(100)])).layers
    places = [int(name) for name in of_layers(layers).place]
    assert len(places) <= noise.MOST_LAYERS < 25 and places == list(range(0, 100, places[1])) and places[-1] > 90


def record(found: NoiseScale, *ranks: torch.Tensor) -> None:
    found.record(torch.stack(ranks, dim=1))


def numbers(Q: float, B: float, P: float, mask: float = 7.0) -> torch.Tensor:
    return torch.tensor([Q, B, P, mask])


def test_what_was_told_is_the_measurement_before():
    """Nobody waits for a copy that has just begun."""
    found = of_layers(scan(make_net()).layers)
    record(found, numbers(3, 4, 4))
    first = found.average.tolist()
    assert found.told == [0.0, 0.0, 0.0] and first[2] == 1
    record(found, numbers(3, 4, 5))
    assert found.told == first and found.average.tolist() != first
    again = of_layers(scan(make_net()).layers)
    again.load_state_dict(found.state_dict())
    for one in (found, again):
        record(one, numbers(3, 4, 4))
    assert again.told == found.told and torch.equal(again.average, found.average)


def test_what_shows_nothing_changes_nothing():
    """One sample, numbers that are not finite, and ranks that measured other layers."""
    found = of_layers(scan(make_net()).layers)
    assert math.isnan(found.value)
    record(found, numbers(2, 4, 1))
    assert found.value == float("inf"), "no signal"
    before = found.average.clone()
    for ranks in ([numbers(2, 1, 2)], [numbers(float("nan"), 4, 1)], [numbers(2, 4, 3), numbers(2, 4, 3, mask=3)]):
        record(found, *ranks)
        assert torch.equal(found.average, before)
    assert found.measurements == 4
    record(found, numbers(1, 2, 1), numbers(1, 2, 3))  # B = 4, Q = 2, P = 4 of both
    assert found.average[2] == 2


def test_factors_are_the_same_with_it_and_without():
    """It keeps inputs until their gradients come; their rows are in A by then."""
    model, sums = make_net(), []
    layers = scan(model).layers
    x, y = make_batch(0, 4)
    for found in (None, of_layers(layers)):
        capture = Capture(model, layers, lambda: 1.0)
        capture.noise = found
        capture.begin_step(frozenset(key for layer in layers for key in layer.keys), 0)
        with capture.own_backward():
            cross_entropy(model(x), y).backward()
        sums.append(capture.sums)
        capture.remove()
    plain, noted = sums
    assert plain.keys() == noted.keys() and len(plain) >= 6
    for key, own in plain.items():
        assert torch.equal(own.sum_P, noted[key].sum_P) and torch.equal(own.count, noted[key].count), key
