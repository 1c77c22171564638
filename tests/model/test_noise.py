"""The noise scale against gradients of single samples and of 64 micro-batches, taken by autograd."""

import pytest
import torch

from ds_kfac.model import noise
from ds_kfac.model.noise import NoiseScale, ratio, squared_norms
from ds_kfac.model.scan import scan
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


def captured(model, x, y, world: int = 1) -> NoiseScale:
    """What hooks of a capture see of one batch."""
    from ds_kfac.model.capture import Capture

    layers = scan(model).layers
    capture = Capture(model, layers, lambda: 1.0)
    capture.noise = NoiseScale(layers, world, torch.device("cpu"))
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
    assert names == ["first", "middle", "head"]
    params = [p for name in names for p in model.get_submodule(name).parameters()]
    h = of_samples(model, params, x, y)
    mean = h.mean(dim=0)
    squared_norm = sum(p.grad.double().square().sum() for p in params)
    assert torch.allclose(squared_norm, mean.square().sum(), rtol=1e-5)
    found.record(found.sums(squared_norm.float(), 1.0))
    variance = (h - mean).square().sum() / (len(h) - 1)
    # both estimators without bias: variance by its definition, and |mean|^2 less its part
    signal = mean.square().sum() - variance / len(h)
    expected = torch.stack([variance, signal])
    assert torch.allclose(found.average.double(), expected, rtol=1e-4, atol=1e-4 * float(variance)), found.average
    assert found.value == pytest.approx(ratio(*expected.tolist()), rel=1e-3)


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
    found.record(found.sums(sum(p.grad.square().sum() for p in params), 1.0))
    assert 0.7 * direct < found.value < 1.3 * direct, (found.value, direct)


def test_layers_whose_rows_are_no_samples_are_left_out():
    """A router that sees tokens in a flat list says nothing of samples."""

    class Flat(Net):
        def forward(self, x, y=None):
            z = self.norm(self.silu(self.first(x)))
            z = self.middle(z.flatten(0, 1)).unflatten(0, z.shape[:2])
            return self.head(torch.tanh(z))

    assert captured(make_net(Flat), *make_batch(0, 4)).counted == ["first", "head"]


def test_many_layers_are_sampled_evenly():
    layers = scan(torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(100)])).layers
    places = [int(name) for name in NoiseScale(layers, 1, torch.device("cpu")).place]
    assert len(places) <= noise.MOST_LAYERS and places == list(range(0, 100, places[1])) and places[-1] > 90


def test_what_was_told_is_the_measurement_before():
    """Nobody waits for a copy that has just begun."""
    found = NoiseScale(scan(make_net()).layers, 1, torch.device("cpu"))
    tensors = [torch.tensor([3.0, 4.0, P]) for P in (4.0, 5.0)]
    found.record(tensors[0])
    first = found.average.tolist()
    assert found.told is None
    found.record(tensors[1])
    assert found.told == first and found.average.tolist() != first
    again = NoiseScale(scan(make_net()).layers, 1, torch.device("cpu"))
    again.load_state_dict(found.state_dict())
    for one in (found, again):
        one.record(tensors[0])
    assert again.told == found.told and torch.equal(again.average, found.average)


def test_no_signal_is_an_infinite_scale_and_one_sample_says_nothing():
    found = NoiseScale(scan(make_net()).layers, 1, torch.device("cpu"))
    found.record(torch.tensor([2.0, 4.0, 1.0]))
    assert found.value == float("inf")
    before = found.average.clone()
    for sums in ([2.0, 1.0, 2.0], [float("nan"), 4.0, 1.0]):
        found.record(torch.tensor(sums))
        assert torch.equal(found.average, before)
