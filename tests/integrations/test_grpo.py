"""TRL's GRPOTrainer by its example, two ranks, ZeRO 2 and 3, with LoRA and without: K-FAC from the
JSON alone sees the rows of a generation, trains, and goes on from a checkpoint."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ds_kfac
from ds_kfac.step import proving
from tests.integrations.runs import STEPS, checkpoint, digest, fresh
from tests.ranks import run_ranks

pytest.importorskip("trl", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
CASES = ((2, False), (3, False), (2, True), (3, True))


def worker(payload: tuple[str, tuple[tuple[int, bool], ...]]) -> dict[tuple[int, bool], Any]:
    """(stage, LoRA) -> what a run of some steps found, and one from its checkpoint."""
    from examples.integrations import tiny, trl_grpo

    folder, cases = payload
    proving.RAISES = False  # TRL multiplies by the head in a function: it has no rows
    ds_kfac.enable()
    base = trl_grpo.taught()  # once: it takes longer than the runs
    trl_grpo.taught, trl_grpo.ANSWERS = lambda: copy.deepcopy(base), 64
    found = {}
    for stage, lora in cases:
        out = Path(folder, f"{stage}{lora}")
        out.mkdir(exist_ok=True)
        blocks = {"zero_optimization": {"stage": stage}}
        blocks["kfac"] = {"factor": {"update_interval": 1}}
        config = tiny.ds_config(Path(tiny.__file__).with_name("ds_config.json"), **blocks)
        path = out / f"config{dist.get_rank()}.json"
        path.write_text(json.dumps(config))
        given = ("--out", str(out), "--deepspeed", str(path), *(["--lora"] if lora else []))
        with contextlib.redirect_stdout(io.StringIO()):
            straight = run(*given)
            resumed = run(*given, "--resume", str(checkpoint(out)))
        found[stage, lora] = straight, resumed
    return found


def run(*arguments: str) -> dict[str, Any]:
    """Of one run: rows that the masks of each step leave, beside the tokens of questions and
    answers, and what it ended with."""
    from trl import GRPOTrainer

    from examples.integrations import trl_grpo

    fresh()
    seen: list[tuple[int, int]] = []
    plain = GRPOTrainer._compute_loss

    def watched(self: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> Any:
        read, rows = model.kfac.mask, []

        def reading(given: tuple, keywords: dict[str, Any]) -> Any:
            masks = read(given, keywords)
            rows.extend(int(mask.sum()) for mask in masks)
            return masks

        model.kfac.mask = reading
        try:
            return plain(self, model, inputs)
        finally:
            model.kfac.mask = read
            tokens = sum(int(inputs[part].sum()) for part in ("prompt_mask", "completion_mask"))
            seen.append((sum(rows), tokens))

    GRPOTrainer._compute_loss = watched  # type: ignore[method-assign]
    try:
        trainer = trl_grpo.main(["--steps", str(STEPS), *arguments])
    finally:
        GRPOTrainer._compute_loss = plain  # type: ignore[method-assign]
    engine, history = trainer.model_wrapped, trainer.state.log_history
    found = {
        "seen": seen,
        "digest": digest(engine),
        "unfit": sorted(engine.kfac.preconditioner.proving.unfit),
        "kfac steps": engine.kfac.preconditioner.steps,
        "rewards": [entry["reward"] for entry in history if "reward" in entry],
        "factor updates": [engine.kfac.counters()["factor_updates"]],
        "adam_ratio": engine.basic_optimizer.adam_ratio,
    }
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("grpo"))
    return run_ranks("tests.integrations.test_grpo:worker", world=2, payload=(folder, CASES))[0]


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
