"""The parameters of ``"optimizer": {"type": "KFACAdamW", "params": {..}}``, for the manual and the schema. Their check
is in ``ds_kfac/directions/kfac_adamw/optimizer.py``."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NAME = "KFACAdamW"
"""The optimizer's type in a DeepSpeed config."""


class OptimizerParams(BaseModel):
    """``null`` and ``"auto"`` are the same as leaving a parameter out. A framework may fill in ``"auto"``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lr: float = Field(0.001, ge=0)
    """Learning rate of the layers' weights and of other matrices. Schedulers change it and adam_lr alike.
    docs/tuning.md has rates that were measured."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    """Decay of the two moments, which a layer has in its eigenbasis. The measured language models have [0.9, 0.95]."""
    eps: float = Field(1e-8, ge=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled: a step takes lr * weight_decay of each parameter, also of those that are stepped at adam_lr. A layer
    that a step did not use does not decay in it."""
    adam_lr: float | None = Field(None, ge=0)
    """Rate of embeddings, norms and biases that are in no layer; heads have one that follows it (docs/tuning.md). null:
    8 lr. 0: they stand still, without weight decay, and heads have lr."""
    torch_adam: bool = False
    """true: torch's AdamW steps what is in no layer. false: DeepSpeed's fused Adam on a GPU, and its CPU Adam for an
    offloaded optimizer, which are compiled at first use. On a CPU without offload it is torch's in both cases."""


DEFAULTS: dict[str, Any] = {name: field.default for name, field in OptimizerParams.model_fields.items()}
"""Parameter -> its default."""
