"""TRL's GRPOTrainer by its example, two ranks, ZeRO 2 and 3, with LoRA and without: K-FAC from the
JSON alone sees the rows of a generation, trains, and goes on from a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.runs import STEPS, twice
from tests.ranks import run_ranks

pytest.importorskip("trl", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
CASES = ((3, False), (2, True))


def watch_rows(seen: list[tuple[int, int]]) -> None:
    """Notes of each step the rows that its masks leave, beside the tokens of questions and
    answers."""
    from trl import GRPOTrainer

    plain = GRPOTrainer._compute_loss

    def watched(self: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> Any:
        read, rows = model.kfac.mask, []

        def reading(given: tuple, keywords: dict[str, Any]) -> Any:
            masks = read(given, keywords)
            rows.extend(int(mask.sum()) for mask in masks)
            return masks

        model.kfac.mask = reading
        loss = plain(self, model, inputs)
        model.kfac.mask = read
        tokens = sum(int(inputs[part].sum()) for part in ("prompt_mask", "completion_mask"))
        seen.append((sum(rows), tokens))
        return loss

    GRPOTrainer._compute_loss = watched


def worker(payload: tuple[str, tuple[tuple[int, bool], ...]]) -> dict[tuple[int, bool], Any]:
    """(stage, LoRA) -> what a run of some steps found, one from its checkpoint, and rows seen."""
    from examples.integrations import trl_grpo

    folder, cases = payload
    base = trl_grpo.taught()  # once: it takes longer than the runs
    trl_grpo.taught, trl_grpo.ANSWERS = lambda: copy.deepcopy(base), 64
    found, seen = {}, []
    watch_rows(seen)
    for stage, lora in cases:
        kfac = {"factor": {"update_interval": 1}}
        blocks = {"zero_optimization": {"stage": stage}, "kfac": kfac}
        flags = ["--lora"] if lora else []
        seen.clear()
        runs = twice("trl_grpo", Path(folder, f"{stage}{lora}"), blocks, *flags)
        found[stage, lora] = *runs, seen[:STEPS]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("grpo"))
    return run_ranks("tests.integrations.test_grpo:worker", world=2, payload=(folder, CASES))[0]


@pytest.mark.parametrize(("stage", "lora"), CASES)
def test_every_step_is_preconditioned_by_rows_that_are_no_padding_and_a_run_resumes(
    runs, stage, lora
):
    straight, resumed, seen = runs[stage, lora]
    assert len(seen) == STEPS and all(rows == tokens >= 64 for rows, tokens in seen), seen
    assert straight["unfit"] == ([] if lora else ["lm_head"])
    assert straight["kfac steps"] == straight["factor updates"] == STEPS
    assert len(straight["rewards"]) == STEPS and 0 < max(straight["rewards"]) < 1
    assert resumed["digest"] == straight["digest"] and resumed["kfac steps"] == STEPS
