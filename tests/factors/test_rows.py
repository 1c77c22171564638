"""Whose rows are whose: experts, and attention, whose rows lie with sequences first; against autograd in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_kfac.factors.files import Factors
from ds_kfac.factors.fitting import fit
from ds_kfac.factors.summary import table
from examples.gpt import GPT, GPTConfig
from tests.close import close
from tests.factors.worker import batches

N, D = 4, 4


def per_sequence(found: Factors, name: str, gradients: list[dict[str, Tensor]]) -> Tensor:
    """The mean of the squares of gradients of sequences in the eigenbasis."""
    about, Q = found.layers[name], {side: found.eigenbasis(name, side).vectors[0][0].double() for side in "AG"}
    total = torch.zeros(len(Q["G"]), len(Q["A"]), dtype=torch.float64)
    for own in gradients:
        weight = own[about["weight"]]
        if about["bias"] is not None:
            weight = torch.cat([weight, own[about["bias"]].unsqueeze(-1)], dim=-1)
        total += (Q["G"].mT @ weight @ Q["A"]) ** 2
    return total / len(gradients)


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
    found = fit(Attends(), [x], lambda own, batch: own(batch).square().mean(), out=tmp_path, progress=False)
    own, gradients = Attends().double(), []
    for sequence in x.double():
        own.zero_grad()
        own(sequence.unsqueeze(0)).square().mean(-1).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in own.named_parameters()})
    assert set(found) == {"attention.in_proj_weight", "attention.out_proj", "head"}
    for name in found:
        expected = per_sequence(found, name, gradients)
        close(found.corrected(name, "sequence"), expected, sums=100, condition=4, dtype=torch.float32)


def mixture(*, stacked: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(width=16, blocks=1, heads=2, context=8, experts=4, stacked=stacked))


def test_experts_of_a_stack_have_the_eigenvalues_of_their_own_rows(tmp_path):
    """In whatever basis, their sum is E |g|^2 |a|^2: that of the same experts as modules."""
    stack, modules = mixture(stacked=True), mixture(stacked=False)
    experts, state = stack.blocks[0].mlp.experts, stack.state_dict()
    prefix = "blocks.0.mlp.experts."
    for name in ("gate_up", "down"):
        whole = state.pop(prefix + name)
        state |= {f"{prefix}{name}.{k}.weight": whole[k] for k in range(experts.count)}
    modules.load_state_dict(state)
    made = [fit(own, batches(2), out=tmp_path / str(k), progress=False) for k, own in enumerate((stack, modules))]
    assert set(made[0]) == set(made[1])
    for name in made[0]:
        one, other = (found.corrected(name).double().sum() for found in made)
        assert one > 0
        close(one, other, sums=500, condition=4, dtype=torch.float32)
        assert [found.has(name, "corrected.sequence") for found in made] == ["experts" not in name] * 2


def test_rows_that_divide_by_the_sequences_are_not_all_of_theirs(tmp_path):
    """An expert's, of which there are as many as it took."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.taken, self.head = nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            flat = flat.index_add(0, torch.arange(1, 9), self.taken(flat[1:9]))
            return F.cross_entropy(self.head(flat), labels.flatten())

    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(2, 6, D, generator=generator), torch.randint(3, (2, 6), generator=generator)
    found = fit(Takes(), [{"x": x, "labels": labels}], out=tmp_path, progress=False)
    assert found.has("head", "corrected.sequence") and not found.has("taken", "corrected.sequence")
    assert found.has("taken", "corrected.token")


def test_an_expert_that_no_token_takes_is_no_error(tmp_path):
    """Nothing could leave it out: a pattern is for the whole stack. Its factor is zero."""
    own = mixture(stacked=True)
    with torch.no_grad():
        own.blocks[0].mlp.router.weight.zero_()  # ties: all take the same two
    found = fit(own, batches(1), out=tmp_path, progress=False)
    names = [name for name in found if "gate_up" in name]
    idle = [name for name in names if not found.factor(name, "G").any()]
    assert len(names) == 4 and len(idle) == 2
    assert [found.has(name, "corrected.token") for name in names] == [name not in idle for name in names]
    assert len(table(found)) > len(found.layers)
