"""Experts: each has the tokens that were routed to it, and no empty place; K and R_p are those of
all layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.recorder import Recorder, compared
from tests.ops.specification import symmetric_pack

TOKENS, WIDTH = 6, 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 5, WIDTH))

    def forward(self, x):
        return torch.cat([F.linear(x[:4], self.w1[0]), F.linear(x[4:], self.w1[1])])


class Mixture(nn.Module):
    """As AutoEP's: 8 places for 6 tokens, of which 4 are one expert's."""

    _is_autoep_layer, ep_size = True, 3

    def __init__(self):
        super().__init__()
        self.experts = Stack()

    def forward(self, x):
        return self.experts(torch.cat([x, x.new_zeros(2, WIDTH)]))[:TOKENS]


def test_places_without_a_token_are_no_rows_of_a_stack_s_expert():
    torch.manual_seed(5)
    model, x = nn.Sequential(Mixture()), torch.randn(TOKENS, WIDTH)
    recorder = Recorder(model, LayerChoice(shares=False))
    # the dispatched rows lie in another order
    mask = torch.tensor([[True, True, False], [True, True, True]])
    recorder.capture.read_mask = lambda arguments, keywords: mask
    recorder.backward(model(x).square().mean())
    found = recorder.factors()
    for name, own in {"0.experts.w1.0": x[:4], "0.experts.w1.1": x[4:]}.items():
        assert found[name].rows == len(own)
        close(found[name].A, symmetric_pack((own.T @ own / len(own)).double()))


class Routed(nn.Module):
    """Experts that are linears; each token goes to one of them, and some experts get none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        scores = self.router(x).softmax(dim=-1)
        weight, chosen = scores.max(dim=-1)
        z = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().flatten()
            z = z.index_add(0, own, expert(x[own]) * weight[own, None])
        return self.head(z)


@pytest.mark.parametrize("tokens", [1, 7])
def test_an_expert_has_its_tokens_and_all_layers_the_same_terms(tokens):
    x = torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1))

    def program(model, backward):
        for part in x:
            backward(model(part).square().mean() / 2)

    found = compared(Routed(), program)
    experts = [
        found[f"experts.{number}"].rows for number in range(3) if f"experts.{number}" in found
    ]
    assert sum(experts) == 2 * tokens and {factors.terms for factors in found.values()} == {
        2 * tokens
    }


def test_an_empty_place_with_a_bias_is_a_row_only_if_it_has_a_gradient():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x):
            places = torch.cat([x, x.new_zeros(3, WIDTH)])
            return self.head(torch.tanh(self.expert(places))[: len(x)])

    found = compared(
        Places(), lambda model, backward: backward(model(torch.ones(TOKENS, WIDTH)).square().mean())
    )
    assert found["expert"].rows == found["head"].rows == TOKENS
