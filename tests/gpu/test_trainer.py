"""transformers' Trainer on one GPU in 16 bits: micro-batches of unequally many labels give the
factors of the whole batch."""

import pytest

from tests.ranks import run_alone

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
pytest.importorskip("trl", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
APART = 0.05
"""Of traces: inputs are rounded to 8 bits, and after a step the weights of two runs differ."""
CASES = [
    pytest.param("cpu", "bf16"),
    pytest.param("cuda", "bf16", marks=pytest.mark.gpu),
    pytest.param("cuda", "fp16", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "precision"), CASES)
def test_the_trainer_trains_in_16_bits(device, precision, tmp_path):
    from tests.integrations.trainer_runs import PRECISION

    target = "tests.integrations.trainer_runs:parts_worker"
    given = {"blocks": PRECISION[precision], precision: True}
    whole, parts = (
        run_alone(target, device=device, payload=(str(tmp_path), "labels", accumulation, given))
        for accumulation in (1, 4)
    )
    assert whole["steps"] == parts["steps"] == 2, "no step was skipped"
    assert whole["traces"].keys() == parts["traces"].keys() and len(whole["traces"]) == 24
    for name, trace in whole["traces"].items():
        assert abs(parts["traces"][name] - trace) <= APART * abs(trace), name
