"""Ulysses sequence parallelism trains like one process with whole sequences."""

import pytest
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from tests.covering import some
from tests.deepspeed.modes import KFAC, Mode
from tests.deepspeed.parallel import SCALED, build, check, clipped
from tests.deepspeed.sequence_runs import make_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

TYPES = {"layers": {"types": ["Linear", "LayerNorm"]}}
MODES = [Mode(f"sp-z{stage}", stage, kfac=TYPES) for stage in (0, 2, 3)]
SAMPLED = Mode("sp-z2-monte_carlo", 2, kfac={"factor": {**KFAC["factor"], "fisher": "monte_carlo"}})
ADAM = Mode("sp-adam-z2", 2, adam=True)
SCALE = [
    Mode("sp-z2-scaled", 2, kfac=SCALED),
    Mode("sp-z0-comm_opt", 0, kfac={**TYPES, "assignment": {"gradient_worker_fraction": 1.0}}),
]
WHOLE = Mode("sp-z2-rows", 2, kfac={"factor": {**KFAC["factor"], "rows": 1}})
"""One rank has the rows, but not those of the other part of the sequence."""


@pytest.mark.parametrize("world", [2, 4])
def test_sequence_parallelism_matches_one_process(world):
    cases = [(mode, over) for mode in MODES for over in ("own", "whole")] + [
        (ADAM, "own"),
        (SAMPLED, "own"),
    ]
    cases = some([*cases, *((mode, "own") for mode in SCALE)], world)
    cases += [(WHOLE, "own")] if world == 2 else []
    for results in run_ranks("tests.deepspeed.sequence_runs:compare", world=world, payload=cases):
        for (mode, over), result in zip(cases, results, strict=True):
            check(f"{mode.name} {over}", result)
            assert result["shared"] == (("q", "kv"),), f"{mode.name} {over}"
            assert bool(result["faults"]) == (mode.stage < 3)
        assert world > 2 or clipped(results), "kl-clip never acted, so it was not tested"


def reduce_worker(payload) -> str:
    parallel_state_sp.initialize_sequence_parallel(2)
    mode = Mode("sp-reduce", 0, kfac={"factor": {**KFAC["factor"], "weight_sharing": "reduce"}})
    with pytest.raises(ValueError) as caught:
        build(
            mode, make_model(parallel_state_sp.get_sequence_parallel_group()), mpu=parallel_state_sp
        )
    return str(caught.value)


def test_reduced_rows_are_refused_where_a_sequence_is_cut():
    assert (
        'use "expand"'
        in run_ranks("tests.deepspeed.test_sequence_parallel:reduce_worker", world=2)[0]
    )
