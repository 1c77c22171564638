"""Factors and eigenbases of layers that several ranks work on; ranks are threads here."""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from ds_kfac.assignment.assign import Contributors
from ds_kfac.assignment.costs import BUILTIN, factor_specs
from ds_kfac.curvature.factor import Side
from ds_kfac.metrics import Metrics
from ds_kfac.model.rows import BatchSum
from ds_kfac.plan.plan import EngineFacts, Plan, make_plan
from ds_kfac.schedule.timetable import FactorsDue
from ds_kfac.step.factors import FactorUpdates
from ds_kfac.step.messages import FAILED
from tests.choices import resolved
from tests.comm.fake_network import FakeNetwork
from tests.models import linear_layer

CPU = torch.device("cpu")
LAYERS = [linear_layer("l0", 5, 3), linear_layer("l1", 3, 4)]
KEYS = frozenset(factor.key for factor in factor_specs(LAYERS))
ROWS, PASSES, TERMS = 6.0, 2.0, 3.0
"""Of one rank: a layer that is called twice has twice as many rows as loss terms."""


def plan_with(eigen_workers: dict[str, int], workers: int, layers=LAYERS) -> Plan:
    """Two ranks."""
    config = resolved(
        {
            "assignment": {"gradient_worker_fraction": workers / 2},
            "preconditioner": {"eigenvalues": "corrected"},
        }
    )
    plan = make_plan(
        layers, EngineFacts(2, None, torch.float32, torch.float32, 0), config, BUILTIN["cpu"]
    )
    return replace(plan, assignment=replace(plan.assignment, eigen_workers=eigen_workers))


def stepped(channel, plan: Plan, due: FactorsDue, step: int = 0, empty: Collection[str] = ()):
    """One step's share of the factors, and what it has done to them. Those of ``empty`` have no
    rows on any rank."""
    plan = replace(plan, contributors=Contributors(channel.world))
    curvature = FactorUpdates(plan, channel, Metrics(CPU), CPU, averaged_over=channel.world)
    reducer = curvature.reducer
    sums = {}
    for key in reducer.begin(due.capture, step):
        counts, sum_P = torch.tensor([ROWS, PASSES, TERMS]), summed(curvature, key, channel.rank)
        sums[key] = BatchSum(0 * sum_P, 0 * counts) if key in empty else BatchSum(sum_P, counts)
    update = curvature.update(step, due, reducer.reduce(sums))
    curvature.decompose(step, update)
    curvature.deliver(step, update)
    assert FAILED not in update.outcomes.values()
    return curvature, update


def summed(curvature: FactorUpdates, key: str, rank: int) -> torch.Tensor:
    """A rank's batch sum: of random rows, the same in every thread."""
    side = curvature.specs[key].side
    rows = torch.randn(
        20,
        side.dim,
        generator=torch.Generator().manual_seed(1000 * ord(key[1]) + 10 * ord(key[-1]) + rank),
    )
    return side.accumulate_(torch.zeros(side.numel), rows)


SPLIT = {"l0/A": 0, "l0/G": 1, "l1/A": 1, "l1/G": 0}
WHOLE = {"l0/A": 0, "l0/G": 0, "l1/A": 1, "l1/G": 1}


TRAVELLING = 1
"""As ``bucket_bytes``: each eigenbasis travels in a message of its own."""


def test_all_workers_have_the_same_bits_of_eigenbases_that_travel_in_16_bits():
    """The rank that decomposes a factor uses the eigenvectors that it has sent, not those that it
    has computed."""
    plan = replace(plan_with(SPLIT, workers=2), wire=torch.bfloat16, bucket_bytes=TRAVELLING)
    first, second = FakeNetwork(2).run(
        lambda channel: stepped(channel, plan, FactorsDue(KEYS, KEYS))[1].bases
    )
    assert first.keys() == second.keys() == KEYS
    for key, basis in first.items():
        (vectors,) = basis.vectors
        assert torch.equal(vectors, second[key].vectors[0]), key
        assert torch.equal(vectors, vectors.bfloat16().float()), key
        assert torch.equal(basis.values, second[key].values), key


@pytest.mark.parametrize("eigen_workers", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize(
    "captured", [KEYS, {"l0/A", "l1/A"}, {"l0/G", "l1/A", "l1/G"}], ids=["all", "A", "some"]
)
def test_all_workers_count_the_same_loss_terms(captured, eigen_workers):
    """With another number its moments, and so its results, would differ from those of the other
    workers."""
    plan = plan_with(eigen_workers, workers=2)

    def work(channel):
        _, update = stepped(channel, plan, FactorsDue(frozenset(captured), frozenset()))
        terms = [update.terms.get(layer.name) for layer in LAYERS]
        return [None if number is None else float(number) for number in terms]

    expected = [2 * TERMS if f"{layer.name}/G" in captured else None for layer in LAYERS]
    assert FakeNetwork(2).run(work) == [expected] * 2


@pytest.mark.parametrize("eigen_workers", [{"q/A": 0, "v/G": 0}, {"q/A": 1, "v/G": 0}], ids=str)
def test_layers_without_g_count_the_terms_that_come_with_the_a_they_share(eigen_workers):
    """As with activations_only; v has a G of its own."""
    layers = [replace(linear_layer(name, 5, 3), G=Side.identity(3)) for name in "qk"] + [
        linear_layer("v", 5, 3)
    ]
    plan = plan_with(
        dict.fromkeys(["q/A", "k/A", "v/A", "v/G"], 0) | eigen_workers, workers=2, layers=layers
    )
    plan = plan.sharing([("q", "k", "v")])

    def work(channel):
        _, update = stepped(channel, plan, FactorsDue(frozenset(["q/A", "v/G"]), frozenset()))
        return [float(update.terms[layer.name]) for layer in layers]

    assert FakeNetwork(2).run(work) == [[2 * TERMS] * 3] * 2
