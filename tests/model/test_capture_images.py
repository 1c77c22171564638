"""Convolutions through the hooks: counts, loss terms, both sides from one grid, shared heads, nothing kept alive."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.scan import LayerChoice, scan
from ds_kfac.model.share import share_of
from tests.close import close, exact
from tests.model.test_capture import Recorder, Watched, own_backward


class Heads(nn.Module):
    """A stem, and a head that several resolutions share, as in a feature pyramid; BatchNorm in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.norm.eval()

    def levels(self, x, count=3):
        z = torch.tanh(self.norm(self.stem(x)))
        return [self.head(F.avg_pool2d(z, 2**level)) for level in range(count)]

    def forward(self, x):
        return sum(level.mean((2, 3)) for level in self.levels(x))


def data(count=5, size=8):
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(2, (count,))


def test_terms_are_examples_and_rows_of_all_calls_are_counted():
    recorder = Recorder(Heads(), LayerChoice(), positions=False)
    x, y = data()
    F.cross_entropy(recorder.model(x), y).backward()
    assert recorder.counts("stem") == [5 * 64, 5]
    assert recorder.counts("head") == [5 * (64 + 16 + 4), 5]
    sums = recorder.sums("head")
    assert float(sums.A.sum_P[-1]) == float(sums.A.count), "the bias's 1 of every position"


def test_a_model_that_returns_its_loss_has_examples_as_terms():
    class Segmenter(Heads):
        def forward(self, x, target):
            return F.mse_loss(self.levels(x, 1)[0], target)

    recorder = Recorder(Segmenter(), LayerChoice(), positions=False)
    x, _ = data()
    recorder.model(x, torch.zeros(5, 2, 8, 8)).backward()
    assert recorder.counts("stem") == [5 * 64, 5] and recorder.counts("head") == [5 * 64, 5]


def test_pixels_are_terms_where_the_model_returns_them():
    class Dense(Heads):
        def forward(self, x):
            return self.levels(x, 1)[0]

    recorder = Recorder(Dense(), LayerChoice(), positions=False)
    x, _ = data()
    F.cross_entropy(recorder.model(x), torch.zeros(5, 8, 8, dtype=torch.long)).backward()
    assert recorder.counts("stem") == [5 * 64, 5 * 64]


def test_a_mask_of_tokens_is_not_for_images():
    read = lambda arguments, keywords: BatchInfo(rows=torch.zeros(5, 3, dtype=torch.bool))  # noqa: E731
    recorder = Recorder(Heads(), LayerChoice(), positions=False, read_batch=read)
    x, y = data()  # [5, 3, ..], as the mask
    F.cross_entropy(recorder.model(x), y).backward()
    assert recorder.counts("stem")[0] == 5 * 64


def test_a_part_in_eval_mode_is_captured_and_the_whole_too():
    model = nn.Sequential(Heads(), nn.Linear(2, 2))
    model[0].eval()
    recorder = Recorder(model, LayerChoice(types=("Conv2d", "BatchNorm")), positions=False)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    assert recorder.counts("0.stem") == [5 * 64, 5] and recorder.counts("0.norm")[0] == 5
    model.eval()
    F.cross_entropy(model(x), y).backward()
    assert recorder.counts("0.stem") == [2 * 5 * 64, 2 * 5]


def test_no_boxes_count_nothing_and_nothing_is_nan():
    recorder = Recorder(Heads(), LayerChoice())
    x, _ = data()
    recorder.model(x[:0]).sum().backward()
    sums = recorder.sums("stem")
    assert recorder.counts("stem") == [0, 0] and not sums.A.sum_P.any() and not sums.G.sum_P.any()
    sum(level.square().mean() for level in recorder.model.levels(x)).backward()  # the head's calls by hand
    assert torch.isfinite(recorder.sums("head").G.sum_P).all()


def test_both_sides_of_a_sample_are_from_the_same_positions():
    """With one-hot images A and G say where their rows came from."""
    model = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False))
    recorder = Recorder(model, LayerChoice())
    x = torch.eye(64).view(1, 64, 8, 8).repeat(20, 1, 1, 1)
    weight = torch.randn(20, 64, 8, 8)
    for turn in range(3):
        recorder.begin(turn)
        y = model(x)
        (y * weight * x).sum().backward()  # channel c has a gradient at position c only
        means = recorder.means()["0"]
        seen = [packed[torch.arange(1, 65).cumsum(0) - 1] > 0 for packed in means]
        assert torch.equal(seen[0], seen[1]) and 0 < int(seen[0].sum()) < 64


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once_with_batch_norm(reentrant):
    class Checkpointed(Heads):
        def forward(self, x):
            z = checkpoint(lambda x: torch.tanh(self.norm(self.stem(x))), x, use_reentrant=reentrant)
            return self.head(z).mean((2, 3))

    counts = []
    for kind in (Checkpointed, Heads):
        torch.manual_seed(0)
        model = kind()
        if kind is Heads:
            model.levels = lambda x, model=model: [model.head(torch.tanh(model.norm(model.stem(x))))]
        recorder = Recorder(model, LayerChoice(), positions=False)
        x, y = data()
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        counts.append((recorder.counts("stem"), recorder.counts("norm"), recorder.sums("norm").A.sum_P.clone()))
    assert counts[0][:2] == counts[1][:2]
    exact(counts[0][2], counts[1][2])


def test_a_frozen_norm_and_an_overriding_subclass_are_named():
    class Standardized(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    class Named(nn.Conv2d):
        pass

    model = nn.ModuleDict({
        "ws": Standardized(3, 4, 3), "named": Named(3, 4, 3), "wn": nn.utils.weight_norm(nn.Conv2d(3, 4, 3)),
        "frozen": nn.BatchNorm2d(4).requires_grad_(False), "sync": nn.SyncBatchNorm(4),
        "up": nn.ConvTranspose2d(4, 4, 2, dilation=2, output_padding=1),
    })  # fmt: skip
    found = scan(model)
    assert [layer.name for layer in found.layers] == ["named"]
    reasons = {skipped.name: skipped.reason for skipped in found.skipped}
    assert "Standardized overrides Conv2d._conv_forward, and does not convolve with its weight alone" in reasons["ws"]
    assert "parametrization" in reasons["wn"] and reasons["frozen"] == "weight is frozen"
    assert "of all ranks" in reasons["sync"] and "output_padding" in reasons["up"]


class Causal(nn.Conv1d):
    """Sees what was, gives its output beside a mask."""

    def forward(self, x, mask=None):
        return super().forward(F.pad(x, (2, 0))), mask


class Head(nn.Conv1d):
    """Of tokens [N, L, C]."""

    def forward(self, x):
        return super().forward(x.mT).mT


class Same(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(F.pad(x, (0, 1)), self.weight, self.bias, self.stride, groups=self.groups)


class Reflecting(nn.Conv1d):
    """Passes on what it was given; the weight in another dtype, which is a copy."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x.double(), weight.double(), bias.double()).float()


class Own(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        kinds = [nn.Conv1d] * 4 if plain else [Causal, Same, Reflecting, Head]
        self.plain = plain
        self.causal, self.same = kinds[0](3, 4, 3, bias=False), kinds[1](4, 6, 2, stride=2, groups=2)
        self.copied, self.head = kinds[2](6, 4, 3, padding=1), kinds[3](4, 2, 1)

    def forward(self, x):
        x = torch.tanh(self.causal(F.pad(x, (2, 0))) if self.plain else self.causal(x)[0])
        x = torch.tanh(self.copied(torch.tanh(self.same(F.pad(x, (0, 1)) if self.plain else x))))
        return (self.head(x) if self.plain else self.head(x.mT).mT).mean(-1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_convolution_with_a_forward_of_its_own_is_seen_where_it_convolves(sampled):
    recorders = []
    for plain in (True, False):
        torch.manual_seed(0)
        recorder = Recorder(Own(plain), LayerChoice(), positions=False, sampled=sampled)
        torch.manual_seed(1)
        loss = F.cross_entropy(recorder.model(torch.randn(5, 3, 9)), torch.tensor([0, 1, 0, 1, 0]))
        if sampled:
            calls = list(recorder.capture.pending)
            assert len(calls) == 4
            recorder.capture.add_sampled(calls, torch.autograd.grad(loss, [call.edge for call in calls]), 1.0)
        else:
            loss.backward()
        recorders.append(recorder)
    plain, own = recorders
    assert [layer.name for layer in own.layers] == [layer.name for layer in plain.layers] and len(own.layers) == 4
    for layer in own.layers:
        assert own.counts(layer.name) == plain.counts(layer.name) and own.counts(layer.name)[1] == 5
        for side in "AG":
            # two products, of up to 6 channels and 3 places and of 5 examples and 9 places
            close(*(getattr(r.sums(layer.name), side).sum_P for r in (own, plain)), sums=6 * 3 + 5 * 9)


def test_another_window_than_the_modules_is_not_taken_for_it():
    class Wider(nn.Conv1d):
        def forward(self, x):
            return F.conv1d(x, self.weight, self.bias, dilation=2)

    recorder = Recorder(nn.Sequential(Wider(3, 4, 3), nn.Conv1d(4, 2, 1)), LayerChoice(), positions=False)
    recorder.model(torch.randn(5, 3, 9)).sum().backward()
    assert set(recorder.means()) == {"1"}, "the first is silent, of which the engine warns"


class Standardized(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


class Shifted(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean()
        return super()._conv_forward(x, weight, bias)


@pytest.mark.parametrize("kind", [Standardized, Shifted])
def test_a_weight_that_is_computed_of_another_has_no_curvature(kind):
    model = nn.ModuleDict({"ws": kind(3, 4, 3), "linear": nn.Linear(4, 4)})
    found = scan(model, LayerChoice(gradients=False))
    assert [layer.name for layer in found.layers] == ["ws", "linear"]
    layer, _ = found.layers
    assert layer.shape == (4, 28) and layer.A.numel == layer.G.numel == 0
    share = share_of(model, found)
    assert share.stepped == share.matrices == 4 * 27 + 16 and share.curved == 16
    assert [layer.name for layer in scan(model).layers] == ["linear"], "with G it is left alone"


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("types", [("Conv2d",), ("Conv2d", "BatchNorm")])
def test_no_activation_of_images_outlives_its_graph(types, sampled):
    recorder = Recorder(Heads(), LayerChoice(types=types), sampled=sampled)
    watched = Watched(recorder.model)
    gc.disable()
    try:
        x, y = data()
        loss = F.cross_entropy(recorder.model(x), y)
        own_backward(recorder, loss)
        if sampled:
            recorder.begin()
        del loss, x
        assert len(watched.seen) > 5 and watched.living() == 0
    finally:
        gc.enable()


def test_an_image_without_a_batch_dimension_is_a_batch_of_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.Tanh(), nn.ConvTranspose2d(4, 4, 2, groups=2))
    x = torch.randn(3, 6, 6)  # of 4 channels and 4 rows where the second layer sees it
    found = []
    for image in (x, x[None]):
        recorder = Recorder(copy.deepcopy(model), LayerChoice(), positions=False)
        recorder.model(image).square().mean().backward()
        counts = [recorder.counts(name)[0] for name in "02"]
        found.append((counts, [recorder.sums(name).A.sum_P.clone() for name in "02"]))
    assert found[0][0] == found[1][0] == [16, 16]
    for single, batched in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(single, batched)
