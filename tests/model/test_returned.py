"""Labels of examples, which may be a condition; and tensors that a model returns beside its loss."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.model import prediction
from ds_kfac.model.batch import ArgumentReader
from ds_kfac.model.loss import Forward
from ds_kfac.model.prediction import last_product
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder

N, D, C = 6, 7, 5
KINDS = LayerChoice(types=("Linear",))


class Conditioned(nn.Module):
    """Labels of examples choose what is generated, or are what it is scored by."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.trunk, self.words, self.scores = nn.Linear(D, C), nn.Embedding(C, D), scores

    def forward(self, x: Tensor, labels: Tensor) -> object:
        z = self.trunk(x + self.words(labels)[:, None])
        return (F.cross_entropy(z.mean(1), labels), z) if self.scores else z


@pytest.mark.parametrize(("scores", "terms"), [(False, N * 3), (True, N)])
def test_labels_of_examples_are_terms_where_the_model_returns_their_loss(scores, terms):
    model = Conditioned(scores)
    recorder = Recorder(model, KINDS, read_batch=ArgumentReader(model))
    output = model(torch.randn(N, 3, D), torch.arange(N) % C)
    (output[0] if scores else output.square().mean()).backward()
    assert recorder.counts("trunk")[1] == terms


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("features", [False, True])
def test_labels_of_examples_say_which_have_none_where_the_loss_is_made_outside(features, announced):
    """Also where features [N, T, D] are returned first, and a plain backward does not say what its loss is made of."""
    model, labels = Conditioned(False), torch.tensor([1, -100, 0, 2, -100])
    recorder = Recorder(model, KINDS)
    model.forward = lambda x, labels: (z := model.trunk(x), z.mean(1))[not features :]
    recorder.capture.read_batch = ArgumentReader(model)
    loss = F.cross_entropy(model(torch.randn(len(labels), 3, D), labels=labels)[-1], labels)
    with recorder.capture.own_backward(loss) if announced else nullcontext():
        loss.backward()
    assert recorder.counts("trunk")[1] == int((labels >= 0).sum())


def test_predictions_of_many_steps_are_each_followed_a_few_times(monkeypatch):
    followed = []
    monkeypatch.setattr(prediction, "last_product", lambda x: followed.append(x) or last_product(x))
    Forward().returned([nn.Linear(D, C)(torch.randn(N, 1, D)) for _ in range(30)], weight_sharing="expand")
    assert len(followed) < 30 * 5


class Pair(nn.Module):
    """Returns a view of its scores that its loss is not made of, as CLIP does, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(D, C), nn.Linear(D, C)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.one(x) @ self.other(x).T
        return {"loss": F.cross_entropy(scores.T, torch.arange(N)), "logits_per_one": scores, "scores": scores.T}


@pytest.mark.parametrize("announced", [False, True])
def test_a_returned_tensor_that_nothing_is_made_of_leaves_the_scale_to_the_loss(announced):
    """A plain backward of a loss over the number of micro-batches, of which nobody told."""
    model, x, found = Pair(), torch.randn(N, D), []
    for parts in (1, 4):
        recorder = Recorder(model, KINDS)
        loss = model(x)["loss"] / parts
        with recorder.capture.own_backward(loss) if announced else nullcontext():
            loss.backward()
        found.append([G for _, G in recorder.means().values()])
        recorder.capture.remove()
    for G, expected_G in zip(*found, strict=True):
        close(G, expected_G, sums=N)
