"""Factors from the rows of some ranks: equal to tests/oracle.py fed with just their rows, in every ZeRO stage."""

import pytest
import torch
import torch.distributed as dist

from tests.covering import some
from tests.deepspeed.modes import KFAC, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, expected, train, weights
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS, ROWS = 6, 3 * MICRO_ROWS
"""Three positions an example."""
SMALL = {"plan": {"BUCKET_BYTES": 512}}
"""Too small for all sums: the first batch comes from the eigen workers alone, later ones in several messages."""


def case(stage: int, rows, *, accumulation: int = 1, adam: bool = False, **kfac):
    factor = {**KFAC["factor"], "rows": rows, **kfac.pop("factor", {})}
    mode = Mode("contributors", stage, kfac={**kfac, "factor": factor}, adam=adam)
    return mode, accumulation


CORRECTED = {"eigenvalues": "corrected"}
CASES = {
    "one": case(2, ROWS),
    "one-z0": case(0, ROWS, assignment={"gradient_worker_fraction": 1.0}),
    "two": case(3, 2 * ROWS),
    "two-z0": case(0, 2 * ROWS),
    "two-accumulated": case(2, 5 * ROWS, accumulation=4),
    "two-corrected": case(2, 2 * ROWS, preconditioner={**KFAC["preconditioner"], **CORRECTED}),
    "two-inverse": case(1, 2 * ROWS, preconditioner={**KFAC["preconditioner"], "method": "inverse"}),
    "one-small": case(2, ROWS, **SMALL),
    "two-small": case(3, 2 * ROWS, **SMALL),
    "all-small": case(2, "all", **SMALL),
    "adam": case(2, 5 * ROWS, accumulation=4, adam=True),
    "adam-one": case(3, 4 * ROWS, accumulation=4, adam=True),
}
EXPECTED = {name: 1 if "one" in name else 4 if "all-" in name else 2 for name in CASES}
"""Contributors once the rows are known."""


def worker(names) -> dict:
    world, results = dist.get_world_size(), {}
    for name in names:
        mode, accumulation = CASES[name]
        engine = build(mode, accumulation)
        kfac, initial = engine.kfac.preconditioner, weights(engine)
        first = kfac.plan
        sent = []
        for step in range(STEPS):
            before = kfac.channel.sent["factors"]
            train(engine, accumulation, steps=1, first=step)
            sent.append(kfac.channel.sent["factors"] - before)

        def before_step(reference, step: int, kfac=kfac, first=first) -> None:
            plan = kfac.plan if step else first

            def only(layer: str, side: str) -> torch.Tensor:
                key = f"{layer}/{side}"
                ranks = plan.contributors.of(key, plan.assignment.eigen_workers[key], step)
                return torch.isin(reference.ranks, torch.tensor(list(ranks)))

            reference.only = only

        final = weights(engine)
        found = None
        if dist.get_rank() == 0:
            found = expected(mode, accumulation, world, initial, steps=STEPS, before_step=before_step)
        results[name] = {
            "difference": difference(final, found.weights, initial) if found else 0.0,
            "bound": found.bound if found else 1.0,
            "sent": sent,
            "first": sorted({first.contributors.counts.get(key, world) for key in kfac.curvature.specs}),
            "counts": sorted({kfac.plan.contributors.counts.get(key, world) for key in kfac.curvature.specs}),
            "summary": kfac.metrics.values(),
        }
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_factors_of_some_ranks_match_the_reference_with_their_rows(world):
    wrong = []
    for results in run_ranks("tests.deepspeed.test_contributors:worker", world=world, payload=some(CASES, world)):
        for name, result in results.items():
            wrong += within(f"{name} on {world}", result["difference"], result["bound"])
            count = min(world, EXPECTED[name])
            assert result["counts"] == [count], (name, result["counts"])
            assert result["first"] == (
                [1] if SMALL.items() <= CASES[name][0].kfac.items() and "all-" not in name else [world]
            ), name
            if count == 1 and name != "one-of-all":
                assert not any(result["sent"][1:]), (name, "statistics need no network")
    assert not wrong, "\n".join(wrong)
