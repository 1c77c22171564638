"""What AutoEP's experts see: rows of all ranks of an expert-parallel group, and places without a token."""

import torch
from torch import nn
from torch.nn import functional as F

from ds_kfac.model.batch import BatchInfo
from ds_kfac.model.expert_rows import ExpertRows
from ds_kfac.model.scan import LayerChoice
from tests.close import close
from tests.model.test_capture import Recorder
from tests.ops.specification import symmetric_pack

TOKENS, WIDTH, RANKS = 6, 4, 3


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 5, WIDTH))

    def forward(self, x):
        return torch.cat([F.linear(x[:4], self.w1[0]), F.linear(x[4:], self.w1[1])])


class Mixture(nn.Module):
    """As AutoEP's: 8 places for 6 tokens, of which 4 are one expert's."""

    _is_autoep_layer, ep_size = True, RANKS

    def __init__(self):
        super().__init__()
        self.experts = Stack()

    def forward(self, x):
        return self.experts(torch.cat([x, x.new_zeros(2, WIDTH)]))[:TOKENS]


def test_places_without_a_token_are_no_rows_of_an_autoep_expert():
    torch.manual_seed(5)
    model, x = nn.Sequential(Mixture()), torch.randn(TOKENS, WIDTH)
    rows = ExpertRows(model)
    recorder = Recorder(model, LayerChoice(shares=False), info_of=rows)
    padded = torch.tensor([[True, True, False], [True, True, True]])  # the dispatched rows lie in another order
    recorder.capture.read_batch = lambda arguments, keywords: BatchInfo(rows=padded)
    model(x).square().mean().backward()
    assert rows("0", BatchInfo()) == BatchInfo(), "the mixture itself sees this rank's tokens"
    owns = {"0.experts.w1.0": x[:4], "0.experts.w1.1": x[4:]}
    for name, own in owns.items():
        assert recorder.counts(name) == [len(own), RANKS * 5], "loss terms of all ranks whose tokens may come"
    found = recorder.means()
    for name, own in owns.items():
        close(found[name][0], symmetric_pack((own.T @ own / len(own)).double()))
    rows.remove()
