"""Convolutions through the hooks: rows, both sides from one grid, shared heads, nothing kept
alive."""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.diagnostics.share import share_of
from ds_kfac.model.scan import LayerChoice, scan
from tests.close import close, exact
from tests.model.recorder import Recorder, Watched
from tests.ops.specification import symmetric_pack

CONVOLUTIONS = LayerChoice(types=("Conv2d",))


class Heads(nn.Module):
    """A stem, and a head that several resolutions share, as in a feature pyramid; BatchNorm in eval
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 1),
        )
        self.norm.eval()

    def levels(self, x, count=3):
        z = torch.tanh(self.norm(self.stem(x)))
        return [self.head(F.avg_pool2d(z, 2**level)) for level in range(count)]

    def forward(self, x):
        return sum(level.mean((2, 3)) for level in self.levels(x))


def data(count=5, size=8):
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(2, (count,))


def test_rows_of_all_calls_are_counted():
    recorder = Recorder(Heads(), CONVOLUTIONS, positions=False)
    x, y = data()
    recorder.backward(F.cross_entropy(recorder.model(x), y))
    bias, rows = (
        recorder.capture.sums["head/A"].sum_P[-1],
        recorder.capture.sums["head/A"].counts[0],
    )
    assert float(bias) == float(rows), "the bias's 1 of every position"
    assert recorder.rows() == {"stem": 5 * 64, "head": 5 * (64 + 16 + 4)}


def by_hand(
    model: nn.Module, loss: Callable, kind: type = nn.Conv2d
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Layer -> second moments of patches and of output gradients, each patch and pixel a row; and
    rows of all calls."""
    calls: dict[str, list] = {}

    def keep(name, module, inputs, output):
        probe = torch.zeros_like(output, requires_grad=True)
        calls.setdefault(name, []).append((module, inputs[0].detach().double(), probe))
        return output + probe

    for name, module in model.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(partial(keep, name))
    loss(model).backward()
    found = {}
    for name, of_layer in calls.items():
        A, G, rows = 0, 0, 0
        for module, x, probe in of_layer:
            patches = F.unfold(
                x, module.kernel_size, module.dilation, module.padding, module.stride
            ).mT.flatten(0, 1)
            patches = torch.cat([patches, torch.ones(len(patches), 1)], dim=1)
            pixels = probe.grad.double().flatten(2).mT.flatten(0, 1)
            A, G, rows = A + patches.T @ patches, G + pixels.T @ pixels, rows + len(patches)
        found[name] = A / rows, G, rows
    return found


@pytest.mark.parametrize("loss", ["of images", "of pixels"])
def test_a_pixel_is_a_row_and_G_has_the_rows_of_the_convolution_nearest_to_the_loss(loss):
    x, y = data()

    def loss_of(model):
        if loss == "of images":
            return F.cross_entropy(model(x), y)
        return F.cross_entropy(model.levels(x, 1)[0], y[:, None, None].expand(5, 8, 8))

    model = Heads()
    truth = by_hand(copy.deepcopy(model), loss_of)
    recorder = Recorder(model, CONVOLUTIONS, positions=False)
    recorder.backward(loss_of(model))
    terms = truth["head"][2]
    for name, found in recorder.factors().items():
        A, G, rows = truth[name]
        assert (found.rows, found.terms) == (rows, terms)
        close(found.A, symmetric_pack(A), sums=1000)
        close(found.G, symmetric_pack(terms * G), sums=1000)


def test_with_reduce_an_image_is_a_row_of_its_mean_patch_and_its_summed_gradient():
    x, y = data()
    recorder = Recorder(Heads(), LayerChoice(), sharing="reduce")
    recorder.backward(F.cross_entropy(recorder.model(x), y))
    found = recorder.factors()["stem"]
    patches = F.unfold(x.double(), 3, padding=1).mean(dim=2)
    patches = torch.cat([patches, torch.ones(5, 1)], dim=1)
    close(found.A, symmetric_pack(patches.T @ patches / 5), sums=1000)
    assert found.rows == 5


def test_a_mask_of_tokens_is_not_for_images():
    recorder = Recorder(Heads(), LayerChoice(), positions=False)
    recorder.capture.read_mask = lambda arguments, keywords: torch.zeros(5, 3, dtype=torch.bool)
    x, y = data()  # [5, 3, ..], as the mask
    y[1:] = -100
    recorder.backward(F.cross_entropy(recorder.model(x), y))
    assert recorder.rows()["stem"] == 5 * 64


def test_a_norm_has_the_gradients_of_examples():
    model = nn.Sequential(Heads(), nn.Linear(2, 2))
    model[0].eval()
    recorder = Recorder(model, LayerChoice(types=("Conv2d", "BatchNorm")), positions=False)
    kept = []
    model[0].norm.register_forward_hook(
        lambda module, inputs, output: (output.retain_grad(), kept.append(output))[1]
    )
    x, y = data()
    recorder.backward(F.cross_entropy(model(x), y))
    found = recorder.factors()
    assert (
        found["0.stem"].rows == 5 * 64 and found["0.norm"].rows == 5 and found["0.norm"].terms == 5
    )
    normalized, g = kept[0].detach().double(), kept[0].grad.double()
    rows = torch.stack([(normalized * g).sum((2, 3)), g.sum((2, 3))], dim=-1)  # weight 1 and bias 0
    blocks = 5 * torch.einsum("nci,ncj->cij", rows, rows)
    close(
        found["0.norm"].A.view(4, 3),
        torch.stack([blocks[:, 0, 0], blocks[:, 1, 0], blocks[:, 1, 1]], 1),
        sums=1000,
    )


def test_no_boxes_count_nothing_and_nothing_is_nan():
    recorder = Recorder(Heads(), LayerChoice())
    x, _ = data()
    recorder.backward(recorder.model(x[:0]).sum())
    assert not recorder.rows() and not recorder.capture.failed
    # the head's calls by hand
    recorder.backward(sum(level.square().mean() for level in recorder.model.levels(x)))
    assert torch.isfinite(recorder.factors()["head"].G).all()


def test_both_sides_of_a_sample_are_from_the_same_positions():
    """With one-hot images A and G say where their rows came from."""
    model = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False))
    recorder = Recorder(model, LayerChoice())
    x = torch.eye(64).view(1, 64, 8, 8).repeat(20, 1, 1, 1)
    weight = torch.randn(20, 64, 8, 8)
    for turn in range(3):
        recorder.begin(turn)
        y = model(x)
        recorder.backward((y * weight * x).sum())  # channel c has a gradient at position c only
        seen = [
            packed[torch.arange(1, 65).cumsum(0) - 1] > 0 for packed in recorder.factors()["0"][:2]
        ]
        assert torch.equal(seen[0], seen[1]) and 0 < int(seen[0].sum()) < 64


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once_with_batch_norm(reentrant):
    class Checkpointed(Heads):
        def forward(self, x):
            z = checkpoint(
                lambda x: torch.tanh(self.norm(self.stem(x))), x, use_reentrant=reentrant
            )
            return self.head(z).mean((2, 3))

    found = []
    for kind in (Checkpointed, Heads):
        torch.manual_seed(0)
        model = kind()
        if kind is Heads:
            model.levels = lambda x, model=model: [
                model.head(torch.tanh(model.norm(model.stem(x))))
            ]
        recorder = Recorder(model, LayerChoice(types=("Conv2d", "BatchNorm")), positions=False)
        x, y = data()
        recorder.backward(F.cross_entropy(model(x.requires_grad_()), y))
        found.append(recorder.factors())
    assert set(found[0]) == {"stem", "norm", "head"}
    for name, expected in found[1].items():
        exact(found[0][name], expected)


def test_a_frozen_norm_and_an_overriding_subclass_are_named():
    class Standardized(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    class Named(nn.Conv2d):
        pass

    model = nn.ModuleDict(
        {
            "ws": Standardized(3, 4, 3),
            "named": Named(3, 4, 3),
            "wn": nn.utils.weight_norm(nn.Conv2d(3, 4, 3)),
            "frozen": nn.BatchNorm2d(4).requires_grad_(False),
            "sync": nn.SyncBatchNorm(4),
            "up": nn.ConvTranspose2d(4, 4, 2, dilation=2, output_padding=1),
        }
    )
    found = scan(model)
    assert [layer.name for layer in found.layers] == ["named"]
    reasons = {skipped.name: skipped.reason for skipped in found.skipped}
    assert (
        "Standardized overrides Conv2d._conv_forward, and does not convolve with its weight alone"
        in reasons["ws"]
    )
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
        self.causal, self.same = (
            kinds[0](3, 4, 3, bias=False),
            kinds[1](4, 6, 2, stride=2, groups=2),
        )
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
            recorder.capture.add_asked(
                calls, torch.autograd.grad(loss, [call.edge for call in calls]), 1.0
            )
            recorder.capture.end_pass()
        else:
            recorder.backward(loss)
        recorders.append(recorder)
    plain, own = (recorder.factors() for recorder in recorders)
    assert list(own) == list(plain) and len(own) == 4
    for name in own:
        assert own[name][2:] == plain[name][2:]
        for side in range(2):
            # two products, of up to 6 channels and 3 places and of 5 examples and 9 places
            close(own[name][side], plain[name][side], sums=6 * 3 + 5 * 9)


def test_another_window_than_the_modules_is_not_taken_for_it():
    class Wider(nn.Conv1d):
        def forward(self, x):
            return F.conv1d(x, self.weight, self.bias, dilation=2)

    recorder = Recorder(
        nn.Sequential(Wider(3, 4, 3), nn.Conv1d(4, 2, 1)), LayerChoice(), positions=False
    )
    recorder.backward(recorder.model(torch.randn(5, 3, 9)).sum())
    assert set(recorder.factors()) == {"1"}, "the first is silent, of which the engine warns"


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
        recorder.backward(loss)
        if sampled:
            recorder.begin()
        del loss, x
        assert len(watched.seen) > 5 and watched.living() == 0
    finally:
        gc.enable()


def test_an_image_without_a_batch_dimension_is_a_batch_of_one():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, groups=1), nn.Tanh(), nn.ConvTranspose2d(4, 4, 2, groups=2)
    )
    x = torch.randn(3, 6, 6)  # of 4 channels and 4 rows where the second layer sees it
    found = []
    for image in (x, x[None]):
        recorder = Recorder(copy.deepcopy(model), LayerChoice(), positions=False)
        recorder.backward(recorder.model(image).square().mean())
        found.append(recorder.factors())
    assert [factors.rows for factors in found[0].values()] == [16, 16]
    exact(found[0], found[1])
