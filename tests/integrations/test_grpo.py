"""TRL's GRPOTrainer, two ranks, ZeRO 2 and 3, with LoRA and without: K-FAC from the JSON alone."""

import pytest

from tests.integrations.runs import STEPS
from tests.ranks import run_ranks

pytest.importorskip("trl", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
CASES = ((2, False), (3, False), (2, True), (3, True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("grpo"))
    return run_ranks("tests.integrations.grpo_runs:worker", world=2, payload=(folder, CASES))[0]


@pytest.mark.parametrize(("stage", "lora"), CASES)
def test_every_step_is_preconditioned_by_rows_that_are_no_padding_and_a_run_resumes(
    runs, stage, lora
):
    straight, resumed = runs[stage, lora]
    assert len(straight["seen"]) == STEPS
    for rows, tokens in straight["seen"]:
        assert rows == tokens >= 64
    assert straight["unfit"] == ([] if lora else ["lm_head"])
    assert straight["kfac steps"] == STEPS and straight["adam_ratio"] == 8
    assert straight["factor updates"][-1] == STEPS and len(straight["rewards"]) == STEPS
    assert 0 < max(straight["rewards"]) < 1
    assert resumed["digest"] == straight["digest"] and resumed["kfac steps"] == STEPS
