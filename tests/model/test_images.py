"""Convolutions through the hooks: rows, both sides from one grid, shared heads, forwards of their
own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.scan import LayerChoice
from tests.close import close, exact
from tests.model.recorder import Recorder, compared, equal_bits, same


class Heads(nn.Module):
    """A stem, and a head that several resolutions share, as in a feature pyramid; BatchNorm in eval
    mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)
        self.norm.eval()

    def levels(self, x, count=3):
        z = torch.tanh(self.norm(self.stem(x)))
        return [self.head(F.avg_pool2d(z, 2**level)) for level in range(count)]

    def forward(self, x):
        return sum(level.mean((2, 3)) for level in self.levels(x))


def data():
    torch.manual_seed(1)
    return torch.randn(5, 3, 8, 8), torch.randint(2, (5,))


@pytest.mark.parametrize("of", ["images", "pixels"])
def test_a_pixel_of_every_call_is_a_row_and_G_has_those_of_the_convolution_nearest_to_the_loss(of):
    x, y = data()

    def program(model, backward):
        if of == "images":
            backward(F.cross_entropy(model(x), y))
        else:
            backward(F.cross_entropy(model.levels(x, 1)[0], y[:, None, None].expand(5, 8, 8)))

    rows = 5 * 64 if of == "pixels" else 5 * (64 + 16 + 4)
    assert compared(Heads(), program)["head"][2:] == (rows, rows)


def test_a_mask_of_tokens_is_not_for_images():
    recorder = Recorder(Heads(), mask=lambda *_: torch.zeros(5, 3, dtype=torch.bool))
    x, y = data()  # [5, 3, ..], as the mask
    y[1:] = -100
    recorder.backward(F.cross_entropy(recorder.model(x), y))
    assert recorder.rows()["stem"] == 5 * 64


def test_a_norm_has_the_gradients_of_examples():
    recorder = Recorder(Heads(), LayerChoice(types=("Conv2d", "BatchNorm")))
    kept = []
    recorder.model.norm.register_forward_hook(
        lambda module, inputs, output: (output.retain_grad(), kept.append(output))[1]
    )
    x, y = data()
    recorder.backward(F.cross_entropy(recorder.model(x), y))
    found = recorder.factors()
    terms = 5 * (64 + 16 + 4)
    assert found["norm"][2:] == (5, terms) and found["stem"].rows == 5 * 64
    normalized, g = kept[0].detach().double(), kept[0].grad.double()  # weight 1 and bias 0
    rows = torch.stack([(normalized * g).sum((2, 3)), g.sum((2, 3))], dim=-1)
    blocks = terms * torch.einsum("nci,ncj->cij", rows, rows)
    packed = torch.stack([blocks[:, 0, 0], blocks[:, 1, 0], blocks[:, 1, 1]], 1)
    close(found["norm"].A.view(4, 3), packed, sums=1000)


def test_no_boxes_count_nothing_and_nothing_is_nan():
    recorder = Recorder(Heads(), positions=True)
    x, _ = data()
    recorder.backward(recorder.model(x[:0]).sum())
    assert not recorder.rows() and not recorder.capture.failed
    # the head's calls by hand
    recorder.backward(sum(level.square().mean() for level in recorder.model.levels(x)))
    assert torch.isfinite(recorder.factors()["head"].G).all()


def test_both_sides_of_a_sample_are_from_the_same_positions():
    """With one-hot images A and G say where their rows came from."""
    recorder = Recorder(nn.Sequential(nn.Conv2d(64, 64, 1, bias=False)), positions=True)
    x = torch.eye(64).view(1, 64, 8, 8).repeat(20, 1, 1, 1)
    weight = torch.randn(20, 64, 8, 8)
    diagonal = torch.arange(1, 65).cumsum(0) - 1
    for turn in range(3):
        recorder.begin(turn)
        y = recorder.model(x)
        recorder.backward((y * weight * x).sum())  # channel c has a gradient at position c only
        seen = [packed[diagonal] > 0 for packed in recorder.factors()["0"][:2]]
        assert torch.equal(seen[0], seen[1]) and 0 < int(seen[0].sum()) < 64


def test_an_image_without_a_batch_dimension_is_a_batch_of_one():
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 4, 2, groups=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), up)
    x = torch.randn(3, 6, 6)  # of 4 channels and 4 rows where the second layer sees it
    found = []
    for image in (x, x[None]):
        recorder = Recorder(copy.deepcopy(model))
        recorder.backward(recorder.model(image).square().mean())
        found.append(recorder.factors())
    assert [factors.rows for factors in found[0].values()] == [16, 16]
    exact(found[0], found[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit_with_batch_norm(reentrant):
    found = []
    for checkpoints in (False, True):
        recorder = Recorder(Heads(), LayerChoice(types=("Conv2d", "BatchNorm")))
        model, (x, y) = recorder.model, data()
        block = lambda x, model=model: torch.tanh(model.norm(model.stem(x)))  # noqa: E731
        x.requires_grad_()
        z = checkpoint(block, x, use_reentrant=reentrant) if checkpoints else block(x)
        recorder.backward(F.cross_entropy(model.head(z).mean((2, 3)), y))
        found.append(recorder.factors())
    assert set(found[0]) == {"stem", "norm", "head"}
    equal_bits(found[1], found[0])


# forwards of their own


class Causal(nn.Conv1d):
    """Sees what was, gives its output beside a mask."""

    def forward(self, x, mask=None):
        return super().forward(F.pad(x, (2, 0))), mask


class Same(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(F.pad(x, (0, 1)), self.weight, self.bias, self.stride, groups=self.groups)


class Reflecting(nn.Conv1d):
    """Passes on what it was given; the weight in another dtype, which is a copy."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x.double(), weight.double(), bias.double()).float()


class Head(nn.Conv1d):
    """Of tokens [N, L, C]."""

    def forward(self, x):
        return super().forward(x.mT).mT


class Own(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = [nn.Conv1d] * 4 if plain else [Causal, Same, Reflecting, Head]
        self.plain = plain
        self.causal = kinds[0](3, 4, 3, bias=False)
        self.same = kinds[1](4, 6, 2, stride=2, groups=2)
        self.copied, self.head = kinds[2](6, 4, 3, padding=1), kinds[3](4, 2, 1)

    def forward(self, x):
        x = torch.tanh(self.causal(F.pad(x, (2, 0))) if self.plain else self.causal(x)[0])
        x = torch.tanh(self.copied(torch.tanh(self.same(F.pad(x, (0, 1)) if self.plain else x))))
        return (self.head(x) if self.plain else self.head(x.mT).mT).mean(-1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_convolution_with_a_forward_of_its_own_is_seen_where_it_convolves(sampled):
    found = []
    for plain in (True, False):
        recorder = Recorder(Own(plain), sampled=sampled)
        torch.manual_seed(1)
        loss = recorder.model(torch.randn(5, 3, 9)).square().mean()
        (recorder.sample if sampled else recorder.backward)(loss)
        found.append(recorder.factors())
    assert len(found[0]) == 4
    same(found[1], found[0])


def test_another_window_than_the_modules_is_not_taken_for_it():
    class Wider(nn.Conv1d):
        def forward(self, x):
            return F.conv1d(x, self.weight, self.bias, dilation=2)

    recorder = Recorder(nn.Sequential(Wider(3, 4, 3), nn.Conv1d(4, 2, 1)))
    recorder.backward(recorder.model(torch.randn(5, 3, 9)).sum())
    assert set(recorder.factors()) == {"1"}, "the first is silent, of which the engine warns"
