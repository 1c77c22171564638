"""Logits from A and the weights are those of all pairs of its rows."""

import pytest
import torch
from torch import nn

from ds_kfac.model.logits import attentions, rms
from ds_kfac.model.scan import Choice, scan
from examples.gpt import GPT, GPTConfig
from tests.close import close

ROWS, WIDTH, HEAD = 40, 12, 3


class Attention(nn.Module):
    """Four heads of queries on two of keys."""

    def __init__(self, *, known: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(WIDTH, 2 * HEAD)
        if known:
            self.head_dim = HEAD


def pairs(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Root mean square of [rows, heads, width], of the largest head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / q.shape[-1] ** 0.5
    return logits.square().mean((1, 2)).sqrt().max()


def test_of_separate_layers_with_biases_and_fewer_keys():
    own, x = Attention(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    (heads,) = attentions(own, {layer.name: layer for layer in scan(own).layers})
    rows = torch.cat([x, torch.ones(ROWS, 1)], dim=-1)
    found = rms(heads, dict(own.named_parameters()), rows.mT @ rows / ROWS)
    expected = pairs(own.q_proj(x).view(ROWS, 4, HEAD), own.k_proj(x).view(ROWS, 2, HEAD))
    close(found, expected.detach(), sums=ROWS + 4 * WIDTH, dtype=torch.float32)


def test_of_a_fused_layer():
    own = GPT(GPTConfig(width=WIDTH, blocks=1, heads=4))
    layers = {layer.name: layer for layer in scan(own, Choice()).layers}
    (heads,) = attentions(own, layers)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found = rms(heads, dict(own.named_parameters()), x.mT @ x / ROWS)
    q, k, _ = own.blocks[0].attention.qkv(x).view(ROWS, 3, 4, 3).unbind(1)
    close(found, pairs(q, k).detach(), sums=ROWS + 4 * WIDTH, dtype=torch.float32)


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_guessed_and_nothing_is_fetched(known):
    own = Attention(known=known)
    found = list(attentions(own, {layer.name: layer for layer in scan(own).layers}))
    assert bool(found) == known  # without a number of heads there are none
    own.q_proj.weight.data = torch.empty(0)  # as stage 3 leaves it
    assert not found or rms(found[0], dict(own.named_parameters()), torch.eye(WIDTH + 1)) is None
