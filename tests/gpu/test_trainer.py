"""transformers' Trainer on one GPU in bf16 and fp16: it learns, and micro-batches of unequally many
labels give the factors of the whole batch."""

import pytest
import torch

from tests.close import near
from tests.ranks import run_alone

pytest.importorskip("transformers", reason="needs transformers and accelerate")
pytest.importorskip("accelerate", reason="needs transformers and accelerate")
pytestmark = pytest.mark.distributed
TARGET = "tests.gpu.trainer_runs:train"
NAMES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
APART = 0.05
"""Of traces: inputs are rounded to 8 bits, and after a step the weights of two runs differ."""


def learns(tmp_path, device: str, precision: str) -> None:
    whole = run_alone(TARGET, device=device, payload=(str(tmp_path / "whole"), precision, 1))
    parts = run_alone(TARGET, device=device, payload=(str(tmp_path / "parts"), precision, 4))
    for found in (whole, parts):
        print(precision, *(f"{loss:.3f}" for loss in found["losses"]), found["counts"])
        assert found["dtype"] == NAMES[precision] and not found["counts"].get("skipped_steps")
        assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert whole["traces"].keys() == parts["traces"].keys() and len(whole["traces"]) == 4 * 2 + 1
    for name, trace in whole["traces"].items():
        near(
            torch.tensor(parts["traces"][name]),
            torch.tensor(trace),
            APART * torch.tensor(trace).abs(),
            "see APART",
            what=name,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", NAMES)
def test_the_trainer_trains_on_a_gpu(tmp_path, precision):
    learns(tmp_path, "cuda", precision)


def test_the_trainer_trains_in_bf16_on_a_cpu(tmp_path):
    learns(tmp_path, "cpu", "bf16")
