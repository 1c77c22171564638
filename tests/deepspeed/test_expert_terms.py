"""Experts without a token, on one of two ranks or on all of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.close import close
from tests.deepspeed.expert_stacks import EXPERTS, WIDTH, Upright, batch, make
from tests.deepspeed.features import merged
from tests.deepspeed.modes import BY_NAME, KFAC, Mode
from tests.deepspeed.runs import build
from tests.models import cross_entropy
from tests.ranks import of_ranks

ROWS, CLASSES = 8, 5
SOME, ALL = [0, 0, 0, 1, 0, 1, 0, 0], [0] * ROWS
EVERY_STEP = {"factor": {"update_interval": 1, "rows": "all"}, "burn_in": {"steps": 0}}


class Mixture(nn.Module):
    """Two experts, in a list of layers or in one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, CLASSES)
        weights, self.stacked = torch.randn(2, WIDTH, WIDTH), kind == "stack"
        if self.stacked:
            self.w = nn.Parameter(weights)
        else:
            self.w = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights)
            for expert, weight in zip(self.w, weights, strict=True):
                expert.weight.data.copy_(weight)

    def expert(self, k: int, x):
        return F.linear(x, self.w[k]) if self.stacked else self.w[k](x)

    def forward(self, x, route):
        out = x
        for k in range(2):
            chosen = (route == k).nonzero()[:, 0]
            out = out.index_add(0, chosen, self.expert(k, x[chosen]))
        return self.head(out)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["list", "stack"])
def test_G_of_an_expert_is_the_second_moment_of_its_gradients_wherever_its_tokens_are(kind):
    """In the second step no rank has a token for the last expert, which then has no update."""
    mode = Mode("z0", 0, kfac=merged(EVERY_STEP, {"eigenbasis": {"refresh_interval": 1}}))
    model, rank = Mixture(kind), dist.get_rank()
    engine = build(mode, model=model, optimizer={"type": "SGD", "params": {"lr": 1e-30}})
    x = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    y, expected = torch.arange(2 * ROWS) % CLASSES, [0.0, 0.0]
    for step, routes in enumerate(((SOME, ALL), (ALL, ALL))):
        route = torch.tensor(routes).flatten()
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        engine.backward(cross_entropy(engine(x[own], route[own]), y[own]))
        engine.step()
        z = model(x, route).detach().requires_grad_()
        # of each row's own loss; each expert adds its outputs to the head's inputs
        g = torch.autograd.grad(cross_entropy(z, y) * len(y), z)[0] @ model.head.weight.detach()
        for k in range(2 if step == 0 else 1):
            G = g[route == k].T @ g[route == k] / len(y)
            expected[k] = G if step == 0 else (expected[k] + G) / 2
    factors = engine.kfac.preconditioner.curvature.factors
    found = {k: (f.side.blocks(f.packed_P)[0][0], float(f.updates)) for k, f in factors.items()}
    first, second = of_ranks(found)
    both = first | second
    for k, updates in enumerate((2, 1)):
        close(both[f"w.{k}/G"][0], expected[k], sums=4 * ROWS, what=f"expert {k}")
        assert both[f"w.{k}/G"][1] == updates


class Avoids(nn.Module):
    """Routes no row to one expert."""

    def __init__(self, dead: int | None) -> None:
        super().__init__()
        self.weight, self.dead = nn.Parameter(torch.eye(EXPERTS, WIDTH)), dead

    def forward(self, h):
        weight = nn.functional.linear(h.float(), self.weight.float()).softmax(-1)
        return (weight * (torch.arange(EXPERTS) != self.dead)).topk(2)


def trained(dead: int | None) -> tuple[set[str], list[set[str]], set[str]]:
    """Layers without a basis; on this rank, factors that each step refreshed; and those that all
    experts share."""
    rows = 48
    kfac = merged(KFAC, {"eigenbasis": {"refresh_interval": 4}, "burn_in": {"steps": 0}})
    model = make(Upright)
    model.router = Avoids(dead)
    engine = build(BY_NAME["z2"], model=model, kfac=kfac, train_micro_batch_size_per_gpu=rows)
    curvature, refreshed = engine.kfac.preconditioner.curvature, []
    for step in range(9):
        engine.backward(engine(*batch(rows, torch.Generator().manual_seed(step))))
        engine.step()
        refreshed.append({key for key, last in curvature.log.fresh.items() if last == step})
    states = engine.kfac.preconditioner.state
    shared = {spec.key for spec in curvature.specs.values() if len(spec.layers) == EXPERTS}
    return {name for name, state in states.items() if not state.basis}, refreshed, shared


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_an_expert_without_tokens_takes_no_basis_from_others_nor_makes_them_refresh(world):
    _, usual, _ = trained(None)
    for dead in range(EXPERTS):
        names, refreshed, shared = trained(dead)
        without = set().union(*of_ranks(names))
        assert len(without) == 2 and all(
            f".{dead}" in name or f"[{dead}]" in name for name in without
        ), without
        assert shared, "no A is shared, so nothing is tested"
        for keys, others in zip(refreshed, usual, strict=True):
            assert keys <= others and shared & keys == shared & others, (dead, keys, others)
