"""Images beside tokens: labels and masks of the text are of no patch, though there may be as many patches as tokens."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_kfac.model.batch import ArgumentReader, RowMasks
from tests.close import close
from tests.model.test_capture import Recorder

N, T, D, P, V = 3, 4, 6, 5, 11
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(V, (N, T), generator=GENERATOR)
PIXELS = torch.randn(N, T, P, generator=GENERATOR)
LABELS = torch.tensor([[-100, -100, 1, 2], [-100, -100, -100, 3], [-100, 4, 5, 6]])
LABELLED = int((LABELS >= 0).sum())
OF_IMAGES, OF_TEXT = ["vision.tower.0", "vision.tower.2", "project", "cross"], ["text", "lm_head"]


class Tower(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tower = how, nn.Sequential(nn.Linear(P, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.tower, x, use_reentrant=False) if self.how == "checkpointed" else self.tower(x)


class Pictures(nn.Module):
    """Patches go through a tower and a projection, to be added to tokens and looked at across from the text."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed, self.vision, self.project = nn.Embedding(V, D), Tower(how), nn.Linear(D, D)
        self.text, self.cross, self.lm_head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask=None, labels=None) -> Tensor:
        pixels = pixel_values.float()
        patches = self.project(self.vision(pixel_values=pixels) if self.how == "named" else self.vision(pixels))
        h = torch.tanh(self.text(self.embed(input_ids) + patches.mean(1, keepdim=True))) + self.cross(patches)
        return F.cross_entropy(self.lm_head(h).flatten(0, 1), labels.flatten())


class Batched(Pictures):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(**batch)


class Named(Tower):
    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.tower(pixel_values)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("how", ["plain", "checkpointed", "named", "cast", "in order", "a batch"])
def test_every_patch_counts_where_tokens_have_labels(how, masked):
    model = Batched(how) if how == "a batch" else Pictures(how)
    if how == "named":
        model.vision = Named(how)
    rows = {}
    for name in OF_IMAGES:
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: rows.update({name: inputs[0].detach().flatten(0, 1)})
        )
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(model)
    given = {"attention_mask": torch.ones_like(IDS)} if masked else {}
    pixels = PIXELS.double() if how == "cast" else PIXELS
    first, named = ((IDS, pixels), {}) if how == "in order" else ((), {"input_ids": IDS, "pixel_values": pixels})
    named |= {"labels": LABELS, **given}
    loss = model(batch=named) if how == "a batch" else model(*first, **named)
    with recorder.capture.own_backward(loss):
        loss.backward()
    assert {name: recorder.counts(name) for name in OF_IMAGES} == {x: [N * T, LABELLED] for x in OF_IMAGES}
    assert {name: recorder.counts(name) for name in OF_TEXT} == {x: [LABELLED] * 2 for x in OF_TEXT}
    for name, x in rows.items():
        with_bias = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        expected = (with_bias.T @ with_bias)[tuple(torch.tril_indices(*[x.shape[1] + 1] * 2))]
        close(recorder.sums(name).A.sum_P, expected, sums=N * T)


def test_features_without_tokens_are_what_labels_are_of():
    """As of a tagger of sounds, whose input is all that there is."""
    model = Pictures("plain")
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(model)
    model.forward = lambda pixel_values, labels: F.cross_entropy(
        model.lm_head(model.vision(pixel_values)).flatten(0, 1), labels.flatten()
    )
    loss = model(pixel_values=PIXELS, labels=LABELS)
    with recorder.capture.own_backward(loss):
        loss.backward()
    assert recorder.counts("vision.tower.0") == [LABELLED, LABELLED]


class Looking(nn.Module):
    """A decoder of text that looks at patches, beside the embedding of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(self.query(h)) + self.key(memory).mean(1, keepdim=True)


class Captioner(nn.Module):
    """``features``: of tokens, to which their embeddings are added in place, not of patches."""

    def __init__(self, features: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.eyes, self.looking, self.out = nn.Embedding(V, D), nn.Linear(P, D), Looking(), nn.Linear(D, V)
        self.features = features

    def forward(self, input_ids: Tensor, seen: Tensor, attention_mask=None, labels=None) -> Tensor:
        h = self.eyes(seen)
        h = h.add_(self.embed(input_ids)) if self.features else self.looking(self.embed(input_ids), h)
        return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("features", [False, True])
def test_rows_of_text_that_look_at_patches_or_have_features_are_masked(features):
    model = Captioner(features)
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(model)
    mask, patches = LABELS.ge(0), torch.randn(N, T + (not features), P)
    loss = model(input_ids=IDS, seen=patches, attention_mask=mask.long(), labels=LABELS)
    with recorder.capture.own_backward(loss):
        loss.backward()
    text = ["eyes", "out"] if features else ["looking.query", "out"]
    assert {name: recorder.counts(name) for name in text} == {name: [LABELLED] * 2 for name in text}
    if not features:
        assert recorder.counts("eyes") == recorder.counts("looking.key") == [N * (T + 1), LABELLED]


def test_a_tower_is_watched_where_ZeRO_3_holds_its_parameters():
    model = Pictures("plain")
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    recorded = len(RowMasks(model)._handles)
    assert recorded == len(RowMasks(Pictures("plain"))._handles) > 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_the_hooks_of_towers_are_not_traced():
    """torch.compile, which traces through other hooks, cannot follow references to storages."""
    model = Pictures("plain")
    recorder = Recorder(model)
    recorder.capture.read_batch = ArgumentReader(model)
    compiled = torch.compile(model, backend="eager")
    loss = compiled(input_ids=IDS, pixel_values=PIXELS, labels=LABELS)
    with recorder.capture.own_backward(loss):
        loss.backward()
    assert recorder.counts("vision.tower.2") == [N * T, LABELLED]
