"""G of an expert without a token on one of two ranks is that of the whole batch on one rank."""

import pytest
import torch
import torch.distributed as dist

from tests.close import close
from tests.deepspeed.modes import Mode
from tests.deepspeed.runs import build
from tests.model.test_siblings import ALL, CLASSES, ROWS, SOME, WIDTH, Mixture
from tests.models import cross_entropy
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed
KFAC = {
    "factor": {"update_interval": 1, "rows": "all"}, "eigenbasis": {"refresh_interval": 1}, "burn_in": {"steps": 0},
}  # fmt: skip
KINDS = {"list": "e", "stack": "w"}


def worker(kinds) -> dict:
    found, rank, world = {}, dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        optimizer = {"type": "SGD", "params": {"lr": 1e-30}}
        engine = build(Mode("z0", 0, kfac=KFAC), 1, model=Mixture(kind), optimizer=optimizer)
        for routes in ((SOME, ALL), (ALL, ALL)):  # in the second step no rank has a token for the last expert
            x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
            y, route = torch.arange(2 * ROWS) % CLASSES, torch.tensor(routes).flatten()
            x, y, route = (each.chunk(world)[rank] for each in (x, y, route))
            engine.backward(cross_entropy(engine(x, route), y))
            engine.step()
        factors = engine.kfac.preconditioner.curvature.factors
        names = [f"{KINDS[kind]}.{k}/G" for k in range(2)]
        found[kind] = {n: (factors[n].packed_P, float(factors[n].updates)) for n in names if n in factors}
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_G_of_an_expert_does_not_depend_on_the_number_of_ranks(kind):
    (alone,) = run_ranks("tests.deepspeed.test_expert_terms:worker", world=1, payload=[kind])
    two = run_ranks("tests.deepspeed.test_expert_terms:worker", world=2, payload=[kind])
    found = two[0][kind] | two[1][kind]
    assert found.keys() == alone[kind].keys()
    assert [alone[kind][f"{KINDS[kind]}.{k}/G"][1] for k in range(2)] == [2, 1], "without a token no update"
    for name, (expected, updates) in alone[kind].items():
        close(found[name][0], expected, sums=4 * ROWS)
        assert found[name][1] == updates
