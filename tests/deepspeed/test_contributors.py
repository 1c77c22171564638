"""Factors from the rows of some ranks, or from some rows of one: equal to tests/oracle.py fed with
just these, in every ZeRO stage."""

import pytest
import torch
import torch.distributed as dist

from ds_kfac.model.convolutions import phase
from tests.covering import some
from tests.deepspeed.modes import KFAC, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, expected, train, weights
from tests.ranks import call_on_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS, TOKENS = 6, 3
ROWS = TOKENS * MICRO_ROWS
SMALL = {"plan": {"BUCKET_BYTES": 512}}
"""Too small for all sums: the first batch comes from the eigen workers alone, later ones in several
messages."""


def case(stage: int, rows, *, accumulation: int = 1, adam: bool = False, **kfac):
    factor = {**KFAC["factor"], "rows": rows}
    return Mode("contributors", stage, kfac={**kfac, "factor": factor}, adam=adam), accumulation


CORRECTED = {"preconditioner": {**KFAC["preconditioner"], "eigenvalues": "corrected"}}
INVERSE = {"preconditioner": {**KFAC["preconditioner"], "method": "inverse"}}
STRIDES = {
    "strided-one": 3,
    "strided-one-z0": 6,
    "strided-one-accumulated": 8,
    "strided-one-corrected": 3,
    "strided-one-small": 2,
}
"""Case -> every which row is taken."""
CASES = {
    "one": case(2, ROWS),
    "one-z0": case(0, ROWS, assignment={"gradient_worker_fraction": 1.0}),
    "two": case(3, 2 * ROWS),
    "two-z0": case(0, 2 * ROWS),
    "two-accumulated": case(2, 5 * ROWS, accumulation=4),
    "two-corrected": case(2, 2 * ROWS, **CORRECTED),
    "two-inverse": case(1, 2 * ROWS, **INVERSE),
    "one-small": case(2, ROWS, **SMALL),
    "two-small": case(3, 2 * ROWS, **SMALL),
    "four-small": case(2, "all", **SMALL),
    "two-adam": case(2, 5 * ROWS, accumulation=4, adam=True),
    "one-adam": case(3, 4 * ROWS, accumulation=4, adam=True),
    "strided-one": case(2, ROWS // 3),
    "strided-one-z0": case(0, ROWS // 5, adam=True),
    "strided-one-accumulated": case(3, 4 * ROWS // 7, accumulation=4),
    "strided-one-corrected": case(1, ROWS // 3, **CORRECTED),
    "strided-one-small": case(2, ROWS // 2, **SMALL),
}
"""Named by the number of contributors once the rows are known."""


def only(reference, plan, key: str, step: int) -> torch.Tensor:
    """Weights of the rows of a batch: those of the ranks and places that contribute."""
    ranks = plan.contributors.of(key, plan.assignment.eigen_workers[key], step)
    here = torch.isin(reference.ranks, torch.tensor(list(ranks)))
    # [N, T], of its call
    row = (reference.places % MICRO_ROWS)[:, None] * TOKENS + torch.arange(TOKENS)
    every = plan.contributors.strides.get(key, 1)
    taken = row % every == phase(step, every)
    return (here[:, None] & taken).flatten() * (every * plan.assignment.world / len(ranks))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.ranks()
def test_factors_of_some_ranks_match_the_reference_with_their_rows(world):
    wrong = []
    for name in some(CASES, world):
        mode, accumulation = CASES[name]
        engine = build(mode, accumulation)
        kfac, initial = engine.kfac.preconditioner, weights(engine)
        plans, sent = [kfac.plan], []
        for step in range(STEPS):
            before = kfac.channel.sent["factors"]
            train(engine, accumulation, steps=1, first=step)
            sent.append(kfac.channel.sent["factors"] - before)
        plans.append(kfac.plan)
        first, later = (
            {plan.contributors.counts.get(key, world) for key in kfac.curvature.specs}
            for plan in plans
        )
        count = next(n for word, n in (("one", 1), ("two", 2), ("four", 4)) if word in name)
        count = min(world, count)
        assert later == {count}, name
        assert first == ({1} if "small" in name and "four" not in name else {world}), name
        strides = set(kfac.plan.contributors.strides.values())
        assert strides == ({STRIDES[name]} if name in STRIDES else set()), name
        assert count > 1 or not any(sent[1:]), (name, "statistics need no network")

        def before_step(reference, step: int, plans=plans) -> None:
            plan = plans[min(step, 1)]
            reference.only = lambda layer, side: only(reference, plan, f"{layer}/{side}", step)

        trained = weights(engine)
        if dist.get_rank() == 0:
            options = {"steps": STEPS, "before_step": before_step}
            found = expected(mode, accumulation, world, initial, **options)
            apart = difference(trained, found.weights, initial)
            wrong += within(f"{name} on {world}", apart, found.bound)
        engine.destroy()
    assert not wrong, "\n".join(wrong)


def save(folder) -> None:
    engine = build(CASES["strided-one"][0], 1)
    train(engine, 1, steps=2)
    engine.save_checkpoint(folder, tag="tag")


def load(world, folder) -> None:
    engine = build(CASES["strided-one"][0], 1, seed=99)
    without = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    engine.load_checkpoint(folder, tag="tag", **without)
    engine.kfac.load_state(folder, "tag")
    kfac = engine.kfac.preconditioner
    assert (kfac.observations.rows is None) == (world == 1)
    train(engine, 1, steps=1, first=2)
    assert set(kfac.observations.rows.values()) == {ROWS}
    assert set(kfac.plan.contributors.strides.values()) == {3}


def test_rows_of_a_rank_are_counted_again_by_another_number_of_ranks(tmp_path):
    """A checkpoint's are those of a rank of its own run."""
    call_on_ranks(2, save, str(tmp_path))
    for world in (1, 2):
        call_on_ranks(world, load, world, str(tmp_path))
