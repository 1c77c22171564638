"""``ds_kfac.KFACAdamW``, the optimizer as an object, for whoever wants one before there is an engine.

What DeepSpeed steps has each parameter group in two (``optimizer.py``), which only a model's layers can tell. So this
one is replaced when ``deepspeed.initialize`` gets it, and from then on its groups are windows on their halves: a
scheduler that was made with it goes on working, with as many groups as it knows.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from ds_kfac.directions.kfac_adamw.optimizer import OWN, PARAMS
from ds_kfac.directions.kfac_adamw.params import checked

ORIGIN = "kfac_origin"
"""Key of a group that was split: the index of the one it came from."""


class Group(dict):
    """A parameter group; known by its class in optimizers that were made of another's groups, as Accelerate does with
    offload."""

    options: Mapping[str, Any]
    """Those of the optimizer that it was made for."""
    taken: tuple[Any, tuple[int, ...]] = (None, ())
    """The optimizer that DeepSpeed steps, and which of its groups are parts of this one."""

    def __getitem__(self, key: str) -> Any:
        optimizer, parts = self.taken
        if parts and key != "params" and key in optimizer.param_groups[parts[0]]:
            return optimizer.param_groups[parts[0]][key]
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        optimizer, parts = self.taken
        for part in parts if key != "params" else ():
            optimizer.param_groups[part][key] = value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


class KFACAdamW(torch.optim.Optimizer):
    """K-FAC's Adam for the layers' matrices and AdamW for all other parameters, as an optimizer to give to DeepSpeed:
    to ``ds_kfac.initialize`` or ``deepspeed.initialize``, from Lightning's ``configure_optimizers``, to Accelerate's
    ``prepare``, or to the Trainer as ``optimizer_cls_and_kwargs=(ds_kfac.KFACAdamW, {"lr": 1e-3})``. No "kfac" block is
    needed then; one in the DeepSpeed config has its say.

    Args:
        params: parameters or parameter groups, as of torch's AdamW.
        lr: rate of the layers' matrices; an AdamW's is a good first choice.
        adam_lr: rate of embeddings, norms and biases, and of heads as ``size.py`` says; None: 8 lr, or lr with
            ``kfac.adam.scale`` "rms". Schedules change both alike.
        betas: as of torch's AdamW, like eps and weight_decay.
        torch_adam: step all other parameters by torch's AdamW where DeepSpeed's would have to be compiled.

    Raises:
        ValueError: a wrong value.
    """

    _opt_called = True  # a scheduler asks whether its optimizer has stepped; DeepSpeed's does

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = PARAMS["lr"],
        *,
        adam_lr: float | None = None,
        betas: tuple[float, float] = PARAMS["betas"],
        eps: float = PARAMS["eps"],
        weight_decay: float = PARAMS["weight_decay"],
        torch_adam: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_lr": adam_lr}
        self.options = checked({**options, "torch_adam": torch_adam}, "KFACAdamW: ")
        super().__init__(params, {key: value for key, value in self.options.items() if key not in OWN})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = Group(param_group)
        group.options = self.options
        super().add_param_group(group)

    def step(self, closure: Any = None) -> NoReturn:
        raise RuntimeError(
            "KFACAdamW: only a DeepSpeed engine can step it: pass it to ds_kfac.initialize, or train with DeepSpeed "
            "(ZeRO stage 0 is enough)"
        )


def given_groups(optimizer: Any) -> list[Group] | None:
    """The groups of a :class:`KFACAdamW`, or of what has been made of them; None of any other optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if groups and all(isinstance(group, Group) for group in groups) else None


def numbered(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """To be split."""
    return [{**group, ORIGIN: index} for index, group in enumerate(groups)]


def hand_over(groups: Iterable[Group], optimizer: torch.optim.Optimizer) -> None:
    """From now on the groups are those of what DeepSpeed steps, split from :func:`numbered` ones."""
    origins = [group.pop(ORIGIN) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        group.taken = optimizer, tuple(part for part, origin in enumerate(origins) if origin == index)
