"""Batches of factors that are scaled down, or that have no row, are counted, here and over
ranks."""

import torch

from ds_kfac.curvature.factor import KroneckerFactor, Side, update_
from ds_kfac.step.messages import unusual

SIDE = Side.dense(3)


def test_a_batch_without_a_row_is_counted_and_leaves_its_factor():
    packed = torch.arange(1.0, 7.0)
    factors = [KroneckerFactor(SIDE, packed.clone(), torch.tensor(20.0)) for _ in range(3)]
    sums = [torch.zeros(6), packed * 1e6, torch.full((6,), torch.inf)]
    counts = torch.tensor([0.0, 2.0, 2.0])
    _, counted = update_(factors, sums, counts, decays=[0.9] * 3, device=torch.device("cpu"))
    assert counted.sum(dim=1).tolist() == [1, 2], "one scaled down, one empty, one not finite"
    for factor in (factors[0], factors[2]):
        assert torch.equal(factor.packed_P, packed)
        assert float(factor.updates) == 20
    assert update_([], [], torch.zeros(0), decays=[], device=torch.device("cpu"))[1].sum(
        dim=1
    ).tolist() == [0, 0]


def test_ranks_add_up():
    scalars = {
        ("limited", 0): 1.0,
        ("empty", 0): 2.0,
        ("limited", 3): 0.0,
        ("empty", 3): 5.0,
        ("fresh", "a/A"): 1.0,
    }
    scalars |= {("missed", 0): 1.0, ("missed", 3): 3.0}
    found = unusual({name: torch.tensor(value) for name, value in scalars.items()})
    assert torch.is_tensor(found) and found.tolist() == [1, 7, 4]
    assert unusual({("fresh", "a/A"): torch.tensor(1.0)}) == 0.0
