"""Mixtures of experts train like all experts in one process."""

import pytest

from tests.close import near
from tests.covering import some
from tests.deepspeed.modes import CLIPPED, KFAC, Mode
from tests.deepspeed.parallel import EVERYTHING, INVERSE, SCALED, check, clipped, same_everywhere
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

# at stage 0 DeepSpeed clips by an average of the ranks' norms
MODES = [
    Mode(f"moe-z{stage}", stage, clip=0.0, kfac={"preconditioner": {"kl_clip": 1e-5}})
    for stage in (0, 1, 2)
]
SCALE = [
    Mode("moe-z1-scaled", 1, clip=0.0, kfac={**SCALED, "preconditioner": {"kl_clip": 1e-5}}),
    Mode("moe-z1-inverse", 1, clip=0.0, kfac={**INVERSE, "communication": {"dtype": "fp32"}}),
    Mode(
        "moe-z0-comm_opt",
        0,
        clip=0.0,
        kfac={
            "preconditioner": {"kl_clip": 1e-5},
            "offload": {"device": "cpu"},
            "assignment": {"gradient_worker_fraction": 1.0, "memory_budget_gb": 1.0},
        },
    ),
]
CASES = [(mode, ep_size, False) for mode in MODES for ep_size in (1, 2)] + [(MODES[1], 2, True)]
ADAM = [Mode(f"moe-adam-z{stage}", stage, adam=True, clip=0.0) for stage in (0, 1)]
CASES += [(mode, 2, False) for mode in SCALE + ADAM]


@pytest.mark.parametrize("world", [2, 4])
def test_experts_match_one_process(world):
    cases = some(CASES, world)
    for rank, results in enumerate(
        run_ranks("tests.deepspeed.expert_runs:compare", world=world, payload=cases)
    ):
        for (mode, ep_size, starved), result in zip(cases, results, strict=True):
            where = f"{mode.name} ep_size {ep_size} rank {rank}"
            assert result["domains"] == [
                ("dense", 2 if starved else 3),  # a gate without gradients is no layer
                (f"experts_ep_size_{ep_size}_rank_{rank % ep_size}", 8 // ep_size),
            ]
            check(where, result)
            assert ("weight is frozen" in result["report"]) == starved  # the gate's
        assert clipped(results), "kl-clip never acted, so it was not tested"


CLIPPING = [
    (Mode(f"moe-adam-z{stage}-clipped", stage, adam=True, clip=CLIPPED), ep_size, False)
    for stage, ep_size in ((1, 1), (1, 2), (2, 2))
]


def test_kfac_adamw_steps_experts_by_the_clipped_gradients_of_one_process():
    """The norm is that of all experts, whichever ranks have them."""
    for of_rank in run_ranks("tests.deepspeed.expert_runs:compare", world=2, payload=CLIPPING):
        for (mode, ep_size, _), result in zip(CLIPPING, of_rank, strict=True):
            where = f"{mode.name} ep_size {ep_size}"
            check(where, result)
            assert result["norm"] > 2 * CLIPPED, f"{where} has something to clip"


def test_g_of_an_expert_is_that_of_one_process():
    kfac = {"factor": {**KFAC["factor"], "update_interval": 1}, "communication": {"dtype": "fp32"}}
    mode = Mode("moe", 1, kfac=kfac, clip=0.0)
    results = run_ranks("tests.deepspeed.expert_runs:expert_factors", world=2, payload=mode)
    seen = 0
    for result in (found for of_rank in results for found in of_rank):
        for name, value in result["expected"].items():
            seen += name.startswith("experts")
            near(
                result["found"][name],
                value,
                1e-5 * float(value.abs().max()),
                "fp32 sums",
                what=name,
            )
    assert seen == 3 * 8, "two layers of each of four experts, also recomputed"


REFUSED = {
    "weight_sharing": Mode(
        "moe", 0, kfac={"factor": {**KFAC["factor"], "weight_sharing": "reduce"}}
    ),
    "monte_carlo": Mode("moe", 0, kfac={"factor": {**KFAC["factor"], "fisher": "monte_carlo"}}),
}


def test_what_experts_cannot_do_is_refused():
    for messages in run_ranks("tests.deepspeed.expert_runs:refusals", world=2, payload=REFUSED):
        for words, message in messages.items():
            assert words in message, (words, message)


def test_with_everything_on_all_ranks_have_the_same_weights():
    mode = Mode("moe-everything", 1, clip=0.0, kfac=EVERYTHING)
    results = run_ranks("tests.deepspeed.expert_runs:everything_on", world=4, payload=mode)
    assert same_everywhere(results)


def test_a_checkpoint_holds_the_experts_of_every_rank():
    for result in run_ranks("tests.deepspeed.expert_runs:saved", world=2, payload=MODES[2]):
        assert result["loaded"] == [True, True] and result["steps"] == [3, 3]
        experts = {
            key.split("deepspeed_experts.")[1][0]
            for key in result["keys"]
            if "deepspeed_experts" in key
        }
        assert experts == set("0123"), "in global numbers"
