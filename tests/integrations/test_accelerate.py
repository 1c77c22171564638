"""Accelerate's "auto": what it fills in itself, and what it says of all else, as
docs/howto/troubleshoot.md has it."""

import contextlib
import io
from typing import Any

import pytest

from tests.ranks import ROOT, run_ranks

pytest.importorskip("accelerate", reason="needs ds_kfac[integrations]")
pytestmark = pytest.mark.distributed
SAID = "`optimizer.params.betas` not found in kwargs"


def worker(params: list[dict[str, Any]]) -> list[Any]:
    """The options of the groups that are stepped, or the error."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import DummyOptim

    import ds_kfac
    from tests.integrations.runs import fresh

    found: list[Any] = []
    ds_kfac.enable()
    for own in params:
        fresh()
        PartialState(cpu=True)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "kfac": {},
            "optimizer": {"type": "KFACAdamW", "params": {"torch_adam": True, **own}},
        }
        model = torch.nn.Linear(4, 4)
        with contextlib.redirect_stdout(io.StringIO()):
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            try:
                engine, _ = accelerator.prepare(
                    model, DummyOptim(model.parameters(), lr=3e-3, weight_decay=0.5)
                )
                group = engine.optimizer.param_groups[0]
                found.append({key: group[key] for key in ("lr", "weight_decay", "betas", "eps")})
            except ValueError as error:
                found.append(str(error))
    return found


def test_accelerate_fills_in_rate_and_decay_and_nothing_else():
    auto = dict.fromkeys(("lr", "weight_decay"), "auto")
    cases = [{**auto, "betas": [0.9, 0.95]}, {**auto, "betas": "auto"}]
    filled, refused = run_ranks(
        "tests.integrations.test_accelerate:worker", world=1, payload=cases
    )[0]
    assert filled == {"lr": 3e-3, "weight_decay": 0.5, "betas": (0.9, 0.95), "eps": 1e-8}
    assert SAID in refused and SAID in (ROOT / "docs/howto/troubleshoot.md").read_text()
