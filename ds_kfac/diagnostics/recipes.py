"""Whether a run's learning rate, weight decay and second beta are near those of a recipe of
docs/howto/recipes.md.

A model does not show at attach what it is trained for: a decoder may be pretrained or fine-tuned,
its labels masked or not. So a run fits if any recipe that its model may follow has all three within
a factor of ten.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from ds_kfac.config.deepspeed_config import block
from ds_kfac.directions.kfac_adamw.optimizer import NAME
from ds_kfac.model.layers import LayerSpec
from ds_kfac.model.scan import ADAPTER
from ds_kfac.step.preconditioner import KFACPreconditioner

FAR = 10.0
"""What a value may differ by. Rates that work span a factor of four; other batches move them, too
(docs/howto/tune.md).
"""
LIMIT, HIGH = math.log(FAR) + 1e-6, math.log(FAR) - 1e-6
"""HIGH is of rates: just ten times a recipe's is a slip; a weight decay of 0.1 for 1 is not."""
LITTLE = 0.01
"""A weight decay that takes hardly anything back: less is no other setting."""
BETA2 = (0.5, 0.999)
"""Second betas that are not far: 0.999 is the default."""


class Recipe(NamedTuple):
    """A heading of docs/howto/recipes.md, and what its config has.

    Attributes:
        models: kinds of models that may follow it, see :func:`kind_of`.
        optimizer: class of the innermost one.
    """

    title: str
    models: tuple[str, ...]
    optimizer: str
    lr: float
    weight_decay: float


WORDS, EXPERTS, ADAPTERS, IMAGES = (
    "language model",
    "mixture of experts",
    "model with adapters",
    "convolutional network",
)
RECIPES = (
    Recipe("Pretraining a decoder", (WORDS, EXPERTS), NAME, 2e-3, 1.0),
    Recipe("Masked model", (WORDS,), NAME, 2e-3, 0.01),
    Recipe("Mixture of experts", (EXPERTS,), NAME, 2e-3, 0.01),
    Recipe("Supervised fine-tuning", (WORDS, EXPERTS), NAME, 2e-5, 0.01),
    Recipe("LoRA", (ADAPTERS,), NAME, 3e-5, 0.0),
    Recipe("DPO", (WORDS, EXPERTS, ADAPTERS), NAME, 5e-7, 0.0),
    Recipe("GRPO", (WORDS, EXPERTS, ADAPTERS), NAME, 2e-4, 0.0),
    Recipe("A ResNet", (IMAGES,), "SGD", 0.3, 5e-4),
    Recipe("A ResNet", (IMAGES,), NAME, 2.5e-3, 0.01),
)


def far_from_recipes(kfac: KFACPreconditioner) -> list[str]:
    """A sentence for the attach report where no recipe that the model may follow is near; else
    nothing."""
    kind, groups = kind_of(kfac.layers, kfac.engine_view.model), kfac.layout.optimizer.param_groups
    peaks = planned_rates(groups, kfac.layout.engine.lr_scheduler)
    own = {kfac.layout.group_index(parameter) for parameter in kfac.layout.params}
    first = max(own, key=lambda index: peaks[index])  # a schedule or a user may have groups of less
    decay = max(float(groups[index].get("weight_decay", 0.0)) for index in own)
    optimizer = kfac.rule.optimizer_type or type(kfac.engine_view.inner).__name__
    beta2 = groups[first]["betas"][1] if "betas" in groups[first] else None
    return said(kind, optimizer, peaks[first], decay, beta2)


def planned_rates(groups: Sequence[Mapping[str, Any]], scheduler: Any) -> list[float]:
    """Each parameter group's largest learning rate, as far as the scheduler says."""
    rates = []
    lists = [getattr(scheduler, name, None) for name in ("max_lrs", "org_lrs", "base_lrs")]
    for index, group in enumerate(groups):
        planned = [group[key] for key in ("lr", "initial_lr", "max_lr") if key in group]
        planned += [of[index] for of in lists if isinstance(of, Sequence) and index < len(of)]
        rates.append(max(map(float, planned)))
    return rates


def config_far_from_recipes(
    ds_config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    layers: Sequence[LayerSpec],
    model: nn.Module,
) -> list[str]:
    """:func:`far_from_recipes` of a config, as far as it has the numbers.

    Args:
        defaults: parameters of the optimizer where the config leaves them out.
    """
    optimizer, schedule = block(ds_config, "optimizer"), block(ds_config, "scheduler")
    params = {**defaults, **block(optimizer, "params")}
    lr = params.get("lr")
    decay = params.get("weight_decay")
    betas = params.get("betas")
    if not isinstance(lr, Real) or not isinstance(decay, Real):
        return []  # "auto", which a framework fills in
    if not isinstance(betas, list | tuple | None):
        return []
    # DeepSpeed's own schedule says what the rates will be, on an optimizer of one number
    one = [torch.zeros(1, dtype=torch.float32, device="cpu")]
    kind = torch.optim.SGD if optimizer.get("type") == "SGD" else torch.optim.AdamW
    rates = kind(one, lr=float(lr))
    scheduler = None
    if name := schedule.get("type"):
        try:
            module = lr_schedules if hasattr(lr_schedules, name) else torch.optim.lr_scheduler
            scheduler = getattr(module, name)(rates, **block(schedule, "params"))
        except Exception:
            # "auto" among its parameters, or wrong ones, which attach or DeepSpeed will refuse
            return []
    (peak,) = planned_rates(rates.param_groups, scheduler)
    beta2 = None if betas is None else betas[1]
    return said(kind_of(layers, model), str(optimizer.get("type")), peak, float(decay), beta2)


def kind_of(layers: Sequence[LayerSpec], model: nn.Module) -> str | None:
    """What kind of model it is, as far as its layers and modules say; None: of no recipe's, or not
    known, as of a pipeline's stage."""
    modules = list(model.modules())
    if any(ADAPTER.search(layer.module) for layer in layers):
        return ADAPTERS
    images = sum(layer.numel for layer in layers if layer.kind in ("Conv2d", "Conv3d"))
    if 2 * images > sum(layer.numel for layer in layers):
        return IMAGES
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    if not any(
        isinstance(module, nn.Linear) and module.out_features in vocabularies for module in modules
    ):
        return None
    return (
        EXPERTS if any(layer.part[1] > 1 or "expert" in layer.module for layer in layers) else WORDS
    )


def said(
    kind: str | None, optimizer: str, lr: float, weight_decay: float, beta2: float | None = None
) -> list[str]:
    """The line for a run of these settings; none if a recipe is near, or there is none for it.

    Args:
        lr: of the matrices, the largest of the schedule as far as it is known.
    """
    recipes = [
        recipe for recipe in RECIPES if kind in recipe.models and recipe.optimizer == optimizer
    ]
    if not recipes or not lr:
        return []
    nearest = min(recipes, key=lambda recipe: _distance(recipe, lr, weight_decay))
    wrong = {"lr": (lr, nearest.lr)} if not -LIMIT <= math.log(lr / nearest.lr) <= HIGH else {}
    if _decay_apart(nearest, weight_decay) > LIMIT:
        wrong["weight_decay"] = weight_decay, nearest.weight_decay
    if beta2 is not None and optimizer == NAME and not BETA2[0] <= beta2 <= BETA2[1]:
        wrong["betas[1]"] = beta2, 0.95
    if not wrong:
        return []
    values = ", ".join(
        f"{name} {value:g} ({of_recipe:g} there)" for name, (value, of_recipe) in wrong.items()
    )
    return [
        f"far from every recipe for a {kind}; from the nearest one, {nearest.title!r} in "
        f"docs/howto/recipes.md: "
        f"{values}. If it is meant, all is well"
    ]


def _decay_apart(recipe: Recipe, weight_decay: float) -> float:
    return abs(math.log(max(weight_decay, LITTLE) / max(recipe.weight_decay, LITTLE)))


def _distance(recipe: Recipe, lr: float, weight_decay: float) -> tuple[int, float]:
    """How many of the values are far, and by how much the rate is another."""
    apart = abs(math.log(lr / recipe.lr)), _decay_apart(recipe, weight_decay)
    return sum(value > LIMIT for value in apart), apart[0]
