"""Factors from the rows of some ranks, or from some rows of one: equal to tests/oracle.py fed with
just these, in every ZeRO stage."""

import pytest
import torch
import torch.distributed as dist

from ds_kfac.model.convolutions import phase
from tests.covering import some
from tests.deepspeed.modes import KFAC, MICRO_ROWS, Mode
from tests.deepspeed.runs import build, expected, train, weights
from tests.ranks import run_ranks
from tests.spread import difference, within

pytestmark = pytest.mark.distributed
STEPS, TOKENS = 6, 3
ROWS = TOKENS * MICRO_ROWS
SMALL = {"plan": {"BUCKET_BYTES": 512}}
"""Too small for all sums: the first batch comes from the eigen workers alone, later ones in several
messages."""


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
    "two-inverse": case(
        1, 2 * ROWS, preconditioner={**KFAC["preconditioner"], "method": "inverse"}
    ),
    "one-small": case(2, ROWS, **SMALL),
    "two-small": case(3, 2 * ROWS, **SMALL),
    "all-small": case(2, "all", **SMALL),
    "adam": case(2, 5 * ROWS, accumulation=4, adam=True),
    "adam-one": case(3, 4 * ROWS, accumulation=4, adam=True),
}
EXPECTED = {name: 1 if "one" in name else 4 if "all-" in name else 2 for name in CASES}
"""Contributors once the rows are known."""
STRIDED = {
    "strided-one": case(2, ROWS // 3),
    "strided-one-z0": case(0, ROWS // 5, adam=True),
    "strided-one-accumulated": case(3, 4 * ROWS // 7, accumulation=4),
    "strided-one-corrected": case(
        1, ROWS // 3, preconditioner={**KFAC["preconditioner"], **CORRECTED}
    ),
    "strided-one-small": case(2, ROWS // 2, **SMALL),
}
STRIDES = {
    "strided-one": 3,
    "strided-one-z0": 6,
    "strided-one-accumulated": 8,
    "strided-one-corrected": 3,
    "strided-one-small": 2,
}
CASES |= STRIDED
EXPECTED |= dict.fromkeys(STRIDED, 1)


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
                here, stride = (
                    torch.isin(reference.ranks, torch.tensor(list(ranks))),
                    plan.contributors.strides,
                )
                # [N, T], of its call
                row = (reference.places % MICRO_ROWS)[:, None] * TOKENS + torch.arange(TOKENS)
                every = stride.get(key, 1)
                taken = row % every == phase(step, every)
                return (here[:, None] & taken).flatten() * (every * world / len(ranks))

            reference.only = only

        final = weights(engine)
        found = None
        if dist.get_rank() == 0:
            found = expected(
                mode, accumulation, world, initial, steps=STEPS, before_step=before_step
            )
        results[name] = {
            "difference": difference(final, found.weights, initial) if found else 0.0,
            "bound": found.bound if found else 1.0,
            "sent": sent,
            "first": sorted(
                {first.contributors.counts.get(key, world) for key in kfac.curvature.specs}
            ),
            "counts": sorted(
                {kfac.plan.contributors.counts.get(key, world) for key in kfac.curvature.specs}
            ),
            "strides": sorted(set(kfac.plan.contributors.strides.values())),
            "summary": kfac.metrics.values(),
        }
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_factors_of_some_ranks_match_the_reference_with_their_rows(world):
    wrong = []
    for results in run_ranks(
        "tests.deepspeed.test_contributors:worker", world=world, payload=some(CASES, world)
    ):
        for name, result in results.items():
            wrong += within(f"{name} on {world}", result["difference"], result["bound"])
            count = min(world, EXPECTED[name])
            assert result["counts"] == [count], (name, result["counts"])
            assert result["first"] == (
                [1]
                if SMALL.items() <= CASES[name][0].kfac.items() and "all-" not in name
                else [world]
            ), name
            assert result["strides"] == ([STRIDES[name]] if name in STRIDES else []), (
                name,
                result["strides"],
            )
            if count == 1:
                assert not any(result["sent"][1:]), (name, "statistics need no network")
    assert not wrong, "\n".join(wrong)


def saving(folder: str) -> None:
    engine = build(STRIDED["strided-one"][0], 1)
    train(engine, 1, steps=2)
    engine.save_checkpoint(folder, tag="tag")
    engine.destroy()


def loading(folder: str) -> tuple:
    engine = build(STRIDED["strided-one"][0], 1, seed=99)
    engine.load_checkpoint(
        folder, tag="tag", load_optimizer_states=False, load_lr_scheduler_states=False
    )
    engine.kfac.load_state(folder, "tag")
    kfac = engine.kfac.preconditioner
    loaded = kfac.observations.rows
    train(engine, 1, steps=1, first=2)
    found = loaded, kfac.observations.rows, dict(kfac.plan.contributors.strides)
    engine.destroy()
    return found


def test_rows_of_a_rank_are_counted_again_by_another_number_of_ranks(tmp_path):
    """A checkpoint's are those of a rank of its own run."""
    run_ranks("tests.deepspeed.test_contributors:saving", world=2, payload=str(tmp_path))
    for world in (1, 2):
        loaded, rows, strides = run_ranks(
            "tests.deepspeed.test_contributors:loading", world=world, payload=str(tmp_path)
        )[0]
        assert (loaded is None) == (world == 1)
        assert set(rows.values()) == {ROWS} and set(strides.values()) == {3}
