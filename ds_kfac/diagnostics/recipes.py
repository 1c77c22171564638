"""Compare a run's learning rate, weight decay and second beta with the recipes of
docs/howto/recipes.md.

When K-FAC attaches, it does not know what the model is trained for. For example, a decoder may be
pretrained or fine-tuned, with or without masked labels. So a run is compared with the nearest
recipe for its type of model, and a warning names the values that are far from that recipe.
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
"""Factor by which a value may differ from the value in a recipe.

The largest learning rate that works is about four times the smallest one, and both depend on the
batch (docs/howto/tune.md).
"""
MOST_APART = math.log(FAR) + 1e-6
"""Two values are far apart if their logarithms differ by more than this. A weight decay of 0.1 is
not far from 1."""
MOST_ABOVE = math.log(FAR) - 1e-6
"""A learning rate is far above a recipe's if their logarithms differ by more than this. Exactly ten
times a recipe's learning rate is far, because it is probably a typing error."""
LEAST_DECAY = 0.01
"""A weight decay that has hardly any effect. Smaller values are treated as this value."""
BETA2 = (0.5, 0.999)
"""Smallest and largest second beta that are not far from a recipe. The default is 0.999."""
RECIPES_BETA2 = 0.95


class Recipe(NamedTuple):
    """A section of docs/howto/recipes.md.

    Attributes:
        title: heading of the section.
        models: types of models that the recipe is for, see :func:`model_type`.
        optimizer: class of the innermost optimizer.
        lr: learning rate in the recipe's config.
        weight_decay: weight decay in the recipe's config.
    """

    title: str
    models: tuple[str, ...]
    optimizer: str
    lr: float
    weight_decay: float


WORDS = "language model"
EXPERTS = "mixture of experts"
ADAPTERS = "model with adapters"
IMAGES = "convolutional network"
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
    """Return a list with a warning for the attach report if the run is far from every recipe for
    its type of model. Otherwise return an empty list."""
    groups = kfac.layout.optimizer.param_groups
    rates = planned_rates(groups, kfac.layout.engine.lr_scheduler)
    indices = {kfac.layout.group_index(parameter) for parameter in kfac.layout.params}
    # compare the largest learning rate, because a user may give some groups a smaller one
    leading = max(indices, key=lambda index: rates[index])
    betas = groups[leading].get("betas")
    return recipe_warnings(
        model_type(kfac.layers, kfac.engine_view.model),
        kfac.rule.optimizer_type or type(kfac.engine_view.inner).__name__,
        rates[leading],
        max(float(groups[index].get("weight_decay", 0.0)) for index in indices),
        None if betas is None else betas[1],
    )


def planned_rates(groups: Sequence[Mapping[str, Any]], scheduler: Any) -> list[float]:
    """Return for each parameter group the largest learning rate that it will have, as far as the
    scheduler's attributes show it."""
    schedules = [getattr(scheduler, name, None) for name in ("max_lrs", "org_lrs", "base_lrs")]
    largest = []
    for index, group in enumerate(groups):
        rates = [group[key] for key in ("lr", "initial_lr", "max_lr") if key in group]
        for schedule in schedules:
            if isinstance(schedule, Sequence) and index < len(schedule):
                rates.append(schedule[index])
        largest.append(max(map(float, rates)))
    return largest


def config_far_from_recipes(
    ds_config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    layers: Sequence[LayerSpec],
    model: nn.Module,
) -> list[str]:
    """Return the same warning as :func:`far_from_recipes`, for a config without an engine.

    If a value is "auto", there is no warning, because a framework will replace the value later.

    Args:
        ds_config: the DeepSpeed config.
        defaults: name of an optimizer argument -> its value if the config does not set it.
        layers: the layers of the model.
        model: the model.
    """
    optimizer = block(ds_config, "optimizer")
    params = {**defaults, **block(optimizer, "params")}
    lr = params.get("lr")
    decay = params.get("weight_decay")
    betas = params.get("betas")
    if not isinstance(lr, Real) or not isinstance(decay, Real):
        return []
    if not isinstance(betas, list | tuple | None):
        return []
    name = str(optimizer.get("type"))
    peak = _peak_rate(name, float(lr), block(ds_config, "scheduler"))
    if peak is None:
        return []
    beta2 = None if betas is None else betas[1]
    return recipe_warnings(model_type(layers, model), name, peak, float(decay), beta2)


def _peak_rate(optimizer: str, lr: float, schedule: Mapping[str, Any]) -> float | None:
    """Return the largest learning rate that a config's "scheduler" block will set; None if it is
    not known.

    To compute it, the scheduler is built for an optimizer with a single one-element tensor.
    """
    element = torch.zeros(1, dtype=torch.float32, device="cpu")
    stand_in: Any = torch.optim.SGD if optimizer == "SGD" else torch.optim.AdamW
    one = stand_in([element], lr=lr)
    scheduler = None
    name = schedule.get("type")
    if name:
        try:
            module = lr_schedules if hasattr(lr_schedules, name) else torch.optim.lr_scheduler
            scheduler = getattr(module, name)(one, **block(schedule, "params"))
        except Exception:
            # An argument is "auto" or wrong. ds_kfac.attach or DeepSpeed will reject a wrong one.
            return None
    (peak,) = planned_rates(one.param_groups, scheduler)
    return peak


def model_type(layers: Sequence[LayerSpec], model: nn.Module) -> str | None:
    """Return the type of a model, as its layers and modules show it. Return None if there is no
    recipe for such a model, or if its type cannot be seen, as in a stage of a pipeline."""
    if any(ADAPTER.search(layer.module) for layer in layers):
        return ADAPTERS
    in_convolutions = sum(layer.numel for layer in layers if layer.kind in ("Conv2d", "Conv3d"))
    if 2 * in_convolutions > sum(layer.numel for layer in layers):
        return IMAGES
    modules = list(model.modules())
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    predicts_words = any(
        isinstance(module, nn.Linear) and module.out_features in vocabularies for module in modules
    )
    if not predicts_words:
        return None
    has_experts = any(layer.part[1] > 1 or "expert" in layer.module for layer in layers)
    return EXPERTS if has_experts else WORDS


def recipe_warnings(
    model: str | None, optimizer: str, lr: float, weight_decay: float, beta2: float | None = None
) -> list[str]:
    """Return a list with the warning for a run with these settings. The list is empty if a recipe
    is near, or if there is no recipe for this type of model and optimizer.

    Args:
        model: see :func:`model_type`.
        optimizer: class of the innermost optimizer.
        lr: learning rate of the matrices. If the schedule is known, its largest learning rate.
        weight_decay: weight decay of the run.
        beta2: second beta of the optimizer; None if it has none.
    """
    recipes = [
        recipe for recipe in RECIPES if model in recipe.models and recipe.optimizer == optimizer
    ]
    if not recipes or not lr:
        return []
    nearest = min(recipes, key=lambda recipe: _distance(recipe, lr, weight_decay))
    far: dict[str, tuple[float, float]] = {}  # name -> (value of the run, value of the recipe)
    if not -MOST_APART <= math.log(lr / nearest.lr) <= MOST_ABOVE:
        far["lr"] = (lr, nearest.lr)
    if _decay_apart(nearest, weight_decay) > MOST_APART:
        far["weight_decay"] = (weight_decay, nearest.weight_decay)
    if beta2 is not None and optimizer == NAME and not BETA2[0] <= beta2 <= BETA2[1]:
        far["betas[1]"] = (beta2, RECIPES_BETA2)
    if not far:
        return []
    values = ", ".join(
        f"{name} {value:g} ({of_recipe:g} there)" for name, (value, of_recipe) in far.items()
    )
    return [
        f"this run is far from every recipe for a {model}. The nearest recipe, {nearest.title!r} "
        f"in docs/howto/recipes.md, has other values: {values}. If you chose your values on "
        "purpose, ignore this line"
    ]


def _decay_apart(recipe: Recipe, weight_decay: float) -> float:
    """Return the absolute difference of the logarithms of a recipe's and a run's weight decay."""
    ratio = max(weight_decay, LEAST_DECAY) / max(recipe.weight_decay, LEAST_DECAY)
    return abs(math.log(ratio))


def _distance(recipe: Recipe, lr: float, weight_decay: float) -> tuple[int, float]:
    """Return how far a run is from a recipe, as two values. The first is the number of its values
    (learning rate and weight decay) that are far from the recipe's. The second is the absolute
    difference of the learning rates' logarithms."""
    rate_apart = abs(math.log(lr / recipe.lr))
    decay_apart = _decay_apart(recipe, weight_decay)
    return sum(apart > MOST_APART for apart in (rate_apart, decay_apart)), rate_apart
