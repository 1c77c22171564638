"""Whose rows are whose: those of attention's sequences, and of experts; against autograd in
float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.factors.command import table
from examples.gpt import GPT, GPTConfig
from tests.close import close
from tests.factors.test_fit import fit, turned_squares
from tests.factors.worker import batches

N, D = 4, 4


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


@pytest.mark.parametrize("positions", [3, N], ids=["longer", "as many positions as sequences"])
def test_rows_of_attention_are_those_of_their_sequences(positions, tmp_path):
    x = torch.randn(N, positions, D, generator=torch.Generator().manual_seed(3))
    found = fit(Attends(), [x], lambda own, batch: own(batch).square().mean(), out=tmp_path)
    own, gradients = Attends().double(), []
    for sequence in x.double():
        own.zero_grad()
        own(sequence.unsqueeze(0)).square().mean(-1).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in own.named_parameters()})
    assert set(found) == {"attention.in_proj_weight", "attention.out_proj", "head"}
    for name in found:
        expected = turned_squares(found, name, gradients)
        close(found.corrected(name), expected, sums=100, condition=4, dtype=torch.float32)


def test_an_expert_that_no_token_takes_is_no_error(tmp_path):
    """Nothing could leave it out: a pattern is for the whole stack. Its factor is zero. The rows of
    experts have no sequences."""
    torch.manual_seed(0)
    own = GPT(GPTConfig(width=16, blocks=1, heads=2, context=8, experts=4, stacked=True))
    with torch.no_grad():
        own.blocks[0].mlp.router.weight.zero_()  # ties: all take the same two
    found = fit(own, batches(1), out=tmp_path)
    names = [name for name in found if "gate_up" in name]
    idle = [name for name in names if not found.factor(name, "G").any()]
    assert len(names) == 4 and len(idle) == 2
    assert [found.has(name, "G/values") for name in names] == [name not in idle for name in names]
    assert {name for name in found if not found.has(name, "corrected")} == {
        name for name in found if "mlp" in name
    }
    assert len(table(found)) > len(found.layers)


class Routed(nn.Module):
    """Tokens go to an expert by the sign of their first entry; ``stacked``: of a stack, or a module
    each."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stacked, self.head = stacked, nn.Linear(D, 3)
        if stacked:
            self.w = nn.Parameter(torch.randn(2, D, D))
        else:
            self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for expert, index in enumerate((flat[:, 0] < 0, flat[:, 0] >= 0)):
            if index.any():
                own = flat[index]
                own = F.linear(own, self.w[expert]) if self.stacked else self.experts[expert](own)
                out = out.index_put((index.nonzero().flatten(),), own)
        return F.cross_entropy(self.head(out), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("stacked", [False, True], ids=["modules", "stack"])
def test_factors_do_not_depend_on_how_the_data_is_cut_into_batches(stacked, tmp_path):
    """An expert's neither, to which in some batches no token comes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, D, generator=generator)
    labels = torch.randint(3, (6, 5), generator=generator)
    x[:4, :, 0].abs_()
    found = []
    for step in (6, 2, 1):
        cuts = zip(x.split(step), labels.split(step), strict=True)
        data = [{"x": own, "labels": terms} for own, terms in cuts]
        found.append(fit(Routed(stacked), data, out=tmp_path / str(step)))
    whole = found[0]
    assert len(set(whole)) == 3
    for cut in found:
        for name in whole:
            assert cut.header["counts"][f"{name}/G"] == labels.numel()
            for side in (side for side in "AG" if f"{name}/{side}" in cut.header["counts"]):
                own, expected = cut.factor(name, side), whole.factor(name, side)
                close(own, expected, sums=60, dtype=torch.float32)
