"""M, the number of loss terms: one for all layers of a loss, told by labels, by what the model returns, or guessed."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model.batch import ArgumentReader, BatchInfo
from ds_kfac.model.output import returned_loss, returned_prediction, terms_of
from ds_kfac.model.prediction import class_place
from ds_kfac.model.sampled_loss import SAMPLERS
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder
from tests.model.test_row_masks import rows_seen
from tests.ops.specification import symmetric_pack

N, T, D, C = 4, 5, 6, 3
LOSS, WIDE = torch.tensor(1.0), torch.zeros(N, T, C)
MASK = torch.ones(N, T, dtype=torch.bool)
MASK[1, 2:], MASK[3] = False, False


@pytest.mark.parametrize(
    ("output", "expand", "reduce"),
    [
        (torch.zeros(N, C), N, N),
        (WIDE, N * T, N),
        ((LOSS, WIDE), N * T, N),
        ((WIDE, LOSS), N * T, N),
        ({"loss": LOSS, "hidden": torch.zeros(7, 7), "logits": WIDE}, N * T, N),
        (SimpleNamespace(loss=LOSS, logits=WIDE), N * T, N),
        (torch.zeros(N, C, 7, 8), N * 7 * 8, N),  # images: classes second, as in torch's losses
        (torch.zeros(N), N, N),
        (torch.zeros(N, T, dtype=torch.int64), None, None),
        (LOSS, None, None),
        ((LOSS,), None, None),
        (None, None, None),
    ],
)
def test_a_prediction_tells_how_many_terms_a_loss_outside_has(output, expand, reduce):
    assert terms_of(output, BatchInfo(), weight_sharing="expand").number == expand
    assert terms_of(output, BatchInfo(), weight_sharing="reduce").number == reduce


def test_padded_predictions_are_no_terms():
    info = BatchInfo(rows=MASK)
    for prediction in (WIDE, WIDE.transpose(0, 1), WIDE.flatten(0, 1)):
        assert float(terms_of(prediction, info, weight_sharing="expand").number) == 2 * T + 2
    for prediction in (WIDE, WIDE.transpose(0, 1)):
        assert float(terms_of(prediction, info, weight_sharing="reduce").number) == 3
    assert terms_of(torch.zeros(N, C), info, weight_sharing="expand").number == N


def test_prediction_and_loss_are_found_in_what_models_return():
    for output in ((LOSS, WIDE), (WIDE, LOSS), {"loss": LOSS, "logits": WIDE}):
        assert returned_prediction(output) is WIDE and returned_loss(output) is LOSS
    assert returned_loss(WIDE) is None and returned_loss(LOSS) is LOSS


class Vision(nn.Module):
    """A ViT's shape: a block on all positions, a head on their mean; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(x)).mean(1))


class Images(Vision):
    """Segmentation: a prediction for each position, [N, C, T, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(x))).transpose(1, 2).unsqueeze(-1)


class Language(Vision):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(x)))


class Inside(Vision):
    """The loss inside, of an argument with a name of its own: nanoGPT's way."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.block(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class OnlyLoss(Vision):
    """The loss inside and nothing else returned; of squares, whose graph has no labels."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), F.one_hot(target, C).float())


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, T, D, generator=generator)
    return x, torch.randint(C, (N,), generator=generator), torch.randint(C, (N, T), generator=generator)


X, Y, YS = batch()
LOSSES = {
    Vision: (lambda model: F.cross_entropy(model(X), Y), N),
    Language: (lambda model: F.cross_entropy(model(X).flatten(0, 1), YS.flatten()), N * T),
    Images: (lambda model: F.cross_entropy(model(X), YS.unsqueeze(-1)), N * T),
    Inside: (lambda model: model(X, YS)[1], N * T),
    OnlyLoss: (lambda model: model(X, Y), N),
}


@pytest.mark.parametrize("kind", list(LOSSES))
def test_all_layers_of_a_loss_have_its_number_of_terms(kind, caplog):
    torch.manual_seed(0)
    model, (loss, terms) = kind(), LOSSES[kind]
    seen = rows_seen(model, loss)
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(model)
    with caplog.at_level(logging.WARNING):
        loss(model).backward()
    for name in ("block", "head"):
        assert recorder.counts(name)[1] == terms, f"{name}: the same in all layers"
        g = seen[name][1][0].grad.reshape(-1, D if name == "block" else C)
        G = recorder.sums(name).G
        close(G.sum_P / G.count, symmetric_pack(terms * g.T @ g), sums=N * T + 2 * D)
    assert len(caplog.records) == (kind is OnlyLoss), "only there it is a guess that layers contradict"
    if kind is OnlyLoss:
        assert "block has other rows than the layer nearest to the loss" in caplog.records[0].message


class Experts(nn.Module):
    """Ends in experts, or in a layer that gets slices, and returns its loss alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.way, self.w = way, nn.Parameter(torch.randn(3, D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.block(x))
        if self.way == "slices":
            return torch.stack([self.last(own) for own in x]).square().mean()
        flat, out = x.flatten(0, 1), torch.zeros(N * T, D)
        for expert, index in enumerate(torch.arange(N * T).tensor_split([3, 9])):
            out = out.index_add(0, index, F.linear(flat[index], self.w[expert]))
        return out.square().mean()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", ["experts", "slices"])
def test_a_part_of_the_rows_is_not_how_many_terms_a_loss_has(way, masked, caplog):
    if way == "slices" and not masked:
        return  # nothing tells that they are some
    recorder = Recorder(Experts(way))
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=MASK if masked else None)
    with caplog.at_level(logging.WARNING):
        recorder.model(X).backward()
    terms = int(MASK.sum()) if masked else N * T
    names = ["block", *(["last"] if way == "slices" else [f"w.{expert}" for expert in range(3)])]
    assert [recorder.counts(name)[1] for name in names] == [terms] * len(names)
    assert not caplog.records


class Labelled(nn.Module):
    """Labels that ArgumentReader knows, and a layer that is called twice; Hugging Face's argument for accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor, labels: Tensor, **kwargs) -> dict[str, Tensor]:
        logits = self.head(self.twice(torch.tanh(self.twice(x))))
        items = kwargs.get("num_items_in_batch")
        if "ignored" in kwargs:  # as BERT's masked language model does with it
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = each @ torch.ones_like(each)  # a sum that is not read from the graph
        return {"loss": losses / ((labels >= 0).sum() if items is None else items), "logits": logits}


def labels_of(*counts: int) -> Tensor:
    """[N, T], so many of each row labelled."""
    return torch.stack([torch.where(torch.arange(T) < count, YS[row], -100) for row, count in enumerate(counts)])


UNEVEN = labels_of(5, 1, 0, 3)


def expected_G(labels: Tensor) -> dict[str, Tensor]:
    """Of the whole batch: mean over its terms of g g^T."""
    torch.manual_seed(0)
    model, terms = Labelled(), int((labels >= 0).sum())
    seen = rows_seen(model, lambda model: model(X, labels)["loss"])
    sums = {}
    for name, (_, probes) in seen.items():
        g = torch.cat([probe.grad.flatten(0, 1) for probe in probes])
        sums[name] = symmetric_pack(terms * g.T @ g)
    return sums


def recorder_of_labelled() -> Recorder:
    torch.manual_seed(0)
    recorder = Recorder(Labelled())
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    return recorder


def assert_G(recorder: Recorder, labels: Tensor) -> None:
    for name, G in expected_G(labels).items():
        sums = recorder.sums(name).G
        assert float(sums.count) == int((labels >= 0).sum()), f"{name}: loss terms"
        close(sums.sum_P / sums.count, G, sums=N * T + 4 * D, what=name)


def test_a_second_call_of_a_layer_does_not_count_its_labels_again():
    recorder = recorder_of_labelled()
    recorder.model(X, UNEVEN)["loss"].backward()
    assert recorder.counts("twice") == [2 * 9, 9] and recorder.counts("head") == [9, 9]
    assert_G(recorder, UNEVEN)


def test_a_loss_times_zero_counts_nothing():
    """As of a rank that is out of data, or a guard that multiplies."""
    recorder = recorder_of_labelled()
    (recorder.model(X[:1], UNEVEN[:1])["loss"] * 0).backward()
    recorder.capture.end_backward()
    recorder.model(X, UNEVEN)["loss"].backward()
    assert_G(recorder, UNEVEN)


@pytest.mark.parametrize("outside", [1.0, 0.25])
@pytest.mark.parametrize("style", ["mean", "items", "items on a scaled loss", "items ignored"])
def test_micro_batches_with_unequal_labels_make_the_whole_batch(style, outside):
    """Hugging Face's loss is a sum divided by the labels of all micro-batches, on all ranks: "items"."""
    recorder, total = recorder_of_labelled(), int((UNEVEN >= 0).sum())
    for rows in (slice(0, 1), slice(1, 4)):
        items = {} if style == "mean" else {"num_items_in_batch": torch.tensor(total)}
        items |= {"ignored": True} if "ignored" in style else {}
        loss = recorder.model(X[rows], UNEVEN[rows], **items)["loss"]
        # what Trainer does to it outside, by the world size or the micro-batches, and a loss scale
        final = loss * outside * (2.0**10 if "scaled" in style else 1.0)
        recorder.capture.begin_backward(torch.tensor(outside if style == "mean" else 1.0))
        final.backward()
        recorder.capture.end_backward()
    assert_G(recorder, UNEVEN)


@pytest.mark.parametrize("style", ["mean", "items"])
def test_two_forwards_before_one_backward_have_their_own_terms(style):
    recorder, total = recorder_of_labelled(), int((UNEVEN >= 0).sum())
    items = {} if style == "mean" else {"num_items_in_batch": total}
    first = recorder.model(X[:1], UNEVEN[:1], **items)["loss"]
    with torch.no_grad():  # a teacher's, or a look at the loss
        recorder.model(X, labels_of(1, 1, 1, 1))
    second = recorder.model(X[1:], UNEVEN[1:], **items)["loss"]
    (first + second).backward()
    recorder.capture.end_backward()
    assert_G(recorder, UNEVEN)


def test_items_are_read_by_name_and_only_where_the_model_returns_a_loss():
    read = ArgumentReader(Labelled())
    assert read((X, UNEVEN), {"num_items_in_batch": 7}).items == 7 and read((X, UNEVEN), {}).items is None
    recorder = recorder_of_labelled()
    recorder.capture.read_batch = lambda *given: replace(read(*given), items=7)
    logits = recorder.model(X, UNEVEN)["logits"]
    recorder.capture.forward.returned(logits, weight_sharing="expand")
    F.cross_entropy(logits.flatten(0, 1), UNEVEN.flatten()).backward()
    assert_G(recorder, UNEVEN)


def test_with_reduce_a_term_is_an_example():
    torch.manual_seed(0)
    recorder = Recorder(Vision())
    recorder.capture.rows.weight_sharing = "reduce"
    F.cross_entropy(recorder.model(X), Y).backward()
    assert recorder.counts("block") == recorder.counts("head") == [N, N]


def test_with_reduce_a_label_of_an_example_is_a_term():
    """As of Hugging Face's sequence classification: labels [N], of which some are -100."""
    torch.manual_seed(0)
    recorder = Recorder(Vision())
    recorder.capture.rows.weight_sharing = "reduce"
    recorder.capture.read_batch = lambda *given: BatchInfo(labelled=torch.arange(N) > 0)
    F.cross_entropy(recorder.model(X)[1:], Y[1:]).backward()
    assert recorder.counts("head")[1] == N - 1


class Same(torch.autograd.Function):
    """As ZeRO-3 puts behind modules."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnLinearFn(torch.autograd.Function):
    """As Megatron's and TransformerEngine's are called."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class NonlinearScale(torch.autograd.Function):
    """Elementwise, of two tensors, with a name that has another one in it."""

    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def zero3(x: Tensor) -> Tensor:
    """F.linear, in every engine of a process that once had one of ZeRO-3."""
    return LinearFunctionForZeroStage3.apply(x, LAST.weight, LAST.bias)


SCALE, PIXELS = nn.Parameter(torch.ones(1, 1, 1)), nn.Conv2d(1, 4, 3, padding=1)
SIX = nn.Linear(6, 5)
TWO = nn.Bilinear(3, 3, 4)
LAST, CONV, UP, IMAGE = nn.Linear(3, 4), nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(3, 4, 3), nn.Conv2d(1, 4, 2)
LAYOUTS = {
    "bilinear": (lambda x: TWO(x.mT, x.mT), 2),
    "linear": (lambda x: LAST(x.mT), 2), "without bias": (lambda x: F.linear(x.mT, LAST.weight), 2),
    "linear, turned": (lambda x: LAST(x.mT).mT, 1), "linear, permuted": (lambda x: LAST(x.mT).permute(0, 2, 1), 1),
    "linear after a convolution": (lambda x: F.linear(CONV(x).mT, LAST.weight.T), 2),
    "convolution": (CONV, 1), "transposed": (UP, 1), "cut": (lambda x: CONV(x)[..., 2:].float() * 2 + 1, 1),
    "resized": (lambda x: F.interpolate(CONV(x), size=20), 1), "turned": (lambda x: CONV(x).transpose(1, 2), 2),
    "turned by mT": (lambda x: CONV(x).mT, 2), "permuted": (lambda x: CONV(x).permute(2, 0, 1), 2),
    "sequences first": (lambda x: CONV(x).permute(2, 1, 0), 1), "activation": (lambda x: torch.tanh(CONV(x)), 1),
    "image without a batch": (IMAGE, 0), "sequence without a batch": (lambda x: CONV(x[0])[None], 1),
    "no graph": (lambda x: x.detach(), 2),
    "scaled": (lambda x: SCALE * CONV(x), 1), "masked": (lambda x: torch.ones(2, 1, 6) * CONV(x), 1),
    "pooled": (lambda x: F.avg_pool1d(CONV(x), 2), 1), "a module's own backward": (lambda x: Same.apply(CONV(x)), 1),
    "pixels in a row": (lambda x: PIXELS(x[:, None]).flatten(2), 1),
    "pixels in a row, turned": (lambda x: PIXELS(x[:, None]).flatten(2).mT, 2),
    "pixels in a row, channels last": (lambda x: PIXELS(x[:, None]).permute(0, 2, 3, 1).flatten(1, 2), 2),
    "of one row": (lambda x: IMAGE(x[:, None, :2]).squeeze(2), 1), "a row": (lambda x: IMAGE(x[:, None])[:, :, 0], 1),
    "mean of rows": (lambda x: IMAGE(x[:, None]).mean(2), 1), "largest": (lambda x: IMAGE(x[:, None]).amax(-1), 1),
    "stacked": (lambda x: torch.stack([LAST(x[..., :3, 0])] * 3, 1), 2),
    "shuffled": (lambda x: CONV(x).view(2, 2, 2, 6).permute(0, 1, 3, 2).reshape(2, 2, 12), 1),
    "a weight on the left": (lambda x: LAST.weight @ x, 1), "turned from the left": (lambda x: (LAST.weight @ x).mT, 2),
    "of words": (lambda x: nn.Embedding(5, 3)(torch.zeros(2, 8, dtype=torch.long)) @ LAST.weight.T, 2),
    "ZeRO-3's linear": (lambda x: zero3(x.mT), 2), "ZeRO-3's, turned": (lambda x: zero3(x.mT).mT, 1),
    "ZeRO-3's, without bias": (lambda x: LinearFunctionForZeroStage3.apply(x.mT, LAST.weight), 2),
    "ZeRO-3's after a convolution": (lambda x: LinearFunctionForZeroStage3.apply(CONV(x), SIX.weight).mT, 1),
    "linear by name": (lambda x: OwnLinearFn.apply(CONV(x), SIX.weight.detach()), 2),
    "not by name": (lambda x: NonlinearScale.apply(CONV(x), SCALE), 1),
    "as many tokens as outputs": (lambda x: LAST(x[..., :4].mT), 2),
    "as many positions as outputs": (lambda x: CONV(x[..., :6]), 1),
    "several tokens of one row": (lambda x: LAST(x[..., 0]).view(2, 2, 2), 2),
}  # fmt: skip
IMAGES = {
    "convolution": (lambda x: IMAGE(x[:, None]), 1), "turned": (lambda x: IMAGE(x[:, None]).movedim(1, -1), 3),
    "resized": (lambda x: F.interpolate(IMAGE(x[:, None]), size=(9, 9)), 1),
    "ZeRO-3's linear": (lambda x: zero3(x.mT[:, None]), 3), "enlarged": (lambda x: F.interpolate(
        IMAGE(x[:, None]), size=(9, 9), mode="bilinear"), 1),
    "linear": (lambda x: LAST(x.mT[:, None]), 3), "linear, turned": (lambda x: LAST(x.mT[:, None]).movedim(3, 1), 1),
    "frames": (lambda x: IMAGE(x[:, None]).view(1, 2, 4, 2, 7), 2), "no graph": (lambda x: x[..., None], 1),
    "patches": (lambda x: LAST(x.mT).view(2, 8, 2, 1, 2).permute(0, 4, 1, 2, 3).reshape(2, 2, 16, 1), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_dimensions_are_tokens_or_positions_of_a_convolution(name):
    make, expected = LAYOUTS[name]
    prediction = make(torch.randn(1 if "image" in name else 2, 3, 8))
    assert prediction.ndim == 3 and class_place(prediction).dim % 3 == expected


@pytest.mark.parametrize("name", IMAGES)
def test_more_dimensions_are_images_unless_a_linear_layer_made_them(name):
    make, expected = IMAGES[name]
    prediction = make(torch.randn(2, 3, 8))
    assert prediction.ndim > 3 and class_place(prediction).dim % prediction.ndim == expected


def test_a_convolution_per_position_has_the_factors_of_the_linear_layer():
    """Logits [N, C, L] as torch's cross_entropy takes them, against [N, L, C]: terms are the N L positions."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv1d(3, 4, 1))
    linear = nn.Sequential(nn.Linear(3, 4))
    linear[0].weight.data.copy_(conv[0].weight.data[..., 0])
    linear[0].bias.data.copy_(conv[0].bias.data)
    x, y = torch.randn(5, 3, 7), torch.randint(4, (5, 7))
    found = []
    for model, rows in ((conv, x), (linear, x.mT.contiguous())):
        recorder = Recorder(model, LayerChoice(), positions=False)
        logits = model(rows)
        F.cross_entropy(logits if model is conv else logits.mT, y).backward()
        assert recorder.counts("0") == [35, 35]
        found.append(recorder.means()["0"])
        sampled = SAMPLERS["cross_entropy"](model(rows), BatchInfo(), torch.Generator().manual_seed(0))
        found[-1] += (sampled.detach(),)
    for conv_side, linear_side, what in zip(*found, ("A", "G", "sampled loss"), strict=True):
        close(conv_side, linear_side, sums=70, what=what)


def test_an_operation_with_the_name_of_a_product_and_one_operand_is_followed():
    class ScaledMm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    assert class_place(ScaledMm.apply(torch.nn.Linear(4, 5)(torch.ones(2, 3, 4)))).dim == 2
