"""Which entries of a prediction are one loss term: what its graph shows, and what it leaves open."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model.batch import ArgumentReader, BatchInfo
from ds_kfac.model.output import returned_prediction, terms_of
from ds_kfac.model.prediction import class_place
from ds_kfac.model.sampled_loss import SAMPLERS
from tests.close import close
from tests.model.test_capture import Recorder

N, T, D, C = 4, 6, 7, 5
generator = torch.Generator().manual_seed(0)
X, ROW, IMAGE = (torch.randn(*shape, generator=generator) for shape in ((N, T, D), (N, D), (N, 3, 8, 9)))
LABELS = torch.randint(C, (N, T), generator=generator)
SIX, FIVE, ONE, TWO = (nn.Linear(D, outputs) for outputs in (6, C, 1, 2))
MAP, MAPS, SHORT = nn.Conv2d(3, 1, 1), nn.Conv2d(3, 8, 1), nn.Conv1d(D, 1, 1)
KEYS, WORDS = nn.Linear(D, D), nn.Embedding(C, C)
EACH = {
    "tokens [N, T, 1]": lambda: ONE(X), "squeezed": lambda: ONE(X).squeeze(-1),
    "all squeezed": lambda: ONE(X).squeeze(),
    "[.., 0]": lambda: ONE(X)[..., 0], "viewed": lambda: ONE(X).view(N, T), "flat": lambda: ONE(X).flatten(1),
    "unbound": lambda: ONE(X).unbind(-1)[0], "summed": lambda: ONE(X).sum(-1), "turned": lambda: ONE(X).mT.squeeze(1),
    "activation": lambda: torch.sigmoid(ONE(X).squeeze(-1)) * 2, "a vector": lambda: X @ ONE.weight[0],
    "rows in order": lambda: ONE(X.flatten(0, 1)).view(N, T, 1).squeeze(-1), "short": lambda: SHORT(X.mT).squeeze(1),
    "energies": lambda: FIVE(X).logsumexp(-1), "energies, turned": lambda: FIVE(X).mT.logsumexp(1),
    "as many classes as tokens": lambda: SIX(X).logsumexp(-1), "kept": lambda: FIVE(X).logsumexp(-1, keepdim=True),
    "losses": lambda: F.cross_entropy(FIVE(X).mT, LABELS, reduction="none"),
    "losses in a row": lambda: F.cross_entropy(FIVE(X).flatten(0, 1), LABELS.flatten(), reduction="none").view(N, T),
    "log-probabilities": lambda: FIVE(X).log_softmax(-1).gather(-1, LABELS[..., None]).squeeze(-1),
    "[.., 0] of log-probabilities": lambda: FIVE(X).log_softmax(-1).gather(-1, LABELS[..., None])[..., 0],
    "half of the outputs": lambda: SIX(X).chunk(2, -1)[0], "as many outputs as tokens": lambda: SIX(X)[..., :3],
    "in parts": lambda: torch.stack([F.cross_entropy(FIVE(X[i]), LABELS[i], reduction="none") for i in range(N)]),
    "critics": lambda: torch.stack([ONE(X).squeeze(-1), ONE(X)[..., 0]], -1),
    "sequence first": lambda: FIVE(X).transpose(0, 1), "twice": lambda: FIVE(X).flatten(0, 1),
}  # fmt: skip
"""A term for each token."""
OTHERS = {
    "classes": (lambda: FIVE(ROW), N), "a value": (lambda: ONE(ROW), N), "squeezed": (lambda: ONE(ROW).squeeze(-1), N),
    "pooled": (lambda: SIX(X).mean(1), N), "the last token": (lambda: SIX(X)[:, -1], N),
    "of one example": (lambda: ONE(X[:1]).squeeze(-1), T), "none": (lambda: ONE(X[:0]).squeeze(-1), 0),
    "softmaxes of one head": (lambda: nn.Linear(D, N)(ROW).view(N, 2, 2), 2 * N),
    "as many examples as outputs": (lambda: SIX(X[0]).view(T, 2, 3), 2 * T),
    "actions": (lambda: ONE(ROW) + FIVE(ROW) - FIVE(ROW).mean(-1, keepdim=True), N),
    "a weight on the left": (lambda: FIVE.weight @ ROW.mT, N), "in a row": (lambda: FIVE(X).flatten(1), N),
    "masks": (lambda: MAP(IMAGE), N * 72), "masks, squeezed": (lambda: MAP(IMAGE).squeeze(1), N * 72),
    "masks [:, 0]": (lambda: MAP(IMAGE)[:, 0], N * 72), "one of several": (lambda: MAPS(IMAGE)[:, 1], N * 72),
    "energies": (lambda: MAPS(IMAGE).logsumexp(1), N * 72), "as many as pixels": (lambda: MAPS(IMAGE).mT, N * 72),
    "losses": (lambda: F.cross_entropy(MAPS(IMAGE), torch.zeros(N, 8, 9).long(), reduction="none"), N * 72),
    "contrast": (lambda: KEYS(ROW) @ KEYS(X[0]).T, N), "contrast, turned": (lambda: (KEYS(X[0]) @ KEYS(ROW).T).T, N),
    "scores": (lambda: torch.einsum("btd,bd->bt", KEYS(X), KEYS(ROW)), N),
    "averaged": (lambda: (ONE(X).softmax(1) * FIVE(X)).sum(1), N),
    "a mixture's": (lambda: (SIX(ROW).softmax(-1)[..., None] * FIVE(X)).sum(1), N),
    "rendered": (lambda: (torch.relu(ONE(X))[..., 0][..., None] * FIVE(X).sigmoid()).sum(-2), N),
    "gated": (lambda: ONE(X).sigmoid() * FIVE(X), N * T), "masked": (lambda: FIVE(X).where(ONE(X) > 9, ONE(X)), N * T),
    "residual": (lambda: WORDS(LABELS) + FIVE(X), N * T),
    "turned, in a row between": (lambda: FIVE(X).flatten(1).view(N, T, C).mT, N * T),
}  # fmt: skip
OPEN = {
    "squeezed": (lambda: ONE(X).squeeze(-1), N * T), "candidates": (lambda: ONE(X.flatten(0, 1)).view(N, T), N),
    "candidates, squeezed": (lambda: ONE(X.flatten(0, 1)).squeeze(-1).view(N, T), N),
    "of an embedding": (lambda: ((WORDS(LABELS) + FIVE(X)) * WORDS(LABELS)).sum(-1), N),
    "moves on a board": (lambda: MAP(IMAGE).flatten(1), N), "one of several": (lambda: FIVE(X)[..., 0], N),
    "begins and ends": (lambda: TWO(X).split(1, -1)[0].squeeze(-1), N), "largest": (lambda: FIVE(X).amax(-1), N),
}  # fmt: skip
"""One number of each token: a term, or a score in a softmax over tokens."""


@pytest.mark.parametrize("name", EACH)
def test_each_token_is_a_term_however_its_outputs_were_left_out(name):
    assert terms_of(EACH[name](), BatchInfo(), weight_sharing="expand").number == N * T


@pytest.mark.parametrize("name", OTHERS)
def test_other_predictions_have_the_terms_that_their_graph_shows_and_no_doubt(name):
    make, terms = OTHERS[name]
    found = terms_of(make(), BatchInfo(), weight_sharing="expand")
    assert found.number == terms and (not found.doubt or name in ("of one example", "none"))


@pytest.mark.parametrize("name", OPEN)
def test_what_a_graph_leaves_open_is_a_doubt_that_says_what_was_taken(name):
    make, terms = OPEN[name]
    found = terms_of(make(), BatchInfo(), weight_sharing="expand")
    assert found.number == terms
    assert ("and each is taken" if terms == N * T else "and each example is taken") in found.doubt


@pytest.mark.parametrize("name", ["tokens [N, T, 1]", "energies", "log-probabilities", "losses", "critics"])
def test_what_a_graph_decides_is_no_doubt(name):
    assert not terms_of(EACH[name](), BatchInfo(), weight_sharing="expand").doubt


def test_answers_of_transformers_are_positions_without_a_doubt():
    begin, end = (each.squeeze(-1) for each in TWO(X).split(1, -1))
    output = {"loss": begin.sum(), "start_logits": begin, "end_logits": end}
    assert terms_of(output, BatchInfo(), weight_sharing="expand") == (N, "")


def test_padded_tokens_are_no_terms_of_values():
    mask = torch.arange(T) < torch.tensor([6, 2, 4, 1])[:, None]
    info = BatchInfo(rows=mask)
    assert float(terms_of(ONE(X).squeeze(-1), info, weight_sharing="expand").number) == 13
    assert terms_of(ONE(X).squeeze(-1), BatchInfo(), weight_sharing="reduce").number == N


def test_a_loss_of_another_shape_is_no_prediction():
    for loss in (
        F.mse_loss(ONE(ROW), torch.zeros(N, 1)).view(1, 1),
        F.cross_entropy(FIVE(ROW), LABELS[:, 0])[None, None],
    ):
        assert returned_prediction(loss) is None
    assert returned_prediction(value := ONE(ROW[:1])) is value and value.shape == (1, 1)


class Values(nn.Module):
    def __init__(self, squeezed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.squeezed = nn.Linear(D, D), nn.Linear(D, 1), squeezed

    def forward(self, x: Tensor) -> Tensor:
        values = self.head(torch.tanh(self.block(x)))
        return values.squeeze(-1) if self.squeezed else values


def test_squeezed_values_have_the_factors_and_the_sampled_loss_of_others_and_are_told_once(caplog):
    found = []
    for squeezed in (False, True):
        recorder = Recorder(Values(squeezed))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                recorder.model(X).square().mean().backward()
        told = [record.message for record in caplog.records]
        assert len(told) == squeezed and all("engine.kfac.read_batch to return BatchInfo(labelled" in t for t in told)
        drawn = SAMPLERS["mse"](recorder.model(X), BatchInfo(), torch.Generator().manual_seed(0)).detach()
        found.append([*(G for _, G in recorder.means().values()), drawn])
    for one, other in zip(*found, strict=True):
        close(one, other, sums=2 * N * T)


def test_a_batch_that_says_its_terms_is_believed_and_told_of_nothing(caplog):
    recorder = Recorder(Values(squeezed=True))
    recorder.capture.read_batch = lambda *given: BatchInfo(labelled=torch.ones(N, dtype=torch.bool))
    with caplog.at_level(logging.WARNING):
        F.cross_entropy(recorder.model(X), LABELS[:, 0]).backward()
    assert recorder.counts("head")[1] == N and not caplog.records


class Classifier(nn.Module):
    def __init__(self, loss_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.loss_only = nn.Linear(D, D), nn.Linear(D, C), loss_only

    def forward(self, x: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor | dict[str, Tensor]:
        weights = attention_mask[..., None].float()
        logits = self.head((torch.tanh(self.block(x)) * weights).sum(1) / weights.sum(1))
        if labels.shape[1:] == (C,):
            loss = F.binary_cross_entropy_with_logits(logits, labels.float())
        else:
            loss = F.cross_entropy(logits, labels.flatten())
        return loss if self.loss_only else {"loss": loss, "logits": logits}


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("kind", ["[N]", "[N, 1]", "[N, C]", "[N, C] floats"])
def test_labels_of_examples_leave_the_mask_of_tokens_in_force(kind, loss_only):
    mask = (torch.arange(T) < torch.tensor([6, 2, 4, 1])[:, None]).long()
    labels = {"[N]": LABELS[:, 0], "[N, 1]": LABELS[:, :1]}.get(kind, LABELS[:, :C] % 2)
    recorder = Recorder(Classifier(loss_only))
    recorder.capture.read_batch = ArgumentReader(recorder.model)
    output = recorder.model(X, mask, labels.float() if "floats" in kind else labels)
    (output if loss_only else output["loss"]).backward()
    assert recorder.counts("block") == [13, N] and recorder.counts("head") == [N, N]


def test_a_split_head_keeps_its_outputs_in_the_last_of_its_dimensions():
    assert class_place(FIVE(X).view(N, T, 1, C)).dim == 3 and class_place(SIX(X).view(N, T, 2, 3)).dim == 3
    assert class_place(MAPS(IMAGE).view(N, 2, 4, 8, 9)).dim == 1, "of an image as in torch's losses"
    assert class_place(SIX(X).view(N, T, 2, 3).permute(0, 2, 3, 1)).dim == 2
    anchors = MAPS(IMAGE).view(N, 2, 4, 8, 9)
    assert class_place(anchors.permute(0, 1, 3, 4, 2).contiguous()).dim == 4, "of each anchor, channels last"
    assert class_place(anchors.permute(0, 3, 4, 1, 2).reshape(N, -1, 4)).dim == 2
    assert class_place(SIX(X).flatten(1).view(N, T, 6)).dim == 2, "of as many tokens, where the graph is of no help"
