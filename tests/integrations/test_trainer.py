"""transformers' Trainer itself: unequally many labels on ranks and micro-batches, evaluation first,
another optimizer, reporters."""

import pytest
import torch

from tests.deepspeed.test_moving import converted
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
OTHER = {"AdamW": "KFACAdamW", "KFACAdamW": "AdamW"}


def run(worker: str, payload, *, world: int = 1):
    """The result of rank 0."""
    target = f"tests.integrations.trainer_runs:{worker}_worker"
    return run_ranks(target, world=world, payload=payload)[0]


APART = 1e-3
"""Of the whole batch's: fp32 sums over eight micro-batches differ by less; traces of factors were
0.6 to 6.4 times those of the whole batch where labels were not weighed."""


KINDS = ("labels", "compute_loss_func", "label_smoothing_factor", "SFTTrainer", "sequence")


@pytest.mark.parametrize(("kind", "stage"), [*((kind, 2) for kind in KINDS), ("sequence", 3)])
def test_ranks_and_micro_batches_make_the_factors_and_weights_of_the_whole_batch(
    kind, stage, tmp_path
):
    """Of unequally many labels; of a sum that is divided outside of the model; and of sequences
    whose labels are shifted before they are cut, and whose losses are gathered and weighed."""
    cut = 1 if kind == "sequence" else 4
    whole, found = (
        run("parts", (str(tmp_path), kind, count, {"stage": stage}), world=world)
        for world, count in ((1, 1), (2, cut))
    )
    assert found["traces"].keys() == whole["traces"].keys() and len(whole["traces"]) == 24
    apart = {key: found["traces"][key] / trace for key, trace in whole["traces"].items() if trace}
    assert all(abs(ratio - 1) < APART for ratio in apart.values()), apart
    for name, weight in whole["weights"].items():
        assert (found["weights"][name] - weight).norm() < APART * weight.norm(), name


def test_evaluation_may_come_first(tmp_path):
    before, after, steps = run("evaluation", str(tmp_path), world=2)
    assert steps == 2 and after < before


@pytest.mark.parametrize(("kind", "stage"), [("AdamW", 0), ("KFACAdamW", 3)])
def test_a_running_job_moves_to_the_other_optimizer(kind, stage, tmp_path):
    """At stage 0 as it is; at the others by a universal checkpoint."""
    saved = run("moving", (str(tmp_path), stage, kind, False, False))
    if stage:
        converted([tmp_path / "checkpoint-2" / "global_step2"])
    moved = run("moving", (str(tmp_path), stage, OTHER[kind], True, stage > 0))
    for name, weight in saved["ended"].items():
        assert torch.equal(moved["begun"][name], weight), "the saved weights"
    assert (moved["at"], moved["step"]) == (2, 4)
    to_kfac = OTHER[kind] == "KFACAdamW"
    assert moved["kfac steps"] == (2 if to_kfac else None)
    assert moved["decay"] == (1.0 if to_kfac else 0.01), "the new config's"
    assert any(not torch.equal(moved["ended"][name], w) for name, w in saved["ended"].items())


@pytest.mark.parametrize("door", ["by hand", "monitor"])
def test_a_logger_has_our_numbers_once_and_constants_at_the_start_alone(door, tmp_path):
    pytest.importorskip("tensorboard")
    prefix = "kfac/" if door == "monitor" else "train/kfac/"
    found = run("logged", (str(tmp_path), door))
    ours = {name: values for name, values in found.items() if "kfac" in name}
    assert all(name.startswith(prefix) for name in ours), ours
    counts = {"updated": 1, "curved": 1, "nu": 3, "kl": 3, "eigenvalue_spread": 3}
    for name, count in counts.items():
        assert len(ours[prefix + name]) == count, (name, ours)
    assert ("kfac/refreshes" in ours) == (door == "monitor"), "which has all counters"
