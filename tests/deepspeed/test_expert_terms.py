"""G of an expert without a token on one of two ranks is that of the whole batch on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.models import cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC = {
    "factor": {"update_interval": 1, "rows": "all"},
    "eigenbasis": {"refresh_interval": 1},
    "burn_in": {"steps": 0},
}
KINDS = {"list": "e", "stack": "w"}
WIDTH, ROWS, CLASSES = 6, 8, 5
SOME, ALL = [0, 0, 0, 1, 0, 1, 0, 0], [0] * ROWS


class Mixture(nn.Module):
    """Two experts, in a list of layers or in one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, CLASSES)
        weights = torch.randn(2, WIDTH, WIDTH)
        if kind == "stack":
            self.w = nn.Parameter(weights)
        else:
            self.e = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights)
            for expert, weight in zip(self.e, weights, strict=True):
                expert.weight.data.copy_(weight)

    def expert(self, k: int, x):
        return F.linear(x, self.w[k]) if hasattr(self, "w") else self.e[k](x)

    def forward(self, x, route):
        out = x
        for k in range(2):
            chosen = (route == k).nonzero()[:, 0]
            out = out.index_add(0, chosen, self.expert(k, x[chosen]))
        return self.head(out)


def worker(kinds) -> dict:
    found, rank, world = {}, dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        optimizer = {"type": "SGD", "params": {"lr": 1e-30}}
        engine = build(Mode("z0", 0, kfac=KFAC), 1, model=Mixture(kind), optimizer=optimizer)
        # in the second step no rank has a token for the last expert
        for routes in ((SOME, ALL), (ALL, ALL)):
            x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
            y, route = torch.arange(2 * ROWS) % CLASSES, torch.tensor(routes).flatten()
            x, y, route = (each.chunk(world)[rank] for each in (x, y, route))
            engine.backward(cross_entropy(engine(x, route), y))
            engine.step()
        factors = engine.kfac.preconditioner.curvature.factors
        names = [f"{KINDS[kind]}.{k}/G" for k in range(2)]
        found[kind] = {
            n: (factors[n].packed_P, float(factors[n].updates)) for n in names if n in factors
        }
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_G_of_an_expert_does_not_depend_on_the_number_of_ranks(kind):
    (alone,) = run_ranks("tests.deepspeed.test_expert_terms:worker", world=1, payload=[kind])
    two = run_ranks("tests.deepspeed.test_expert_terms:worker", world=2, payload=[kind])
    found = two[0][kind] | two[1][kind]
    assert found.keys() == alone[kind].keys()
    assert [alone[kind][f"{KINDS[kind]}.{k}/G"][1] for k in range(2)] == [2, 1], (
        "without a token no update"
    )
    for name, (expected, updates) in alone[kind].items():
        close(found[name][0], expected, sums=4 * ROWS)
        assert found[name][1] == updates
