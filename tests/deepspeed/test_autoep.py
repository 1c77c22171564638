"""Mixtures that DeepSpeed's AutoEP has spread over ranks train like all experts in one process."""

from functools import partial

import pytest
import torch

from tests.deepspeed.autoep_runs import Case
from tests.deepspeed.modes import Mode
from tests.deepspeed.parallel import EVERYTHING, check, clipped, same_everywhere
from tests.ranks import run_ranks
from tests.spread import within

pytestmark = pytest.mark.distributed


def sgd(stage: int, **options) -> Mode:
    return Mode(
        f"autoep-z{stage}", stage, clip=0.0, kfac={"preconditioner": {"kl_clip": 1e-5}}, **options
    )


def adam(stage: int, **options) -> Mode:
    return Mode(f"autoep-adam-z{stage}", stage, clip=0.0, adam=True, **options)


CASES = {
    2: [
        Case(sgd(0), 2, grouped=False),
        Case(sgd(0), 2, experts=2),
        Case(sgd(1), 1),
        Case(sgd(2), 2, checkpointed=True),
        Case(sgd(3), 2, grouped=False),
        Case(adam(0), 2),
        Case(adam(1), 2),
        Case(adam(3), 1),
    ],
    4: [
        Case(sgd(1), 2),
        Case(sgd(3, zero_init=True), 2),
        Case(adam(2), 2, grouped=False),
        Case(adam(3), 2),
    ],
}


@pytest.mark.parametrize("world", [2, 4])
def test_experts_match_one_process(world):
    cases = CASES[world]
    found = run_ranks(
        "tests.deepspeed.autoep_runs:compare", world=world, payload=cases, timeout=900
    )
    for rank, results in enumerate(found):
        for case, result in zip(cases, results, strict=True):
            where = f"{case.name} rank {rank}"
            expert_rank = rank % case.ep_size
            assert result["domains"] == [
                ("dense", 3),
                (f"experts_ep_size_{case.ep_size}_rank_{expert_rank}", 3 * case.local),
            ], where
            stacks = {
                f"mlp.experts.w{number}.{index}"
                for number in (1, 2, 3)
                for index in range(case.local)
            }
            assert set(result["seen"]) == {"up", "head", "mlp.router.gate", *stacks}, where
            check(where, result)
        assert clipped(results), "kl-clip never acted, so it was not tested"


def test_grouped_experts_that_share_A_step_as_experts_in_a_loop():
    mode = Mode("autoep-shared", 2, clip=0.0)
    for result in run_ranks(
        "tests.deepspeed.autoep_runs:sharing", world=2, payload=Case(mode, 2, apart=False)
    ):
        assert not within("shared", result["difference"], result["bound"]), result["difference"]
        for keys in result["keys"]:
            own = [key for key in keys if key.startswith("mlp.experts")]
            assert {key for key in own if key.endswith("/A")} == {
                "mlp.experts.w1.0/A",
                "mlp.experts.w2.0/A",
            }, own


def test_with_everything_on_all_ranks_have_the_same_weights():
    case = Case(
        Mode("autoep-everything", 2, dtype="bf16", clip=0.0, kfac=EVERYTHING), 2, apart=False
    )
    results = run_ranks("tests.deepspeed.autoep_runs:everything_on", world=4, payload=case)
    assert results[0].keys() != results[1].keys() and results[0].keys() == results[2].keys(), (
        "two have each expert"
    )
    assert same_everywhere(results)


PLAIN = Case(Mode("autoep", 1), 2)
REFUSED = {
    "disable_triton_grouped_mm to true": (PLAIN, {}, {"use_triton_grouped_mm": True}),
    'gate_up_impl to "separate"': (PLAIN, {"gate_up_impl": "fused"}, {}),
    'comm_backend to "comm"': (PLAIN, {}, {"comm_backend": "deepep"}),
    "autotp_size to 1": (PLAIN, {}, {"autotp_size": partial(int, 2)}),
}


def test_what_autoep_cannot_do_is_refused():
    for messages in run_ranks("tests.deepspeed.autoep_runs:refusals", world=2, payload=REFUSED):
        for words, message in messages.items():
            assert words in message, (words, message)


def test_an_optimizer_made_before_the_layers_were_replaced_is_refused():
    for message in run_ranks("tests.deepspeed.autoep_runs:object_refused", world=2, payload=PLAIN):
        assert "name it in the DeepSpeed config" in message


def test_a_checkpoint_holds_the_experts_of_every_rank():
    for result in run_ranks("tests.deepspeed.autoep_runs:saved", world=2, payload=Case(sgd(2), 2)):
        assert result["loaded"] == [True, True] and result["steps"] == [3, 3]
        experts = {key.split("experts.w1.")[1][0] for key in result["keys"] if "experts.w1" in key}
        assert experts == set("0123"), "in global numbers"


def test_an_A_that_experts_share_continues_at_another_ep_size():
    leaders = {
        2: {f"mlp.experts.{stack}.{first}/A" for stack in ("w1", "w2") for first in (0, 2)},
        1: {f"mlp.experts.{stack}.0/A" for stack in ("w1", "w2")},
    }
    case = Case(Mode("autoep-saved", 2, clip=0.0), 2, apart=False)
    for results in run_ranks("tests.deepspeed.autoep_runs:saved_sharing", world=2, payload=case):
        for result, (before, after) in zip(results, [(2, 1), (1, 2)], strict=True):
            assert (
                result["saved"].keys() == leaders[before]
                and result["loaded"].keys() == leaders[after]
            )
            assert result["again"] == []
            for key, factor in result["loaded"].items():
                source = key if key in result["saved"] else key.replace(".2/", ".0/")
                assert torch.equal(factor, result["saved"][source]), key
