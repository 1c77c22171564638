"""Pipeline stages train like the sequential model in one process."""

import pytest

from tests.close import near
from tests.covering import some
from tests.deepspeed.modes import FP32_ACCUM, KFAC, Mode
from tests.deepspeed.parallel import INVERSE, SCALED, check, clipped
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

TYPES = {"layers": {"types": ["Linear", "LayerNorm"]}}
COMM_OPT = {"assignment": {"gradient_worker_fraction": 1.0}, "offload": {"device": "cpu"}}
CASES = [
    # at stage 0 DeepSpeed clips by the norm of the first stage alone
    (Mode("pipe-z0", 0, clip=0.0, kfac=TYPES), 4),
    (Mode("pipe-z1", 1, kfac=TYPES), 4),
    (Mode("pipe-z1", 1, kfac=TYPES), 1),
    (Mode("pipe-bf16", 1, "bf16", extra=FP32_ACCUM, clip=0.0), 3),
    (Mode("pipe-z1-scaled", 1, kfac=SCALED), 3),
    (Mode("pipe-z0-comm_opt", 0, clip=0.0, kfac=COMM_OPT), 1),
    (Mode("pipe-z1-inverse", 1, kfac={**TYPES, **INVERSE}), 4),
    (Mode("pipe-adam-z1", 1, adam=True, kfac=TYPES), 4),
    (Mode("pipe-adam-z0", 0, adam=True, clip=0.0), 4),
]
FORK = [(Mode(f"pipe-fork-z{stage}", stage, clip=0.0), 3) for stage in (0, 1)]


@pytest.mark.parametrize("world", [2, 4])
def test_pipelines_match_one_process(world):
    cases = some(CASES, world)
    for rank, results in enumerate(
        run_ranks("tests.deepspeed.pipeline_runs:compare", world=world, payload=cases)
    ):
        for (mode, accumulation), result in zip(cases, results, strict=True):
            where = f"{mode.name} {accumulation} rank {rank}"
            check(where, result)
        assert world > 2 or clipped(results), "kl-clip never acted, so it was not tested"


def test_a_stage_with_two_outputs_matches_one_process():
    """Its layer's gradient is the sum of what comes by both."""
    for rank, results in enumerate(
        run_ranks("tests.deepspeed.pipeline_runs:compare", world=2, payload=FORK)
    ):
        for (mode, _), result in zip(FORK, results, strict=True):
            where = f"{mode.name} rank {rank}"
            check(where, result)


def test_recomputed_micro_batches_of_other_lengths_have_their_own_loss_terms():
    mode = Mode("pipe-lengths", 0, clip=0.0)
    for plain, recomputed in run_ranks(
        "tests.deepspeed.pipeline_runs:lengths", world=2, payload=mode
    ):
        assert plain.keys() == recomputed.keys() and len(plain) > 8
        for name, value in plain.items():
            size = float(value.abs().max())
            near(recomputed[name], value, 1e-5 * size, "the same sums in another order", what=name)


def test_a_batch_ramp_changes_the_micro_batches_of_a_pipeline():
    mode = Mode("pipe-z1", 1, kfac=TYPES)
    for result in run_ranks("tests.deepspeed.pipeline_runs:ramped", world=2, payload=mode):
        assert result["batches"] == [1, 1, 2, 4, 4] and result["same"]
        assert result["losses True"] == result["losses False"], (
            "DeepSpeed divides by micro-batches after the step"
        )


def test_a_head_is_found_by_its_shape_though_the_embedding_is_in_another_stage():
    run = "tests.deepspeed.pipeline_runs:words_trained"
    (whole,) = run_ranks(run, world=1, payload=1)
    first, last = run_ranks(run, world=2, payload=2)
    stages = first | last
    assert stages.keys() == whole.keys()
    for name, weight in whole.items():
        near(stages[name], weight, 1e-4, "rounding; with the other direction 0.03", what=name)


REFUSED = {
    "monte_carlo": Mode("pipe", 0, kfac={"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}),
    "parameter groups": Mode("pipe", 1, adam=True, clip=0.0),  # only the first stage has a norm
    "no layer to precondition": Mode("pipe", 0, kfac={"layers": {"types": ["LayerNorm"]}}),
}


def test_what_pipelines_cannot_do_is_refused_on_every_rank():
    for messages in run_ranks("tests.deepspeed.pipeline_runs:refusals", world=2, payload=REFUSED):
        for words, message in messages.items():
            assert words in message, (words, message)


def test_tied_layers_are_left_to_the_optimizer_and_checkpoints_hold_every_stage():
    results = run_ranks(
        "tests.deepspeed.pipeline_runs:tied_and_saved", world=2, payload=TYPES, timeout=100
    )
    assert [result["layers"] for result in results] == [["1"], ["2"]]
    for result in results:
        assert "TiedLayerSpec" in result["report"]
        assert result["loaded"] and result["same"] and result["loaded without stages"]
        expected = sorted(
            f"{layer}.{part}"
            for layer in "12"
            for part in ("A.factor.pt", "G.factor.pt", "layer.pt")
        )
        assert result["files"] == expected, "each factor and each layer once"
        assert result["refused"].count("saved with 2 pipeline stages, this engine has 1") == 2
        assert "KFACAdamW" not in result["refused"], "these engines have another optimizer"
        assert result["weights alone"], "as the error says"
