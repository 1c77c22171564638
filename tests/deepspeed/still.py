"""Engines whose parameters stay as they are, for tests of the factors that the steps collect."""

import contextlib
import io
from typing import Any

from torch import nn

import ds_kfac


def still_engine(
    model: nn.Module, *, stage: int, micro_batch: int, kfac: dict[str, Any], **more: Any
) -> Any:
    """An engine at learning rate 0, without clipping, that trains the parameters that require a
    gradient.

    Args:
        kfac: the "kfac" block of its config.
        more: other entries of its config.
    """
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "kfac": kfac,
        **more,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = ds_kfac.initialize(model=model, model_parameters=trained, config=config)
    return engine
