"""Samplers of the Monte-Carlo Fisher: they draw from the model, and their losses are the
training's."""

from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from ds_kfac.engine import monte_carlo as loss_sampling
from ds_kfac.engine.monte_carlo import LossSampling
from ds_kfac.model.sampled_loss import cross_entropy, mse, prediction_tensor
from tests.close import near


def everywhere(prediction: torch.Tensor) -> torch.Tensor:
    """The true loss has a gradient at every entry."""
    return torch.ones_like(prediction, dtype=torch.bool)


def test_labels_are_drawn_from_the_prediction():
    p = torch.tensor([0.1, 0.2, 0.7])
    logits = torch.log(p).repeat(20000, 1).requires_grad_()
    cross_entropy(logits, everywhere(logits), torch.Generator().manual_seed(0)).backward()
    # d loss / d logits = (p - one-hot of the drawn label) / M
    drawn = (logits.detach().softmax(-1) - 20000 * logits.grad).round().mean(dim=0)
    why = "6 standard deviations of a mean of 20,000 draws"
    near(drawn, p, 6 * (p * (1 - p) / 20000).sqrt(), why)


@pytest.mark.parametrize("outputs", [1, 4])
def test_gaussian_targets_have_the_fisher_of_mse_loss(outputs):
    """F.mse_loss is a mean over all elements, so its Hessian per example is (2 / outputs) I."""
    prediction = torch.zeros(40000, outputs, requires_grad=True)
    mse(prediction, everywhere(prediction), torch.Generator().manual_seed(0)).backward()
    rows = 40000 * prediction.grad
    scale = 2 / outputs
    why = "6 standard deviations of a mean of 40,000 squares of normal numbers"
    bound = 6 * scale * (2 / 40000) ** 0.5
    near(rows.T @ rows / 40000, scale * torch.eye(outputs), bound, why)


def test_the_prediction_is_found_in_what_models_return():
    logits, loss, hidden = torch.randn(2, 3), torch.tensor(1.0), torch.randn(2, 4)
    outputs = [logits, SimpleNamespace(logits=logits), {"logits": logits}]
    for found in (*outputs, (loss, logits), (logits, loss), (logits, hidden)):
        assert prediction_tensor(found) is logits
    with pytest.raises(ValueError, match=r"got a scalar, a loss.*kfac.factor.prediction"):
        prediction_tensor(torch.tensor(1.0))


def test_a_rank_whose_batch_is_skipped_goes_on_and_a_program_without_samples_does_not(monkeypatch):
    sampling = LossSampling.__new__(LossSampling)
    sampling.kfac = SimpleNamespace(capture=SimpleNamespace(active=True), steps=7, rank=1)
    sampling._predictions, sampling._warned, sampling._step = WeakKeyDictionary(), False, 3
    said = []
    monkeypatch.setattr(loss_sampling.logger, "warning", said.append)
    sampling.check()
    sampling.check()
    assert [text.split(":")[1] for text in said] == [" rank 1 has no statistics in step 7"]
    sampling._step = -1
    with pytest.raises(ValueError, match="no sampled backward"):
        sampling.check()
